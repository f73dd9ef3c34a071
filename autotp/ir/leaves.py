"""The leaves of a program, by kind, each with what may be done with a tensor of that kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LeafKind:
    """The policy of the leaves of one kind.

    Attributes:
        name: what messages call it.
        splits: the solver may split it.
        trained: it has a gradient and an optimizer's states.
        passed: a call passes it; the others are the module's own.
        steady: a rank holds it all the time.
        carried: what the program makes of it comes back in the next call, so that its layout is the same going in and
            out, and in every program of a plan.
        written: a forward may write to it. What it writes goes to the module's own tensor, or to the caller's.
        saved: it is in a checkpoint, under its own name.
    """

    name: str
    splits: bool = False
    trained: bool = False
    passed: bool = False
    steady: bool = False
    carried: bool = False
    written: bool = False
    saved: bool = False

    def __reduce__(self) -> Any:
        """A copy, in this process or another, is the same kind: kinds are compared by identity."""
        return next((name for name, kind in globals().items() if kind is self), super().__reduce__())

    def __str__(self) -> str:
        return self.name

    @property
    def weight(self) -> bool:
        """Return whether a rank holds a part of it all the time, trained or not."""
        return self.splits and self.steady


PARAMETER = LeafKind("parameter", splits=True, trained=True, steady=True, saved=True)
BUFFER = LeafKind("buffer", steady=True, written=True, saved=True)
TABLE = LeafKind(
    "buffer", splits=True, steady=True, saved=True
)  # a weight that is never trained, such as a quantised one
CONSTANT = LeafKind("constant", steady=True)
INPUT = LeafKind("input", passed=True, written=True)
STATE = LeafKind(
    "state", splits=True, passed=True, carried=True, written=True
)  # a cached key or value, a convolution's
SEEDS = LeafKind("seeds")  # what counter-based random numbers come from
