"""Fake tensors, and the symbolic sizes of graphs."""

from __future__ import annotations

import builtins
import contextlib
import math
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.printers import PythonPrinter


def fake_mode() -> FakeTensorMode:
    """Make a fake tensor mode that `torch.export` accepts for a model's parameters."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, like: torch.Tensor, dtype: Any, device: torch.device | str) -> torch.Tensor:
    """Make a fake tensor as large as another one, and a parameter where that is one.

    It is made directly: by way of the mode and of `nn.Parameter`, which detaches, it takes several times as long.

    Args:
        mode: that it belongs to. like: gives shape and strides. dtype: of its elements. device: that it claims.
    """
    with without_torch_functions():
        empty = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
        copy: Any = FakeTensor(mode, empty, torch.device(device))
    if isinstance(like, torch.nn.Parameter):
        copy.requires_grad_(like.requires_grad)
        copy._is_param = True
    return copy


def without_torch_functions() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which reading tensors' attributes is not shown to the tracer's modes, which is slow."""
    return torch._C.DisableTorchFunction()


def told_by_data(val: Any) -> bool:
    """Return whether a value, or one of its sizes, is a number that only the data tell."""
    symbolic = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool
    return any(isinstance(v, symbolic) and free_unbacked_symbols(v) for v in pytree.tree_leaves(val))


def mode_of(val: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the mode that fake tensors belong to."""
    return next((v.fake_mode for v in pytree.tree_leaves(val) if isinstance(v, FakeTensor)), contextlib.nullcontext())


def shape_env(graph: fx.Graph) -> ShapeEnv | None:
    """Return the shape environment that the symbolic sizes of this graph belong to."""
    for node in graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            sizes = val.shape if isinstance(val, torch.Tensor) else [val]
            for size in sizes:
                if isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat):
                    return size.node.shape_env
    return None


def read_shape_env(env: ShapeEnv | None) -> tuple[dict, dict, list[sympy.Basic]]:
    """Return hints (symbol -> example size), ranges (symbol -> (low, high)) and guards of a shape environment."""
    if env is None:
        return {}, {}, []
    values = getattr(env, "backed_var_to_val", None)
    values = env.var_to_val if values is None else values
    hints = {k: int(v) for k, v in values.items()}
    ranges = {k: (_bound(r.lower, 0), _bound(r.upper, 2**62)) for k, r in env.var_to_range.items()}
    return hints, ranges, [g.expr for g in env.guards]


def _bound(x: Any, otherwise: int) -> int:
    return int(x) if getattr(x, "is_Integer", False) else otherwise


def size_code(symbols: list[sympy.Symbol], tests: list[Any], sizes: list[Any]) -> Any:
    """Compile a predicate of symbols' values and of further sizes: all tests hold, and each size equals its expression.

    Args:
        symbols: the first arguments. tests: relations between symbols.
        sizes: an expression, or number, for each further argument.

    Returns: None where torch's printer cannot write one of them as Python.
    """
    printer = PythonPrinter()
    names = {s: f"s{i}" for i, s in enumerate(symbols)}
    plain = {s: sympy.Symbol(name, integer=True, positive=True) for s, name in names.items()}
    extra = [f"n{i}" for i in range(len(sizes))]
    try:
        texts = [printer.doprint(sympy.sympify(t).xreplace(plain)) for t in tests if t not in (True, sympy.true)]
        texts += [
            f"{name} == {printer.doprint(sympy.sympify(size).xreplace(plain))}"
            for name, size in zip(extra, sizes, strict=True)
        ]
        body = " and ".join(f"({text})" for text in texts) or "True"
    except Exception:  # of a printer that does not know a function
        return None
    code = eval(f"lambda {', '.join([*names.values(), *extra])}: {body}", {"math": math})
    defined = all(n == "math" or hasattr(math, n) or hasattr(builtins, n) for n in code.__code__.co_names)
    return code if defined else None
