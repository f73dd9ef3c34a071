"""Tensor parallelism by hand: a two-layer MLP over two ranks, in NumPy and by autotp, and its proof over four."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard as Split

from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.driver.verify import compare
from autotp.inputs import Inputs
from autotp.ir.layouts import P, Shard
from autotp.proof.run import Simulated, Values, run

X = [[1.0, 2.0]]
W_UP = [[1.0, 0.0, 1.0, 2.0], [0.0, 1.0, 1.0, -1.0]]
W_DOWN = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]
PARTIALS, SUM = [[[1.0, 2.0]], [[3.0, 3.0]]], [[4.0, 5.0]]


class TwoMatmuls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.tensor(W_UP)), nn.Parameter(torch.tensor(W_DOWN))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down


def test_by_hand():
    """Columns of the first weight, the same rows of the second: each rank has a summand of the result."""
    x, up, down = map(np.array, (X, W_UP, W_DOWN))
    partials = [x @ u @ d for u, d in zip(np.split(up, 2, axis=1), np.split(down, 2, axis=0), strict=True)]
    assert [p.tolist() for p in partials] == PARTIALS
    assert np.add(*partials).tolist() == SUM == (x @ up @ down).tolist()


def test_by_autotp():
    model, inputs = TwoMatmuls(), Inputs(torch.tensor(X).requires_grad_())
    captured, notes = capture_model(model, inputs, torch.device("cpu"))
    options = Options.read(2, Steering(pins={"up": Split(1), "down": Split(0)}))
    program, sharded = apply_plan(captured, solve_plan(captured, notes, options, "TwoMatmuls"), options)
    values = Values.of(captured, model, inputs)
    ranks = {n: _dealt(sharded.layouts[n], v) for n, v in _leaves(sharded, values).items()}
    ran = run(sharded, ranks, Simulated(2))
    outputs, same = ran.outputs
    partials = next(v for n, v in ran.nodes.items() if sharded.layouts.get(n) == P)
    assert [p.tolist() for p in partials] == PARTIALS
    assert outputs[0].tolist() == same[0].tolist() == SUM
    assert compare(program, sharded, values).ok


def _leaves(sharded, values):
    named = {n.name: v for n, (v,) in values.nodes.items()}
    return {n: named[n.name] for n in sharded.graph.nodes if n.op == "placeholder"}


def _dealt(layout, value):
    return list(value.chunk(2, layout.dim)) if isinstance(layout, Shard) else [value, value]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_proof_over_ranks(tp):
    """y = relu(x A) B with A = [A_1 ... A_n], B = [B_1; ...; B_n]: relu acts on each column, so y is the sum of
    relu(x A_i) B_i (g* forward); dL/dx is the sum of (dy B_i^T * relu') A_i^T (f's backward); weights' gradients are
    the slices of the whole ones (Shoeybi et al. 2019, section 3)."""
    draw = np.random.default_rng(0)
    x, a, b, dy = (draw.standard_normal(s) for s in ((5, 6), (6, 8), (8, 6), (5, 6)))
    hidden = x @ a
    y, dhidden = np.maximum(hidden, 0) @ b, (dy @ b.T) * (hidden > 0)
    dx, da, db = dhidden @ a.T, x.T @ dhidden, np.maximum(hidden, 0).T @ dy
    ranks = [_rank(x, dy, *part) for part in zip(np.split(a, tp, axis=1), np.split(b, tp, axis=0), strict=True)]
    ys, dxs, das, dbs = zip(*ranks, strict=True)
    whole = (sum(ys), sum(dxs), np.concatenate(das, axis=1), np.concatenate(dbs, axis=0))
    for found, expected in zip(whole, (y, dx, da, db), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    if tp > 1:  # and not without the sums
        assert not np.allclose(ys[0], y) and not np.allclose(dxs[0], dx)


def _rank(x, dy, a, b):
    """One rank's forward and backward on its own columns of A and rows of B."""
    hidden = x @ a
    dhidden = (dy @ b.T) * (hidden > 0)
    return np.maximum(hidden, 0) @ b, dhidden @ a.T, x.T @ dhidden, np.maximum(hidden, 0).T @ dy
