"""Functions with a backward of their own (`torch.autograd.Function`): each call is one operator of the graph.

Tracing through would keep the forward and lose the backward. The operator calls the user's Function itself
(`autotp.kernels.functions`). What may be split is read off its forward and backward, traced by themselves with every
size a symbol (`autotp.rules.functions`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.errors import CaptureError
from autotp.ir.graph import draws
from autotp.kernels.functions import CALL, CALLS, DRAW, SIZE, TENSOR, Called, enter
from autotp.rules.functions import loops_of

from .messages import the_users

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
WAY_OUT = "Pass every tensor that it reads as an argument of `apply`, and everything else as a plain number or string."


@contextmanager
def functions_kept() -> Iterator[None]:
    """Within this context a Function that a trace comes to is an operator of the graph."""
    with compat.functions_as(_call):
        yield


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = function is torch.nn.modules._functions.BackwardHookFunction  # gives what it is given
    if compat.module_stack() is None or hooks:
        return compat.apply_function(function, *args, **kwargs)
    leaves, spec = compat.tree_flatten((args, kwargs))
    for x in leaves:
        if not isinstance(x, (Tensor, torch.SymInt)) and type(x) not in PLAIN:
            raise _refused(function, f"it is given {_told(x)}, which may hold tensors", _line())
    slots = tuple(TENSOR if isinstance(x, Tensor) else SIZE if isinstance(x, torch.SymInt) else x for x in leaves)
    key = enter(Called(function, slots, spec, where=_line()))
    called = CALLS[key]
    xs, numbers = ([x for x in leaves if isinstance(x, kind)] for kind in (Tensor, torch.SymInt))
    version = [x._version for x in xs]
    made = iter(CALL(xs, numbers, key))
    if version != [x._version for x in xs]:
        raise _refused(function, "it writes to its arguments", called.where)
    if any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in called.outs):
        raise _refused(function, "it returns a number that depends on sizes or values", called.where)
    outs = [next(made) if x is TENSOR else x for x in called.outs]
    return compat.tree_unflatten(outs, called.out_spec)


def read_functions(graph: fx.Graph) -> None:
    """Read off every Function of an exported graph how it may be split, and whether it draws random numbers.

    Raises:
        CaptureError: it reads tensors that are not its arguments, or its backward cannot be traced.
    """
    for node in [n for n in graph.nodes if n.target is CALL]:
        xs, _, key = node.args
        called, values = CALLS[key], [x.meta["val"] for x in xs]
        kind = tuple(v.ndim for v in values)
        try:
            graph, count, guards = compat.trace_gradient(lambda *given, node=node: _again(node, given), values)
        except Exception as error:  # whatever the user's code may raise
            told = (str(error).splitlines() or [""])[0]
            why = f"its forward and backward cannot be traced by themselves ({type(error).__name__}: {told})"
            raise _refused(called.function, why, called.where) from error
        if any(draws(n) for n in graph.nodes if n.op == "call_function"):
            node.target = DRAW
        found = loops_of(graph, len(values), count, guards) if node.target is CALL and not node.args[1] else ()
        known = called.loops.get(kind, found)
        called.loops[kind] = tuple(x for x in found if x in known)


def _again(node: fx.Node, xs: tuple[Tensor, ...]) -> list[Tensor]:
    _, given, key = node.args
    return CALL(list(xs), [compat.hint(n.meta["val"]) if isinstance(n, fx.Node) else n for n in given], key)  # type: ignore[union-attr]


def _refused(function: Any, why: str, where: str) -> CaptureError:
    at = f" ({where})" if where else ""
    return CaptureError(
        f"{function.__qualname__}.apply{at} cannot be captured with its own backward: {why}. {WAY_OUT} Or write it "
        "with torch operators whose derivative is the wanted one (`x + (f(x) - x).detach()` for a straight-through "
        "gradient)"
    )


def _told(x: Any) -> str:
    return f"a {type(x).__name__}" if not isinstance(x, type) else f"the class {x.__name__}"


def _line() -> str:
    """The user's line that is running, as `file:line: code`."""
    frames = traceback.extract_stack()
    at = next((f for f in reversed(frames) if the_users(f.filename)), None)
    return f"{at.filename}:{at.lineno}: {at.line}" if at is not None else ""
