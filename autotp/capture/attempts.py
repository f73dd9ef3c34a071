"""Table of the attempts of a capture, in order, where `torch.export` refuses a model as it is.

A change alters the arguments, the skeleton or the exporter, never the user's model. It is tried only if an earlier
attempt failed with an error that it can fix, and no earlier failure rules it out. Each row is tried with equal blocks
traced once, and then with all of them traced where that may have been the fault. Whatever a change assumes of the model
is proved on the model itself, where its weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .assumptions import AssumptionProof, all_but_the_last, every_index, masks_of_ones
from .capture_errors import kinds_of, line_of_error
from .export import Attempt
from .repeated_blocks import CannotRepeat


@dataclass(frozen=True)
class Change:
    """A change of an attempt.

    Attributes:
        name: for messages.
        against: says whether it may help where an attempt without it failed so.
        apply: makes the change; returns a note for the plan, and a proof that the model computes the same with it; or
            None where it changes nothing for this model.
    """

    name: str
    against: Callable[[Failure], bool]
    apply: Callable[[Attempt], tuple[str, AssumptionProof | None] | None]


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.

    Attributes:
        changes: those of the attempt; `flat`: it traced every block.
        kinds: those of `messages.KINDS` that the error is of.
        line: file and number of the user's innermost line; None where the error has none.
        blocks: equal blocks were traced once, and may be at fault.
        disproved: the model itself refuted an assumption of the attempt.
        recurs: fixed sizes left a decision open that was met with symbolic ones.
    """

    changes: tuple[Change, ...]
    flat: bool
    error: Exception
    kinds: Set[str]
    line: tuple[str, int] | None
    blocks: bool
    disproved: bool
    recurs: bool

    @classmethod
    def of(
        cls, changes: tuple[Change, ...], flat: bool, error: Exception, attempt: Attempt, earlier: Sequence[Failure]
    ) -> Failure:
        """Classify a failure, to skip attempts that would fail the same way.

        Args:
            changes, flat, attempt: of the failure. error: that it raised. earlier: the failures before.
        """
        kinds, line = kinds_of(error), line_of_error(error)
        # A decision on values stays open whatever way the blocks are traced.
        traced_once = isinstance(error, CannotRepeat) or "value" not in kinds
        blocks = bool(attempt.repeats and attempt.repeats.blocks) and traced_once
        lines = {f.line for f in earlier if "value" in f.kinds and STATIC not in f.changes}
        recurs = STATIC in changes and "value" in kinds and line is not None and line in lines
        return cls(changes, flat, error, kinds, line, blocks, attempt.assumes, recurs)


def worth_trying(changes: tuple[Change, ...], flat: bool, failures: Sequence[Failure]) -> bool:
    """Say whether an attempt with these changes, and with every block traced, may go better than those that failed."""
    if flat and not any(f.blocks for f in failures if f.changes == changes):
        return False
    for change in changes:
        if not any(change.against(f) for f in failures):
            return False
    return not any(f.disproved and {*f.changes} <= {*changes} for f in failures)


def attempt_errors(failures: Sequence[Failure]) -> list[tuple[str, Exception]]:
    """List the changes that were tried, with the error; of an attempt in both ways to trace the blocks the last."""
    errors: dict[str, Exception] = {}
    for failure in failures:
        errors[" and ".join(change.name for change in failure.changes)] = failure.error
    return list(errors.items())


# ---- sizes, and branches on values -----------------------------------------------------------------------------------


def _static(attempt: Attempt) -> tuple[str, None]:
    attempt.symbolic = False
    return "captured for one batch size and length only: the model does not export with symbolic sizes", None


def _kind(kind: str) -> Callable[[Failure], bool]:
    """Make a condition on the kind of an error."""
    return lambda failure: kind in failure.kinds


def _draft(attempt: Attempt) -> tuple[str, None]:
    attempt.draft, attempt.repeats = True, None
    note = "captured by draft_export: branches on values of the inputs are taken as the example inputs take them, every"
    return f"{note} call is checked, and one that takes another branch is captured by itself", None


# ---- experts ---------------------------------------------------------------------------------------------------------


CAN = "_can_set_experts_implementation"  # how a transformers model says whether it has several


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _experts(implementation: str) -> Change:
    """Make a change of a model's implementation of experts: some of transformers' loop over the experts that are hit,
    which cannot be exported."""

    def apply(attempt: Attempt) -> tuple[str, None] | None:
        can: list[Any] = [getattr(m, CAN) for m in attempt.bare.modules() if hasattr(m, CAN)]
        if can and not any(ask() for ask in can):
            return None
        configs = {id(c): c for m in attempt.bare.modules() if (c := getattr(m, "config", None)) is not None}
        values = {i: getattr(c, "_experts_implementation", None) for i, c in configs.items()}
        others = [i for i, value in values.items() if value not in (None, implementation)]
        attempt.contexts += [_set(configs[i], "_experts_implementation", implementation) for i in others]
        if not others:
            return None
        return f"captured with the experts implementation {implementation!r} in place of {values[others[0]]!r}", None

    return Change(f"the experts implementation {implementation!r}", _kind("value"), apply)


# ---- the attempts ----------------------------------------------------------------------------------------------------

STATIC = Change("fixed sizes", lambda failure: True, _static)
DRAFT = Change("draft_export", lambda failure: failure.recurs, _draft)
DECIDE = Change("draft_export", _kind("value"), _draft)
EVERY = Change("loops over all indices", _kind("loop"), every_index)
LOOPS = Change("loops over indices", _kind("loop"), lambda attempt: ("", None))  # only where there are any
BUT_LAST = Change("all of them but the last", _kind("index"), all_but_the_last)
ONES = Change("masks of ones", _kind("none"), masks_of_ones)
GROUPED, BATCHED = _experts("grouped_mm"), _experts("batched_mm")

ATTEMPTS: tuple[tuple[Change, ...], ...] = (
    (),
    (GROUPED,),
    (BATCHED,),
    (EVERY,),
    (LOOPS, BUT_LAST),
    (ONES,),
    (ONES, GROUPED),
    (ONES, BATCHED),
    (ONES, EVERY),
    (STATIC,),
    (DRAFT,),
    (STATIC, DECIDE),
    (STATIC, EVERY),
    (STATIC, LOOPS, BUT_LAST),
    (STATIC, ONES),
    (STATIC, ONES, DECIDE),
    (STATIC, ONES, EVERY),
)
