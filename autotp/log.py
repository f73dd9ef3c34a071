"""Logging: `AUTOTP_LOG=debug` shows stages and passes with their times, `info` long stages, a folder dumps graphs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("autotp")
LATE = 2.0  # seconds after which a stage says that it goes on, and then after twice as many
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure() -> None:
    """Follow `AUTOTP_LOG`; without it, logging is the application's own business."""
    wish = os.environ.get("AUTOTP_LOG", "")
    if wish:
        log.setLevel(LEVELS.get(wish.lower(), logging.DEBUG))
        if not log.handlers:
            log.addHandler(logging.StreamHandler())


def dump(name: str, text: object) -> None:
    """Write a text, or what prints as one, to the folder that `AUTOTP_LOG` names; ranks have folders of their own."""
    wish = os.environ.get("AUTOTP_LOG", "")
    if wish and wish.lower() not in LEVELS:
        folder = Path(wish, f"rank{os.environ['RANK']}") if "RANK" in os.environ else Path(wish)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(str(text))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: it takes 15% of planning a hundred layers."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


under_way: list[str] = []  # the stages that have begun and not ended, outer ones first


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Log the CPU seconds of a stage; of one that takes longer than two seconds meanwhile, that it goes on."""
    start = time.process_time()
    under_way.append(name)
    try:
        with telling(name, log.info) if log.isEnabledFor(logging.INFO) else contextlib.nullcontext():
            yield
    finally:
        under_way.remove(name)
    log.debug("%s: %.2f s CPU", name, time.process_time() - start)


@contextlib.contextmanager
def telling(what: object, say: Callable[[str], None]) -> Iterator[None]:
    """Tell that work which takes longer than two seconds goes on, ever less often.

    Args:
        what: prints as the work's name. say: is called with a line, from another thread.
    """

    def tell() -> None:
        began, pause = time.monotonic(), LATE
        while not over.wait(pause):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")
            pause *= 2

    over = threading.Event()
    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()
