"""A rank's program as that of all virtual ranks of one process (`autotp.comm.virtual`).

Nodes, modules and what flows between them stay as they are: a value that virtual ranks have each for itself flows as a
`Virtual`, and every call runs for all of them. So each virtual rank starts the kernels of a rank by itself, on the same
shapes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.comm.conversions import FUNCTIONS, on_hosts
from autotp.comm.virtual import Deterministic, Host, Virtual, aligned, at_rank, each, values_of
from autotp.ir.graph import Capture, draws, short_name
from autotp.ir.layouts import Layout
from autotp.ir.marks import mark
from autotp.ir.specs import INVARIANT, Spec

from . import eager

PLACE = ("rank", "tp", "group")
aten: Any = torch.ops.aten
# Operators by which threads of a CPU add up in any order, forward or backward, but in torch's deterministic mode.
UNSTEADY = frozenset(
    {
        aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default,
        aten.put.default, aten.take.default,
    }
)  # fmt: skip


def host_program(graph: fx.Graph, host: Host) -> None:
    """Let every call of a rank's program, which is changed in place, run for all virtual ranks of a process."""
    conversions = set(FUNCTIONS.values())
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        ranked, name = mark(node).axis == "tp", short_name(node.target)
        call = _conversion(host) if node.target in conversions else _operator(node, host, ranked)
        call.__name__ = call.__qualname__ = name
        node.target = call
        if ranked:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACE}


def host_states(graph: fx.Graph, captured: Capture, layouts: Mapping[str, Layout], host: Host) -> None:
    """Let a rank's program, which is changed in place, take and give states of all virtual ranks of a process.

    A process holds of a state what its virtual ranks have, one after another along the dimension that is split.

    Args:
        captured: what the program was made from. layouts: of states, by name.
    """
    inputs = graph.find_nodes(op="placeholder")
    first: Any = next(n for n in graph.nodes if n.op != "placeholder")
    states: dict[str, tuple[fx.Node, fx.Node]] = {}
    for leaf, node in zip(captured.leaves, inputs, strict=True):
        layout = layouts.get(leaf.name)
        if leaf.kind.carried and leaf.is_tensor and layout is not None and layout.sharded_dim is not None:
            sizes = [int(layout.distribution.local(rank, host.tp)) for rank in host.here]  # type: ignore[union-attr]
            with graph.inserting_before(first):
                dealt = graph.call_function(_dealt, (node, sizes, layout.sharded_dim))
            node.replace_all_uses_with(dealt, lambda user, dealt=dealt: user is not dealt)
            dealt.meta = {**node.meta, "nn_module_stack": {}}
            states[leaf.name] = node, dealt
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, value in enumerate(values):
        name = captured.becomes(position)
        if name is not None and isinstance(value, fx.Node):
            layout = layouts.get(name)
            dim = None if layout is None else layout.sharded_dim
            with graph.inserting_before(output):
                values[position] = graph.call_function(_joined, (value, dim, *states.get(name, ())))
            values[position].meta = {**value.meta, "nn_module_stack": {}}
    output.args = (tuple(values),)


def _dealt(state: Tensor, sizes: Sequence[int], dim: int) -> Any:
    """Return what each virtual rank has of a state, laid out in memory as a rank's own."""
    if len(sizes) == 1:
        return state
    return Virtual([aligned(x.contiguous()) for x in state.split(list(sizes), dim)])


def _joined(value: Any, dim: int | None, state: Any = None, dealt: Any = None) -> Tensor:
    """Return a state of all virtual ranks here.

    Args:
        value: what these have. dim: that is split; None where each has all. state, dealt: what came in, and how it was
            dealt to them: it is the state still where each has written to its part of its memory.
    """
    if not isinstance(value, Virtual):
        return value
    if dim is None:
        return value.values[0]
    if isinstance(dealt, Virtual) and all(x is y for x, y in zip(value.values, dealt.values, strict=True)):
        memory = state.untyped_storage().data_ptr()
        if all(x.untyped_storage().data_ptr() == memory for x in dealt.values):
            return state
    return torch.cat(list(value.values), dim)


def _operator(node: fx.Node, host: Host, ranked: bool) -> Callable[..., Any]:
    call, random = eager.quick(node), draws(node)
    call = _steady(call) if node.target in UNSTEADY else call
    return lambda *args, **kwargs: each(call, args, kwargs, host, ranked, random)


def _steady(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that runs in torch's deterministic mode, with its backward."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        mode = Deterministic()
        with mode:
            y = call(*args, **kwargs)
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(mode.__enter__)
            y.grad_fn.register_hook(mode.__exit__)
        return y

    return run


def _conversion(host: Host) -> Callable[..., Any]:
    def run(x: Any, src: Spec, dst: Spec, **options: Any) -> Any:
        src, dst = at_rank((src, dst), 0)  # what of them is data is alike on all
        return convert(x, src, dst, host, **options)

    return run


def convert(x: Any, src: Spec, dst: Spec, host: Host, **options: Any) -> Any:
    """Convert what the virtual ranks of a process have.

    Args:
        x: under `src`: one tensor, or a `Virtual`. src, dst: run-time layouts. host: the process.
        options: `wire` and `reduces` of the functions of the table.
    """
    ys = on_hosts(values_of(x, host.own), src, dst, host, **options)
    # Of what is whole, and of which no rank has a gradient of its own, one is enough.
    alike = dst.mark == INVARIANT.mark or dst.whole and not any(y.requires_grad for y in ys)
    return ys[0] if alike or host.own == 1 else Virtual(ys)
