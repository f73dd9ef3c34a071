"""Where a vocabulary is looked up in and scored against: the embedding and the cross entropy over dealt rows."""

from __future__ import annotations

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
from autotp.passes.optimise.matching import CASTS, calls, erase, put, value_of
from autotp.rules.lookup import vocabulary_embedding

OPS: Any = torch.ops.autotp
MAX = "max"
VIEWS = (aten.reshape, aten.view, aten.flatten, aten.unsqueeze, aten.squeeze, aten.slice, aten.contiguous)
CONVERSIONS = frozenset(convert.FUNCTIONS.values())


def look_up(node: fx.Node) -> fx.Node | None:
    """An embedding whose vocabulary is dealt out, where this rank's rows are one run of ids."""
    if node.target is not vocabulary_embedding:
        return None
    operands: Any = node.args
    weight, ids, runs, padding = operands
    numbers = [runs.repeat, padding, *(n for segment in runs.segments for n in segment)]
    if value_of(weight).dtype not in DTYPES or not all(isinstance(n, int) for n in numbers):
        return None
    place: Any = node.kwargs
    mine = [(start, length) for start, length in runs.spans(**place) if length]
    if any(start + length != then for (start, length), (then, _) in zip(mine, mine[1:], strict=False)):
        return None
    args = weight, ids, mine[0][0] if mine else 0, runs.length, padding
    return put(OPS.vocabulary_rows.default, args, (node,), node)


def sum_in_one_pass(node: fx.Node) -> fx.Node | None:
    """The sums of a cross entropy and the maximum that they take: together, and then the maximum over the ranks.

    The maximum of the scores is the maximum of every rank's own, so where the scores were gathered for it, a number an
    example is now reduced instead. Scores that were cast to float32 for their loss are read as they were before that.
    """
    if node.target is not OPS.class_sums.default:
        return None
    operands: Any = node.args
    scores, most, target, total = operands
    chain = _maximum(scores, most, node)
    if chain is None or value_of(scores).dtype not in DTYPES:
        return None
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
            maximum = _again(old, maximum, scope)
        new = graph.call_function(OPS.class_sums_of.default, (scores, maximum, target, terms, total))
    inherit(new, node, scope=scope)
    node.replace_all_uses_with(new)
    erase([node])
    return new


def _maximum(scores: Any, most: Any, reader: fx.Node) -> list[Any] | None:
    """The conversions from the largest of these scores to its reader, the last one first; None if it is not that."""
    chain: list[Any] = []
    while True:
        if set(most.users) != {chain[-1] if chain else reader}:
            return None
        if most.target not in CONVERSIONS:
            break
        chain.append(most)
        most = most.args[0]
    if not calls(most, aten.amax) or len(most.args) != 2 or list(most.args[1]) not in ([1], [-1]):
        return None
    of = most.args[0]
    if of.target in CONVERSIONS:
        if chain or of.args[1].sharded_dim != 1 or not of.args[2].whole:
            return None
        chain, of = [of], of.args[0]
    return chain if calls(of, aten.detach) and of.args[0] is scores else None


def _before_cast(scores: fx.Node, reader: fx.Node, scope: tuple[str, ...]) -> fx.Node:
    """The scores in half precision, where nothing else reads what they were cast to; otherwise as they are.

    The kernels compute in float32 and round a gradient once, as the cast's own gradient does: no number changes.
    """
    views: list[Any] = []
    node: Any = scores
    while calls(node, *VIEWS):
        views, node = [*views, node], node.args[0]
    if node.target not in CASTS or value_of(node).dtype != WIDE or value_of(node.args[0]).dtype not in DTYPES:
        return scores
    inside = {reader, node, *views}
    if any(u not in inside and not calls(u, aten.detach) for n in (node, *views) for u in n.users):
        return scores
    half = node.args[0]
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
