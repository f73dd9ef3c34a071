"""Processes forked from this one, which begin with all that it holds."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from benchmarks.helpers.isolate import Record, ended, merge

PATIENCE = 900.0  # seconds
GRACE = 3.0  # seconds for the others once one has ended wrongly


def forked(function: Callable[..., None], each: Sequence[tuple[Any, ...]]) -> list[tuple[Record, str]]:
    """What `function(*arguments, send)` sends from a process for each of the arguments, merged, all at once.

    Returns:
        For each the record, and why it is not complete ("" where it is).
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in each]
    works = [
        context.Process(target=_work, args=(there, function, arguments), daemon=True)
        for (_, there), arguments in zip(pipes, each, strict=True)
    ]
    for work, (_, there) in zip(works, pipes, strict=True):
        work.start()
        there.close()
    try:
        return _listen([here for here, _ in pipes], works)
    finally:
        for work in works:
            work.kill()
            work.join()


def _work(pipe: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    function(*arguments, pipe.send)
    pipe.send(None)


def _listen(pipes: list[Any], works: list[Any]) -> list[tuple[Record, str]]:
    found: list[tuple[Record, str]] = [({}, "out of time") for _ in pipes]
    until, open_ = time.monotonic() + PATIENCE, {pipe: i for i, pipe in enumerate(pipes)}
    while open_ and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(open_), left):
            i = open_[pipe]  # type: ignore[index]
            try:
                part = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                works[i].join(GRACE)
                found[i] = found[i][0], ended(works[i].exitcode)
                until = min(until, time.monotonic() + GRACE)
                del open_[pipe]  # type: ignore[arg-type]
                continue
            if part is None:
                found[i] = found[i][0], ""
                del open_[pipe]  # type: ignore[arg-type]
            else:
                found[i] = merge(found[i][0], part), found[i][1]
    return found
