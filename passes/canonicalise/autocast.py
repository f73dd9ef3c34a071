"""Autocast made explicit: the casts that an operator's operands went through stand in the graph.

`torch.export` records operators above autocast: the dtypes of the results show it, the casts are missing. With the
casts in the graph, an operator may be decomposed or moved without changing what it is computed in, and the program is
run with autocast switched off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import Capture
from autotp.ir.op import aten
from autotp.passes.base import Changes, Pass

# Contractions: autocast lowers all operands, and fake tensors do not mind if they differ.
LOWERED = frozenset(
    ["linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "prelu",
     "scaled_dot_product_attention", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
     "conv_transpose2d", "conv_transpose3d", "conv_tbc"]
)  # fmt: skip


class ExplicitCasts(Pass[Capture]):
    """Casts before every operator whose recorded result only autocast explains."""

    name = "explicit-casts"

    def idle(self, program: Capture) -> str:
        """Run only where something ran under autocast, around the call or within it."""
        ran = program.autocast or (program.state and program.state[-1] is not None)
        return "" if ran else "no autocast around the call or within it"

    def run(self, program: Capture) -> Changes:
        calls = [n for n in program.graph.nodes if n.op == "call_function" and _dtype(n.meta.get("val")) is not None]
        return Changes(sum(self._cast(program.graph, n) for n in calls), "operators have their operands cast")

    def _cast(self, graph: fx.Graph, node: fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        dtype = _dtype(node.meta["val"])
        if schema is None or schema.is_mutable:
            return False
        lowered = schema.name.removeprefix("aten::") in LOWERED
        if not lowered and (_result_dtype(node, None) == dtype or _result_dtype(node, dtype) != dtype):
            return False
        operands = [i for i in node.all_input_nodes if _dtype(i.meta.get("val")) not in (None, dtype)]
        with graph.inserting_before(node):
            for operand in operands:
                cast = graph.call_function(aten.to.dtype, (operand, dtype))
                cast.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
                node.replace_input_with(operand, cast)
        return bool(operands)


def _dtype(val: Any) -> torch.dtype | None:
    """Give the dtype of the first floating tensor of a value."""
    return next((v.dtype for v in compat.tree_leaves(val) if isinstance(v, Tensor) and v.is_floating_point()), None)


def _result_dtype(node: fx.Node, dtype: torch.dtype | None) -> torch.dtype | None:
    """Compute the operator's dtype without autocast, its floating operands cast to `dtype` (None: as they are)."""

    def operand(n: fx.Node) -> Any:
        val = n.meta.get("val")
        return val.to(dtype) if dtype is not None and isinstance(val, Tensor) and val.is_floating_point() else val

    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    device = next(v.device for v in compat.tree_leaves(node.meta["val"]) if isinstance(v, Tensor))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            return _dtype(node.target(*args, **kwargs))  # type: ignore[operator]
        except (RuntimeError, TypeError):  # operands of different dtypes
            return None
