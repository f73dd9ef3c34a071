"""Random operators drawn by counters, so that each rank draws its part and the numbers depend on no degree.

A captured program that draws gets one more input: a seed for each drawing operator, made from one number of torch's
default generator (`seeds`). What is drawn then depends on the seed and on the index of an element in the whole value:
not on tp, nor on what is split, nor on whether it is drawn again for a recomputed activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autotp.ir.graph import SEEDS, Capture, Emit, Leaf, before, draws, replace_node
from autotp.ir.marks import write
from autotp.ir.op import Op, aten, expression, packet_of, sizes
from autotp.kernels.operators import GOLDEN, OPS, mixed
from autotp.passes.base import Changes, Pass
from autotp.rules.local import Sizes


def base_seed() -> int:
    """Draw one number of torch's default generator."""
    return int(torch.randint(2**62, (), dtype=torch.int64))


def seeds(count: int, place: int = 0, base: int | None = None) -> Tensor:
    """Derive a seed for each of `count` operators from one number.

    Args:
        place: on the axes beside tp: parts of a batch are drawn for independently.
        base: that number, the same on all tp ranks; by default one of torch's default generator.
    """
    start = torch.tensor(base_seed() if base is None else base)
    return mixed(torch.arange(count) + mixed(start + torch.tensor(place) * GOLDEN))  # which wraps around


@dataclass(frozen=True)
class CountedRandom(Pass[Capture]):
    """Replaces random operators by ones that draw by counters, where there is a form for them.

    Attributes:
        random: what is asked for; only "counter" changes anything.
    """

    name = "counted-random"
    random: str = "counter"

    def idle(self, program: Capture) -> str:
        """Run only where that is asked for and something draws."""
        if self.random != "counter":
            return f"random={self.random!r}"
        return "" if _drawing(program) else "nothing draws"

    def run(self, program: Capture) -> Changes:
        drawing, graph = _drawing(program), program.graph
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            leaf = graph.placeholder(SEEDS.name)
        leaf.meta["val"] = drawing[0].meta["val"].new_empty((len(drawing),), dtype=torch.int64).detach()
        symbols = Sizes(graph, program.symbols)
        attentions = sum(packet_of(n.target) is aten.scaled_dot_product_attention for n in drawing)
        for i, node in enumerate(drawing):
            with graph.inserting_after(leaf):  # outside of every module: equal blocks stay equal
                seed = graph.call_function(aten.select.int, (leaf, 0, i))
            seed.meta["val"] = leaf.meta["val"].new_empty(())
            write(seed, no_grad=False)
            with before(node) as call:
                new = FORMS[packet_of(node.target)](_Call(call, symbols, seed), Op.of(node))
            replace_node(node, new)
        if attentions:
            program.notes.append(
                f"{attentions} attentions drop weights, and are decomposed for that: the weights are kept for the "
                "backward"
            )
        program.leaves = [*program.leaves, Leaf(leaf, SEEDS, SEEDS.name)]
        return Changes(len(drawing), "operators draw by counters")


def _drawing(program: Capture) -> list[fx.Node]:
    return [n for n in program.graph.nodes if draws(n) and packet_of(n.target) in FORMS]


@dataclass
class _Call:
    """Writes calls before a node, in its module, with their fake values."""

    emit: Emit
    sizes: Sizes
    seed: fx.Node

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit(function, *args, **kwargs)

    def shape(self, value: Tensor) -> list[Any]:
        """Give the sizes of a value, with nodes for symbolic ones."""
        out = []
        for n in value.shape:
            size = self.sizes.of(expression(n))
            if isinstance(size, fx.Node):
                size.meta.setdefault("val", n)
            out.append(size)
        return out

    def dropped(self, x: fx.Node, p: float) -> fx.Node:
        """Write dropout of a value."""
        return self(OPS.counter_dropout.default, x, self.seed, None, 0, self.shape(x.meta["val"]), float(p))

    def uniform(self, like: Tensor, dtype: torch.dtype) -> fx.Node:
        """Write uniform numbers in the shape of a value."""
        shape = self.shape(like)
        return self(OPS.counter_uniform.default, shape, self.seed, None, 0, shape, dtype)


def _dropout(call: _Call, op: Op) -> fx.Node:
    return call.dropped(op.slots[0], op.args["p"])


def _channels(call: _Call, op: Op) -> fx.Node:
    """Drop whole channels at once: the first two dimensions have a mask."""
    x = op.slots[0]
    thin = x
    for _ in range(2, len(op.ins[0])):
        thin = call(aten.select.int, thin, 2, 0)
    noise = call.dropped(call(aten.ones_like.default, thin), op.args["p"])
    for _ in range(2, len(op.ins[0])):
        noise = call(aten.unsqueeze.default, noise, -1)
    return call(aten.mul.Tensor, x, noise)


def _attention(call: _Call, op: Op) -> fx.Node:
    """Decompose attention whose weights are dropped: softmax(q kᵀ + mask), dropout, v."""
    query, key, value = (op.args[name] for name in ("query", "key", "value"))
    scale = op.args["scale"] or 1 / math.sqrt(op.ins[0][-1])
    if op.args["enable_gqa"]:
        key, value = (_repeated(call, x, query) for x in (key, value))
    scores = call(aten.matmul.default, call(aten.mul.Tensor, query, scale), call(aten.transpose.int, key, -2, -1))
    mask = op.args["attn_mask"]
    if op.args["is_causal"]:
        lengths = call.shape(scores.meta["val"])[-2:]
        device = scores.meta["val"].device
        mask = call(aten.tril.default, call(aten.ones.default, lengths, dtype=torch.bool, device=device))
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        scores = call(aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten.softmax.int if mask is None else aten._safe_softmax.default, scores, -1)
    return call(aten.matmul.default, call.dropped(weights, op.args["dropout_p"]), value)


def _repeated(call: _Call, x: fx.Node, query: fx.Node) -> fx.Node:
    """Repeat every key head once for each of its query heads."""
    heads, kv = sizes(query.meta["val"])[-3], sizes(x.meta["val"])[-3]
    if heads == kv:
        return x
    shape = call.shape(x.meta["val"])
    wide = call(aten.expand.default, call(aten.unsqueeze.default, x, -3), [*shape[:-2], heads // kv, *shape[-2:]])
    return call(aten.reshape.default, wide, [*shape[:-3], heads, *shape[-2:]])


def _bernoulli(call: _Call, op: Op) -> fx.Node:
    val = op.node.meta["val"]
    compare, p = (aten.lt.Scalar, op.args["p"]) if op.target is aten.bernoulli.p else (aten.lt.Tensor, op.slots[0])
    return call(aten.to.dtype, call(compare, call.uniform(val, torch.float32), p), val.dtype)


def _uniform(call: _Call, op: Op) -> fx.Node:
    return call.uniform(op.node.meta["val"], op.node.meta["val"].dtype)


FORMS: dict[Any, Callable[[_Call, Op], fx.Node]] = {
    aten.dropout: _dropout,
    aten.feature_dropout: _channels,
    aten.scaled_dot_product_attention: _attention,
    aten.bernoulli: _bernoulli,
    aten.rand: _uniform,
    aten.rand_like: _uniform,
}
