"""Bitwise comparison over numbers of processes: the program of all ranks, run by each number that divides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm.virtual import Deterministic, every
from autotp.ir.graph import Capture, Leaf
from autotp.ir.layouts import I
from autotp.ir.program import Planned, Sharded
from autotp.ir.specs import INVARIANT, REPLICATED
from autotp.passes.shard.deal import Dealt
from autotp.text import axis_text, divisors

from .differences import backward, loss, own_leaf
from .report import Difference, Report
from .run import CallLayouts, Simulated, Values, run

Parts = list[tuple[str, fx.Node, list[Any]]]  # of each value or gradient what every virtual rank has


def same_bits(planned: Planned, sharded: Sharded, values: Values, whole: Capture, beside: Sequence[Dealt]) -> Report:
    """Run the program of all ranks by every number of processes, and compare values and gradients bitwise.

    Args:
        planned, sharded: the decided graph and its program for `planned.tp` ranks.
        values: of the captured graph's leaves, in their own types.
        whole: the captured graph. beside: the axes beside tp, of which the program is one rank's.

    Returns:
        A `Report` without plan and capture error; it names the first value that differs.
    """
    leaves = {node: value for node, (value,) in values.nodes.items()}
    call = CallLayouts(whole, sharded, leaves, Simulated(planned.tp, beside))
    state, compared = torch.get_rng_state(), 0
    axes = {x.axis: x.ranks for x in beside}
    # Processes on each axis, which have as many virtual ranks each; the last has one process for each rank.
    *meshes, most = product(*map(divisors, (*axes.values(), planned.tp)))
    degrees = (*meshes, most) if beside else divisors(planned.tp)
    report = Report(planned.tp, None, 0.0, 0.0, 0.0, 0, degrees=tuple(degrees), beside=axes)
    with Deterministic():
        expected, failed = _parts(planned, call, most, state)
        for mesh in meshes:
            ours, _ = _parts(planned, call, mesh, state)
            for (direction, node, xs), (*_, ys) in zip(ours, expected, strict=True):
                compared += 1
                differing = [rank for rank, (x, y) in enumerate(zip(xs, ys, strict=True)) if not same(x, y)]
                if differing:
                    at, reference = (axis_text(dict(zip((*axes, "tp"), n, strict=True))) for n in (mesh, most))
                    detail = f"virtual rank {differing[0]} has other bits at {at} than at {reference}"
                    difference = Difference.at(node, direction, float("inf"), detail)
                    return replace(report, values=compared, difference=difference)
    return replace(report, values=compared, forward_only=failed)


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal to the bit, but for the sign of zeros."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or not isinstance(x, bool | int | float | str))
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.detach().contiguous(), y.detach().contiguous()
    # What is no number equals itself by its bytes alone.
    return torch.equal(x, y) or torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))


def _parts(planned: Planned, call: CallLayouts, mesh: Sequence[int], state: Tensor) -> tuple[Parts, str]:
    """Return every value in order, then every gradient from the last to the leaves'; and why there are no gradients.

    Args:
        planned, call: see `same_bits`. mesh: processes on each axis. state: of the random numbers.
    """
    axes = reversed(call.on.axes.items())
    on = replace(call.on, virtual={axis: size // n for n, (axis, (size, _)) in zip(mesh, axes, strict=True)})
    ranks, operands = {}, {}
    for leaf, node in call.pairs():
        values, operands[node] = _leaf(planned, call, on, leaf, node)
        ranks[node] = on.each_rank(values)
    torch.set_rng_state(state)
    ours = run(call.sharded, operands, on, watch=True)
    ranks = {node: on.each_rank(values) for node, values in ours.nodes.items()} | ranks
    failed = backward(loss([*chain.from_iterable(map(every, chain(*ours.outputs)))]))
    forward, gradients = [], []
    for node, values in ranks.items():
        for xs in zip(*map(compat.tree_leaves, values), strict=True):
            forward.append(("forward", node, [*xs]))
            if isinstance(xs[0], Tensor) and xs[0].requires_grad:
                gradients.append(("backward", node, [x.grad for x in xs]))
    return [*forward, *reversed(gradients)], failed


def _leaf(planned: Planned, call: CallLayouts, on: Simulated, leaf: Leaf, node: fx.Node) -> tuple[list[Any], list[Any]]:
    """Return the parts of a leaf that processes hold, and the operands of their programs: of a weight, one for each
    slice of the batch, whose gradients are summed along the tree.

    Args:
        planned, call: see `same_bits`. on: the processes. leaf, node: of the captured graph, and of the ranks'.
    """
    over = [*call.over(leaf), call.sharded.layouts.get(node, I)]
    graded = call.sharded.origin.get(node, (node, 0))[0] in planned.grads
    axes = [(axis, *of, layout) for (axis, of), layout in zip(reversed(on.axes.items()), over, strict=True)]
    once = {}  # a process holds once what is equal on its ranks
    parts = []
    for rank, value in enumerate(call.dealt(leaf, node)):
        place = []
        for axis, size, stride, layout in axes:
            at = rank // stride % size
            place.append(at if layout.sharded_dim is not None else at // on.virtual[axis])
        parts.append(once.setdefault(tuple(place), own_leaf(value, graded)))
    local = on.of_hosts(parts)
    if leaf.kind.passed or not graded or not on.beside:
        return local, local
    specs = [(INVARIANT, REPLICATED)] * on.world
    return local, on.converted(local, specs, on.beside[0].axis)
