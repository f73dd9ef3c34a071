"""Repeated blocks that are no modules, items of lists and steps of loops: equal ones share their decisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autotp
from autotp.cost import Cluster
from autotp.driver.compile import capture_model
from autotp.inputs import Inputs
from autotp.ir.scopes import module_path
from autotp.passes.analysis import fold as folding
from autotp.passes.analysis.fold import items
from autotp.passes.shard.planner import Builder

WIDTH = 8
X = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Lists(nn.Module):
    """Pairs of networks with residual sums between, as `for first, second in self.layers:`."""

    def __init__(self, depth: int, order: tuple[int, ...] = (), wide: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.order = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), order
        self.layers = nn.ModuleList([self._item(2 * WIDTH + (wide if i == 1 else 0)) for i in range(depth)])

    @staticmethod
    def _item(wide: int) -> nn.ModuleList:
        first = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        return nn.ModuleList([first, nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in self.order or range(len(self.layers)):
            first, second = self.layers[i]  # type: ignore[misc]
            x = first(x) + x
            x = second(x) + x
        return self.head(x)


def decided(model: nn.Module) -> int:
    """How many calls decide for themselves."""
    program, _ = capture_model(model, Inputs(X), torch.device("cpu"), check=False)
    grads = {n for n in program.graph.nodes if n.op == "call_function"}
    same = folding.find(program, grads).same
    return sum(same[n] is n for n in grads)


def test_what_is_decided_does_not_grow_with_depth(monkeypatch):
    few = decided(Lists(3))
    assert decided(Lists(5)) == few
    assert decided(Lists(5, wide=WIDTH)) > few  # an item that is not like the others
    monkeypatch.setattr(folding, "items", lambda nodes: {})
    assert decided(Lists(5)) > decided(Lists(3)) > few


class Nested(nn.Module):
    """Lists of blocks in the items of a list, as the transformers of a U-Net's attentions."""

    def __init__(self, depth: int, inner: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.levels = nn.ModuleList([self._level(inner) for _ in range(depth)])

    @staticmethod
    def _level(inner: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(inner)])

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            x = level(x)
        return x


def test_equal_blocks_within_equal_blocks_decide_once():
    few = decided(Nested(2, 2))
    assert decided(Nested(2, 4)) == decided(Nested(3, 4)) == few
    assert autotp.verify(Nested(2, 3), 2, X)


