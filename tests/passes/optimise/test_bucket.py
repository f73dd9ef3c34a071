"""Never more communication than needed: what is shared, what is merged, and what is not sent at all."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import collectives
from autotp.comm import conversions as convert
from autotp.ir.marks import mark
from autotp.ir.specs import INVARIANT, REPLICATED
from tests.helpers.compare import gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn, transformer
from tests.helpers.modules.overlapped import called, calls_of, made

EXACT = 1e-12
GRAPHS: dict[tuple[str, bool], list[str]] = {}

LAYOUTS = INVARIANT, REPLICATED


def graph_of(name: str, sequence: bool = False) -> list[str]:
    """The lines of one rank's program."""
    if (name, sequence) not in GRAPHS:
        model: Any = transformer(name)
        sharded: Any = autotp.compile(model, 2, example_inputs=inputs_of(model), sequence_parallel=sequence)
        GRAPHS[name, sequence] = sharded.graph.splitlines()
    return GRAPHS[name, sequence]


def marked(lines: list[str], mark: str) -> list[str]:
    return [line for line in lines if f" = {mark}(" in line]


# ---- what there is none of -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptj", "gpt_neox"])
def test_attention_and_feed_forward_side_by_side_are_reduced_once(name):
    """One sum for both in each of the two layers; before them one f where they read one norm, and one for the head.

    GPT-NeoX has a norm for each of the two: f is before the norms, whose weights' gradients are summed in one call.
    """
    lines = graph_of(name)
    reduced = [*marked(lines, "f*"), *marked(lines, "all_reduce")]
    layers = [line for line in reduced if "P -> " in line]
    assert 2 <= len(layers) <= 3, layers  # one in a layer, and one where the embedding is split
    entering = marked(lines, "f")
    assert len(entering) == (3 if name == "gptj" else 2), entering
    assert bool(marked(lines, "f_bucket")) == (name == "gpt_neox")


@pytest.mark.parametrize("name, sequence, mark", [("llama", False, "f"), ("llama", True, "g")])
def test_queries_keys_and_values_share_one_conversion(name, sequence, mark):
    lines = graph_of(name, sequence)
    found = {line.partition(":")[0] for line in marked(lines, mark)}
    products = [
        line for line in lines if "aten.linear(" in line and "layers_1_self_attn" in line and "o_proj" not in line
    ]
    read = [line.partition("aten.linear(")[2].partition(",")[0] for line in products]
    assert len(read) == 3 and len(set(read)) == 1 and read[0] in found, products


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5-short", id="t5")])
@pytest.mark.parametrize("sequence", [False, True])
def test_no_conversion_is_dead_or_made_twice(name, sequence):
    model: Any = transformer(name)
    sharded: Any = autotp.compile(model, 2, example_inputs=inputs_of(model), sequence_parallel=sequence, optimise=False)
    nodes = [n for n in sharded._programs_made[-1].graph.nodes if n.target in convert.FUNCTIONS.values()]
    assert nodes and all(n.users for n in nodes)
    sources = [(n.args[0], mark(n).conversion) for n in nodes]
    assert len(set(sources)) == len(sources)


# ---- the bucket ------------------------------------------------------------------------------------------------------


