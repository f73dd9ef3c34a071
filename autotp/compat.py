"""The only place that imports private parts of torch, with what differs between the versions (2.11 - 2.13)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.distributed._functional_collectives  # registers the meta kernels of the ops below
from torch import fx
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

# Functional collectives as dispatcher ops: the compiler sees them, fake tensors pass through them.
c10d_ops: Any = torch.ops._c10d_functional

tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten
TreeSpec = pytree.TreeSpec
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what load_state_dict returns


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that `torch.export` accepts for a model's parameters."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Without torch's own log lines about guards and missing fake kernels."""
    loggers = [logging.getLogger(n) for n in ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")]
    levels = [x.level for x in loggers]
    for x in loggers:
        x.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for x, level in zip(loggers, levels, strict=True):
            x.setLevel(level)


def shape_env(graph: fx.Graph) -> ShapeEnv | None:
    """The shape environment that the symbolic sizes of this graph belong to."""
    for node in graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            sizes = val.shape if isinstance(val, torch.Tensor) else [val]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    return None


def read_shape_env(env: ShapeEnv | None) -> tuple[dict, dict, list[sympy.Basic]]:
    """Hints (symbol -> example size), ranges (symbol -> (low, high)) and guards of a shape environment."""
    if env is None:
        return {}, {}, []
    values = getattr(env, "backed_var_to_val", None)
    values = env.var_to_val if values is None else values
    hints = {k: int(v) for k, v in values.items()}
    ranges = {k: (_bound(r.lower, 0), _bound(r.upper, 2**62)) for k, r in env.var_to_range.items()}
    return hints, ranges, [g.expr for g in env.guards]


def _bound(x: Any, otherwise: int) -> int:
    return int(x) if getattr(x, "is_Integer", False) else otherwise


sym_size: Any = torch.ops.aten.sym_size.int

OpOverloadPacket = torch._ops.OpOverloadPacket


def operator(op: Any) -> Any:
    """The overload or packet that an operator is: by itself, as a custom operator, or by name; None where unknown."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        space, _, name = op.replace("::", ".").partition(".")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, space), packet, None) if packet else None
        op = getattr(op, overload, None) if overload else op
    return op if isinstance(op, OpOverloadPacket | torch._ops.OpOverload) else None
