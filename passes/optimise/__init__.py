"""Optimisations of one rank's program: a table of rewrites that keep its numbers, each with an off switch."""

from __future__ import annotations

from .base import Optimisation, Setting
from .table import OPTIMISATIONS, Fired, Switches, optimise, read_switches

__all__ = ["OPTIMISATIONS", "Fired", "Optimisation", "Setting", "Switches", "optimise", "read_switches"]
