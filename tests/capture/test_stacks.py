"""Stacks of equal blocks are traced once, and the graph is that of the flat trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.capture import export_passes, repeated_blocks
from autotp.driver.compile import capture_model
from autotp.inputs import normalise
from autotp.ir.graph import short_name
from autotp.ir.scopes import module_path
from tests.helpers.models import inputs_of, transformer

DEPTH, WIDTH = 4, 8
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A gated residual block; `place` is its number in the stack."""

    outer: list[nn.Module]

    def __init__(self, place: int, scale: float = 1.0) -> None:
        super().__init__()
        self.place, self.scale = place, scale
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), float(place)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        gate, value = self.up(x + self.get_buffer("shift")).chunk(2, -1)
        y = self.down(gate.sigmoid() * value) * self.scale
        return x + (y if mask is None else y * mask)


class Reads(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) if self.place % 2 else super().forward(x, mask).relu()


class Writes(Block):
    """Changes what it is given, which the caller sees."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        x.mul_(0.5)
        return y


class Owns(Block):
    """Changes only what it made."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        y[..., :2] += 1
        return y.mul_(0.5)


class Keeps(Block):
    """Writes to its buffer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.get_buffer("shift").add_(1)
        return super().forward(x, mask)


class Product:
    """Computes a block's product, as processors of attention do; `held` is anything."""

    def __init__(self, held: Any = None) -> None:
        self.held, self.sizes = held, torch.Size([WIDTH])

    def __call__(self, gate: Tensor, value: Tensor) -> Tensor:
        return gate.sigmoid() * value


class Aided(Block):
    """Has an object of its own for its product."""

    def __init__(self, place: int, scale: float = 1.0) -> None:
        super().__init__(place, scale)
        self.product = Product()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.product(*self.up(x).chunk(2, -1))) * self.scale
        return x + (y if mask is None else y * mask)


class Leaves(Aided):
    """Leaves in its object what the model reads afterwards."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.product.held = y = super().forward(x, mask)
        return y


class Closed(Block):
    """Reads a weight that is not its own."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.outer[0](x), mask)


