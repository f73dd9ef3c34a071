"""Compositions run by workers, and what came of them."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tests.helpers.processes.pool import Pool, WorkerError

from .features import BY_NAME, pairs
from .run import told, world_of

Names = tuple[str, ...]
PATIENCE = 300.0  # seconds until ranks count as hung


def outcome(pool: Pool, names: Names) -> dict[str, Any]:
    """What came of a composition: on all ranks the same, or it has failed.

    Args:
        pool: workers, as many as it has ranks. names: its features.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = pool.run(told, names, folder, world=world_of(names), timeout=PATIENCE)
        except WorkerError as error:
            ranks = [("failed", str(error), 0.0)]
    kinds = {kind for kind, *_ in ranks}
    said: list[Any] = [text for _, text, _ in ranks]
    kind = ranks[0][0] if len(kinds) == 1 else "failed"
    if kind == "equal":
        said = [max(said)]
        kind = "equal" if said[0] < max(BY_NAME[name].close for name in names) else "failed"
    elif len({str(text).split(":")[0] for text in said}) == 1:
        said = said[:1]
    spent = round(sum(seconds for *_, seconds in ranks), 1)
    return {"kind": kind, "said": " | ".join(map(str, said)) if len(said) > 1 else said[0], "seconds": spent}


def outcomes(wanted: Iterable[Names], end: float = math.inf) -> Iterator[tuple[Names, dict[str, Any]]]:
    """Run compositions by the number of their ranks, each number with workers of its own.

    Args:
        wanted: the compositions. end: time of `time.monotonic` after which none begins.
    """
    every, pool, size = pairs(), Pool(), 0
    try:
        for names in sorted(wanted, key=lambda n: (world_of(n), every.index(n) if n in every else len(every))):
            if time.monotonic() > end:
                return
            if world_of(names) != size:
                pool.close()
                size = world_of(names)
            yield names, outcome(pool, names)
    finally:
        pool.close()