class Begun(nn.Module):
    """Layers that put what they make behind literals, as a cache does that was empty: one for each of so many parts."""

    def __init__(self, *literals: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH)]) for _ in literals])
        for layer, count in zip(self.layers, literals, strict=True):
            layer.forward = lambda x, layer=layer, count=count: self._layer(layer, x, count)  # type: ignore[method-assign]

    @staticmethod
    def _layer(layer: Any, x: Tensor, count: int) -> Tensor:
        empty = [torch.tensor([]) for _ in range(count)] * (2 // count)
        halves = layer[0](x).chunk(2, -1)
        return torch.cat([torch.cat(pair, 1) for pair in zip(empty, halves, strict=True)], -1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_literals_do_not_tell_equal_blocks_apart():
    """Torch numbers them over the whole model. How many there are in a block does tell it apart."""
    few = decided(Begun(2, 2))
    assert decided(Begun(2, 2, 2)) == few
    assert decided(Begun(2, 1, 2)) > few
    assert autotp.verify(Begun(2, 1, 2), 2, X)


class Chosen(nn.Module):
    """A block that works on the tokens whose first element is positive, as many as the data tell in each block."""

    def __init__(self, last: int = WIDTH) -> None:
        super().__init__()
        self.last, self.up, self.down = last, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = (tokens[: self.last, 0] > 0).nonzero().flatten()
        return tokens.index_add(0, chosen, self.down(torch.relu(self.up(tokens[chosen])))).view_as(x)


def test_sizes_that_the_data_tell_do_not_tell_equal_blocks_apart(monkeypatch):
    few = decided(nn.Sequential(Chosen(), Chosen()))
    assert decided(nn.Sequential(Chosen(), Chosen(), Chosen(), Chosen())) == few
    assert decided(nn.Sequential(Chosen(), Chosen(), Chosen(3))) > few  # at most three are chosen, not eight
    assert autotp.verify(nn.Sequential(Chosen(), Chosen(), Chosen()), 2, X)
    monkeypatch.setattr(folding, "_data_sizes", lambda program: {})
    assert decided(nn.Sequential(Chosen(), Chosen(), Chosen(), Chosen())) > few


class Cut(nn.Module):
    """A layer of some positions, from one on."""

    def __init__(self, first: int | None) -> None:
        super().__init__()
        self.first, self.layer = first, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = torch.ops.aten.slice.Tensor(x, 1, self.first, 3)
        return x + self.layer(part).mean(1, keepdim=True)


def test_a_slice_from_none_is_one_from_the_first():
    few = decided(nn.Sequential(Cut(0), Cut(0), Cut(0)))
    assert decided(nn.Sequential(Cut(0), Cut(None), Cut(0))) == few
    assert decided(nn.Sequential(Cut(0), Cut(1), Cut(0))) > few


@pytest.mark.parametrize("order", [(0, 1, 0), (0, 1, 1, 0)])
def test_items_that_are_called_again_are_no_blocks(order):
    program, _ = capture_model(Lists(2, order), Inputs(X), torch.device("cpu"), check=False)
    paths = {n: module_path(n) for n in program.graph.nodes if n.op == "call_function"}
    assert "layers" not in items(paths) and autotp.verify(Lists(2, order), 2, X)


def test_plans_are_right_and_alike_in_every_item():
    report: Any = autotp.verify(Lists(4), 2, X)
    assert report
    held = {p.name: p.local for p in report.plan.parameters}
    for i in (1, 2, 3):
        assert {n: s for n, s in held.items() if n.startswith(f"layers.{i}.")} == {
            n.replace("layers.0.", f"layers.{i}."): s for n, s in held.items() if n.startswith("layers.0.")
        }


class Loop(nn.Module):
    """A cell over the steps of time, whose states are stacked; each `other` step is of another kind."""

    def __init__(self, other: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.recur, self.other = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), other

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            gate, value = (self.enter(x[:, t]) + self.recur(h)).chunk(2, -1)
            value = value.relu() if self.other and t % self.other == 1 else value.tanh()
            h = h + gate.sigmoid() * (value - h)
            states.append(h)
        return torch.stack(states, 1)


def problem_of(steps: int, other: int = 0) -> tuple[int, int]:
    """Numbers of items and of uses that the solver gets for a loop."""
    inputs = Inputs(torch.randn(2, steps, WIDTH))
    program, _ = capture_model(Loop(other), inputs, torch.device("cpu"), check=False)
    problem, _ = Builder(program, 2, Cluster.preset("h100")).build()
    return len(problem.items), len(problem.uses)


def test_the_problem_does_not_grow_with_the_steps_of_a_loop(monkeypatch):
    assert problem_of(8) == problem_of(20)
    assert problem_of(12, other=2) == problem_of(20, other=2), "a period of two steps"
    assert problem_of(16, other=100)[0] > problem_of(16)[0], "a step that is not like the others"
    monkeypatch.setattr(folding, "MIN_STEPS", 100)
    assert problem_of(20)[0] > problem_of(8)[0] + 100, "the negative control"


@pytest.mark.parametrize("other", [0, 2])
def test_loops_are_right_and_alike_in_every_step(other):
    x = torch.randn(2, 12, WIDTH)
    pins = {"enter.weight": Shard(0)}
    plan = autotp.plan(Loop(other), 2, example_inputs=x, pins=pins, check_capture=False)
    assert autotp.verify(Loop(other), 2, x, plan=plan).ok
    kinds = {repr(d.outs) for name, d in plan.decisions.items() if name.startswith("tanh")}
    assert len(kinds) <= 2, "of the steps within the loop, and of those at its ends"


class Numbered(nn.Module):
    """A loop over weights, and one over the same weights in the other order."""

    def __init__(self, count: int, back: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights, self.back = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(count)), back

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = x + (x @ w).relu()
        for w in reversed(self.weights) if self.back else ():
            x = x + (x @ w.t()).tanh()
        return x


@pytest.mark.parametrize("back", [False, True])
def test_weights_of_steps_are_decided_once(back):
    few = decided(Numbered(6, back))
    assert decided(Numbered(9, back)) == few
    report: Any = autotp.verify(Numbered(7, back), 2, X)
    assert report.ok and len({p.local for p in report.plan.parameters[1:]}) == 1, "the first step reads the input"
