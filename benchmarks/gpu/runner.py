"""Runs parts: each in a process of its own, within its seconds, item by item, from where it stopped."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .parts import PARTS, ROOT, State, key, load, module, path_of, save
from .sizes import SCALES

LIMIT = 450.0  # seconds of a part's process
SPARE = 30.0  # seconds before that from which no further item begins


def work(part: str, device: str, folder: Path, limit: float) -> None:
    """Run what is left of a part in this process, for so many seconds; every result is written as soon as it is there.

    Args:
        part: its number. device: "cuda" or "cpu". folder: of the files. limit: seconds.
    """
    until = time.monotonic() + limit - min(SPARE, limit / 4)
    path = path_of(folder, part)
    state = load(path, key(part, device))
    try:
        found = module(part).items(SCALES[device])
    except ImportError as error:
        state.names, state.faults = ["all"], {"all": f"not installed: {error.name} ({error})"}
        return save(path, state)
    state.names = list(found)
    for name in state.left:
        if time.monotonic() > until:
            break
        state.running, began = name, time.monotonic()
        save(path, state)
        try:
            state.results[name] = found[name]()
        except Exception as error:  # of one item: the others go on
            state.faults[name] = f"{type(error).__name__}: {str(error).strip()[:500]}"
        state.running, state.seconds[name] = "", round(time.monotonic() - began, 1)
        save(path, state)
        torch.compiler.reset()  # torch compiles one function for a few sizes only, and then refuses
        if device == "cuda":
            torch.cuda.empty_cache()
    return None


def run(part: str, device: str, folder: Path, seconds: float, whole: bool = True) -> State:
    """Run a part in a process of its own, which is ended after so many seconds, and say what is known of it then.

    Args:
        part: its number. device: "cuda" or "cpu". folder: of the files.
        seconds: for the process. whole: whether that is all that an item may ever have.
    """
    path, wanted = path_of(folder, part), key(part, device)
    folder.mkdir(parents=True, exist_ok=True)
    begins = load(path, wanted).left[:1]
    code, late = _process(part, device, folder, seconds)
    state = load(path, wanted)
    why = f"it ran past {seconds:.0f} s" if late else f"its process ended with code {code}: {_tail(path)}"
    if not state.names and (whole or not late):
        state.names, state.faults = ["all"], {"all": why}
    elif state.running and (not late or (whole and [state.running] == (begins or state.names[:1]))):
        state.faults[state.running] = why  # what had less than all of a process's time is tried again
    elif not late and begins and state.left[:1] == begins:
        state.faults[begins[0]] = why
    state.running = ""
    save(path, state)
    return state


def command(part: str, device: str, folder: Path, seconds: float) -> list[str]:
    """What a part's process runs."""
    words = ("--child", part, "--device", device, "--out", str(folder), "--limit", str(seconds))
    return [sys.executable, "-m", "benchmarks.gpu", *words]


def _process(part: str, device: str, folder: Path, seconds: float) -> tuple[int, bool]:
    """The exit code of the process of a part, and whether it was ended."""
    words = command(part, device, folder, seconds)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTP_CACHE": os.environ.get("AUTOTP_CACHE", "0")}
    with open(path_of(folder, part).with_suffix(".log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            return process.wait(seconds), False
        except subprocess.TimeoutExpired:
            return 0, True
        finally:  # with all that it started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(path: Path) -> str:
    lines = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def run_all(
    chosen: Sequence[str],
    device: str,
    folder: Path,
    say: Callable[[str], None],
    limit: float = LIMIT,
    budget: float = math.inf,
    again: bool = False,
) -> dict[str, State]:
    """Run parts in turn until the budget is spent.

    Args:
        chosen: numbers of parts. device: "cuda" or "cpu". folder: of the files. say: told what begins.
        limit: seconds of one part's process. budget: seconds of all. again: forget what is known of these parts.

    Returns:
        What is known of every part that has a file, chosen or not.
    """
    until = time.monotonic() + budget
    for part in chosen:
        if again:
            path_of(folder, part).unlink(missing_ok=True)
        state = load(path_of(folder, part), key(part, device))
        while not state.complete:
            left = until - time.monotonic()
            if left < min(SPARE, limit):
                say(f"part {part}: the budget is spent; the same command goes on from here")
                break
            say(f"part {part} ({PARTS[part]}): {f'{len(state.left)} items left' if state.names else 'begins'}")
            state = run(part, device, folder, min(limit, left), whole=left >= limit)
    states = {part: load(path_of(folder, part), key(part, device)) for part in PARTS}
    return {part: state for part, state in states.items() if state.names}
