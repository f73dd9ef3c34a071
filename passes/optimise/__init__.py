"""Optimisations of one rank's program: a table of rewrites that keep its numbers, each with an off switch."""

from __future__ import annotations

from .base import Optimisation, RankProgram, Setting
from .table import OPTIMISATIONS, Fired, Switches, read_switches

__all__ = ["OPTIMISATIONS", "Fired", "Optimisation", "RankProgram", "Setting", "Switches", "read_switches"]
