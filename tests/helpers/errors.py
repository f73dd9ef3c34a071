"""What a call fails with, and after how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import autotp


def error_of(fn: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.perf_counter()
    try:
        fn()
    except autotp.AutoTPError as error:
        return type(error).__name__, str(error), time.perf_counter() - start
    return "", "", time.perf_counter() - start


def message_of(fn: Callable[[], Any]) -> str:
    """ "" where it does not fail."""
    return error_of(fn)[1]
