"""How a value lies over the ranks of one mesh axis: the layouts, their duals, and what depends on the kind of layout.

I, R, S and P are those of JAX `shard_map`'s varying and invariant axes and of the package `spmd-types`.
`register` takes a further kind: planning, rewriting, simulating and saving ask a layout, never for its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from .distributions import Distribution
from .layout import Layout, Reduction, ToSize
from .partitions import Groups, Partition, Segment
from .sizes import Size, chunk, divide, simplify

if TYPE_CHECKING:
    from .specs import Spec

__all__ = [
    "Distribution", "Grouped", "Groups", "I", "Invariant", "Layout", "P", "Partial", "Partition", "R", "Reduction",
    "Replicate", "Segment", "Shard", "Size", "chunk", "dealt_by", "divide", "kinds", "register", "simplify",
]  # fmt: skip


@dataclass(frozen=True)
class Invariant(Layout):
    """The whole value, the same on every rank; its gradient is too."""

    mark: ClassVar[str] = "I"

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import InvariantSpec  # noqa: PLC0415  a plan is read without torch

        return InvariantSpec()


@dataclass(frozen=True)
class Replicate(Layout):
    """The whole value, the same on every rank; each rank's gradient is one summand (or, for `max`, one candidate)."""

    gradients: Reduction = "sum"
    mark: ClassVar[str] = "R"

    @property
    def dual(self) -> Layout:
        return Partial(self.gradients)

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import ReplicateMaxSpec, ReplicateSpec  # noqa: PLC0415  a plan is read without torch

        return ReplicateSpec() if self.gradients == "sum" else ReplicateMaxSpec()

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        return {"R": R, "R(max)": Replicate("max")}.get(data) if isinstance(data, str) else None

    def __str__(self) -> str:
        return "R" if self.gradients == "sum" else f"R({self.gradients})"


@dataclass(frozen=True)
class Partial(Layout):
    """One summand (or, for `max`, one candidate) of the value on every rank; its gradient is whole on each."""

    reduction: Reduction = "sum"  # type: ignore[misc]
    mark: ClassVar[str] = "P"
    partial: ClassVar[bool] = True

    @property
    def dual(self) -> Layout:
        return R

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import PartialSpec  # noqa: PLC0415  a plan is read without torch

        return PartialSpec(reduction=self.reduction)

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        return {"P": P, "P(max)": Partial("max")}.get(data) if isinstance(data, str) else None

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


@dataclass(frozen=True)
class Shard(Layout):
    """One slice of dimension `dim`, dealt by `partition`; its gradient likewise."""

    dim: int
    partition: Partition
    mark: ClassVar[str] = "S"
    distribution_kind: ClassVar[type[Distribution] | None] = Partition
    split: ClassVar[bool] = True

    @property
    def sharded_dim(self) -> int | None:
        return self.dim

    @property
    def distribution(self) -> Distribution | None:
        return self.partition

    @property
    def stored(self) -> Partition | None:
        return self.partition

    @property
    def pieces(self) -> Size:
        return self.partition.pieces

    def share(self, tp: int, hint: Callable[[Size], int]) -> float:
        return self.partition.share(tp, hint)

    def local_shape(self, shape: Sequence[int], tp: int, rank: int = 0) -> tuple[int, ...]:
        return (*shape[: self.dim], self.partition.local(rank, tp), *shape[self.dim + 1 :])

    def plain(self, tp: int) -> bool:
        return self.partition.is_plain(tp)

    def even(self, tp: int) -> bool:
        return self.partition.even(tp)

    def penalty(self, tp: int) -> int:
        return self.partition.penalty(tp)

    def small(self, tp: int) -> Layout:
        return replace(self, partition=self.partition.small(tp))

    def words(self, units: bool = True) -> str:
        """`Shard(0) by 128`: dealt in units of 128; `in 3 pieces`, each of which is dealt."""
        pieces, unit = self.partition.pieces, self.partition.unit
        by = f" by {unit}" if units and unit is not None else ""
        return f"Shard({self.dim})" + (f" in {pieces} pieces" if pieces != 1 else "") + by

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import ShardSpec  # noqa: PLC0415  a plan is read without torch

        return ShardSpec(self.dim, *self.partition.to_runtime(size))

    def to_json(self) -> Any:
        return {"dim": self.dim, "partition": self.partition.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        ours = isinstance(data, dict) and "partition" in data
        return cls(data["dim"], Partition.from_json(data["partition"])) if ours else None

    @classmethod
    def seeds(cls, length: Size, tp: int) -> Iterable[Distribution]:
        return (Partition.plain(length, tp),)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Grouped(Layout):
    """The rows of a rank's groups along dimension `dim`, in their places among all rows; its gradient likewise."""

    dim: int
    partition: Groups
    mark: ClassVar[str] = "G"
    distribution_kind: ClassVar[type[Distribution] | None] = Groups
    split: ClassVar[bool] = True

    @property
    def distribution(self) -> Distribution | None:
        return self.partition

    @property
    def groups(self) -> Groups | None:
        return self.partition

    def plain(self, tp: int) -> bool:
        return False

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import GroupedSpec  # noqa: PLC0415  a plan is read without torch

        return GroupedSpec(self.dim, size(self.partition), self.partition.to_runtime(size).segments)

    def to_json(self) -> Any:
        return {"dim": self.dim, "groups": self.partition.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        ours = isinstance(data, dict) and "groups" in data
        return cls(data["dim"], Groups.from_json(data["groups"])) if ours else None

    def __str__(self) -> str:
        return f"G({self.dim})"


I, R, P = Invariant(), Replicate(), Partial()  # noqa: E741  the field's letters
_KINDS: dict[str, type[Layout]] = {}


def register(kind: type[Layout]) -> type[Layout]:
    """Take a kind of layout into planning and saved plans; its conversions go to `comm.conversions.register`.

    Raises:
        ValueError: another kind has its mark.
    """
    if _KINDS.setdefault(kind.mark, kind) is not kind:
        raise ValueError(f"{kind.__name__} and {_KINDS[kind.mark].__name__} have the same mark {kind.mark!r}")
    return kind


for _kind in (Invariant, Replicate, Partial, Shard, Grouped):
    register(_kind)


def kinds() -> tuple[type[Layout], ...]:
    """All kinds of layout, in the order in which they were registered."""
    return tuple(_KINDS.values())


def dealt_by(dim: int, distribution: Distribution) -> Layout:
    """The layout that deals this dimension so.

    Example:
        >>> str(dealt_by(0, Partition.plain(8, 2)))
        'S(0)'
    """
    kind: Any = next(k for k in kinds() if k.distribution_kind is type(distribution))
    return kind(dim, distribution)
