"""Layouts of a value over the ranks of one mesh axis, their duals, and what depends on the kind of layout.

I, R, S and P are those of JAX `shard_map`'s varying and invariant axes and of the package `spmd-types`.
`register` takes a further kind: planning, rewriting, simulating and saving ask a layout, never for its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .partitions import Copies, Distribution, Groups, Partition, Segment  # noqa: F401
from .sizes import Hint, Size, ToSize, dealt, divide, record, simplify  # noqa: F401

if TYPE_CHECKING:
    from .specs import Spec

Reduction = Literal["sum", "max"]


@record
class Layout:
    """Base of the layouts of a value on one mesh axis.

    Attributes:
        mark: the short name of the kind, unique among them.
        distribution_kind: the class of its distribution of a dimension; None: it distributes none.
        partial: whether a rank holds a summand, or a candidate, of every element.
        reduction: how the ranks' tensors become the value where it is partial.
        split: whether ranks own different elements.
        variants: the fields of each layout of the kind, where it has no dimension.
    """

    mark: ClassVar[str] = ""
    distribution_kind: ClassVar[type[Distribution] | None] = None
    partial: ClassVar[bool] = False
    reduction: ClassVar[Reduction] = "sum"
    split: ClassVar[bool] = False
    variants: ClassVar[tuple[tuple[Any, ...], ...]] = ((),)

    @property
    def dual(self) -> Layout:
        """The layout of the value's gradient."""
        return self

    @property
    def sharded_dim(self) -> int | None:
        """The dimension of which a rank stores a slice; None where it stores every dimension whole."""
        return None

    @property
    def distribution(self) -> Distribution | None:
        """Distribution of its dimension; None where it has none."""
        return None

    @property
    def groups(self) -> Groups | None:
        """Groups by which rows are sharded; None where they are not."""
        return None

    @property
    def stored(self) -> Partition | None:
        """Partition of `sharded_dim` that DTensors hold; None: a rank stores the whole and takes its slice."""
        return None

    @property
    def copies(self) -> int:
        """Number of ranks that follow each other and have one slice, where ranks have slices."""
        return 1

    @property
    def pieces(self) -> Size:
        """Number of runs of a dimension that are sharded separately, as those of a fused weight."""
        return 1 if self.distribution is None else self.distribution.pieces

    def share(self, tp: int, hint: Hint) -> float:
        """Return the largest part of a value that one rank holds; `hint` gives a number for every size."""
        return 1.0 if self.distribution is None else self.distribution.share(tp, hint)

    def part(self, rank: int | None, tp: int, hint: Hint) -> float:
        """Return the part of a value that `rank` holds, the largest where it is None; `hint` as of `share`."""
        if rank is None or self.distribution is None:
            return self.share(tp, hint)
        return self.distribution.part(rank, tp, hint)

    def local_shape(self, shape: Sequence[int], tp: int, rank: int = 0) -> tuple[int, ...]:
        """Return the local shape of a value of this shape on `rank`, in a layout of numbers; rank 0 has most."""
        return tuple(shape)

    def plain(self, tp: int) -> bool:
        """Say whether DTensor's placement of the same name means the same."""
        return self.distribution is None or self.distribution.is_plain(tp)

    def even(self, tp: int) -> bool:
        """Say whether every rank certainly stores the same number of elements."""
        return self.distribution is None or self.distribution.even(tp)

    def padding(self, tp: int) -> float:
        """Return how many times the value's elements ranks send, where all pad to the fullest of unequal shares."""
        return 1.0 if self.distribution is None else self.distribution.padding(tp)

    def penalty(self, tp: int) -> int:
        """Return the points that break ties between equal costs."""
        return 0 if self.distribution is None else self.distribution.penalty(tp)

    def small(self, tp: int) -> Layout:
        """Make the same kind of layout of a dimension with a few elements."""
        return self

    def words(self, units: bool = True) -> str:
        """Describe the layout of a parameter for a reader of plans; with `units`, in units of how many elements."""
        return "whole"

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        """Convert to what conversions take: sizes mapped by `size` (to an int, or to the fx.Node that computes it)."""
        from . import specs  # noqa: PLC0415  a plan is read without torch

        kind: Any = getattr(specs, f"{type(self).__name__}Spec")
        return kind(*self._numbers(size))

    def _numbers(self, size: ToSize) -> tuple[Any, ...]:
        """Return the fields of the run-time layout."""
        return ()

    def to_json(self) -> Any:
        """Return plain data that `from_json` reads."""
        return str(self)

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        """Read what `to_json` gave; None where the data are of another kind."""
        kinds = (cls(*fields) for fields in cls.variants)
        return next((x for x in kinds if str(x) == data), None)

    @classmethod
    def seeds(cls, length: Size, tp: int) -> Iterable[Distribution]:
        """Return the distributions of this kind that a dimension of this length may have by itself."""
        return ()

    def __str__(self) -> str:
        return self.mark


# ---- the kinds -------------------------------------------------------------------------------------------------------


@record
class Invariant(Layout):
    """The whole value, the same on every rank; its gradient is too."""

    mark = "I"


@record
class Replicate(Layout):
    """The whole value, the same on every rank; each rank's gradient is one summand (or, for `max`, one candidate)."""

    gradients: Reduction = "sum"
    mark = "R"
    variants = (), ("max",)

    @property
    def dual(self) -> Layout:
        return Partial(self.gradients)

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        from .specs import ReplicateMaxSpec, ReplicateSpec  # noqa: PLC0415  a plan is read without torch

        return ReplicateSpec() if self.gradients == "sum" else ReplicateMaxSpec()

    def __str__(self) -> str:
        return "R" if self.gradients == "sum" else f"R({self.gradients})"


