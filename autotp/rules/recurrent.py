"""Recurrent networks: the hidden units of a cell with all their gates, and the examples of whole sequences.

A cell reads all units of the state before; a sequence is one operator, within which no rank could ask the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotp.ir.op import Op, aten
from autotp.ir.specs import Runs

if TYPE_CHECKING:
    from .local import ShardCall


def local_cell(op: Op, local: ShardCall):
    units = local.out_partition(1)
    args = local.arguments(op)
    weights = [args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
    if units is None:
        return local.unchanged(op)
    if "rnn" in str(op.target):
        return rnn_units, ("tanh" in str(op.target), args["input"], args["hx"], *weights), {}
    if len(op.outs) == 2:
        return lstm_units, (args["input"], *args["hx"], *weights), {}
    return local.ranked(gru_units, args["input"], args["hx"], *weights, local.runs(units))


def rnn_units(
    tanh: bool, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensor:
    """Compute a step of some units of a plain cell.

    Args:
        tanh: its nonlinearity, otherwise the positive part. x: input, [examples, k]. h: of all units, [examples, n].
        w_ih, w_hh, b_ih, b_hh: rows of these units.

    Returns: h of these units, [examples, units here].
    """
    summed = aten.linear(x, w_ih, b_ih) + aten.linear(h, w_hh, b_hh)
    return summed.tanh() if tanh else summed.relu()


def lstm_units(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a step of some units of an LSTM cell.

    Args:
        x: input, [examples, k]. h: of all units, [examples, n]. c: of these, [examples, units here].
        w_ih, w_hh, b_ih, b_hh: rows of these units in each of four gates.

    Returns: h and c of these units.
    """
    i, f, g, o = (aten.linear(x, w_ih, b_ih) + aten.linear(h, w_hh, b_hh)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_units(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    units: Runs,
    *,
    rank: int,
    tp: int,
) -> Tensor:
    """Compute a step of some units of a GRU cell.

    Args:
        x: input, [examples, k]. h: of all units, [examples, n].
        w_ih, w_hh, b_ih, b_hh: rows of these units in each of three gates.
        units: their distribution. rank, tp: this rank, of how many.

    Returns: h of these units, [examples, units here].
    """
    local = torch.cat([h.narrow(1, start, length) for start, length in units.spans(rank, tp)], 1)
    of_input, before = aten.linear(x, w_ih, b_ih).chunk(3, 1), aten.linear(h, w_hh, b_hh).chunk(3, 1)
    r, z = (of_input[0] + before[0]).sigmoid(), (of_input[1] + before[1]).sigmoid()
    return z * local + (1 - z) * (of_input[2] + r * before[2]).tanh()
