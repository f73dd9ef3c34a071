"""Programs captured with symbolic batch and length, split in every way, run at other sizes than captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import sympy
import torch
from torch import Tensor, nn

from autotp.capture.capture import capture, skeleton
from autotp.cost import Cluster
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.ir.layouts import I, R, Shard
from autotp.ir.op import aten, sizes
from autotp.ir.program import Decision, Planned, Sharded
from autotp.passes.base import run_passes
from autotp.passes.canonicalise.canonicalise import CANONICAL
from autotp.passes.shard.planner import Builder
from autotp.passes.shard.rewrite import rewrite
from autotp.proof.run import Simulated, StepError, run
from autotp.rules.core import RULES
from autotp.rules.views import MERGED, atoms

WIDTH = 12
SIZES = ((3, 5), (2, 7), (5, 2))  # two positions: with three ranks one has none


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


SYMBOLIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "heads": lambda x, w: x.view(x.shape[0], x.shape[1], 3, 4),
    "heads by -1": lambda x, w: x.view(x.shape[0], x.shape[1], -1, 4).transpose(1, 2),
    "merge": lambda x, w: x.reshape(-1, WIDTH),
    "merge and unmerge": lambda x, w: x.reshape(-1, WIDTH).relu().view(x.shape[0], -1, WIDTH),
    "merge all": lambda x, w: x.flatten(),
    "unmerge heads": lambda x, w: x.view(x.shape[0] * x.shape[1], 3, 4),
    "expand": lambda x, w: x[:, :, None].expand(x.shape[0], x.shape[1], 5, WIDTH),
    "expand a weight": lambda x, w: x * w[None, :1].expand(x.shape[0], x.shape[1], WIDTH),
    "drop the first": lambda x, w: x[:, 1:],
    "drop the last": lambda x, w: x[:, :-1],
    "columns": lambda x, w: x[..., 4:10],
    "last position": lambda x, w: x[:, -1],
    "split": lambda x, w: torch.cat([a * 2 for a in x.split([4, 8], -1)], -1),
    "chunk": lambda x, w: torch.mul(*x.chunk(2, -1)),
    "cat positions": lambda x, w: torch.cat([x, x * 2], 1),
    "cat a weight": lambda x, w: torch.cat([w[:1].expand(x.shape[0], 1, WIDTH), x], 1),
    "matmul": lambda x, w: x @ w.t(),
    "scores": lambda x, w: x @ x.transpose(1, 2),
    "linear": lambda x, w: nn.functional.linear(x, w, w[:, 0]),
    "mean of positions": lambda x, w: x.mean(1),
    "mean of all": lambda x, w: x.mean(),
    "sum": lambda x, w: x.sum((0, 1)),
    "pad": lambda x, w: nn.functional.pad(x, (0, 0, 1, 0)),
    "same operand twice": lambda x, w: x * x,
    "attention": lambda x, w: attention(x.view(*x.shape[:2], 3, 4).transpose(1, 2)),
    "repeat": lambda x, w: x.repeat(1, 2, 1),
}


class Symbolic(nn.Module):
    """One operator on a value `[batch, length, WIDTH]` that carries a gradient."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(6, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale, self.weight)


def plans(builder: Builder) -> list[Planned]:
    """For every choice of every operator: that choice, and everything else whole."""
    for leaf in builder.leaves:
        builder.candidates.seed((leaf, 0), sizes(leaf.meta["val"]))
    problem, heads = builder.build()
    whole = {}
    for node, item in zip(heads, problem.items, strict=False):
        whole[node] = Decision(item.choices[0].ins, item.choices[0].outs)
        assert not node.users or {*whole[node].ins, *whole[node].outs} <= {I, R}
    found = []
    for node, item in zip(heads, problem.items, strict=False):
        for c in item.choices if node in builder.ops else ():
            decisions = {n: whole[builder.same[n]] for n in (*builder.leaves, *builder.calls)}
            same = [n for n in builder.calls if builder.same[n] is node]
            decisions.update(dict.fromkeys(same, Decision(c.ins, c.outs, c.factor, c.loop)))
            fields = {
                "ends": builder.ends,
                "ops": builder.ops,
                "rules": builder.rules,
                "same": builder.same,
                "grads": builder.grads,
            }
            found.append(Planned(program=builder.program, tp=builder.tp, decisions=decisions, **fields))
    return found


