"""Attention over a cache: which masks are recognised by computing them, and that what is fused computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autotp.ir.graph import copy_graph
from autotp.ir.op import aten
from autotp.kernels.attention import attend, attention_mask, cached_attention
from autotp.passes.optimise.cached_attention import SDPA, CachedAttention
from autotp.passes.optimise.masks import recognise
from autotp.passes.optimise.optimisation import RankProgram

HEADS, KV, SIZE, WINDOW = 4, 2, 4, 4
EXACT = 1e-12
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
FAMILY: dict[str, Mask] = {
    "causal": lambda at, own, there: at <= own,
    "window": lambda at, own, there: (at <= own) & (at > own - WINDOW),
    "padded": lambda at, own, there: (at <= own) & there,
    "all": lambda at, own, there: (own >= at) & (own - at < WINDOW) & there,
}
OTHERS: dict[str, Mask] = {
    "strict": lambda at, own, there: at < own,
    "chunked": lambda at, own, there: (at <= own) & (at // WINDOW == own // WINDOW),
    "both ways": lambda at, own, there: (at <= own + 1) & there,
    "sunk": lambda at, own, there: ((at <= own) & (at > own - WINDOW)) | (at == 0),
}


def repeated(x: Tensor) -> Tensor:
    """As libraries write it: a copy of every head for each of its group."""
    batch, _, length, _ = x.shape
    return x.unsqueeze(2).expand(batch, KV, HEADS // KV, length, SIZE).reshape(batch, HEADS, length, SIZE)


class Many(nn.Module):
    """The same attention over a past under every mask, and over a cache of fixed length from a position on."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, padding: Tensor, position: Tensor
    ) -> dict[str, Any]:
        out: dict[str, Any] = {}
        new = q.shape[2]
        for name, mask in (FAMILY | OTHERS).items():
            keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], -2)
            at = torch.arange(keys.shape[2])
            own = torch.arange(new).unsqueeze(1) + past_k.shape[2]
            there = padding.bool().index_select(1, at).unsqueeze(1).unsqueeze(1)
            where = mask(at, own, there).expand(q.shape[0], 1, new, keys.shape[2])
            out[name] = F.scaled_dot_product_attention(q, repeated(keys), repeated(values), where), keys, values
        own = torch.arange(new) + position
        keys, values = torch.index_copy(past_k, 2, own, k), torch.index_copy(past_v, 2, own, v)
        where = (torch.arange(keys.shape[2]) <= own.unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        out["fixed"] = F.scaled_dot_product_attention(q, keys, values, where, enable_gqa=True, scale=0.3), keys, values
        return out


def arguments(new: int, past: int) -> tuple[Tensor, ...]:
    """New tokens and a past; of the second sequence's padding one is at the left."""
    draw = torch.Generator().manual_seed(new + past)
    shapes = [(HEADS, new), (KV, new), (KV, new), (KV, past), (KV, past)]
    tensors = [torch.randn(2, heads, n, SIZE, generator=draw, dtype=torch.float64) for heads, n in shapes]
    padding = torch.ones(2, past + new, dtype=torch.long)
    padding[1, 0] = 0
    return (*tensors, padding, torch.tensor(min(1, past - new)))


@pytest.fixture(scope="module")
def exported() -> fx.Graph:
    """The graph for sizes of any number, but for the heads."""
    any_, new, given = torch.export.Dim.AUTO, torch.export.Dim("new"), arguments(3, 7)
    # Torch 2.12 does not see by itself that there are as many keys as queries.
    shapes = [{0: any_, 2: length} for length in (new, new, new, any_, any_)]
    with torch.no_grad():
        return torch.export.export(Many(), given, dynamic_shapes=(*shapes, {0: any_, 1: any_}, {})).graph


def copied(graph: fx.Graph) -> fx.Graph:
    new, env = fx.Graph(), {}
    copy_graph(graph.nodes, env, new)
    return new


def attentions(graph: fx.Graph) -> dict[str, fx.Node]:
    """The attention of each name, in the order in which they are called."""
    found = [n for n in graph.nodes if n.target in (SDPA, attend, cached_attention)]
    return dict(zip([*FAMILY, *OTHERS, "fixed"], found, strict=True))


def run(graph: fx.Graph) -> str:
    program: Any = RankProgram(graph, None)  # type: ignore[arg-type]
    before = set(graph.nodes)
    done = CachedAttention().run(program)
    CachedAttention().check(program, before)
    return done.what


def test_what_is_fused_computes_the_same_and_the_others_stay(exported):
    graph = copied(exported)
    fused, left = len(FAMILY) + 1, len(OTHERS)
    assert run(graph) == f"{fused} attentions read their cache as it is; {left} masks are of no known kind"
    calls = attentions(graph)
    assert all(calls[name].target is cached_attention for name in FAMILY) and calls["fixed"].target is attend
    assert all(calls[name].target is SDPA for name in OTHERS)
    assert sum(n.target is aten.cat.default for n in graph.nodes) == 2 * len(OTHERS)
    windows = [n.args[4] for n in graph.nodes if n.target is attention_mask]
    assert windows == [None, WINDOW, None, WINDOW, None]
    module = fx.GraphModule({}, graph)
    for new, past in ((3, 7), (1, 9), (2, 2), (1, 1)):
        given = arguments(new, past)
        wanted = [x for each in Many()(*given).values() for x in each]
        worst = [float((a - b).abs().max()) for a, b in zip(module(*given), wanted, strict=True)]
        assert max(worst) < EXACT, (new, past, worst)


def test_a_mutated_mask_is_refused(exported):
    """One comparison, or one number, is another: the mask is of no kind, or of another window."""
    graph = copied(exported)
    masks = {name: node.args[3] for name, node in attentions(graph).items()}
    assert recognise(masks["causal"]) is not None  # type: ignore[arg-type]
    for name in ("causal", "padded", "fixed"):
        compared = _within(masks[name], aten.le.Tensor)
        compared.target = aten.lt.Tensor
        assert recognise(masks[name]) is None, name  # type: ignore[arg-type]
        compared.target = aten.le.Tensor
    near = _within(masks["window"], aten.sub.Tensor)
    near.args = (near.args[0], 2 * WINDOW)
    found = recognise(masks["window"])  # type: ignore[arg-type]
    assert found is not None and found.window == 2 * WINDOW
    near.target = aten.floor_divide.default
    assert recognise(masks["window"]) is None  # type: ignore[arg-type]


def _within(mask: Any, target: Any) -> Any:
    """The call of this operator that a mask is made by."""
    stack, met = [mask], set()
    while stack:
        node = stack.pop()
        if node.target is target:
            return node
        met.add(node)
        stack += [n for n in node.all_input_nodes if n not in met]
    raise AssertionError(f"{mask} is made without {target}")


def decomposed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute `attend` by products and a softmax, with repeated heads, to hold it against."""
    count = q.shape[1] // max(keys.shape[1], 1)
    keys, values = keys.repeat_interleave(count, 1), values.repeat_interleave(count, 1)
    scores = q @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("heads", [KV, HEADS])
def test_the_operator_is_its_decomposition(heads):
    q, k, v, past_k, past_v, padding, position = arguments(2, 6)
    k, v, past_k, past_v = (x.repeat_interleave(heads // KV, 1) for x in (k, v, past_k, past_v))
    cpu, length = torch.device("cpu"), 8
    masks = [None, *(attention_mask(2, length, at, rows, window, cpu) for at, rows, window in (
        (None, None, None), (position, None, 3), (None, padding, None), (position, padding, 2)))]  # fmt: skip
    worst = []
    for mask in masks:
        y, keys, values = cached_attention(q, past_k, past_v, k, v, mask, 0.4)
        assert torch.equal(keys, torch.cat([past_k, k], 2)) and torch.equal(values, torch.cat([past_v, v], 2))
        worst.append(float((y - decomposed(q, keys, values, mask, 0.4)).abs().max()))
        worst.append(-float((y - decomposed(q, keys, values.roll(1, 2), mask, 0.4)).abs().max()))  # another cache
    assert max(worst) < EXACT and sum(x < -1e-3 for x in worst) == len(masks)


def test_one_new_token_needs_no_mask_but_for_padding():
    cpu = torch.device("cpu")
    padding = torch.tensor([[0, 1, 1, 1, 9]])
    assert attention_mask(1, 4, None, padding, None, cpu).tolist() == [[[[False, True, True, True]]]]
    assert attention_mask(1, 4, None, None, None, cpu).all() and attention_mask(
        1, 4, torch.tensor(2), None, 2, cpu
    ).tolist() == [[False, True, True, False]]
    assert attention_mask(2, 3, None, None, None, cpu).tolist() == [[True, True, False], [True, True, True]]
