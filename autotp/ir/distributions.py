"""What every way of dealing a dimension to the ranks answers: the base of `partitions.Partition` and `Groups`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .sizes import Size, simplify

if TYPE_CHECKING:
    from .runs import Runs


@dataclass(frozen=True)
class Segment:
    """`count` units of `unit` consecutive elements; whole units are dealt to the ranks by `chunk`.

    With `reverse` the last rank owns the first chunk. Such a segment is dealt evenly.
    """

    count: Size
    unit: Size = 1
    reverse: bool = False

    @property
    def length(self) -> Size:
        return simplify(self.count * self.unit)


class Distribution:
    """Base of the ways in which a loop, or a dimension that carries it, is dealt to the ranks.

    A kind answers for itself what depends on it; what a kind does not say is impossible with it.

    Attributes:
        by_data: whether only the data says which elements a rank owns; a parameter cannot lie so.
        field: a key of its JSON that no other kind has.
    """

    by_data: ClassVar[bool] = False
    field: ClassVar[str]

    @property
    def length(self) -> Size:
        """Elements of the dimension."""
        raise NotImplementedError(f"{type(self).__name__}.length")

    @property
    def static(self) -> bool:
        """Whether no size in it is a symbol."""
        return False

    @property
    def pieces(self) -> Size:
        """How many runs of the dimension are dealt separately, as those of a fused weight."""
        return 1

    @property
    def unit(self) -> Size | None:
        """Elements that stay together, where that is one number."""
        return None

    def even(self, tp: int) -> bool:
        """Whether every rank certainly stores the same number of elements."""
        raise NotImplementedError(f"{type(self).__name__}.even")

    def full(self, tp: int) -> bool:
        """Whether every rank certainly owns something."""
        raise NotImplementedError(f"{type(self).__name__}.full")

    def is_plain(self, tp: int) -> bool:
        """Whether it is the split that DTensor's `Shard` means."""
        return False

    def lift(self, repeat: Size, unit: Size, tp: int) -> Distribution | None:
        """That of a dimension which holds this loop `repeat` times, `unit` elements a step; None: there is none."""
        return self if repeat == unit == 1 else None

    def lower(self, repeat: Size, unit: Size, tp: int) -> Distribution | None:
        """The inverse of `lift`, or None where this cuts through a unit."""
        return self if repeat == unit == 1 else None

    def cut(self, lengths: Sequence[Size], tp: int) -> Sequence[Distribution] | None:
        """Those of consecutive pieces, or None where a boundary falls inside a part, or where it falls is not known."""
        return None

    def runs(self) -> Sequence[Segment] | None:
        """Its segments one after the other, to be joined with others; None where it cannot be."""
        return None

    def by_groups(self, ends: int) -> Distribution | None:
        """That of the rows of groups which are dealt so; `ends` as in `Groups`. None where rows cannot follow."""
        return None

    def local(self, rank: int, tp: int) -> int:
        """Elements that `rank` owns, where `static`."""
        raise NotImplementedError(f"{type(self).__name__}.local")

    def share(self, tp: int, hint: Callable[[Size], int]) -> float:
        """Largest part that one rank stores; `hint` gives a number for every size."""
        return 1.0

    def small(self, tp: int) -> Self:
        """The same kind of distribution with a few elements."""
        return self

    def simplicity(self, tp: int) -> tuple[bool, int, bool, str]:
        """What candidates are ordered by: even before uneven, few runs before many, a plain split before a repeated."""
        return (not self.even(tp), 1, False, str(self))

    def penalty(self, tp: int) -> int:
        """What breaks ties between equal costs."""
        return 0

    def to_runtime(self, size: Callable[[Any], Any]) -> Runs:
        """The form that calls of a rank's program take, each size mapped by `size`."""
        raise NotImplementedError(f"{type(self).__name__}.to_runtime")

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        raise NotImplementedError(f"{type(self).__name__}.to_json")

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the data are no distribution of this kind.
        """
        raise NotImplementedError(f"{cls.__name__}.from_json")
