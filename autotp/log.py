"""Logging: `AUTOTP_LOG=debug` shows stages and passes with their times; `AUTOTP_LOG=some/folder` dumps graphs too."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("autotp")
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
    """Log the CPU seconds of a stage."""
    start = time.process_time()
    yield
    log.debug("%s: %.2f s CPU", name, time.process_time() - start)
