"""Whether the capture of a small model is that of a large one of the same classes, but for depth and widths.

A graph is read as runs of operators: those of one block of a stack that was cut, and those between blocks. Two runs are
equal where they have the same operators on the same operands: values of the run, the block's own weights, values of
other runs by what these are and how many like them lie between. Every run of the large graph must have its like in the
small one, and the other way round.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autotp import compat
from autotp.ir.graph import Capture, short_name, tensors, where
from autotp.ir.leaves import CONSTANT
from autotp.ir.marks import mark
from autotp.ir.op import aten, expression
from autotp.ir.scopes import module_path
from autotp.ir.sizes import substitute

from .stacks import path_of, place_in

COPIES = (aten.contiguous.default, aten.clone.default)  # which there are depends on how equal blocks were traced
CLOSE = 1e-6  # of two literals' logarithms


@dataclass
class _Run:
    """Operators one after the other: of the block at `place`, or of none.

    Attributes:
        kind: what they compute, wherever their operands come from. links: where these come from.
        numbers: literals, which may differ between the graphs as widths do.
    """

    place: tuple[str, int] | None
    nodes: list[fx.Node] = field(default_factory=list)
    kind: str = ""
    links: Hashable = None
    numbers: list[Any] = field(default_factory=list)


def differs(large: Capture, small: Capture, stacks: Mapping[str, int], ratio: int = 1) -> str:
    """Where the graphs are not the same, in words; empty where they are.

    Args:
        stacks: names of the stacks of which the small model has fewer blocks.
        ratio: by which its layers are narrower.
    """
    ours, theirs = _runs(large, stacks), _runs(small, stacks)
    runs_of: dict[Hashable, list[_Run]] = {}
    for run in theirs:
        runs_of.setdefault((run.kind, run.links), []).append(run)
    for run in ours:
        like = runs_of.get((run.kind, run.links), [])
        if not like:
            return f"no operators of it are those from {where(run.nodes[0])} on"
        if not any(_numbers_fit(run.numbers, other.numbers, ratio) for other in like):
            return f"numbers among the operators from {where(run.nodes[0])} on are others"
    missing = runs_of.keys() - {(run.kind, run.links) for run in ours}
    return f"it has operators more, from {where(runs_of[missing.pop()][0].nodes[0])} on" if missing else ""


def _runs(program: Capture, stacks: Mapping[str, int]) -> list[_Run]:
    """The runs of a graph, in order."""
    runs: list[_Run] = []
    home: dict[fx.Node, tuple[int, int]] = {}  # node -> its run, and its place in it
    for node in program.graph.nodes:
        if node.op == "placeholder" or _is_size(node) or node.target in COPIES:
            continue
        place = next((p for path in module_path(node) if (p := _block(path, stacks))), None)
        if not runs or runs[-1].place != place or node.op == "output":
            runs.append(_Run(place))
        home[node] = len(runs) - 1, len(runs[-1].nodes)
        runs[-1].nodes.append(node)
    reader = _Reader(program, runs, home, stacks)
    for i, run in enumerate(runs):
        reader.read(i, run)
    for i, run in enumerate(runs):
        run.links = tuple(reader.link(i, node) for node in reader.outside[i])
    return runs


def _block(name: str, stacks: Mapping[str, int]) -> tuple[str, int] | None:
    """The block of one of the stacks that this is, or lies in."""
    for stack in stacks:
        place = place_in(stack, name)
        if place is not None:
            return stack, place
    return None


@dataclass
class _Reader:
    program: Capture
    runs: list[_Run]
    home: dict[fx.Node, tuple[int, int]]
    stacks: Mapping[str, int]
    outside: list[list[fx.Node]] = field(default_factory=list)  # of each run: what it reads of other runs

    def __post_init__(self) -> None:
        self.leaves = {leaf.node: leaf for leaf in self.program.leaves}
        self.takers: dict[Any, list[str | int]] = {}
        results = compat.tree_leaves(self.program.graph.output_node().args)
        for i, taker in self.program.mutations.items():
            self.takers.setdefault(results[i], []).append(taker)

    def read(self, index: int, run: _Run) -> None:
        """Say what a run computes: its operators in order, each with what it reads and who takes its value."""
        outside: dict[fx.Node, int] = {}
        rows = []
        for node in run.nodes:
            operands = [self._operand(x, index, outside) for x in self._arguments(node)]
            target = short_name(node.target) if node.op == "call_function" else node.op
            rows.append((target, tuple(operands), _shape(node), self._mutated_places(node, run)))
        place = run.place[0] if run.place else None
        run.kind = hashlib.sha256(repr((place, rows)).encode()).hexdigest()
        self.outside.append(list(outside))

    def _arguments(self, node: fx.Node) -> list[Any]:
        """What a node reads; of the output, what the call returns, for what it writes stands with each value."""
        leaves = compat.tree_leaves((node.args, node.kwargs))
        if node.op != "output":
            return leaves
        return [x for i, x in enumerate(leaves) if i not in self.program.mutations]

    def _operand(self, x: Any, index: int, outside: dict[fx.Node, int]) -> Hashable:
        """One operand of a run's operator, said so that it is the same in another graph.

        Args:
            x: a node, or a literal. index: of the run.
            outside: the values of other runs that this one reads, by their place among these; grows.
        """
        run = self.runs[index]
        # Widths are literals and differ from graph to graph: compared as numbers, after all else.
        if type(x) in (int, float):
            run.numbers.append(x)
            return type(x)
        if not isinstance(x, fx.Node):
            return repr(x)
        # A copy changes no numbers, and which there are depends on how equal blocks were traced.
        while x.target in COPIES:
            x = x.all_input_nodes[0]
        # Of batch times heads a stand-in has another number: compared is which sizes it depends on.
        if _is_size(x):
            return self._size(x, run)
        # The block's own weight has a name within the block; one of elsewhere is a value like any other of elsewhere.
        if x in self.leaves:
            if self._name(self.leaves[x].name, run) != self.leaves[x].name:
                return self._leaf(x, run)
        elif self.home[x][0] == index:
            return "own", self.home[x][1]
        return "outside", outside.setdefault(x, len(outside)), _shape(x)

    def link(self, index: int, node: fx.Node) -> Hashable:
        """What a value from elsewhere is: a leaf, or one of a run of what kind, with how many like that between."""
        if node in self.leaves:
            return self._leaf(node, self.runs[index])
        maker, place = self.home[node]
        kind = self.runs[maker].kind
        return kind, place, sum(run.kind == kind for run in self.runs[maker + 1 : index])

    def _size(self, node: fx.Node, run: _Run) -> Hashable:
        """A size by what it is made of, for blocks share them or not: the inputs' sizes that it depends on."""
        value = expression(node.meta["val"])
        symbols = sorted(value.free_symbols, key=str) if isinstance(value, sympy.Basic) else []
        names = {x: self._source(x) for x in symbols}
        sizes: dict[Any, Any] = {x: sympy.Integer(101 + zlib.crc32(name.encode()) % 1000) for x, name in names.items()}
        number = substitute(value, sizes) if isinstance(value, sympy.Basic) else value
        run.numbers.append(int(number) if getattr(number, "is_Integer", False) else number)
        return "size", tuple(sorted(names.values()))

    def _source(self, symbol: sympy.Basic) -> str:
        node, dim = self.program.symbols.get(symbol, (None, 0))  # type: ignore[call-overload]
        return f"{self.leaves[node].name}.{dim}" if node in self.leaves else "data"

    def _leaf(self, node: fx.Node, run: _Run) -> Hashable:
        leaf = self.leaves[node]
        return leaf.kind.name, self._name(leaf.name, run) if leaf.kind is not CONSTANT else "", _shape(node)

    def _name(self, name: str, run: _Run) -> Hashable:
        """A name, relative to the run's block where it is within that."""
        place = _block(name, self.stacks)
        if place is None or place != run.place:
            return name
        return name.removeprefix(path_of(*place))

    def _mutated_places(self, node: fx.Node, run: _Run) -> Hashable:
        """Which buffers or inputs take this value afterwards."""
        out: list[Hashable] = []
        for t in self.takers.get(node, ()):
            out.append(self._name(t, run) if isinstance(t, str) else t)
        return tuple(out)


def _is_size(node: fx.Node) -> bool:
    """Whether a node computes a number from sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _shape(node: fx.Node) -> Hashable:
    """What is the same at every width."""
    return mark(node).no_grad, tuple((v.ndim, v.dtype) for v in tensors(node))


def _numbers_fit(ours: list[Any], theirs: list[Any], ratio: int) -> bool:
    return len(ours) == len(theirs) and all(_fits(a, b, ratio) for a, b in zip(ours, theirs, strict=True))


def _fits(a: Any, b: Any, ratio: int) -> bool:
    """Whether two literals are the same, or differ as sizes, or numbers made of one size, do."""
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
    return abs(halves - round(halves)) < CLOSE
