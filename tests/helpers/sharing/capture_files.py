"""Captures that one process made, for the others of a test run: each rank of the pool would make its own.

A capture is a file named by all that it depends on. Whoever needs it first locks the name; the others wait, and read.
What cannot be said in words that mean the same everywhere (a local class, a file of the test's own) is not shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from autotp.capture.rank0 import pack, unpack
from autotp.capture.request import CaptureRequest
from autotp.ir.graph import Capture

FOLDER = "AUTOTP_TEST_CAPTURES"  # set by the run
WORTH = 0.3  # CPU seconds from which on a capture is written
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum)
PLACES = (str(Path(__file__).parents[3]), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))


def once(
    key: Any, make: Callable[[], Capture], enough: Callable[[Capture], bool], alone: Callable[[Capture], bool]
) -> Capture:
    """The capture of this key: another process's where there is one and it is `enough`, else made here.

    One that is not for this process `alone` is kept for others.
    """
    path = _path(key)
    if path is None:
        return make()
    with _locked(path):
        found = _read(path)
        if found is None or not enough(found):
            began = time.process_time()
            found = make()
            if time.process_time() - began > WORTH and not alone(found):
                _write(path, found)
        return found


def _path(key: Any) -> Path | None:
    """Where a capture lies; None where its key means something in this process alone."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    try:
        return Path(folder, hashlib.sha256(_text(key).encode()).hexdigest())
    except LookupError:
        return None


def _text(value: Any) -> str:
    """The same text for the same key in every process.

    Raises:
        LookupError: there is none.
    """
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_text, value)))}}}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _name(value)
    if isinstance(value, (*PLAIN, CaptureRequest)):
        return repr(value)
    raise LookupError(value)


def _name(value: Any) -> str:
    """Where a class or function is found, if that is in a file that does not change."""
    if value.__module__ == "builtins" or (isinstance(value, BuiltinFunctionType) and " at 0x" not in repr(value)):
        return f"{value.__module__}:{value!r}"
    found: Any = sys.modules.get(value.__module__ or "")
    file = getattr(found, "__file__", None) or ""
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not value or value.__module__ == "__main__" or not file.startswith(PLACES):
        raise LookupError(value)
    return f"{value.__module__}:{value.__qualname__}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Within this context no other process is at this file."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, captured: Capture) -> None:
    with contextlib.suppress(Exception), warnings.catch_warnings():  # something in it has no form in a file
        warnings.simplefilter("ignore")
        path.write_bytes(pack(captured))


def _read(path: Path) -> Capture | None:
    if not path.exists():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return unpack(path.read_bytes(), torch.device("cpu"))
    except Exception:  # a class that this process does not know
        return None
