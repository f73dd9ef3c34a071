"""Whether an operator of the model's own code, which nothing rewrites, computes a part by the arguments that it has."""

from __future__ import annotations

from typing import Any

from autotp.ir.layouts import Layout
from autotp.ir.op import Op, Rule, aten
from autotp.rules.views import local_shape


def runs_on_part(op: Op, rule: Rule | None, operand: Layout | None, result: Layout | None) -> bool:
    """Whether the same arguments serve a rank that has a part.

    Args:
        op: the call. rule: of it.
        operand, result: how the first operand is read and the first result lies; None for whole.
    """
    # An operator whose arguments say no sizes has no `localise`.
    if rule is None or rule.localise is None or result is None or result.sharded_dim is None:
        return True
    if rule.localise is local_shape:
        return _open_dims(op) <= {result.sharded_dim}
    if op.args.get("dim") is None:
        return op.target is aten.expand.default
    # A softmax over the split dimension would be one over a part of it.
    return operand is None or operand.sharded_dim not in _dims(op)


def _open_dims(op: Op) -> set[int]:
    """Dimensions whose size a view leaves open by -1: that of a split one must be, for as a number it is the whole's.

    `unflatten` says the sizes of one dimension alone, and so they count from that one.
    """
    start = op.dim() if "sizes" in op.args else 0
    names = [k for k in ("size", "shape", "sizes") if k in op.args]
    sizes: Any = op.args[names[0]] if names else ()
    return {start + d for d, n in enumerate(sizes) if isinstance(n, int) and n == -1}


def _dims(op: Op) -> set[int]:
    """The dimensions that the operator works along, counted from the front."""
    dims = op.args["dim"]
    every = dims if isinstance(dims, list | tuple) else [dims]
    return {d % len(op.ins[0]) for d in every}
