"""Text of numbers and names: bytes, seconds, lists, near misses."""

from __future__ import annotations

import difflib
import math
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError

BITS = ("tp_invariant", "dp_invariant")  # keywords that ask for equal bits
CPU_INFO = Path("/proc/cpuinfo")
BESIDE = ("dp", "cp")  # names of a mesh's axes beside tp, the outermost first


def divisors(n: int) -> list[int]:
    """Return all divisors of a count, as of ranks, in ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def counts(number: Any) -> bool:
    """Return whether it is a whole number of at least 1, as of ranks or calls; a flag is no number."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def axis_text(degrees: Mapping[str, Any], between: str = " x ") -> str:
    """Return degrees as text, such as "dp=2 x cp=2"."""
    return between.join(f"{name}={n}" for name, n in degrees.items())


def message_of(error: BaseException) -> str:
    """Return an error as text: its class and its message."""
    return f"{type(error).__name__}: {error}"


def amount(nbytes: float) -> str:
    """Format bytes with a binary unit."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= step:
            return f"{nbytes / step:.1f} {unit}"
    return f"{nbytes:.0f} B"


UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_bytes(size: float | str, name: str = "memory", of: str = "bytes per rank") -> float:
    """Read a number of bytes, or text such as "80GB" (10^9 bytes each) or "74.5 GiB" (2^30).

    Args:
        size: as the user gives it. name: of the argument. of: what is counted.

    Raises:
        InputError: it is neither, or not greater than 0.
    """
    match = re.fullmatch(r"([0-9.]+) *([a-z]*)", size.strip().lower()) if isinstance(size, str) else None
    number, unit = match.groups() if match else (size, "")
    try:
        nbytes = float(number) * UNITS[unit]
    except (KeyError, TypeError, ValueError):
        nbytes = math.nan
    if isinstance(size, bool) or not (math.isfinite(nbytes) and nbytes > 0):
        raise InputError(f"{name}={size!r}: give a number of {of}, or text such as '80GB' or '74.5GiB'.")
    return nbytes


def number(x: float) -> str:
    """Format a count with a decimal unit."""
    for unit, step in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= step:
            return f"{x / step:.2f}{unit}"
    return f"{x:.0f}"


def first_line(text: object, default: str = "") -> str:
    """Return the first line of a text, such as an error's message; `default` where there is none."""
    return next(iter(str(text).strip().splitlines()), default)


def failure(error: BaseException) -> str:
    """Return the class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def indented(lines: Iterable[str]) -> str:
    """Indent lines of a message below its first."""
    return "".join(f"  {line}\n" for line in lines)


def counted(count: object, noun: str) -> str:
    """Return `1 head`, `8 heads`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def seconds(x: float) -> str:
    """Format a time in milliseconds or microseconds."""
    return f"{1e3 * x:.3f} ms" if x >= 1e-4 else f"{1e6 * x:.1f} us"


def round_seconds(x: float, most: float) -> str:
    """Format a round time, in a unit that suits all up to `most`."""
    unit, factor = next((u, f) for u, f, least in (("s", 1, 1.0), ("ms", 1e3, 1e-3), ("us", 1e6, 0.0)) if most >= least)
    return f"{factor * x:g} {unit}" if x else "0"


def listed(items: Iterable[Any]) -> str:
    """Join the items as text, each once."""
    return ", ".join(dict.fromkeys(map(str, items)))


def near(key: str, names: Iterable[str]) -> str:
    """Return the names that are most like a key."""
    names = list(names)
    return ", ".join(difflib.get_close_matches(key, names, n=3, cutoff=0.3) or names[:5])


def processor() -> str:
    """Return the name of this machine's CPU."""
    names = re.findall(r"model name\s*: (.*)", CPU_INFO.read_text()) if CPU_INFO.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
