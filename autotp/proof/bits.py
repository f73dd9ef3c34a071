"""Equal bits at every number of processes: the program of all ranks, run by each number that divides them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm.virtual import Deterministic, values_of
from autotp.ir.graph import short_name
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path
from autotp.text import divisors

from .differences import backward, loss, own_leaf
from .report import Difference, Report
from .run import CallLayouts, Simulated, Values, run

Parts = list[tuple[str, fx.Node, list[Any]]]  # of each value or gradient what every virtual rank has


def same_bits(planned: Planned, sharded: Sharded, values: Values) -> Report:
    """Run the program of all ranks by every number of processes, and compare values and gradients to the bit.

    Args:
        planned, sharded: the decided graph and its program for `planned.tp` ranks.
        values: of the captured graph's leaves, in their own types.

    Returns:
        A `Report` without plan and capture error; it names the first value that differs.
    """
    with Deterministic():
        return _compared(planned, sharded, values)


def _compared(planned: Planned, sharded: Sharded, values: Values) -> Report:
    tp, state, compared = planned.tp, torch.get_rng_state(), 0
    degrees = tuple(divisors(tp))  # numbers of processes that have as many virtual ranks each
    # Those of one process for each rank, of which all others are to have the bits.
    expected, failed = _parts(planned, sharded, values, 1, state)
    for k in degrees[:-1]:
        ours, _ = _parts(planned, sharded, values, tp // k, state)
        for (direction, node, xs), (*_, ys) in zip(ours, expected, strict=True):
            compared += 1
            odd = next((rank for rank, (x, y) in enumerate(zip(xs, ys, strict=True)) if not same(x, y)), None)
            if odd is not None:
                detail = f"virtual rank {odd} has other bits at tp={k} than at tp={tp}"
                path = module_path(node)
                place = node.name, short_name(node.target), path[-1] if path else ""
                difference = Difference(direction, *place, float("inf"), detail)
                return Report(tp, None, 0.0, 0.0, 0.0, compared, difference, degrees=degrees)
    return Report(tp, None, 0.0, 0.0, 0.0, compared, forward_only=failed, degrees=degrees)


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal to the bit, but for the sign of zeros."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or not isinstance(x, bool | int | float | str))
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.detach().contiguous(), y.detach().contiguous()
    # What is no number equals itself by its bytes alone.
    return torch.equal(x, y) or torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))


def _parts(planned: Planned, sharded: Sharded, values: Values, own: int, state: Tensor) -> tuple[Parts, str]:
    """Every value in order, and then every gradient, from the last to the leaves'; why there are none of these.

    Args:
        planned, sharded, values: see `same_bits`. own: virtual ranks of a process. state: of the random numbers.
    """
    on = Simulated(planned.tp, own=own)
    call = CallLayouts(planned.program, sharded, {node: value for node, (value,) in values.nodes.items()}, on)
    leaves = {}
    for leaf, node in call.pairs():
        graded = sharded.origin.get(node, (node, 0))[0] in planned.grads
        parts = [own_leaf(x, graded) for x in call.dealt(leaf, node)]
        layout = sharded.layouts.get(node)
        leaves[node] = on.of_hosts(parts, layout is None or layout.sharded_dim is None)
    torch.set_rng_state(state)
    ours = run(sharded, leaves, on, watch=True)
    ranks = {node: on.each_rank(each) for node, each in ours.nodes.items()}
    outputs: list[Any] = []
    for output in chain(*ours.outputs):
        outputs += values_of(output, 1)
    failed = backward(loss(outputs))
    forward: Parts = []
    gradients: Parts = []
    for node, each in ranks.items():
        for xs in zip(*map(compat.tree_leaves, each), strict=True):
            forward.append(("forward", node, [*xs]))
            if isinstance(xs[0], Tensor) and xs[0].requires_grad:
                gradients.append(("backward", node, [x.grad for x in xs]))
    return [*forward, *reversed(gradients)], failed
