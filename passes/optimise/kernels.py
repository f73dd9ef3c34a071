"""Kernels: fused operators (`autotp.kernels`) in the place of the operators that they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autotp.comm import conversions as convert
from autotp.ir.layouts import Partial
from autotp.ir.marks import conversion_of, inherit, mark, write
from autotp.ir.op import aten, is_tensor, sizes
from autotp.ir.scopes import scope_path
from autotp.ir.specs import PartialSpec
from autotp.kernels.common import DTYPES, WIDE, available
from autotp.kernels.norm import MAX_COLUMNS
from autotp.passes.base import Changes
from autotp.passes.schema import converts
from autotp.rules.lookup import vocabulary_embedding

from .expressions import (
    CASTS,
    Call,
    Cast,
    Either,
    Name,
    call_in_place,
    calls,
    closed,
    erase,
    find,
    one_region,
    put,
    scope_of,
    summable,
    value_of,
    whole_rows,
)
from .judged import Judged, Rewrite, retarget
from .optimisation import Optimisation, RankProgram

# ---- norms -----------------------------------------------------------------------------------------------------------

# Patterns of norms, as one operator or written out, with the residual that is added before; and of GeLU with a bias.

OPS: Any = torch.ops.autotp
X = Cast(Name("x"))
SQUARE = Either((Call(aten.pow, (X, 2.0)), Call(aten.square, (X,)), Call(aten.mul, (X, X))))
MEAN = Call(aten.add, (Call(aten.mean, (SQUARE, [-1], True)), Name("eps", number=True)))
ROOT = Either((Call(aten.rsqrt, (MEAN,)), Call(aten.pow, (MEAN, -0.5))))
NORMAL = Cast(Call(aten.mul, (X, ROOT)))
WRITTEN_OUT = (Cast(Call(aten.mul, (NORMAL, Name("weight")))), NORMAL)
EPS = torch.finfo(torch.float32).eps  # of torch.rms_norm, where none is given


@dataclass(frozen=True)
class FoundNorm:
    """A norm that a graph computes: of `x`, in `nodes`, of which the last one is the result.

    Attributes:
        options: weight and bias, each a node or None, eps, and whether the mean is subtracted.
    """

    x: fx.Node
    options: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


def norm(node: fx.Node) -> Rewrite | None:
    """Find LayerNorm or RMSNorm over the last dimension."""
    match = _match(node)
    if match is None:
        return None
    return call_in_place(OPS.norm.default, (match.x, *match.options), match.nodes, node, None)


def norm_of_sum(node: fx.Node) -> Rewrite | None:
    """Find a norm with the addition before it, where the module that calls the norm makes it."""
    match = _match(node)
    if match is None or not _added(match, node):
        return None
    x, residual = match.x.args[:2]
    return call_in_place(OPS.add_norm.default, (x, residual, *match.options), (match.x, *match.nodes), node, match.x)


def _match(node: fx.Node) -> FoundNorm | None:
    match = _operator(node) or _written_out(node)
    return match if match is not None and _fits(match, node) else None


def _operator(node: fx.Node) -> FoundNorm | None:
    if not calls(node, aten.layer_norm, aten.rms_norm) or node.kwargs or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    args: list[Any] = [*node.args, *[None] * 5]
    if calls(node, aten.rms_norm):
        return FoundNorm(args[0], (args[2], None, EPS if args[3] is None else args[3], False), (node,))
    return FoundNorm(args[0], (*args[2:4], 1e-5 if args[4] is None else args[4], True), (node,))


def _written_out(node: fx.Node) -> FoundNorm | None:
    for pattern in WRITTEN_OUT:
        match = find(pattern, node)
        if match is not None:
            options = match.names.get("weight"), None, float(match["eps"]), False
            return FoundNorm(match["x"], options, match.nodes)
    return None


def _fits(match: FoundNorm, node: fx.Node) -> bool:
    """Say whether the kernel takes it: whole rows of a dtype that it knows, and vectors as long as they are."""
    x, out = value_of(match.x), value_of(node)
    columns = sizes(x)[-1] if x.ndim else 0
    vectors = [value_of(v) for v in match.options[:2] if v is not None]
    return (
        x.dtype in DTYPES
        and x.dtype == out.dtype
        and sizes(x) == sizes(out)
        and isinstance(columns, int)
        and columns <= MAX_COLUMNS
        and all(v.dtype in DTYPES and sizes(v) == sizes(x)[-1:] for v in vectors)
        and whole_rows(match.x)
        and summable(match.x)
    )


def _added(match: FoundNorm, node: fx.Node) -> bool:
    """Say whether what is normalised is a sum of two values of its own shape, made where the norm is called.

    A sum that another module makes stays there: it may be that module's output.
    """
    add = match.x
    if not calls(add, aten.add) or add.kwargs or not all(is_tensor(a) for a in add.args):
        return False
    total = value_of(add)
    alike = all(sizes(v) == sizes(total) and v.dtype == total.dtype for v in map(value_of, add.all_input_nodes))
    later = all(user > node for user in add.users if user not in match.nodes)
    nodes = [add, *match.nodes]
    return alike and later and one_region(nodes) and scope_of(nodes) == scope_path(add)


# ---- GeLU with a bias ------------------------------------------------------------------------------------------------

# Patterns of GeLU with a bias.

VALUE = Name("x")
CUBIC = Call(aten.mul, (Call(aten.pow, (VALUE, 3.0)), 0.044715))
TANH = Call(aten.tanh, (Call(aten.mul, (Call(aten.add, (VALUE, CUBIC)), math.sqrt(2 / math.pi))),))
SHIFTED = Call(aten.add, (TANH, 1.0))
GELU = {  # how it is called, or written out
    "gelu": Call(aten.gelu, (VALUE,)),
    "gelu_tanh": Either(
        (
            Call(aten.gelu, (VALUE,), {"approximate": "tanh"}),
            Call(aten.mul, (Call(aten.mul, (VALUE, 0.5)), SHIFTED)),
            Call(aten.mul, (Call(aten.mul, (VALUE, SHIFTED)), 0.5)),
        )
    ),
}


def bias_then_gelu(node: fx.Node) -> Rewrite | None:
    """Find GeLU of a product with a bias; the product goes on without it, and the kernel adds it in float32."""
    for activation, pattern in GELU.items():
        match = find(pattern, node)
        if match is not None and value_of(node).dtype in DTYPES and summable(node):
            product = match["x"]
            between = (product,) if calls(product, aten.reshape, aten.view) else ()
            product = product.args[0] if between else product
            nodes = product, *between, *match.nodes
            if _biased(product) and closed(nodes, [node]):
                return Rewrite(nodes, _split, (product, between, match.nodes, activation == "gelu_tanh"))
    return None


def _biased(product: Any) -> bool:
    """Say whether it is a product of matrices with a bias for each column."""
    if calls(product, aten.linear):
        bias = product.args[2] if len(product.args) > 2 else None
    else:
        bias = product.args[0] if calls(product, aten.addmm) and not product.kwargs else None
    return isinstance(bias, fx.Node) and value_of(bias).ndim == 1


def _split(product: fx.Node, between: tuple[fx.Node, ...], nodes: tuple[fx.Node, ...], tanh: bool) -> fx.Node:
    """Take the bias off the product and put the kernel at the end."""
    out = max(nodes)
    scope = scope_of([product, *between, *nodes])
    if calls(product, aten.linear):
        x, weight, bias = product.args[:3]
        product.args = (x, weight)
    else:
        bias, x, weight = product.args[:3]
        product.target, product.args = aten.mm.default, (x, weight)
    for node in (product, *between):
        write(node, scope=scope)
    new = put(OPS.bias_gelu.default, ((between or (product,))[-1], bias, tanh), nodes, out)
    write(new, scope=scope)
    return new


# ---- a sharded vocabulary --------------------------------------------------------------------------------------------

# Patterns over a sharded vocabulary: the embedding, and the cross entropy.

MAX = "max"
VIEWS = (aten.reshape, aten.view, aten.flatten, aten.unsqueeze, aten.squeeze, aten.slice, aten.contiguous)


def look_up(node: fx.Node) -> Rewrite | None:
    """Find an embedding whose vocabulary is sharded, where each rank's rows are one run of ids."""
    if node.target is not vocabulary_embedding:
        return None
    operands: Any = node.args
    weight, ids, runs, padding = operands
    numbers = [runs.repeat, padding, *(n for segment in runs.segments for n in segment[:2])]
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
            if converts(old):
                maximum = _again(old, maximum, scope)
        new = graph.call_function(OPS.class_sums_of.default, (scores, maximum, target, terms, total))
    inherit(new, node, scope=scope)
    node.replace_all_uses_with(new)
    erase([node])
    return new


