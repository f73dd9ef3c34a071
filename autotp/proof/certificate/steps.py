"""Conversions in the checker's words."""

from __future__ import annotations

from typing import Any

from autotp.errors import PlanError
from autotp.ir.specs import Spec
from autotp.plans.export.styles import AXIS, spmd_types

Step = tuple[str, str, str]  # a transition of `spmd_types.rules`, and the types that it goes from and to

# Letters are the checker's types; "src" and "dst" the slices that the call names, S(dim). Rows by group (G) are split
# along the dimension of the rows. That an all-reduce wants P, and not merely V, is how `spmd_types.rules` reads it.
STEPS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("I", "R"): (("convert", "I", "R"),),
    ("P", "I"): (("all_reduce", "P", "I"),),
    ("S", "R"): (("all_gather", "src", "R"),),
    ("P", "S"): (("reduce_scatter", "P", "dst"),),
    ("S", "I"): (("all_gather", "src", "I"),),
    ("I", "S"): (("convert", "I", "dst"),),
    ("S", "S"): (("all_to_all", "src", "dst"),),
    ("P", "R"): (("all_reduce", "P", "R"),),
    ("R", "I"): (("convert", "R", "I"),),
    ("I", "P"): (("convert", "I", "P"),),
    ("R", "P"): (("convert", "R", "P"),),
    ("R", "S"): (("convert", "R", "dst"),),
    ("S", "P"): (("convert", "src", "P"),),
    ("I", "G"): (("convert", "I", "dst"),),
    ("R", "G"): (("convert", "R", "dst"),),
    ("P", "G"): (("all_reduce", "P", "R"), ("convert", "R", "dst")),
    ("S", "G"): (("all_gather", "src", "R"), ("convert", "R", "dst")),
    ("G", "S"): (("convert", "src", "P"), ("reduce_scatter", "P", "dst")),
    ("G", "I"): (("convert", "src", "P"), ("all_reduce", "P", "I")),
    ("G", "R"): (("convert", "src", "P"), ("all_reduce", "P", "R")),
    ("G", "P"): (("convert", "src", "P"),),
}
AGAIN: tuple[Step, ...] = (("all_gather", "src", "R"), ("convert", "R", "dst"))  # the same dimension, dealt otherwise


def transit(x: Any, src: Spec, dst: Spec, out: Any) -> None:
    """Type a conversion's result.

    Args:
        x: a typed tensor. src, dst: the call's own literals. out: a tensor that takes the type.

    Raises:
        SpmdTypeError: of the checker: `x` is not what the conversion says. PlanError: it has no word for these kinds.
    """
    spmd, rules = spmd_types(), spmd_types("rules")
    types = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "src": _slice(spmd, src), "dst": _slice(spmd, dst)}
    steps = STEPS.get((src.mark, dst.mark), ())
    if (src.mark, dst.mark) == ("S", "S") and src.sharded_dim == dst.sharded_dim:
        steps = AGAIN
    if not steps:
        raise PlanError(f"the checker has no transition for a conversion from {src.mark} to {dst.mark}")
    for i, (name, a, b) in enumerate(steps):
        last = {"out": out} if i == len(steps) - 1 else {}
        x = getattr(rules, name)(x, AXIS, src=types[a], dst=types[b], **last)


def _slice(spmd: Any, spec: Spec) -> Any:
    return None if spec.dim is None else spmd.S(spec.dim)
