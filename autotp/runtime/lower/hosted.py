"""The program of a rank made that of all virtual ranks of one process (`autotp.comm.virtual`).

Nodes, modules and what flows between them stay as they are: a value that virtual ranks have each for itself flows as a
`Virtual`, and every call runs for all of them. So each virtual rank starts the kernels of a rank by itself, on the same
shapes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm.conversions import FUNCTIONS, on_hosts
from autotp.comm.virtual import Deterministic, Host, Hosts, Virtual, aligned, at_rank, on_all, values_of
from autotp.errors import InputError, StateError
from autotp.inputs import examples_of, micro_batch
from autotp.ir.graph import Capture, Function, draws, shape_of, short_name
from autotp.ir.layouts import Layouts
from autotp.ir.marks import mark
from autotp.ir.op import expression, sizes
from autotp.ir.specs import INVARIANT, SUMMANDS, Spec
from autotp.passes.shard.batch_axis import has, scale_gradient

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


OWN_LOSS = (
    "a backward from an output of this process's slice of the batch, with dp_invariant: a loss of a slice is summed in "
    "another order on another mesh. Have it taken of each virtual micro-batch: loss = module.mean_loss(function, "
    "outputs, targets), with all that is made of the outputs in the function; or of the whole batch, in the model: "
    "autotp.compile(..., loss=function)."
)
COUNT = "an output that counts examples, with dp_invariant: it would be a micro-batch's. Let the model not return it."
STATES = "generate() and calls with a cache, with dp_invariant: compile for these with tp_invariant alone."
LOST = "an output of each micro-batch by itself, without a dimension of the batch, with dp_invariant: leave it out."


def host_program(graph: fx.Graph, hosts: Hosts) -> None:
    """Let every call of a rank's program, which is changed in place, run for all virtual ranks of a process."""
    conversions = set(FUNCTIONS.values())
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        marks, name = mark(node), short_name(node.target)
        if node.target is scale_gradient:  # gradients of weights are summed over the batch, not averaged
            node.args = node.args[0], 1
        if node.target in conversions:
            call = _conversion(hosts, "tp" if marks.batch is None or marks.conversion is not None else marks.batch.axis)
        else:
            call = _operator(node, hosts, marks.axis)
        call.__name__ = call.__qualname__ = name
        node.target = call
        if marks.axis is not None:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACE}


def _inserted(graph: fx.Graph, before: Any, function: Function, value: fx.Node, *options: Any) -> fx.Node:
    """Write a call of a function of a value and options before a node, outside of all modules."""
    with graph.inserting_before(before):
        node = graph.call_function(function, (value, *options))
    node.meta = {**value.meta, "nn_module_stack": {}}
    return node


def host_batch(graph: fx.Graph, captured: Capture, host: Host) -> None:
    """Let a rank's program, which is changed in place, take and give what all micro-batches of a process have.

    Args:
        captured: what the program was made from. host: the process among those that share the batch.
    """
    if captured.has_states:
        raise StateError(STATES)
    firsts = [shape_of(leaf.node)[0] for leaf in captured.inputs if shape_of(leaf.node)]
    batch, nodes = cast(sympy.Symbol, firsts[0]), iter(graph.find_nodes(op="placeholder"))
    first: Any = next(n for n in graph.nodes if n.op != "placeholder")
    for leaf, node in zip(captured.leaves, nodes, strict=True):
        if leaf.kind.passed and shape_of(leaf.node)[:1] == (batch,):
            parts = _inserted(graph, first, micro_batches, node, host.local)
            node.replace_all_uses_with(parts, lambda user, parts=parts: user is not parts)
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, whole in enumerate(compat.tree_leaves(captured.graph.output_node().args)):
        val = whole.meta.get("val") if isinstance(whole, fx.Node) else whole
        if isinstance(val, torch.SymInt) and has([expression(val)], batch):
            raise StateError(COUNT)
        if isinstance(whole, fx.Node) and isinstance(val, Tensor):
            dim = next((d for d, n in enumerate(sizes(val)) if has([n], batch)), None)
            values[position] = _inserted(graph, output, _of_slice, values[position], dim)
    output.args = (tuple(values),)


