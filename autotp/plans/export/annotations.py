"""A plan's layouts as the annotations of spmd_types, and that package, which is an extra of its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotp.errors import InputError
from autotp.ir.layouts import Layout

if TYPE_CHECKING:
    from autotp.plans.plan import Plan

AXIS = "tp"  # what annotations call the mesh axis


def spmd_types(part: str = "") -> Any:
    """The package spmd_types, or a module of it.

    Args:
        part: the module's name; empty for the package itself.

    Raises:
        InputError: it is not installed, or does not fit this torch.
    """
    try:
        return import_module(f"spmd_types.{part}" if part else "spmd_types")
    except ImportError as error:
        raise InputError(
            f"this needs the package spmd_types, which could not be imported ({error}). It comes with an extra of "
            "autotp: pip install 'autotp[certify]'."
        ) from error


def annotation(layout: Layout) -> Any:
    """A layout as a type of the checker: R, I, P or S(dim).

    Rows by group are V: what they hold is no slice. So are candidates for a maximum, for P is a sum.
    """
    spmd = spmd_types()
    if layout.sharded_dim is not None and layout.groups is None:
        return spmd.S(layout.sharded_dim)
    summed = layout.partial and layout.to_runtime().reduction == "sum"
    return {"I": spmd.I, "R": spmd.R, "P": spmd.P if summed else spmd.V}.get(layout.mark, spmd.V)


def of_layouts(layouts: Mapping[str, Layout]) -> dict[str, dict[str, Any]]:
    """Name -> what `spmd_types.assert_type` takes for that value: the mesh axis and its type there."""
    return {name: {AXIS: annotation(layout)} for name, layout in layouts.items()}


def to_spmd_types(plan: Plan) -> dict[str, dict[str, Any]]:
    """The layouts of a plan's parameters, split buffers and states, by name."""
    return of_layouts({**plan.placements, **plan.states})