def _maximum(scores: Any, most: Any, reader: fx.Node) -> list[Any] | None:
    """List the calls from the largest of these scores to its reader, the last one first; None if it is not that.

    Of conversions among them there is one that gathers the scores before, or those of their largest after.
    """
    # Backwards from the sums: conversions of the maximum, the maximum, and what was gathered for it.
    chain = []
    while True:
        if set(most.users) != {chain[-1] if chain else reader}:
            return None
        chain.append(most)
        if not converts(most):
            break
        most = most.args[0]
    if not calls(most, aten.amax) or len(most.args) != 2 or list(most.args[1]) not in ([1], [-1]):
        return None
    of = most.args[0]
    # Either the scores are gathered or their maximum is: twice would be a maximum over the ranks of what is whole.
    if converts(of):
        if len(chain) > 1 or of.args[1].sharded_dim != 1 or not of.args[2].whole:
            return None
        chain, of = [*chain, of], of.args[0]
    return [*chain, of] if calls(of, aten.detach) and of.args[0] is scores else None


def _casted(scores: fx.Node, reader: fx.Node) -> list[Any]:
    """List the cast to float32 and the views of it that scores are, the last first, where nothing else reads them."""
    nodes = []
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
    """Give the scores in half precision, where nothing else reads what they were cast to; otherwise as they are.

    The kernels compute in float32 and round a gradient once, as the cast's own gradient does: no number changes.
    """
    *views, cast = _casted(scores, reader) or [None]
    if cast is None:
        return scores
    half: Any = cast.args[0]
    for old in reversed(views):
        value = value_of(old).new_empty(value_of(old).shape, dtype=value_of(half).dtype)
        with scores.graph.inserting_before(reader):
            new = scores.graph.call_function(old.target, (half, *old.args[1:]), old.kwargs)
        inherit(new, old, value, scope=scope)
        half = new
    return half


