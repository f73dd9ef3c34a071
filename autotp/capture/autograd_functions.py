"""Functions with a backward of their own (`torch.autograd.Function`): each call is one operator of the graph.

Tracing through would keep the forward and lose the backward. The operator calls the user's Function itself
(`autotp.kernels.functions`). The dimensions that may be split are read off its forward and backward, traced by
themselves with every size a symbol (`autotp.rules.function_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autotp import compat
from autotp.cost.compute import example
from autotp.errors import CaptureError
from autotp.ir.graph import draws, floating
from autotp.kernels.functions import CALL, CALLS, DRAW, SIZE, TENSOR, FunctionCall, apply, enter, functions_as
from autotp.passes.canonicalise.functionalise import drop_inert, memory, mutates, written_operand
from autotp.proof.differences import gradients
from autotp.rules.function_rules import linear_backward, loops_of
from autotp.text import failure

from .capture_errors import running_line

PLAIN_TYPES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

TORCHS = ("torch._", "torch.nn.modules._functions")  # what torch makes of its own operators and hooks


@contextmanager
def functions_kept() -> Iterator[None]:
    """Context in which a Function that a trace comes to is an operator of the graph."""
    with functions_as(_call):
        yield


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a call of a Function within a trace as one operator, whose outputs are fake.

    Raises:
        CaptureError: an argument may hold tensors, or a result depends on sizes.
    """
    if compat.module_stack() is None or function.__module__.startswith(TORCHS):
        return apply(function, *args, **kwargs)
    leaves, spec = compat.tree_flatten((args, kwargs))
    for x in leaves:
        # A tensor within an object of the user's would be a constant of the graph: no gradient would reach it.
        if not isinstance(x, (Tensor, torch.SymInt)) and type(x) not in PLAIN_TYPES:
            raise _refused(function, f"it is given {_text(x)}, which may hold tensors", _line())
    # Tensors and sizes are operands, so that values and gradients flow; all else is in the record of the call.
    xs = [x for x in leaves if isinstance(x, Tensor)]
    numbers = [x for x in leaves if isinstance(x, torch.SymInt)]
    key = enter(FunctionCall(function, tuple(map(_slot, leaves)), spec, tuple(x.dtype for x in xs), _line()))
    record = CALLS[key]
    # A Function that writes to its arguments says so nowhere: their versions tell.
    version = [x._version for x in xs]
    results = iter(CALL(xs, numbers, key))
    record.writes = record.writes or version != [x._version for x in xs]
    if any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in record.outs):
        raise _refused(function, "it returns a number that depends on sizes or values", record.where)
    # Outputs that are no tensors, such as None, stand where the Function returned them.
    outs: list[Any] = []
    for x in record.outs:
        outs.append(next(results) if x is TENSOR else x)
    assert record.out_spec is not None  # the call above has set it
    return compat.tree_unflatten(outs, record.out_spec)


def _slot(x: Any) -> Any:
    """Return the stand-in for an argument in the record of a call: tensors and sizes differ from call to call."""
    if isinstance(x, Tensor):
        return TENSOR
    return SIZE if isinstance(x, torch.SymInt) else x


def writes_to(node: fx.Node) -> list[fx.Node]:
    """List the operands that a node of an export writes to; a Function may write to any of its tensors."""
    if node.target is CALL:
        return list(node.args[0]) if CALLS[node.args[2]].writes else []  # type: ignore[arg-type, index]
    return [written_operand(node) or node] if mutates(node) else []


def refuse_seen_writes(graph: fx.Graph) -> None:
    """Refuse a Function that writes to its arguments where that can be seen: it is given copies of them.

    Args:
        graph: of an export whose fake values share memory where the real ones do.

    Raises:
        CaptureError: an argument is an input or a weight, or something reads it after the call.
    """
    calls = [n for n in graph.nodes if n.target is CALL and CALLS[n.args[2]].writes]
    # A dropout that drops nothing shares no memory in the graph, and does in the model.
    if calls:
        drop_inert(graph)
    places_of = memory(graph) if calls else {}
    for node in calls:
        # All values in the same memory, views and what they are views of: a write to one is seen in all.
        targets = set().union(*(places_of[x] for x in writes_to(node)))
        names = [n for n, places in places_of.items() if places & targets and n < node]
        record = CALLS[node.args[2]]
        # The caller, or the next step, would see the change in the model and not here.
        if any(n.op in ("placeholder", "get_attr") for n in names):
            raise _refused(record.function, "it writes to an argument that is an input or a weight", record.where)
        # So would an operator that comes later. What nothing reads any more may be written to.
        if any(user > node for n in names for user in n.users):
            raise _refused(record.function, "it writes to an argument that is read afterwards", record.where)