class Stack(nn.Module):
    """Runs its blocks; what happens between them is by number."""

    def __init__(self, kind: type[Block] = Block, scales: tuple[float, ...] = (1.0,) * DEPTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks = [kind(i, scale) for i, scale in enumerate(scales)]
        for block in blocks if kind is Closed else ():
            block.outer = [self.first]  # in a list, which hides it from `parameters()`
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        kept = []
        for i, block in enumerate(self.layers):
            before, x = x, block(x, mask=torch.ones_like(x[..., :1]) if i == 2 else None)
            kept += [before * i] if i in (1, 3) else []
            kept += [block.product.held] if isinstance(block, Leaves) else []
        return x, *kept


def rows(captured: Any) -> list[Any]:
    """Operators in order, wired by position, with shapes, literals, modules and names of leaves; what is written to."""
    named = {leaf.node: leaf.name for leaf in captured.leaves}
    place = {n: i for i, n in enumerate(captured.graph.nodes)}

    def told(x: Any) -> Any:
        return (named.get(x) or place[x]) if isinstance(x, torch.fx.Node) else repr(x)

    def shape(n: Any) -> str:
        return str(getattr(n.meta.get("val"), "shape", None))

    return [*captured.mutations.items()] + [
        (short_name(n.target), torch.fx.map_arg(n.args, told), shape(n), module_path(n))
        for n in captured.graph.nodes
        if n.op in ("call_function", "output")
    ]


@pytest.fixture
def counted(monkeypatch):
    """How many calls of blocks were traced in full, and how many were short."""
    made = {"full": 0, "short": 0}
    call = repeated_blocks.Repeats._call

    def counting(self: Any, own: Any, block: int, kind: int, *rest: Any) -> Any:
        made["short" if kind in repeated_blocks._results else "full"] += 1
        return call(self, own, block, kind, *rest)

    monkeypatch.setattr(repeated_blocks.Repeats, "_call", counting)
    return made


def captured_flat(model: nn.Module, inputs: Any, monkeypatch: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(repeated_blocks, "stacks", lambda model: {})
        return capture_model(model, normalise(inputs), torch.device("cpu"))[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_transformer_is_the_same_graph_and_plan(name, counted, monkeypatch):
    model = transformer(name, num_hidden_layers=DEPTH)
    inputs = inputs_of(model)
    once = capture_model(model, normalise(inputs), torch.device("cpu"))[0]
    assert counted == {"full": 1, "short": DEPTH - 1}
    flat = captured_flat(model, inputs, monkeypatch)
    assert rows(once) == rows(flat)
    plan = autotp.plan(model, 2, example_inputs=inputs)
    monkeypatch.setattr(repeated_blocks, "stacks", lambda model: {})
    other = autotp.plan(model, 2, example_inputs=inputs)
    assert plan.placements == other.placements and plan.totals == other.totals
    assert list(plan.decisions.values()) == list(other.decisions.values())
    assert [replace(c, value="", first="") for c in plan.collectives] == [
        replace(c, value="", first="") for c in other.collectives
    ], "but for the names of values"


@pytest.mark.parametrize("kind", [Block, Owns, Aided])
def test_what_happens_between_blocks_is_kept(kind, counted, monkeypatch, captured_once):
    model = Stack(kind)
    once = capture_model(model, normalise(X), torch.device("cpu"))[0]
    assert counted == {"full": 2, "short": DEPTH - 2}, "with a mask and without are two kinds of call"
    assert rows(once) == rows(captured_flat(model, X, monkeypatch))
    assert autotp.verify(model, 2, X)


def test_blocks_that_differ_are_traced_apart(counted):
    model = Stack(scales=(1.0, 2.0, 1.0, 2.0, 1.0, 3.0))
    assert autotp.verify(model, 2, X)
    assert counted == {"full": 3, "short": 2}, "the third has a mask; the last is alone of its kind"


@pytest.mark.parametrize("held", [float, Product, lambda i: [lambda x: x], lambda i: torch.zeros(1)])
def test_blocks_whose_objects_hold_something_else_are_traced_apart(held, counted, captured_once):
    model = Stack(Aided)
    for i, block in enumerate(model.layers):
        vars(block)["product"].held = held(i)
    assert len(set(repeated_blocks.kinds(model.layers))) == DEPTH
    assert autotp.verify(model, 2, X) and counted == {"full": 0, "short": 0}


def test_an_object_that_holds_itself_is_told():
    model = Stack(Aided)
    for block in model.layers:
        product = vars(block)["product"]
        product.held = product
    assert len(set(repeated_blocks.kinds(model.layers))) == DEPTH, "an object in an object is itself alone"


def test_a_collection_that_holds_itself_is_told():
    model = Stack(Aided)
    for block in model.layers:
        vars(block)["product"].held = held = []
        held.append(held)
    assert len(set(repeated_blocks.kinds(model.layers))) == DEPTH


def test_an_object_is_another_than_one_whose_memory_it_took():
    block = Aided(0)
    block.product.held = [torch.ones(1)]
    before = repeated_blocks._attributes(block, set(), {})
    assert repeated_blocks._attributes(block, set(), {}) == before
    for _ in range(3):
        block.product.held.pop()
        block.product.held.append(torch.ones(1))
        assert repeated_blocks._attributes(block, set(), {}) != before


def test_what_blocks_leave_in_their_objects_is_each_ones_own(monkeypatch, captured_once):
    model = Stack(Leaves)
    flat = rows(captured_flat(model, X, monkeypatch))
    assert rows(capture_model(model, normalise(X), torch.device("cpu"), check=False)[0]) == flat
    assert autotp.verify(model, 2, X)
    monkeypatch.setattr(repeated_blocks, "_attributes", lambda *_: [])  # the negative control
    assert rows(capture_model(model, normalise(X), torch.device("cpu"), check=False)[0]) != flat


@pytest.mark.parametrize("kind", [Reads, Writes, Keeps, Closed])
def test_blocks_that_cannot_stand_for_each_other_are_traced_one_by_one(kind, monkeypatch, captured_once):
    model = Stack(kind)
    once = capture_model(model, normalise(X), torch.device("cpu"))[0]
    assert rows(once) == rows(captured_flat(model, X, monkeypatch))
    assert autotp.verify(model, 2, X)


GUARDS = {
    "unread": (repeated_blocks, "unread", lambda stack: nullcontext()),
    "writes": (export_passes, "refuse_writes", lambda graph: None),
}


@pytest.mark.parametrize(("kind", "guard"), [(Reads, "unread"), (Writes, "writes"), (Keeps, "writes")])
def test_without_its_guards_the_capture_would_be_wrong(kind, guard, monkeypatch):
    """The negative controls; the self-check would notice, so it is left out here."""
    model = Stack(kind)
    flat = captured_flat(model, X, monkeypatch)
    assert rows(capture_model(model, normalise(X), torch.device("cpu"), check=False)[0]) == rows(flat)
    monkeypatch.setattr(*GUARDS[guard])
    assert rows(capture_model(model, normalise(X), torch.device("cpu"), check=False)[0]) != rows(flat)


def test_a_forward_of_the_blocks_own_is_put_back():
    def own(x: Tensor) -> Tensor:
        return 2 * x

    model = nn.Sequential(*(Block(i) for i in range(DEPTH)))
    for block in model:
        block.forward = own
    with repeated_blocks.Repeats(model).tracing():
        assert all(block.forward is not own for block in model), "they are not called as repeats"
    assert all(vars(block).get("forward") is own for block in model)


def lists_of_blocks(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(i) for i in range(depth)))


def test_a_model_that_is_itself_the_list_of_its_blocks():
    plans = [autotp.plan(lists_of_blocks(depth), 2, example_inputs=X) for depth in (5, 9)]
    few, many = (len({block.first for block in plan.blocks}) for plan in plans)
    assert few == many, "the blocks share their decisions"
    captured, _ = capture_model(lists_of_blocks(DEPTH), normalise(X), torch.device("cpu"))
    inner = {path for node in captured.graph.nodes for path in module_path(node)}
    assert inner == {*map(str, range(DEPTH)), *(f"{i}.{x}" for i in range(DEPTH) for x in ("up", "down"))}


class Gaps(nn.Module):
    """A list that leaves a place empty, as code does that switches layers off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), None, *(nn.Linear(8, 8) for _ in range(3))])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if layer is None else layer(x).relu()
        return x


def test_a_list_with_an_empty_place_is_captured():
    report = autotp.verify(Gaps(), 2, torch.randn(4, 8))
    assert report and report.output_error < 1e-9


class Sliced(nn.Module):
    """Calls slices of its lists, and has one module in two places: torch then names modules by the slices."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.Tanh()
        self.ends = nn.Sequential(nn.Linear(4, 16), act, nn.Linear(16, 4), act)
        self.between = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends[2:](self.ends[:2](x))
        for layer in self.between[1:][:-1]:
            x = layer(x)
        return x


def test_modules_in_slices_of_lists_are_called_by_their_own_names():
    torch.manual_seed(0)
    model, x = Sliced(), torch.randn(3, 4)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    seen: list[list[str]] = []
    for each in (model, sharded):
        seen.append([])
        for name, module in each.named_modules():
            module.register_forward_hook(lambda *_, name=name, to=seen[-1]: to.append(name))
    torch.testing.assert_close(sharded(x), model(x))
    assert seen[0] == seen[1] and seen[0][:2] == ["ends.0", "ends.1"] and "between.2" in seen[0]