def _again(old: Any, value: fx.Node, scope: tuple[str, ...]) -> fx.Node:
    """Write a conversion of the maximum: the same one, or for a gather of the scores a maximum over the ranks."""
    target, args, conversion = old.target, old.args[1:], mark(old).conversion
    if value_of(old).ndim == 2:
        args = (PartialSpec(MAX), args[1])
        target, conversion = convert.function_for(*args), (Partial(MAX), conversion_of(old)[1])
    new = value.graph.call_function(target, (value, *args), old.kwargs)
    inherit(new, old, value_of(value), scope=scope, conversion=conversion)
    return new


def _unlaid(new: fx.Node, source: fx.Node, scope: tuple[str, ...], val: torch.Tensor) -> None:
    """Put `new` into the scope of `source`, without its layout."""
    inherit(new, source, val, scope=scope, layout=None, conversion=None, axis=None)


def drop(node: fx.Node) -> Rewrite | None:
    """Find a dropout by counter: the call itself, by its kernel."""
    if node.target is not OPS.counter_dropout.default:
        return None
    return Rewrite((node,), retarget, (node, OPS.counter_dropout_fused.default))


# Kernel, and what finds an expression of it that ends in the node. Tried in this order.
PATTERNS: tuple[tuple[str, Callable[[fx.Node], Rewrite | None]], ...] = (
    ("add_norm", norm_of_sum),
    ("norm", norm),
    ("bias_gelu", bias_then_gelu),
    ("vocabulary_rows", look_up),
    ("class_terms", sum_in_one_pass),
    ("counter_dropout", drop),
)


class Kernels(Optimisation):
    """Put kernels into a rank's graph; an expression with a conversion in it, or read in its middle, stays."""

    name = "kernels"
    measurable = True

    def idle(self, program: RankProgram) -> str:
        """Stay off where nobody measures them."""
        setting = program.setting
        if setting.device.type != "cuda" or not available():
            return "nowhere: without Triton on a CUDA device they are plain PyTorch (optimise={'kernels': True})"
        return "" if self.name in setting.judges else "nowhere: not measured (optimise={'kernels': True})"

    def run(self, program: RankProgram) -> Changes:
        """Put in every kernel that was not measured to be slower than what is there."""
        judged = Judged(program, self)
        node = program.graph.output_node().prev
        while node.op != "root":  # from the end, so that a longer expression comes before those within it
            node = (_put(node, judged) or node).prev
        program.graph.eliminate_dead_code()
        return Changes(judged.fired.total(), ", ".join(judged.summary()) or "nowhere: no pattern was found")


def _put(node: fx.Node, judged: Judged) -> fx.Node | None:
    """Put in the first kernel that stands for an expression which ends in this node, and is used."""
    for name, pattern in PATTERNS:
        rewrite = pattern(node)
        new = None if rewrite is None else judged.put(name, rewrite)
        if new is not None:
            return new
    return None
