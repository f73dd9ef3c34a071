"""Comparison of the captures of a large model and of a small one of its classes, with fewer and narrower layers.

Each operator has a kind: what it computes within its block, from the block's own weights, and from values of elsewhere,
which are told by their own kind and by how many like them lie between. Both captures must have the same kinds.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autotp import compat
from autotp.ir.graph import Capture, short_name, tensors, where
from autotp.ir.leaves import CONSTANT
from autotp.ir.marks import mark
from autotp.ir.op import aten, expression, symbols_of
from autotp.ir.scopes import module_path

from .stacks import path_of, place_in

COPIES = (aten.contiguous.default, aten.clone.default)  # which there are depends on how equal blocks were traced
LITERAL_TOLERANCE = 1e-6  # of two literals' logarithms
Place = tuple[str, int] | None  # a block of a stack; None for what is in none


@dataclass
class _Operator:
    """One operator of a graph.

    Attributes:
        place: its block. kind: what it computes within the block.
        outside: values that it reads of elsewhere; `numbers`: literals, which may differ between graphs as widths do.
    """

    node: fx.Node
    place: Place
    kind: str = ""
    outside: list[fx.Node] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)


def differs(large: Capture, small: Capture, stacks: Mapping[str, int], ratio: int = 1) -> str:
    """Say where the graphs are not the same; "" where they are.

    Args:
        stacks: names of the stacks of which the small model has fewer blocks.
        ratio: by which its layers are narrower.
    """
    theirs: dict[Hashable, list[_Operator]] = defaultdict(list)
    for key, operator in _Reader(small, stacks).operators():
        theirs[key].append(operator)
    ours: set[Hashable] = set()
    for key, operator in _Reader(large, stacks).operators():
        ours.add(key)
        if key not in theirs:
            return f"no operators of it are those from {where(operator.node)} on"
        if not any(_numbers_fit(operator.numbers, like.numbers, ratio) for like in theirs[key]):
            return f"numbers among the operators from {where(operator.node)} on are others"
    missing = next((like[0] for key, like in theirs.items() if key not in ours), None)
    return "" if missing is None else f"it has operators more, from {where(missing.node)} on"


class _Reader:
    def __init__(self, program: Capture, stacks: Mapping[str, int]) -> None:
        self.program, self.stacks = program, stacks
        self.leaves = {leaf.node: leaf for leaf in program.leaves}
        self.read: dict[fx.Node, _Operator] = {}
        self.takers: dict[Any, list[str | int]] = defaultdict(list)  # value -> the buffers and inputs that take it
        results = compat.tree_leaves(program.graph.output_node().args)
        for i, taker in program.mutations.items():
            self.takers[results[i]].append(taker)

    def operators(self) -> Iterator[tuple[Hashable, _Operator]]:
        """The operators in order, each with its kind and those of what it reads of elsewhere."""
        for node in self.program.graph.nodes:
            if node.op != "placeholder" and not _is_size(node) and node.target not in COPIES:
                self.read[node] = self._operator(node)
        counts: Counter[str] = Counter()
        numbers: dict[fx.Node, int] = {}  # of an operator among those of its kind
        for node, operator in self.read.items():
            kinds = [(x, self.read[x].kind) for x in operator.outside]
            links = [(kind, counts[kind] - numbers[x]) for x, kind in kinds]
            numbers[node] = counts[operator.kind]
            counts[operator.kind] += 1
            yield (operator.kind, *links), operator

    def _operator(self, node: fx.Node) -> _Operator:
        places = (self._block(path) for path in module_path(node))
        operator = _Operator(node, next((p for p in places if p is not None), None))
        operands = compat.tree_leaves((node.args, node.kwargs))
        if node.op == "output":  # what it writes stands with each value
            operands = [x for i, x in enumerate(operands) if i not in self.program.mutations]
        takers: list[Any] = []
        for taker in self.takers.get(node, ()):
            takers.append(self._name(taker, operator.place) if isinstance(taker, str) else taker)
        target = short_name(node.target) if node.op == "call_function" else node.op
        words = [operator.place and operator.place[0], target, _shape(node), takers]
        words += [self._operand(x, operator) for x in operands]
        operator.kind = hashlib.sha256(repr(words).encode()).hexdigest()
        return operator

    def _operand(self, x: Any, operator: _Operator) -> Hashable:
        """Describe what an operator reads, the same in another graph; a block's own weight by its name in the block."""
        # Widths are literals and differ from graph to graph: compared as numbers, after all else.
        if type(x) in (int, float):
            operator.numbers.append(x)
            return type(x)
        if not isinstance(x, fx.Node):
            return repr(x)
        # Which copies there are depends on how equal blocks were traced.
        while x.target in COPIES:
            x = x.all_input_nodes[0]
        # Of batch times heads a stand-in has another number: compared is which sizes it depends on.
        if _is_size(x):
            return self._size(x)
        if x in self.leaves:
            return self._leaf(x, operator.place)
        own = self.read[x]
        # Within a block by what it computes there; of another block's, any that is of its kind would do.
        if own.place == operator.place:
            operator.outside += [y for y in own.outside if y not in operator.outside]
            return own.kind, tuple(map(operator.outside.index, own.outside))
        if x not in operator.outside:
            operator.outside.append(x)
        return "outside", operator.outside.index(x), _shape(x)

    def _size(self, node: fx.Node) -> Hashable:
        """Describe a size by the inputs' sizes that it depends on, for blocks share its operators or not."""
        return "size", tuple(sorted(map(self._source, symbols_of(expression(node.meta["val"])))))

    def _source(self, symbol: sympy.Basic) -> str:
        node, dim = self.program.symbols.get(symbol, (None, 0))  # type: ignore[call-overload]
        return f"{self.leaves[node].name}.{dim}" if node in self.leaves else "data"

    def _leaf(self, node: fx.Node, place: Place) -> Hashable:
        leaf = self.leaves[node]
        return leaf.kind.name, self._name(leaf.name, place) if leaf.kind is not CONSTANT else "", _shape(node)

    def _name(self, name: str, place: Place) -> str:
        """A name, relative to the block at this place where it is within that."""
        return name.removeprefix(path_of(*place)) if place is not None and self._block(name) == place else name

    def _block(self, name: str) -> Place:
        """The block of one of the stacks that this is, or lies in."""
        places = ((stack, place_in(stack, name)) for stack in self.stacks)
        return next(((stack, i) for stack, i in places if i is not None), None)


def _is_size(node: fx.Node) -> bool:
    """Say whether a node computes a number from sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _shape(node: fx.Node) -> Hashable:
    """Describe a value as far as it is the same at every width."""
    return mark(node).no_grad, tuple((v.ndim, v.dtype) for v in tensors(node))


def _numbers_fit(ours: list[Any], theirs: list[Any], ratio: int) -> bool:
    return len(ours) == len(theirs) and all(_fits(a, b, ratio) for a, b in zip(ours, theirs, strict=True))


def _fits(a: Any, b: Any, ratio: int) -> bool:
    """Say whether two literals are the same, or differ as sizes, or numbers made of one size, do."""
    if a == b or (a != a and b != b):
        return True
    if type(a) not in (int, float) or type(b) is not type(a):
        return False
    if ratio == 1:
        return False
    if type(a) is int:
        return 0 < b < a
    if a * b <= 0 or not math.isfinite(a) or not math.isfinite(b):
        return False
    halves = 2 * math.log(a / b) / math.log(ratio)
    return abs(halves - round(halves)) < LITERAL_TOLERANCE
