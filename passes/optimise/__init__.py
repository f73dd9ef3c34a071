# ruff: noqa: F401  names that others import from here
"""Optimisations of one rank's program: a table of rewrites that keep its numbers, each with an off switch."""

from __future__ import annotations

from collections.abc import Mapping

from autotp.errors import InputError

from .cached_attention import CachedAttention
from .gradient_bucket import Bucket
from .kernels import Kernels
from .optimisation import Alternative, Judge, Optimisation, RankProgram, Setting, Value, Verdict
from .overlap_products import Overlap, Regather

OPTIMISATIONS: tuple[Optimisation, ...] = (
    CachedAttention(), Kernels(), Bucket(), Overlap(), Regather(),
)  # fmt: skip
Fired = tuple[tuple[str, str], ...]  # name of an optimisation, and what became of it
Switches = bool | Mapping[str, bool | str] | None
MEASURED = "measured"  # a switch: on where it was measured faster


def read_switches(switches: Switches) -> dict[str, bool | str]:
    """Read what is switched on or off by name; what is not named decides by itself.

    Args:
        switches: names -> on or off, or "measured" for what can be; True or False for all; None for none.

    Raises:
        InputError: a name is not known, or a switch is none.
    """
    names = [x.name for x in OPTIMISATIONS]
    if switches is None or isinstance(switches, bool):
        return {} if switches is None else dict.fromkeys(names, switches)
    if not isinstance(switches, Mapping) or not all(isinstance(on, bool) or on == MEASURED for on in switches.values()):
        raise InputError(
            f"optimise={switches!r}: give True or False, or a mapping such as "
            "{'overlap': False, 'kernels': 'measured'}."
        )
    if unknown := [name for name in switches if name not in names]:
        raise InputError(f"optimise names {unknown[0]!r}, which is no optimisation; there are {', '.join(names)}.")
    if unmeasured := [x.name for x in OPTIMISATIONS if switches.get(x.name) == MEASURED and not x.measurable]:
        raise InputError(f"optimise: {unmeasured[0]!r} is not measured; give True or False.")
    return dict(switches)
