"""Optimisations of one rank's program: a table of rewrites that keep its numbers, each with an off switch."""

from __future__ import annotations

from .alternatives import Alternative
from .base import Judge, Optimisation, RankProgram, Setting, Verdict
from .table import MEASURED, OPTIMISATIONS, Fired, Switches, read_switches

__all__ = [
    "MEASURED", "OPTIMISATIONS", "Alternative", "Fired", "Judge", "Optimisation", "RankProgram", "Setting", "Switches",
    "Verdict", "read_switches",
]  # fmt: skip
