"""Logging: `AUTOTP_LOG=debug` shows stages and passes with their times, `info` long stages, a folder dumps graphs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Log the CPU seconds of a stage; of one that takes longer than two seconds meanwhile, that it goes on."""
    start, over = time.process_time(), threading.Event()
    if log.isEnabledFor(logging.INFO):
        threading.Thread(target=_tell, args=(name, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
    log.debug("%s: %.2f s CPU", name, time.process_time() - start)


def _tell(name: str, over: threading.Event) -> None:
    """Say that a stage goes on, ever less often, until it is over."""
    began, pause = time.monotonic(), LATE
    while not over.wait(pause):
        log.info("%s: %.0f s so far", name, time.monotonic() - began)
        pause *= 2
