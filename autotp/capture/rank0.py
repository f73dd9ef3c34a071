"""One rank captures and the others take its program, where all of them would capture the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autotp.comm.ranks import Ranks, broadcast, from_all, together
from autotp.ir.graph import Capture
from autotp.log import log
from autotp.passes.base import Pass, run_passes

from .packing import Unpackable, pack, unpack

T = TypeVar("T")
RankKey = tuple[str | None, str]  # what a rank's capture depends on, or None and why that cannot be told
WHAT = "capturing the model"


def capture_once(
    ranks: Ranks | None,
    agreed: Sequence[Pass[Capture]],
    key: Callable[[], RankKey],
    make: Callable[[], tuple[Capture, T]],
    take: Callable[[Capture, T], tuple[Capture, T]] = lambda captured, rest: (captured, rest),
) -> tuple[Capture, T]:
    """A capture, the same on every rank: rank 0's, or each rank's own where they may differ. A collective call.

    Args:
        ranks: None in one plain process. agreed: passes where every rank has captured for itself.
        key: all that a capture depends on; equal keys are equal captures.
        make: captures here, and gives with it what else came of that, which pickles.
        take: what this rank does with another's.

    Raises:
        CaptureError: as `make`; then every rank captures, and fails by itself. RankError: it fails on some.
    """
    if ranks is None or ranks.tp == 1:
        return _own(ranks, agreed, make)
    mine = together(ranks, WHAT, key)
    rank_keys = from_all(ranks, mine, "what a capture depends on")
    why = next((reason for word, reason in rank_keys if word is None), "")
    if why or len({word for word, _ in rank_keys}) > 1:
        return _each(ranks, agreed, make, why or "what it depends on differs between the ranks")
    own, error, message = _first(make) if ranks.rank == 0 else (None, None, None)
    data, why = broadcast(ranks, message)  # type: ignore[misc]
    if data is None:
        return _each(ranks, agreed, lambda: _again(own, error, make), why)
    if ranks.rank:
        own, why = _as_own(data, ranks, take)
    if odd := next((x for x in from_all(ranks, why, WHAT) if x), ""):
        return _each(ranks, agreed, lambda: _again(own, None, make), odd)
    assert own is not None
    return own


def _each(
    ranks: Ranks, agreed: Sequence[Pass[Capture]], make: Callable[[], tuple[Capture, T]], why: str
) -> tuple[Capture, T]:
    """Every rank's own capture, and why there is not one for all."""
    log.info("every rank captures the model for itself: %s", why)
    return _own(ranks, agreed, make)


def _own(
    ranks: Ranks | None, agreed: Sequence[Pass[Capture]], make: Callable[[], tuple[Capture, T]]
) -> tuple[Capture, T]:
    """Every rank's own capture, in one order."""
    captured, rest = together(ranks, WHAT, make)
    run_passes(captured, agreed)
    return captured, rest


def _first(make: Callable[[], tuple[Capture, T]]) -> tuple[Any, Exception | None, Any]:
    """What rank 0 made, what it raised, and what it sends: bytes, or why there are none."""
    try:
        own = make()
    except Exception as error:  # whatever a user's forward may raise: the others then raise it too
        return None, error, (None, f"it failed on rank 0: {type(error).__name__}")
    try:
        return own, None, (pickle.dumps((pack(own[0]), own[1])), "")
    except Unpackable as odd:
        return own, None, (None, str(odd))
    except (pickle.PicklingError, AttributeError, TypeError) as odd:  # a class that is local to a function
        return own, None, (None, str(odd))


def _as_own(data: bytes, ranks: Ranks, take: Callable[..., tuple[Capture, T]]) -> tuple[Any, str]:
    """Rank 0's capture as this rank's, or why it cannot be."""
    try:
        packed, rest = pickle.loads(data)
        captured = unpack(packed, ranks.device)
    except (Unpackable, AttributeError, ImportError, pickle.UnpicklingError) as odd:
        return None, f"rank {ranks.rank} cannot read rank 0's capture: {odd}"
    return take(captured, rest), ""


def _again(own: Any, error: Exception | None, make: Callable[[], tuple[Capture, T]]) -> tuple[Capture, T]:
    """What is known already, or this rank's own."""
    if error is not None:
        raise error
    return make() if own is None else own