@record
class Partial(Layout):
    """One summand (or, for `max`, one candidate) of the value on every rank; its gradient is whole on each."""

    reduction: Reduction = "sum"  # type: ignore[misc]
    mark = "P"
    variants = Replicate.variants
    partial = True

    @property
    def dual(self) -> Layout:
        return R

    def _numbers(self, size: ToSize) -> tuple[Any, ...]:
        return (self.reduction,)

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


@record
class _Distributed(Layout):
    """A dimension that is distributed over the ranks; `key` is the field of its JSON that no other kind has."""

    dim: int
    partition: Distribution
    split = True
    key: ClassVar[str]

    @property
    def distribution(self) -> Distribution | None:
        return self.partition

    def to_json(self) -> Any:
        return {"dim": self.dim, self.key: self.partition.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        kind: Any = cls.distribution_kind
        return cls(data["dim"], kind.from_json(data[cls.key])) if isinstance(data, dict) and cls.key in data else None

    def __str__(self) -> str:
        return f"{self.mark}({self.dim})"


@record
class _Sliced(_Distributed):
    """A slice of dimension `dim` on every rank."""

    partition: Partition | Copies

    @property
    def sharded_dim(self) -> int | None:
        return self.dim

    def local_shape(self, shape: Sequence[int], tp: int, rank: int = 0) -> tuple[int, ...]:
        return (*shape[: self.dim], self.partition.local(rank, tp), *shape[self.dim + 1 :])

    def small(self, tp: int) -> Layout:
        return replace(self, partition=self.partition.small(tp))

    def _numbers(self, size: ToSize) -> tuple[Any, ...]:
        return (self.dim, *self.partition.to_runtime(size))


@record
class Shard(_Sliced):
    """One slice of dimension `dim`, sharded by `partition`; its gradient likewise."""

    partition: Partition
    mark, key = "S", "partition"
    distribution_kind = Partition

    @property
    def stored(self) -> Partition | None:
        return self.partition

    def words(self, units: bool = True) -> str:
        """Describe it: `Shard(0) by 128` is sharded in units of 128; `in 3 pieces`, each of which is sharded."""
        pieces, unit = self.partition.pieces, self.partition.unit
        by = f" by {unit}" if units and unit is not None else ""
        return f"Shard({self.dim})" + (f" in {pieces} pieces" if pieces != 1 else "") + by

    @classmethod
    def seeds(cls, length: Size, tp: int) -> Iterable[Distribution]:
        return (Partition.plain(length, tp),)


@record
class Grouped(_Distributed):
    """The rows of a rank's groups along dimension `dim`, in their places among all rows; its gradient likewise."""

    partition: Groups
    mark, key = "G", "groups"
    distribution_kind = Groups

    @property
    def groups(self) -> Groups | None:
        return self.partition

    def _numbers(self, size: ToSize) -> tuple[Any, ...]:
        return self.dim, size(self.partition), self.partition.to_runtime(size).segments


@record
class Travelled(_Distributed):
    """Rows along dimension `dim` with the ranks that own their groups, and with no other; its gradient likewise."""

    partition: Groups
    mark, key = "T", "travelled"

    @property
    def copies(self) -> int:
        """Ranks that follow each other and own the same groups."""
        return getattr(self.partition.of, "copies", 1)

    def _numbers(self, size: ToSize) -> tuple[Any, ...]:
        segments = self.partition.to_runtime(size).segments
        return self.dim, size(self.partition), segments, self.copies


@record
class Copied(_Sliced):
    """A slice of dimension `dim`, which a group of ranks has alike; each rank's gradient of it is a summand."""

    partition: Copies
    mark, key = "C", "copied"
    distribution_kind = Copies

    @property
    def copies(self) -> int:
        return self.partition.copies

    @property
    def dual(self) -> Layout:
        return Summed(self.dim, self.partition)

    def words(self, units: bool = True) -> str:
        """Describe it: `Shard(1) on 2 ranks each`."""
        return f"Shard({self.dim}) on {self.partition.copies} ranks each"


@record
class Summed(Copied):
    """One summand, on each rank of a group, of the group's slice: the gradient of a value that is `Copied`."""

    mark, key = "D", "summed"
    partial = True

    @property
    def dual(self) -> Layout:
        return Copied(self.dim, self.partition)


I, R, P = Invariant(), Replicate(), Partial()  # noqa: E741  the field's letters
_KINDS: dict[str, type[Layout]] = {}


def register(kind: type[Layout]) -> type[Layout]:
    """Enter a kind of layout into planning and saved plans; its conversions go to `comm.conversions.register`.

    Raises:
        ValueError: another kind has its mark.
    """
    if _KINDS.setdefault(kind.mark, kind) is not kind:
        raise ValueError(f"{kind.__name__} and {_KINDS[kind.mark].__name__} have the same mark {kind.mark!r}")
    return kind


for _kind in (Invariant, Replicate, Partial, Shard, Grouped, Copied, Summed):
    register(_kind)


def kinds() -> tuple[type[Layout], ...]:
    """Return all kinds of layout, in the order in which they were registered."""
    return tuple(_KINDS.values())


def dealt_by(dim: int, distribution: Distribution) -> Layout:
    """Return the layout that distributes this dimension so.

    Example:
        >>> str(dealt_by(0, Partition.plain(8, 2)))
        'S(0)'
    """
    kind: Any = next(k for k in kinds() if k.distribution_kind is type(distribution))
    return kind(dim, distribution)


Layouts = Mapping[str, Layout]  # by the names of the values
SlotLayouts = tuple[Layout, ...]  # of the operands of a call, or of its results
