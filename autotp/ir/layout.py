"""What every layout answers: the base of those in `layouts.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .distributions import Distribution
from .partitions import Groups, Partition
from .sizes import Size

if TYPE_CHECKING:
    from .specs import Spec

Reduction = Literal["sum", "max"]
ToSize = Callable[[Any], Any]  # a size, or `Groups` for their ends, as what a run-time layout has in its place


@dataclass(frozen=True)
class Layout:
    """Base of the layouts of a value on one mesh axis.

    Attributes:
        mark: the short name of the kind, unique among them.
        distribution_kind: how it deals out a dimension, the class; None: it deals out none.
        partial: whether a rank holds a summand, or a candidate, of every element.
        reduction: how the ranks' tensors become the value where it is partial.
        split: whether ranks own different elements.
    """

    mark: ClassVar[str] = ""
    distribution_kind: ClassVar[type[Distribution] | None] = None
    partial: ClassVar[bool] = False
    reduction: ClassVar[Reduction] = "sum"
    split: ClassVar[bool] = False

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
        """How its dimension is dealt out; None where it has none."""
        return None

    @property
    def groups(self) -> Groups | None:
        """By which groups rows are dealt; None where they are not."""
        return None

    @property
    def stored(self) -> Partition | None:
        """The partition of `sharded_dim` that DTensors hold; None: a rank stores the whole and takes its slice."""
        return None

    @property
    def pieces(self) -> Size:
        """How many runs of a dimension are dealt separately, as those of a fused weight."""
        return 1

    def share(self, tp: int, hint: Callable[[Size], int]) -> float:
        """Largest part of a value that one rank holds; `hint` gives a number for every size."""
        return 1.0

    def local_shape(self, shape: Sequence[int], tp: int, rank: int = 0) -> tuple[int, ...]:
        """The shape of what `rank` holds of a value of this shape, in a layout of numbers; rank 0 has most."""
        return tuple(shape)

    def plain(self, tp: int) -> bool:
        """Whether DTensor's placement of the same name means the same."""
        return True

    def even(self, tp: int) -> bool:
        """Whether every rank certainly stores the same number of elements."""
        return True

    def penalty(self, tp: int) -> int:
        """What breaks ties between equal costs."""
        return 0

    def small(self, tp: int) -> Layout:
        """The same kind of layout of a dimension with a few elements."""
        return self

    def words(self, units: bool = True) -> str:
        """The layout of a parameter as a reader of plans sees it; with `units`, in units of how many elements."""
        return "whole"

    def to_runtime(self, size: ToSize = lambda s: s) -> Spec:
        """What conversions take: sizes mapped by `size` (to an int, or to the fx.Node that computes it)."""
        raise NotImplementedError(f"{type(self).__name__}.to_runtime")

    def to_json(self) -> Any:
        """Plain data that `from_json` reads."""
        return str(self)

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        """The inverse of `to_json`; None where the data are of another kind."""
        return cls() if data == cls.mark else None

    @classmethod
    def seeds(cls, length: Size, tp: int) -> Iterable[Distribution]:
        """The distributions of this kind that a dimension of this length may have by itself."""
        return ()

    def __str__(self) -> str:
        return self.mark