def bucketed(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Three tensors, one of them frozen and one of another dtype, and gradients of gradients."""
    named = {"rank": rank, "tp": world, "group": group.group_name}
    own = torch.Generator().manual_seed(1 + rank)
    shared = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, dtype=torch.double, generator=shared) for n in (5, 7, 3)]
    factors = [torch.randn(x.shape, dtype=torch.double, generator=own) for x in tensors]
    results, counts = [], []
    for one in (False, True):
        leaves = [x.clone().requires_grad_(i != 1) for i, x in enumerate(tensors)]
        outs = convert.f_bucket(leaves, **named) if one else [convert.f(x, *LAYOUTS, **named) for x in leaves]
        loss = torch.stack([(f * y**3).sum() for f, y in zip(factors, outs, strict=True)]).sum()
        wanted = [leaves[0], leaves[2]]
        with patch.object(collectives, "_start", wraps=collectives._start) as start:
            first = torch.autograd.grad(loss, wanted, retain_graph=True)
        again = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), wanted)
        results.append([*first, *second])
        counts.append(start.call_count)
    mixed = [torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.double, requires_grad=True)]
    torch.stack([y.double().sum() for y in convert.f_bucket(mixed, **named)]).sum().backward()
    return {
        "same": all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "sent": counts,
        "mixed": [(x.grad.dtype == x.dtype, x.grad.tolist()) for x in mixed if x.grad is not None],
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_one_all_reduce_gives_what_several_gave(pool, world):
    for found in pool.run(bucketed, world=world):
        assert found["sent"] == [2, 1], found
        assert found["same"] or world > 2, found  # more than two summands may come in another order
        assert found["mixed"] == [(True, [world, world])] * 2


def training(rank: int, world: int, group: Any, name: str) -> dict[str, Any]:
    """With and without: collectives of a backward, and the difference from the unsharded model."""
    model, inputs = made(name)
    called(model, inputs).square().mean().backward()
    found: dict[str, Any] = {}
    for on in (False, True):
        sharded: Any = autotp.compile(
            model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=True, optimise={"bucket": on}
        )
        loss = called(sharded, inputs).square().mean()
        with patch.object(collectives, "_start", wraps=collectives._start) as start:
            loss.backward()
        text = next(line for line in sharded.plan.report().splitlines() if "bucket:" in line)
        found[str(on)] = start.call_count, gradients_differ(sharded, model), calls_of(sharded, "f_bucket"), text
    return found


@pytest.mark.parametrize("name, fewer", [("llama", 2), ("gpt2", 7), ("plain", 3)])
def test_a_block_sends_the_gradients_of_its_norms_at_once(pool, name, fewer):
    for found in pool.run(training, name, world=2):
        off, on = found["False"], found["True"]
        assert off[0] - on[0] == fewer, found
        assert max(off[1], on[1]) < EXACT, found
        assert off[2] == 0 and on[2] > 0 and "switched off" in off[3] and "became" in on[3], found


def wrong(rank: int, world: int, group: Any) -> float:
    """A bucket whose sum is left out."""
    model, inputs = made("plain")
    called(model, inputs).square().mean().backward()
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=True)
    with patch.dict(convert.FUNCTIONS, f=lambda x, *_, **__: x):
        called(sharded, inputs).square().mean().backward()
    return gradients_differ(sharded, model)


def test_a_sum_that_is_left_out_shows(pool):
    assert min(pool.run(wrong, world=2)) > 1e-2


def freezing(rank: int, world: int, group: Any) -> list[int]:
    """Collectives of a backward in which all parameters, those of the last block, and none of the norms are trained."""
    model, inputs = made("plain")
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=True)
    counts = []
    for frozen in ("nothing", "norm.bias", "norm"):
        for n, p in sharded.named_parameters():
            p.requires_grad_(frozen not in n)
        loss = called(sharded, inputs).square().mean()
        with patch.object(collectives, "_start", wraps=collectives._start) as start:
            loss.backward()
        counts.append(start.call_count)
    return counts


def test_frozen_norms_send_nothing(pool):
    for every, weights, none in pool.run(freezing, world=2):
        assert every == weights  # one all-reduce for a block, of less
        assert weights - none == 3


def own_region(rank: int, world: int, group: Any) -> float:
    """Layers that checkpoint themselves read their norms in the region: so does the bucket."""
    torch.manual_seed(0)
    model = redrawn(Lean()).double()
    inputs = torch.randn(2, 16, 16, dtype=torch.double)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=True)
    assert calls_of(sharded, "f_bucket") == 3
    for m in (model, sharded):
        called(m, inputs).square().mean().backward()
    return gradients_differ(sharded, model)


class Lean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = made("plain")[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.whole.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return self.whole.head(x)


def test_buckets_stay_in_their_region(pool):
    assert max(pool.run(own_region, world=2)) < EXACT
