"""Find repeated blocks: equal nodes of equal blocks share one decision, so that solving does not grow with depth."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from autotp import compat
from autotp.ir.graph import CONSTANT, Capture, tensors
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.scopes import Block, Blocks, module_of, module_path

Members = dict[str, list[fx.Node]]  # path of a block -> its nodes, in order
DataSizes = Mapping[sympy.Symbol, Any]  # a size that only the data tell -> what is known of it

LISTS = -1  # in place of a depth
SELECT, SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor
DIGITS = re.compile(r"\d+")
NUMBER = re.compile(r"\d+$")  # of a constant: torch counts them over the whole model
INDEXED = re.compile(r"(^|\.)\d+(@\d+)?$")  # the model itself may be the list


def repeated(program: Capture, grads: set[fx.Node]) -> Blocks:
    """Give the blocks of a program, found once: all who need them read `Capture.blocks`.

    Args:
        program: the canonical graph. grads: nodes whose values carry gradients.
    """
    if [*program.blocks.same] != [*program.graph.nodes]:  # none were, or of the graph before a pass
        program.blocks = find(program, grads)
    return program.blocks


def find(program: Capture, grads: set[fx.Node], marks: Mapping[fx.Node, str] | None = None) -> Blocks:
    """Find blocks, and which of them are equal. Nodes with different `marks` (such as pins) are not.

    Args:
        program: the canonical graph.
        grads: nodes whose values carry gradients.
        marks: node -> what distinguishes it from its equals.
    """
    names = program.names | {x.node: NUMBER.sub("", x.name) for x in program.leaves if x.kind is CONSTANT}
    marked, data_sizes = marks or {}, _data_sizes(program)

    @cache
    def shape(n: fx.Node) -> Any:
        return marked.get(n), tuple((n in grads, sizes(v), v.dtype) for v in tensors(n))

    blocks: list[Block] = []
    twins: dict[fx.Node, fx.Node] = {}
    paths = {n: module_path(n) for n in program.graph.nodes if n.op == "call_function"}
    # First lists whose items are not called themselves, as no path of modules says where such a block ends; then
    # modules with an index, the outer ones first: what is equal as a whole layer needs no comparison of its parts.
    for level in (LISTS, 0, 1, 2, 3):
        place: dict[fx.Node, int] = {}  # first node of a block of this level -> place of the block
        for container, members in (items(paths) if level == LISTS else _instances(paths, level)).items():
            first: dict[Any, tuple[int, list[fx.Node]]] = {}
            for path, nodes in members.items():
                place[nodes[0]] = equal = len(blocks)
                if fresh := [n for n in nodes if n not in twins]:
                    signature, fresh = _signature(path, fresh, names, shape, data_sizes)
                    equal, theirs = first.setdefault(signature, (equal, fresh))
                    twins.update((n, t) for n, t in zip(fresh, theirs, strict=True) if n is not t)
                else:
                    equal = place.get(_first(twins, nodes[0]), equal)
                blocks.append(Block(path, container, tuple(nodes), equal))
    weights = {x.node: DIGITS.sub("#", x.name) for x in program.leaves if x.kind.weight}
    for loop in steps([n for n in paths if n not in twins], weights, lambda n: _numbered(shape(n), data_sizes, {})):
        alike: dict[Any, list[fx.Node]] = {}
        for nodes in loop:
            signature, members = _signature("", nodes, weights, shape, data_sizes)
            pairs = zip(members, alike.setdefault(signature, members), strict=True)
            # Two loops may read the same weights, in another order.
            twins.update((n, t) for n, t in pairs if n not in twins and _first(twins, t) is not n)
    return Blocks(tuple(blocks), {n: _first(twins, n) for n in program.graph.nodes})


def _first(twins: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """Follow a node to its representative: a block that stands for others may hold equal blocks itself."""
    while node in twins:
        node = twins[node]
    return node


def _instances(paths: Mapping[fx.Node, tuple[str, ...]], level: int) -> dict[str, Members]:
    """Map container -> block -> its nodes, for the blocks at this depth of indexed modules."""
    out: dict[str, Members] = defaultdict(lambda: defaultdict(list))
    for n, path in paths.items():
        indexed = [p for p in path if INDEXED.search(p)]
        if len(indexed) > level:
            out[INDEXED.sub("", indexed[level])][indexed[level]].append(n)
    return out


def _signature(
    path: str, nodes: list[fx.Node], names: dict[fx.Node, str], shape: Callable[[fx.Node], Any], data_sizes: DataSizes
) -> tuple[Any, list[fx.Node]]:
    """Give a value that is equal for equal blocks, and the block's nodes and leaves in its order."""
    place, module = {n: i for i, n in enumerate(nodes)}, path.split("@")[0]
    outside: dict[fx.Node, int] = {}
    leaves: dict[fx.Node, int] = {}

    def encode(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return repr(x)
        if x in place:
            return ("node", place[x])
        name = names.get(x, "")
        if name and (not module or name.startswith(module + ".")):
            return ("leaf", name[len(module) :], leaves.setdefault(x, len(leaves)), shape(x))
        return ("outside", outside.setdefault(x, len(outside)), shape(x))

    rows = tuple((n.target, tuple(map(encode, _arguments(n, module))), shape(n), mark(n).no_grad) for n in nodes)
    return _numbered(rows, data_sizes, {}), [*nodes, *leaves]


def _data_sizes(program: Capture) -> DataSizes:
    """Find the sizes that only the data tell and no guard names: each call that makes one has a symbol of its own."""
    symbols = {s for n in program.graph.nodes for s in n.meta.get("unbacked_bindings") or ()}
    read = {s for guard in program.guards for s in guard.free_symbols}
    return {s: program.ranges.get(s) for s in symbols - read}


def _numbered(value: Any, data_sizes: DataSizes, numbers: dict[sympy.Symbol, sympy.Symbol]) -> Any:
    """Number such sizes in a value in the order in which they come, as equal blocks have different ones."""
    if isinstance(value, tuple) and data_sizes:
        return tuple([_numbered(x, data_sizes, numbers) for x in value])
    if not isinstance(value, sympy.Expr):
        return value
    for s in sorted(data_sizes.keys() & value.free_symbols, key=lambda s: (len(str(s)), str(s))):
        numbers.setdefault(s, sympy.Symbol(f"{len(numbers)} {data_sizes[s]}", integer=True))
    return value.xreplace(numbers)


def _arguments(node: fx.Node, module: str = "") -> list[Any]:
    """List the arguments of a call, a slice from None as one from 0; of a step of a loop, which has no module, without
    the place that it selects: no rule reads that."""
    args = node.args[:2] if not module and node.target is SELECT else node.args
    if node.target is SLICE and args[2:3] == (None,):
        args = (*args[:2], 0, *args[3:])
    return compat.tree_leaves((args, node.kwargs))


# ---- lists of blocks -------------------------------------------------------------------------------------------------

# Blocks that are no modules of their own: `for attention, forward in self.layers:` calls what is in a list's items.
#
# An item of such a list has no forward, so no node says that it belongs to it; what stands between the calls, such as
# the residual sums, belongs to the module that has the list. A block is all from an item's first node to the next
# one's.

ITEM = re.compile(r"^(.*?\.)?\d+(?=\.)")  # up to the outermost place in a list that is not the last of the path
PLACED = re.compile(r"(^|\.)\d+$")

Place = tuple[str, tuple[str, ...]]  # an item, and the modules around its list, outermost first


def items(paths: Mapping[fx.Node, tuple[str, ...]]) -> dict[str, Members]:
    """Map list -> item -> its nodes in order, for lists whose items are not called themselves, outside of other blocks.

    Args:
        paths: call -> the modules around it, in the order of the graph.
    """
    modules = {module_of(p) for path in paths.values() for p in path}
    places = {n: place for n, path in paths.items() if (place := _place(path, modules)) is not None}
    lists: dict[Place, list[fx.Node]] = defaultdict(list)
    for n, (item, around) in places.items():
        lists[PLACED.sub("", item), around].append(n)
    calls = list(paths)
    containers = {}
    for (name, around), members in lists.items():
        blocks = _blocks(calls, members, places)
        inside = all(paths[n][: len(around)] == around for block in blocks.values() for n in block)
        if len(blocks) > 1 and inside:
            containers[name] = blocks
    return containers


def _place(path: tuple[str, ...], modules: set[str]) -> Place | None:
    """Find the item of a list that a node is in; None where it is in none, or in a block before."""
    for level, name in enumerate(path):
        item = ITEM.match(module_of(name))
        if item is not None and item.group(0) not in modules:
            return item.group(0), path[:level]
        if PLACED.search(module_of(name)):
            return None
    return None


def _blocks(calls: Sequence[fx.Node], members: Sequence[fx.Node], places: Mapping[fx.Node, Place]) -> Members:
    """Map item -> all nodes up to the next item's first, of the last as many as of the first; empty if they mix."""
    order = {n: i for i, n in enumerate(calls)}
    runs: list[tuple[str, int]] = []
    for n in members:
        item = places[n][0]
        if not runs or runs[-1][0] != item:
            runs.append((item, order[n]))
    if len({item for item, _ in runs}) < len(runs) or len(runs) < 2:
        return {}
    length = runs[1][1] - runs[0][1]
    ends = [start for _, start in runs[1:]] + [runs[-1][1] + length]
    return {item: list(calls[start:end]) for (item, start), end in zip(runs, ends, strict=True)}


# ---- steps of loops --------------------------------------------------------------------------------------------------

# A loop that the model unrolls (a recurrence over time, experts one by one) is the same calls again and again, of no
# modules of their own. What a step reads from outside may differ, as that of a repeated block may: the step before.
# Weights are its own where their names differ by a number, and those of all steps where they do not.

MIN_STEPS = 4


def steps(
    calls: Sequence[fx.Node], weights: Mapping[fx.Node, str], shape: Callable[[fx.Node], Any]
) -> list[list[list[fx.Node]]]:
    """List the nodes of each step of each loop, in order, for the runs of at least `MIN_STEPS` steps.

    Args:
        calls: nodes in the order of the graph.
        weights: their names, without numbers. shape: gives what must be equal of a node beside its call.
    """
    kinds = [_kind(n, weights, shape) for n in calls]
    following, last = [len(calls)] * len(calls), dict[Any, int]()
    for i in reversed(range(len(calls))):
        following[i] = last.get(kinds[i], len(calls))
        last[kinds[i]] = i
    loops, at = [], 0
    while at < len(calls):
        period, end = following[at] - at, at
        while end + period < len(calls) and kinds[end] == kinds[end + period]:
            end += 1
        count = (end - at) // period + 1
        length = count * period if count >= MIN_STEPS else 1
        if count >= MIN_STEPS:
            loops.append([list(calls[k : k + period]) for k in range(at, at + length, period)])
        at += length
    return loops


def _kind(node: fx.Node, weights: Mapping[fx.Node, str], shape: Callable[[fx.Node], Any]) -> Any:
    """Give all that calls at one place of equal steps have in common."""
    operands = []
    for x in _arguments(node):
        # Names of weights distinguish products of one shape; what is computed is another value in each step.
        operands.append(weights.get(x, x.target) if isinstance(x, fx.Node) else repr(x))
    modules = tuple(map(module_of, module_path(node)))
    return node.target, tuple(operands), shape(node), mark(node).no_grad, modules
