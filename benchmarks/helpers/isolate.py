"""Run a function in a process of its own, with a deadline, and gather what it sends."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.export  # loaded once, in the server that processes are forked from
import transformers

Record = dict[str, Any]
Send = Callable[[Record], None]
PRELOAD = "benchmarks.helpers.measure"  # imports torch and transformers once, in the server that forks


def run(
    function: Callable[..., None], *arguments: Any, limit: float, parent: bool = False, preload: str = PRELOAD
) -> tuple[Record, str]:
    """What `function(*arguments, send)` sends from a new process, merged.

    Args:
        function: of a module, so that it can be named to another process. limit: seconds.
        parent: whether it starts processes of its own, which end with it.
        preload: module that the server imports before.

    Returns:
        The record, and why it is not complete ("" where it is).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, function, arguments, parent), daemon=not parent)
    process.start()
    there.close()
    try:
        return _listen(here, time.monotonic() + limit, process)
    finally:
        if parent and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def merge(record: Mapping[str, Any], part: Mapping[str, Any]) -> Record:
    """A record with a part added; where both hold a mapping, the union of the two."""
    both = {k: {**record[k], **v} for k, v in part.items() if isinstance(v, dict) and isinstance(record.get(k), dict)}
    return {**record, **part, **both}


def _work(pipe: Any, function: Callable[..., None], arguments: tuple[Any, ...], parent: bool) -> None:
    if parent:
        os.setpgrp()  # so that all are ended together
    logging.disable()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:  # what models say when they are built or called
        sys.stdout = sys.stderr = nothing
        function(*arguments, pipe.send)
    pipe.send(None)


def _listen(pipe: multiprocessing.connection.Connection, until: float, process: Any) -> tuple[Record, str]:
    record: Record = {}
    try:
        while pipe.poll(max(until - time.monotonic(), 0)):
            part = pipe.recv()
            if part is None:
                return record, ""
            record = merge(record, part)
    except EOFError:
        process.join(5)
        return record, ended(process.exitcode)
    return record, "out of time"


def ended(code: int | None) -> str:
    """Why a process ended that sent no end."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return "out of CPU time" if name == "SIGXCPU" else f"the process died: {name}"
    return f"the process ended with code {code}"
