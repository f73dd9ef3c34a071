"""Patterns over a vocabulary that is dealt out: the embedding, and the cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autotp.comm import conversions as convert
from autotp.ir.layouts import Partial
from autotp.ir.marks import conversion_of, inherit, mark
from autotp.ir.op import aten
from autotp.ir.scopes import scope_path
from autotp.ir.specs import PartialSpec
from autotp.kernels.common import DTYPES, WIDE
from autotp.rules.lookup import vocabulary_embedding

from .expressions import CASTS, call_in_place, calls, erase, value_of
from .judged import Rewrite

OPS: Any = torch.ops.autotp
MAX = "max"
VIEWS = (aten.reshape, aten.view, aten.flatten, aten.unsqueeze, aten.squeeze, aten.slice, aten.contiguous)
CONVERSIONS = frozenset(convert.FUNCTIONS.values())


def look_up(node: fx.Node) -> Rewrite | None:
    """Find an embedding whose vocabulary is dealt out, where each rank's rows are one run of ids."""
    if node.target is not vocabulary_embedding:
        return None
    operands: Any = node.args
    weight, ids, runs, padding = operands
    numbers = [runs.repeat, padding, *(n for segment in runs.segments for n in segment)]
    if value_of(weight).dtype not in DTYPES or not all(isinstance(n, int) for n in numbers):
        return None
    place: Any = node.kwargs
    if not all(_one_run(runs.spans(rank, place["tp"])) for rank in range(place["tp"])):
        return None  # on all ranks or on none, for they are measured together
    mine = [span for span in runs.spans(**place) if span[1]]
    args = weight, ids, mine[0][0] if mine else 0, runs.length, padding
    return call_in_place(OPS.vocabulary_rows.default, args, (node,), node)


def _one_run(spans: Sequence[tuple[int, int]]) -> bool:
    """Say whether runs, some of which may be empty, follow each other."""
    runs = [span for span in spans if span[1]]
    return all(start + length == then for (start, length), (then, _) in pairwise(runs))


def sum_in_one_pass(node: fx.Node) -> Rewrite | None:
    """Find the sums of a cross entropy and the maximum that they take: together, and then the maximum over the ranks.

    The maximum of the scores is the maximum of every rank's own, so where the scores were gathered for it, a number an
    example is now reduced instead. Scores that were cast to float32 for their loss are read as they were before that.
    """
    if node.target is not OPS.class_sums.default:
        return None
    operands: Any = node.args
    scores, most, *_ = operands
    chain = _maximum(scores, most, node)
    if chain is None or value_of(scores).dtype not in DTYPES:
        return None
    return Rewrite((node, *chain, *_casted(scores, node)), _in_one_pass, (node, chain))


def _in_one_pass(node: fx.Node, chain: list[Any]) -> fx.Node:
    """Put in the terms of the scores, the maximum over the ranks, and the sums of both."""
    operands: Any = node.args
    scores, most, target, total = operands
    graph, scope = node.graph, scope_path(node)
    with graph.inserting_before(node):
        scores = _before_cast(scores, node, scope)
        cut = graph.call_function(aten.detach.default, (scores,))
        inherit(cut, scores, scope=scope, conversion=None, axis=None)
        terms = graph.call_function(OPS.class_terms.default, (cut, target, total))
        value = value_of(node)
        _unlaid(terms, node, scope, value.new_empty((value.shape[0] + 1, value.shape[1])))
        maximum = graph.call_function(aten.select.int, (terms, 0, 0))
        _unlaid(maximum, most, scope, value.new_empty(value.shape[1:]))
        for old in reversed(chain):
            if old.target in CONVERSIONS:
                maximum = _again(old, maximum, scope)
        new = graph.call_function(OPS.class_sums_of.default, (scores, maximum, target, terms, total))
    inherit(new, node, scope=scope)
    node.replace_all_uses_with(new)
    erase([node])
    return new


def _maximum(scores: Any, most: Any, reader: fx.Node) -> list[Any] | None:
    """The calls from the largest of these scores to its reader, the last one first; None if it is not that.

    Of conversions among them there is one that gathers the scores before, or those of their largest after.
    """
    # Backwards from the sums: conversions of the maximum, the maximum, and what was gathered for it.
    chain: list[Any] = []
    while True:
        if set(most.users) != {chain[-1] if chain else reader}:
            return None
        chain.append(most)
        if most.target not in CONVERSIONS:
            break
        most = most.args[0]
    if not calls(most, aten.amax) or len(most.args) != 2 or list(most.args[1]) not in ([1], [-1]):
        return None
    of = most.args[0]
    # Either the scores are gathered or their maximum is: twice would be a maximum over the ranks of what is whole.
    if of.target in CONVERSIONS:
        if len(chain) > 1 or of.args[1].sharded_dim != 1 or not of.args[2].whole:
            return None
        chain, of = [*chain, of], of.args[0]
    return [*chain, of] if calls(of, aten.detach) and of.args[0] is scores else None


def _casted(scores: fx.Node, reader: fx.Node) -> list[Any]:
    """The cast to float32 and the views of it that scores are, the last first, where nothing else reads them."""
    nodes: list[Any] = []
    node: Any = scores
    while calls(node, *VIEWS):
        nodes, node = [*nodes, node], node.args[0]
    nodes.append(node)
    if node.target not in CASTS or value_of(node).dtype != WIDE or value_of(node.args[0]).dtype not in DTYPES:
        return []
    inside = {reader, *nodes}
    outside = [u for n in nodes for u in n.users if u not in inside and not calls(u, aten.detach)]
    return [] if outside else nodes


def _before_cast(scores: fx.Node, reader: fx.Node, scope: tuple[str, ...]) -> fx.Node:
    """The scores in half precision, where nothing else reads what they were cast to; otherwise as they are.

    The kernels compute in float32 and round a gradient once, as the cast's own gradient does: no number changes.
    """
    *views, cast = _casted(scores, reader) or [None]
    if cast is None:
        return scores
    half: Any = cast.args[0]
    for old in reversed(views):
        value = value_of(old)
        with scores.graph.inserting_before(reader):
            new = scores.graph.call_function(old.target, (half, *old.args[1:]), old.kwargs)
        inherit(new, old, scope=scope)
        new.meta["val"] = value.new_empty(value.shape, dtype=value_of(half).dtype)
        half = new
    return half


def _again(old: Any, value: fx.Node, scope: tuple[str, ...]) -> fx.Node:
    """A conversion of the maximum: the same one, or for a gather of the scores a maximum over the ranks."""
    target, args, conversion = old.target, old.args[1:], mark(old).conversion
    if value_of(old).ndim == 2:
        args = (PartialSpec(MAX), args[1])
        target, conversion = convert.function_for(*args), (Partial(MAX), conversion_of(old)[1])
    new = value.graph.call_function(target, (value, *args), old.kwargs)
    inherit(new, old, scope=scope, conversion=conversion)
    new.meta["val"] = value_of(value)
    return new


def _unlaid(new: fx.Node, source: fx.Node, scope: tuple[str, ...], val: torch.Tensor) -> None:
    """`new` belongs where `source` does, and its value lies otherwise."""
    inherit(new, source, scope=scope, layout=None, conversion=None, axis=None)
    new.meta["val"] = val