def micro_batches(x: Tensor, count: int) -> Any:
    """Return what each of so many micro-batches has of a tensor, laid out in memory as one by itself."""
    parts = [aligned(part.contiguous()) for part in x.split(len(x) // count)]
    return Virtual(parts, "dp") if count > 1 else parts[0]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        first, *rest = parts
        return torch.cat(parts, dim) if rest else first.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:  # type: ignore[override]
        raise StateError(OWN_LOSS)


def _of_slice(value: Any, dim: int | None) -> Tensor:
    """Concatenate an output of all micro-batches of a process along its batch dimension, None where it has none."""
    parts = value.values if isinstance(value, Virtual) else [value]
    if dim is None:
        if len(parts) > 1 and parts[0].requires_grad:
            raise StateError(LOST)
        return parts[0]
    whole = _Joined.apply(dim, *parts)
    whole.micro_batches = parts  # of which `mean_loss` is taken
    return whole  # type: ignore[no-any-return]


def mean_loss(self: Any, loss: Callable[..., Tensor], *values: Any) -> Tensor:
    """Average a loss of the user's over the batch: with `dp_invariant` the same bits on any mesh. A collective call.

    Args:
        loss: gives a number for a micro-batch, from the values cut along their first dimension: with `dp_invariant` it
            is called for each virtual one of this rank, and the mean of all is taken along the tree.
        values: of this rank's slice of the batch: outputs as the module gave them, targets.

    Returns: with `dp_invariant` the loss of the whole batch, the same on all ranks; else `loss(*values)`.

    Raises:
        InputError: the slice does not divide into micro-batches, or the function gives no number.
    """
    for host in self._shards.hosts[:-1]:
        with self._calls.turn("mean_loss"):
            self._calls.any(False, "mean_loss")
            return _mean_loss(loss, values, host)
    return loss(*values)


def _mean_loss(loss: Callable[..., Tensor], values: tuple[Any, ...], host: Host) -> Tensor:
    leaves, spec = compat.tree_flatten(values)
    micro_batch(leaves, host.local)  # which is refused where they are not of one size
    examples, columns = examples_of(leaves), []
    for x in leaves:
        parts = getattr(x, "micro_batches", None)
        if parts is None:
            batched = isinstance(x, Tensor) and x.ndim and len(x) == examples
            parts = values_of(micro_batches(x, host.local) if batched else x, host.local, "dp")
        columns.append(parts)
    losses = [loss(*compat.tree_unflatten(row, spec)) for row in zip(*columns, strict=True)]
    fault = next((x for x in losses if not isinstance(x, Tensor) or x.ndim), None)
    if fault is not None:
        what = f"a tensor of shape {tuple(fault.shape)}" if isinstance(fault, Tensor) else type(fault).__name__
        raise InputError(
            f"mean_loss: the function gave {what}, and the loss of a micro-batch is a tensor without shape."
        )
    return convert(Virtual(losses, "dp"), SUMMANDS, INVARIANT, (host,), "dp") / host.size


def host_states(graph: fx.Graph, captured: Capture, layouts: Layouts, host: Host) -> None:
    """Let a rank's program, which is changed in place, take and give states of all virtual ranks of a process.

    A process holds of a state what its virtual ranks have, one after another along the dimension that is split.

    Args:
        captured: what the program was made from. layouts: of states, by name.
    """
    inputs = graph.find_nodes(op="placeholder")
    first: Any = next(n for n in graph.nodes if n.op != "placeholder")
    states = {}
    for leaf, node in zip(captured.leaves, inputs, strict=True):
        layout = layouts.get(leaf.name)
        if leaf.kind.carried and leaf.is_tensor and layout is not None and layout.sharded_dim is not None:
            sizes = [int(layout.distribution.local(rank, host.size)) for rank in host.here]  # type: ignore[union-attr]
            parts = _inserted(graph, first, _split, node, sizes, layout.sharded_dim)
            node.replace_all_uses_with(parts, lambda user, parts=parts: user is not parts)
            states[leaf.name] = node, parts
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, value in enumerate(values):
        name = captured.becomes(position)
        if name is not None and isinstance(value, fx.Node):
            layout = layouts.get(name)
            dim = None if layout is None else layout.sharded_dim
            values[position] = _inserted(graph, output, _joined, value, dim, *states.get(name, ()))
    output.args = (tuple(values),)


def _split(state: Tensor, sizes: Sequence[int], dim: int) -> Any:
    """Return what each virtual rank has of a state, laid out in memory as a rank's own."""
    if len(sizes) == 1:
        return state
    return Virtual([aligned(x.contiguous()) for x in state.split(list(sizes), dim)])


def _joined(value: Any, dim: int | None, state: Any = None, parts: Any = None) -> Tensor:
    """Concatenate a state of all virtual ranks here.

    Args:
        value: what these have. dim: that is split; None where each has all. state, parts: what came in, and the virtual
            ranks' parts of it: the result is the state itself where each has written to its part in place.
    """
    if not isinstance(value, Virtual):
        return value
    if dim is None:
        return value.values[0]
    if isinstance(parts, Virtual) and all(x is y for x, y in zip(value.values, parts.values, strict=True)):
        memory = state.untyped_storage().data_ptr()
        if all(x.untyped_storage().data_ptr() == memory for x in parts.values):
            return state
    return torch.cat(list(value.values), dim)


def _operator(node: fx.Node, hosts: Hosts, axis: str | None) -> Function:
    call, random = eager.quick(node), draws(node)
    call = _steady(call) if node.target in UNSTEADY else call
    return lambda *args, **kwargs: on_all(call, args, kwargs, hosts, axis, random)


def _steady(call: Function) -> Function:
    """Make an operator run in torch's deterministic mode, with its backward."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        mode = Deterministic()
        with mode:
            y = call(*args, **kwargs)
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(mode.__enter__)
            y.grad_fn.register_hook(mode.__exit__)
        return y

    return run


def _conversion(hosts: Hosts, axis: str) -> Function:
    def run(x: Any, src: Spec, dst: Spec, **options: Any) -> Any:
        return convert(x, src, dst, hosts, axis, **options)

    return run


def convert(x: Any, src: Spec, dst: Spec, hosts: Hosts, axis: str = "tp", **options: Any) -> Any:
    """Convert what the virtual ranks of a process have.

    Args:
        x: under `src`: one tensor, or a `Virtual`. src, dst: run-time layouts. hosts: the process. axis: over which.
        options: `wire` and `reduces` of the functions of the table.
    """
    host, *inner = hosts
    if host.axis != axis:  # each slice of the batch by itself
        return on_all(partial(convert, hosts=inner, axis=axis, **options), (x, src, dst), {}, (host,))
    src, dst = at_rank((src, dst), 0, axis)  # what of them is data is alike on all
    values = values_of(x, host.local, axis)
    across = next((value for value in values if isinstance(value, Virtual)), None)
    if across is not None:  # what each rank of an inner axis has by itself
        rows = []
        for at in range(len(across.values)):
            row = Virtual([at_rank((value,), at, across.axis)[0] for value in values], axis)
            source, target = at_rank((src, dst), at, across.axis)
            rows.append(convert(row, source, target, (host,), axis, **options))
        if not any(isinstance(row, Virtual) for row in rows):
            return Virtual(rows, across.axis)
        columns = zip(*[values_of(row, host.local, axis) for row in rows], strict=True)
        return Virtual([Virtual(column, across.axis) for column in columns], axis)
    ys = on_hosts(values, src, dst, host, **options)
    # Of what is whole, and of which no rank has a gradient of its own, one is enough.
    alike = dst.mark == INVARIANT.mark or dst.whole and not any(y.requires_grad for y in ys)
    return ys[0] if alike or host.local == 1 else Virtual(ys, axis)