def read_functions(graph: fx.Graph) -> None:
    """Find how every Function of an exported graph may be split, and whether it draws random numbers.

    Raises:
        CaptureError: it reads tensors that are not its arguments, or its backward cannot be traced.
    """
    for node in [n for n in graph.nodes if n.target is CALL]:
        xs, _, key = node.args
        record, values = CALLS[key], [x.meta["val"] for x in xs]
        kind = tuple(v.ndim for v in values)
        # Traced by itself, with a symbol for every size: whether a dimension may be split is read off this graph.
        try:
            graph, count, guards = _traced(lambda *xs, node=node: _again(node, xs), values)
        except Exception as error:  # whatever the user's code may raise
            reason = f"its forward and backward cannot be traced by themselves ({failure(error)})"
            raise _refused(record.function, reason, record.where) from error
        # One that draws random numbers is another operator, which no rule splits.
        if any(draws(n) for n in graph.nodes if n.op == "call_function"):
            node.target = DRAW
        loops = loops_of(graph, len(values), count, guards) if node.target is CALL and not node.args[1] else ()
        record.linear = record.linear and linear_backward(graph, len(values))
        # Calls of one record share what is known: a loop holds for all of them or counts for none.
        before = record.loops.get(kind, loops)
        record.loops[kind] = tuple(x for x in loops if x in before)


def _traced(function: Callable[..., list[Tensor]], like: list[Tensor]) -> tuple[fx.Graph, int, list[sympy.Basic]]:
    """Trace a function and its gradient, with a symbol for every size.

    Returns: a graph from operands and outputs' gradients to outputs and operands' gradients, None where there is none;
        the number of outputs; and the guards on sizes.
    """
    mode, env, values = _symbolic(like)

    def both(xs: list[Tensor], toward: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Return the outputs of the function, and its operands' gradients where those of the outputs are given."""
        operands: list[Tensor] = []
        for x in xs:
            operands.append(x.detach().requires_grad_() if floating(x) else x)
        with torch.enable_grad():
            outs = function(*operands)
        computed = gradients(outs, toward, operands)
        return [y.detach() for y in outs], computed

    with mode:
        outs, _ = both(values, [])
        toward = [torch.empty_like(y) for y in outs]
        traced = make_fx(both)(values, toward)
    return traced.graph, len(toward), [g.expr for g in env.guards]


def _symbolic(like: list[Tensor]) -> tuple[Any, ShapeEnv, list[Tensor]]:
    """Make fake values as large as others, with a symbol of its own for every size, in a mode of their own."""
    env = ShapeEnv(duck_shape=False)
    mode, values = compat.FakeTensorMode(shape_env=env), []
    for x in like:
        free = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.ndim)
        sized = mode.from_tensor(example(x), symbolic_context=free)
        with mode:
            values.append(torch.empty_strided(sized.shape, sized.stride(), dtype=x.dtype, device=x.device))
    return mode, env, values


def _again(node: fx.Node, xs: tuple[Tensor, ...]) -> list[Tensor]:
    _, sizes, key = node.args
    return CALL(list(xs), fx.map_arg(sizes, lambda n: example(n.meta["val"])), key)


def _refused(function: Any, reason: str, where: str) -> CaptureError:
    at = f" ({where})" if where else ""
    return CaptureError(f"{function.__qualname__}.apply{at} cannot be captured with its own backward: {reason}")


def _text(x: Any) -> str:
    return f"a {type(x).__name__}" if not isinstance(x, type) else f"the class {x.__name__}"


def _line() -> str:
    """Return the user's line that is running, as `file:line: code`."""
    at = running_line()
    return f"{at.filename}:{at.lineno}: {at.line}" if at is not None else ""
