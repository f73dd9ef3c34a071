"""What capture tries, in order, where `torch.export` refuses a model as it is.

A change is of the arguments, of the skeleton or of how it is exported; never of the user's model. It is tried only
where an earlier attempt failed in the way that it is against, where it changes anything for this model, and where what
the earlier attempts failed of does not say that this one fails of the same. What a change assumes of the model is
proved on the model itself, where its weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from .assumptions import AssumptionProof, all_but_the_last, every_index, masks_of_ones, no_skips
from .causes import INPUTS, Cause
from .export import Attempt


@dataclass(frozen=True)
class Change:
    """One thing to do otherwise.

    Attributes:
        name: for messages.
        against: whether it may help where an attempt without it failed of this cause.
        apply: makes the change; returns what was done, for the plan's notes, and a proof that the model computes the
            same with it, or None where it changes nothing for this model.
        leaves: whether it certainly leaves this cause as it is.
    """

    name: str
    against: Callable[[Cause], bool]
    apply: Callable[[Attempt], tuple[str, AssumptionProof | None] | None]
    leaves: Callable[[Cause], bool] = lambda cause: False


class Failure(NamedTuple):
    """An attempt that failed: its changes, the error, and why."""

    changes: tuple[Change, ...]
    error: Exception
    cause: Cause


def worth_trying(changes: Sequence[Change], failures: Sequence[Failure]) -> bool:
    """Whether an attempt with these changes may go better than those that failed."""
    if FLAT in changes:
        once = [f for f in failures if (*f.changes, FLAT) == tuple(changes)]
        if not any(f.cause.blocks for f in once):
            return False  # the same attempt with equal blocks traced once was not made, or had none
    for change in changes:
        if not any(change.against(f.cause) for f in failures):
            return False
    names = {change.name for change in changes}
    for failure in failures:
        had = {change.name for change in failure.changes}
        further = [change for change in changes if change.name not in had]
        # It does all that one did, and the rest changes nothing of what that one failed of.
        if had <= names and (failure.cause.disproved or all(change.leaves(failure.cause) for change in further)):
            return False
    return True


def attempt_errors(failures: Sequence[Failure]) -> list[tuple[str, Exception]]:
    """What was tried, in words, and the error; of one attempt with and without equal blocks traced once the last."""
    errors: dict[str, Exception] = {}
    for changes, error, _ in failures:
        errors[" and ".join(change.name for change in changes if change is not FLAT)] = error
    return list(errors.items())


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _flat(attempt: Attempt) -> tuple[str, None]:
    attempt.repeats = None
    return "", None


def _no_sizes_decide(cause: Cause) -> bool:
    """Whether it is a decision on data, which is open with any sizes, and in any way to trace the blocks."""
    return bool(cause.reads)


# ---- sizes, and branches on values -----------------------------------------------------------------------------------


def _static(attempt: Attempt) -> tuple[str, None]:
    attempt.symbolic = False
    return "captured for one batch size and length only: the model does not export with symbolic sizes", None


def _branch(cause: Cause) -> bool:
    """Whether it is a decision on values of the inputs, whatever their sizes are."""
    return cause.reads == {INPUTS} or cause.recurs


def _beyond_inputs(cause: Cause) -> bool:
    """Whether it is a decision on other data than the inputs, which is no condition of a call."""
    return bool(cause.reads - {INPUTS})


def _kind(kind: str) -> Callable[[Cause], bool]:
    """A change against errors of a kind of `messages.KINDS`."""
    return lambda cause: kind in cause.kinds


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
    """Mixture-of-experts models of transformers bring several implementations; some loop over the experts that are
    hit, which cannot be exported."""

    def apply(attempt: Attempt) -> tuple[str, None] | None:
        can: list[Any] = [getattr(m, CAN) for m in attempt.bare.modules() if hasattr(m, CAN)]
        if can and not any(ask() for ask in can):
            return None
        configs = {id(c): c for m in attempt.bare.modules() if (c := getattr(m, "config", None)) is not None}
        own = {i: getattr(c, "_experts_implementation", None) for i, c in configs.items()}
        others = [i for i, value in own.items() if value not in (None, implementation)]
        attempt.contexts += [_set(configs[i], "_experts_implementation", implementation) for i in others]
        if not others:
            return None
        return f"captured with the experts implementation {implementation!r} in place of {own[others[0]]!r}", None

    return Change(f"the experts implementation {implementation!r}", _kind("value"), apply)


# ---- the attempts ----------------------------------------------------------------------------------------------------

FLAT = Change("every block traced", lambda cause: cause.blocks, _flat, leaves=_no_sizes_decide)
STATIC = Change("fixed sizes", lambda cause: True, _static, leaves=_no_sizes_decide)
DRAFT = Change("draft_export", _branch, _draft, leaves=_beyond_inputs)
DECIDE = Change("draft_export", _kind("value"), _draft, leaves=_beyond_inputs)
EVERY = Change("loops over all indices", _kind("loop"), every_index)
LOOPS = Change("loops over indices", _kind("loop"), lambda attempt: ("", None))  # only where there are any
BUT_LAST = Change("all of them but the last", _kind("index"), all_but_the_last)
NONE_SKIPPED = Change("nothing skipped", _kind("skip"), no_skips)
ONES = Change("masks of ones", _kind("none"), masks_of_ones)
GROUPED, BATCHED = _experts("grouped_mm"), _experts("batched_mm")

ATTEMPTS: tuple[tuple[Change, ...], ...] = (
    (),
    (FLAT,),
    (GROUPED,),
    (GROUPED, FLAT),
    (BATCHED,),
    (BATCHED, FLAT),
    (EVERY,),
    (EVERY, FLAT),
    (LOOPS, BUT_LAST),
    (LOOPS, BUT_LAST, FLAT),
    (ONES,),
    (ONES, FLAT),
    (ONES, GROUPED),
    (ONES, GROUPED, FLAT),
    (ONES, BATCHED),
    (ONES, BATCHED, FLAT),
    (ONES, EVERY),
    (ONES, EVERY, FLAT),
    (STATIC,),
    (STATIC, FLAT),
    (DRAFT,),
    (NONE_SKIPPED,),
    (NONE_SKIPPED, FLAT),
    (STATIC, DECIDE),
    (STATIC, EVERY),
    (STATIC, EVERY, FLAT),
    (STATIC, LOOPS, BUT_LAST),
    (STATIC, LOOPS, BUT_LAST, FLAT),
    (STATIC, NONE_SKIPPED),
    (STATIC, NONE_SKIPPED, FLAT),
    (STATIC, ONES),
    (STATIC, ONES, FLAT),
    (STATIC, ONES, DECIDE),
    (STATIC, ONES, EVERY),
    (STATIC, ONES, EVERY, FLAT),
)
