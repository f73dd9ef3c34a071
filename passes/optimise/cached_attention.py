"""Cached attention: a program that adds tokens to a cache attends to it without a mask in four dimensions.

What a library writes as a mask for all pairs of tokens, copies of keys and values for every head of the query, and a
product over them becomes one call, where the mask is of a known family (`masks.py`, which computes it).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import fx

from autotp.comm.conversions import part_of_copy
from autotp.ir.marks import inherit
from autotp.ir.op import Op, aten
from autotp.ir.scopes import scope_path
from autotp.kernels.attention import attend, attention_mask, cached_attention
from autotp.passes.base import Changes

from .expressions import calls, closed, put, value_of
from .masks import MaskFamily, recognise
from .optimisation import Optimisation, RankProgram

SDPA = aten.scaled_dot_product_attention.default
GROWN, WRITES = (aten.cat,), (aten.index_copy, aten.index_put)
WIDER, JOINED = (aten.unsqueeze, aten.reshape, aten.view), (aten.reshape, aten.view, aten._unsafe_view)


class Side(NamedTuple):
    """Keys or values of an attention.

    Attributes:
        cache: the call that puts the new ones to the old ones. copies: what repeats its heads, the last first.
    """

    cache: fx.Node
    copies: tuple[fx.Node, ...]

    @property
    def grown(self) -> bool:
        """Say whether the cache becomes longer; otherwise it is written to."""
        return calls(self.cache, *GROWN)


class CachedAttention(Optimisation):
    """Fuses the attention of new tokens over a cache into one call."""

    name = "cached_attention"

    def run(self, program: RankProgram) -> Changes:
        """Put one call in the place of each, and say how many masks are of no known kind."""
        graph = program.graph
        narrow_of = cache(_narrow)
        count, others = 0, 0
        for node in [n for n in graph.nodes if n.target is SDPA]:
            parts = _read(node)
            if parts is None:
                continue
            mask = Op.of(node).args["attn_mask"]
            narrow = None if mask is None else narrow_of(mask)
            if narrow is False:
                others += 1
                continue
            _fuse(node, narrow, *parts)
            count += 1
        graph.eliminate_dead_code()
        rest = f"; {others} masks are of no known kind" if others else ""
        if not count:
            return Changes(0, f"nowhere: no attention over a cache{rest}")
        return Changes(count, f"{count} attentions read their cache as it is{rest}")


def _read(node: fx.Node) -> tuple[Side, Side] | None:
    """Find keys and values of an attention, where both are a cache."""
    args = Op.of(node).args
    if args["dropout_p"] or args["is_causal"]:
        return None
    sides = [_side(args[name], node) for name in ("key", "value")]
    if sides[0] is None or sides[1] is None or sides[0].grown != sides[1].grown or sides[0].cache is sides[1].cache:
        return None
    return sides[0], sides[1]


def _side(value: fx.Node, reader: fx.Node) -> Side | None:
    """Find the cache behind an operand, through the copies for every head of the query."""
    node: Any = value
    copies: list[fx.Node] = []
    if not _is_cache(node):
        steps = _repeats(node)
        if steps is None or not closed([reader, *steps], (reader,)):
            return None
        copies, node = steps, steps[-1].args[0]
    if not _is_cache(node):
        return None
    late = [user for user in node.users if user not in (reader, *copies) and not reader < user]
    return None if late else Side(node, tuple(copies))


def _is_cache(node: Any) -> bool:
    """Say whether new keys or values are put to old ones along the tokens."""
    if not calls(node, *GROWN, *WRITES) or value_of(node).ndim != 4:
        return False
    if calls(node, *WRITES):
        return True
    tensors, dim = Op.of(node).args["tensors"], Op.of(node).args["dim"]
    return len(tensors) == 2 and dim % 4 == 2 and tensors[0].op == "placeholder"


def _repeats(node: Any) -> list[fx.Node] | None:
    """Match [batch, heads, length, size] -> [.., heads, 1, ..] -> [.., heads, times, ..] -> [.., heads * times, ..]."""
    # Read from the end, as libraries write `repeat_kv`: joined, perhaps copied, expanded, and a dimension put in.
    steps = [node]
    if node.target is part_of_copy:  # of a head that other ranks have too, those for this rank's queries
        steps.append(node := node.args[0])
    if not calls(node, *JOINED):
        return None
    if calls(node.args[0], aten.clone):
        steps.append(node.args[0])
    wide = steps[-1].args[0]
    if not calls(wide, aten.expand) or not calls(wide.args[0], *WIDER):
        return None
    one = wide.args[0]
    shapes = [tuple(value_of(n).shape) for n in (node, wide, one, one.args[0])]
    if [len(s) for s in shapes] != [4, 5, 5, 4] or shapes[2][2] != 1 or shapes[2][1] != shapes[3][1]:
        return None
    same = shapes[1][1] == shapes[3][1] and shapes[0][1] == shapes[1][1] * shapes[1][2]
    return [*steps, wide, one] if same else None


def _narrow(mask: fx.Node) -> Any:
    """Put in what stands for a mask: a node, None for none at all, False where it is of no known kind.

    One that the caller passes is his, and stays.
    """
    if mask.op == "placeholder":
        return mask
    family = recognise(mask)
    if family is None:
        return False
    return None if family.everything else _put_mask(mask, family)


def _put_mask(mask: fx.Node, family: MaskFamily) -> fx.Node:
    val = value_of(mask)
    args: Any = family.new, family.length, family.position, family.padding, family.window, val.device
    with mask.graph.inserting_before(mask):
        node = mask.graph.call_function(attention_mask, args)
    inherit(node, mask, val[0, 0] if family.padding is None else None, scope=scope_path(mask))
    return node


def _fuse(node: fx.Node, mask: fx.Node | None, keys: Side, values: Side) -> None:
    """Put one call in the place of an attention and what only it reads; a cache that is written to stays a call."""
    args = Op.of(node).args
    q, scale, copies = args["query"], args["scale"], [*keys.copies, *values.copies]
    if not keys.grown:
        put(attend, (q, keys.cache, values.cache, mask, scale), [node, *copies], node)
        return
    (past_keys, new_keys), (past_values, new_values) = (Op.of(x.cache).args["tensors"] for x in (keys, values))
    operands = (q, past_keys, past_values, new_keys, new_values, mask, scale)
    put(cached_attention, operands, [node, *copies, keys.cache, values.cache], node, keys.cache, values.cache)