def grown(planned: Planned) -> bool:
    """Whether the plan splits a dimension whose size is known only when the program runs."""
    layouts = [x for d in planned.decisions.values() for x in (*d.ins, *d.outs)]
    return any(isinstance(x, Shard) and not x.partition.static for x in layouts)


def check(model: Symbolic, captured: Capture, sharded: Sharded, tp: int, x: Tensor) -> None:
    """The sharded program on simulated ranks against the model itself, outputs and gradients."""
    model.zero_grad()
    expected = model(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    tensors = {**dict(model.named_parameters()), "x": x}
    held = {}
    for leaf, node in zip(captured.leaves, [n for n in sharded.graph.nodes if n.op == "placeholder"], strict=True):
        whole = tensors[leaf.name].detach()
        held[node] = [whole.clone().requires_grad_(leaf.kind.trained) for _ in range(tp)]
    got = run(sharded, held, Simulated(tp)).outputs
    for (y,) in got:
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.autograd.backward([y for (y,) in got], [gradient] * tp)
    for leaf, parts in zip(captured.leaves, held.values(), strict=True):
        for part in parts if wanted.get(leaf.name) is not None else ():
            torch.testing.assert_close(part.grad, wanted[leaf.name], rtol=1e-10, atol=1e-10)


@cache
def symbolic(name: str) -> tuple[Symbolic, Capture]:
    """A module and its program, of which plans are made for any number of ranks."""
    model = Symbolic(SYMBOLIC[name])
    captured = capture(skeleton(model, "cpu"), Inputs(torch.randn(4, 6, WIDTH, dtype=torch.float64)))
    run_passes(captured, CANONICAL)
    assert len(captured.symbols) == 2
    return model, captured


def proved(name: str, tp: int) -> int:
    """Check every plan of a module; how many of them split a symbolic dimension."""
    model, captured = symbolic(name)
    builder = Builder(captured, tp, Cluster.preset("local"))
    builder.prices.weights.clear()  # one operator is split at a time: what is made of a weight has to be gathered here
    found = plans(builder)
    for planned in found:
        sharded = rewrite(planned, builder.prices.convert)
        for batch, length in SIZES if grown(planned) else SIZES[:1]:
            check(model, captured, sharded, tp, torch.randn(batch, length, WIDTH, dtype=torch.float64))
    return sum(map(grown, found))


@pytest.mark.parametrize("tp", (2, 3))
@pytest.mark.parametrize("name", SYMBOLIC)
def test_every_choice_is_right_for_other_sizes_than_captured(name, tp):
    assert proved(name, tp)


@pytest.mark.parametrize("name", ["expand", "heads by -1"])
def test_whole_sizes_in_a_shard_are_noticed(name, monkeypatch):
    for target in (aten.expand.default, aten.reshape.default):
        right = RULES[target]
        monkeypatch.setitem(RULES, target, lambda op, right=right: replace(right(op), localise=None))
    with pytest.raises(StepError):
        proved(name, 2)


def test_a_loop_of_several_dimensions_is_in_none_of_them():
    """Of [8, 1, 8] as [8 // s, s, 8] the first 8 was taken for the last: heads were dealt as their elements."""
    s = sympy.Symbol("s", integer=True, positive=True)
    assert atoms((3, 8, 1, 8), (3, sympy.floor(8 / s), s, 8)) == [(3, 0, 0), (8, 1, MERGED)]
    assert atoms((3, 4, 5), (4, 3, 5)) == [(4, MERGED, 0), (3, MERGED, 1), (5, 2, 2)]
    assert atoms((3, 8, s, 8), (3, 8, 8 * s)) == [(3, 0, 0), (8, 1, 1), (s, 2, 2), (8, 3, 2)]  # each in its own
