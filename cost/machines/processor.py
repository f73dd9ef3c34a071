"""The processor and the memory of this machine: `autotp doctor` reads them, and little else."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def memory() -> float:
    """Bytes of this machine's memory; a nominal number where the platform does not tell."""
    countable = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if countable else 16e9


def free_memory() -> int:
    """Bytes of it that a process can still take; 0 where the platform does not tell."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), 0)


def processor() -> str:
    """The name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    lines = [x for x in text.splitlines() if x.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.processor() or platform.machine()
