"""What capture tries, in order, where `torch.export` refuses a model as it is.

A change is of the arguments, of the skeleton or of how it is exported; never of the user's model. It is tried only
where the errors so far are of the kind that it is against, and where it changes anything for this model. What a change
assumes of the model is proved on the model itself, where its weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autotp.ir.graph import Capture
from autotp.log import log

from .assumptions import AssumptionProof, every_index, masks_of_ones
from .export import Attempt
from .messages import capture_error, kinds_of, recurs
from .repeated_blocks import Repeats
from .selfcheck import Trial


@dataclass(frozen=True)
class Change:
    """One thing to do otherwise.

    Attributes:
        name: for messages.
        against: the kind of error that it helps against, by `advice.kinds_of`; "" for all; "branch" for a decision on a
            value that is there with fixed sizes too.
        apply: makes the change; returns what was done, for the plan's notes, and a proof that the model computes the
            same with it, or None where it changes nothing for this model.
    """

    name: str
    against: str
    apply: Callable[[Attempt], tuple[str, AssumptionProof | None] | None]


def climb(
    start: Callable[[], Attempt],
    export: Callable[[Attempt], Capture],
    finish: Callable[[Capture], None],
    trial: Trial | None,
) -> Capture:
    """The capture of the first rung of `LADDER` that can be exported and that `finish` does not refuse.

    Raises:
        CaptureError: there is none.
    """
    failures: list[tuple[str, Exception]] = []
    kinds = {""}
    for rung in LADDER:
        if not {change.against for change in rung} <= kinds:
            continue
        try:
            found = _stand(start, rung, export, finish, trial)
        except Exception as error:  # whatever a user's forward and torch's tracer may raise
            kinds |= kinds_of(error) | ({"branch"} if STATIC in rung and recurs(error, failures) else set())
            failures.append((" and ".join(change.name for change in rung), error))
            continue
        if found is not None:
            return found
    fails = trial.skip if trial is not None and not trial.skip and trial.original() is None else ""
    raise capture_error(start().bare, failures, fails) from failures[0][1]


def _stand(
    start: Callable[[], Attempt],
    rung: tuple[Change, ...],
    export: Callable[[Attempt], Capture],
    finish: Callable[[Capture], None],
    trial: Trial | None,
) -> Capture | None:
    """The finished capture of one rung, with equal blocks traced once where that can be."""
    attempt = start()
    attempt.repeats = None if DRAFT in rung or DECIDE in rung else Repeats(attempt.bare)
    while True:
        try:
            made = _step(attempt, rung, export, trial)
            if made is None:
                return None
            finish(made[0])
            for each in made[1]:
                each.compare(made[0])
            return made[0]
        except Exception as error:
            if not (attempt.repeats and attempt.repeats.blocks):
                raise
            log.debug("equal blocks are traced one by one: %s", error)
            attempt = start()


def _step(
    attempt: Attempt, rung: tuple[Change, ...], export: Callable[[Attempt], Capture], trial: Trial | None
) -> tuple[Capture, list[Trial]] | None:
    """The capture of one rung, and further trials of it; None where one of its changes changes nothing."""
    made = [change.apply(attempt) for change in rung]
    done = [each for each in made if each is not None]
    if len(done) < len(made):
        return None
    proofs = [proof for _, proof in done if proof is not None]
    more = [proof(trial) for proof in proofs if trial is not None and not trial.skip]
    found = export(attempt)
    found.notes += [note for note, _ in done]
    if proofs and trial is not None and trial.skip:
        found.notes.append(f"that the model computes the same so was assumed, not proved: {trial.skip}")
    return found, more


# ---- sizes, and branches on values -----------------------------------------------------------------------------------


def _static(attempt: Attempt) -> tuple[str, None]:
    attempt.symbolic = False
    return "captured for one batch size and length only: the model does not export with symbolic sizes", None


def _draft(attempt: Attempt) -> tuple[str, None]:
    attempt.draft = True
    note = "captured by draft_export: branches on values of the inputs are taken as the example inputs take them, every"
    return f"{note} call is checked, and one that takes another branch is captured by itself", None


# ---- experts ---------------------------------------------------------------------------------------------------------


CAN = "_can_set_experts_implementation"  # how a transformers model says whether it has several


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    held = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, held)


def _experts(wanted: str) -> Change:
    """Mixture-of-experts models of transformers bring several implementations; some loop over the experts that are
    hit, which cannot be exported."""

    def apply(attempt: Attempt) -> tuple[str, None] | None:
        can: list[Any] = [getattr(m, CAN) for m in attempt.bare.modules() if hasattr(m, CAN)]
        if can and not any(ask() for ask in can):
            return None
        configs = {id(c): c for m in attempt.bare.modules() if (c := getattr(m, "config", None)) is not None}
        given = {i: getattr(c, "_experts_implementation", None) for i, c in configs.items()}
        others = [i for i, value in given.items() if value not in (None, wanted)]
        attempt.contexts += [_set(configs[i], "_experts_implementation", wanted) for i in others]
        note = f"captured with the experts implementation {wanted!r} in place of {given[others[0]]!r}" if others else ""
        return (note, None) if note else None

    return Change(f"the experts implementation {wanted!r}", "value", apply)


# ---- the ladder ------------------------------------------------------------------------------------------------------

STATIC = Change("fixed sizes", "", _static)
DRAFT, DECIDE = Change("draft_export", "branch", _draft), Change("draft_export", "value", _draft)
EVERY = Change("loops over all indices", "loop", every_index)
ONES = Change("masks of ones", "none", masks_of_ones)
GROUPED, BATCHED = _experts("grouped_mm"), _experts("batched_mm")

LADDER: tuple[tuple[Change, ...], ...] = (
    (),
    (GROUPED,),
    (BATCHED,),
    (EVERY,),
    (ONES,),
    (ONES, GROUPED),
    (ONES, BATCHED),
    (ONES, EVERY),
    (STATIC,),
    (DRAFT,),
    (STATIC, DECIDE),
    (STATIC, EVERY),
    (STATIC, ONES),
    (STATIC, ONES, DECIDE),
    (STATIC, ONES, EVERY),
)
