"""Equal bits at every number of processes: the program of all ranks, run by each number that divides them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from autotp.text import divisors

from .differences import backward, loss, own_leaf
from .report import Difference, Report
from .run import CallLayouts, Simulated, Values, run

Parts = list[tuple[str, fx.Node, list[Any]]]  # of each value or gradient what every virtual rank has


def same_bits(planned: Planned, sharded: Sharded, values: Values, whole: Capture, beside: Sequence[Dealt]) -> Report:
    """Run the program of all ranks by every number of processes, and compare values and gradients to the bit.

    Args:
        planned, sharded: the decided graph and its program for `planned.tp` ranks.
        values: of the captured graph's leaves, in their own types.
        whole: the captured graph. beside: the axes beside tp, of which the program is one rank's.

    Returns:
        A `Report` without plan and capture error; it names the first value that differs.
    """
    leaves = {node: value for node, (value,) in values.nodes.items()}
    with Deterministic():
        return _compared(planned, CallLayouts(whole, sharded, leaves, Simulated(planned.tp, beside)))


def _compared(planned: Planned, call: CallLayouts) -> Report:
    state, compared = torch.get_rng_state(), 0
    beside = {x.axis: x.ranks for x in call.on.beside}
    sizes = {**beside, "tp": planned.tp}
    # Processes on each axis, which have as many virtual ranks each; the last has one process for each rank.
    *meshes, most = product(*map(divisors, sizes.values()))
    expected, failed = _parts(planned, call, most, state)
    degrees = (*meshes, most) if beside else divisors(planned.tp)
    report = Report(planned.tp, None, 0.0, 0.0, 0.0, 0, degrees=tuple(degrees), beside=beside)
    for mesh in meshes:
        ours, _ = _parts(planned, call, mesh, state)
        for (direction, node, xs), (*_, ys) in zip(ours, expected, strict=True):
            compared += 1
            odd = next((rank for rank, (x, y) in enumerate(zip(xs, ys, strict=True)) if not same(x, y)), None)
            if odd is not None:
                detail = f"virtual rank {odd} has other bits at {_text(sizes, mesh)} than at {_text(sizes, most)}"
                difference = Difference.at(node, direction, float("inf"), detail)
                return replace(report, values=compared, difference=difference)
    return replace(report, values=compared, forward_only=failed)


def _text(axes: Iterable[str], mesh: Sequence[int]) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in zip(axes, mesh, strict=True))


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
    """Every value in order, and then every gradient, from the last to the leaves'; why there are none of these.

    Args:
        planned, call: see `same_bits`. mesh: processes on each axis. state: of the random numbers.
    """
    axes = reversed(call.on.axes.items())
    on = replace(call.on, own={axis: size // n for n, (axis, (size, _)) in zip(mesh, axes, strict=True)})
    ranks: dict[fx.Node, list[Any]] = {}
    operands: dict[fx.Node, list[Any]] = {}
    for leaf, node in call.pairs():
        own, operands[node] = _leaf(planned, call, on, leaf, node)
        ranks[node] = on.each_rank(own)
    torch.set_rng_state(state)
    ours = run(call.sharded, operands, on, watch=True)
    ranks = {node: on.each_rank(each) for node, each in ours.nodes.items()} | ranks
    outputs: list[Any] = []
    for output in chain(*ours.outputs):
        outputs += every(output)
    failed = backward(loss(outputs))
    forward: Parts = []
    gradients: Parts = []
    for node, each in ranks.items():
        for xs in zip(*map(compat.tree_leaves, each), strict=True):
            forward.append(("forward", node, [*xs]))
            if isinstance(xs[0], Tensor) and xs[0].requires_grad:
                gradients.append(("backward", node, [x.grad for x in xs]))
    return [*forward, *reversed(gradients)], failed


def _leaf(planned: Planned, call: CallLayouts, on: Simulated, leaf: Leaf, node: fx.Node) -> tuple[list[Any], list[Any]]:
    """Return what processes hold of a leaf, and what their programs take: of a weight what each slice of the batch
    reads, whose gradients are summed along the tree.

    Args:
        planned, call: see `same_bits`. on: the processes. leaf, node: of the captured graph, and of the ranks'.
    """
    over = [*call.over(leaf), call.sharded.layouts.get(node, I)]
    graded = call.sharded.origin.get(node, (node, 0))[0] in planned.grads
    axes = [(axis, *of, lies) for (axis, of), lies in zip(reversed(on.axes.items()), over, strict=True)]
    once: dict[Any, Any] = {}  # what ranks of a process have alike it holds once
    parts: list[Any] = []
    for rank, value in enumerate(call.dealt(leaf, node)):
        place = []
        for axis, size, stride, lies in axes:
            at = rank // stride % size
            place.append(at if lies.sharded_dim is not None else at // on.own[axis])
        parts.append(once.setdefault(tuple(place), own_leaf(value, graded)))
    own = on.of_hosts(parts)
    if leaf.kind.passed or not graded or not on.beside:
        return own, own
    specs = [(INVARIANT, REPLICATED)] * on.world
    return own, on.converted(own, specs, on.beside[0].axis)
