"""The family of a mask of attention, found by computing it for some lengths, positions and paddings.

The family is `autotp.kernels.attention.attention_mask`: causal from a position on, within a window, without
padding. A mask is of it where both agree on all that is tried: lengths around every whole number of its graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm.conversions import as_invariant, f
from autotp.ir.layouts import Size
from autotp.ir.marks import mark
from autotp.ir.op import expression, is_tensor, symbols_of
from autotp.kernels.attention import attention_mask

MOST_NODES, LONGEST, ENDLESS = 96, 1 << 18, 1 << 62  # of a mask's graph; of what is tried; the end of a slice
LONGEST_CAUSAL = 1 << 12
BATCH, SOME_NEW, SOME_PAST = 2, (1, 3), (1, 2, 9)
CPU = torch.device("cpu")
KEEPING = (f, as_invariant)  # conversions that leave the forward's value as it is
ARITHMETIC = (operator.add, operator.sub, operator.mul)


@dataclass(frozen=True)
class MaskFamily:
    """A mask of the family: arguments of `attention_mask`, of which tensors and sizes may be nodes."""

    new: fx.Node | Size
    length: fx.Node | Size
    position: fx.Node | None
    padding: fx.Node | None
    window: int | None

    @property
    def everything(self) -> bool:
        """Say whether every new token attends to every other."""
        return isinstance(self.new, int) and self.new == 1 and self.position is self.padding is self.window is None


class Trial(NamedTuple):
    """Sizes and values that a mask is computed for: new tokens, those before them, and the position of the first."""

    new: int
    past: int
    position: int


@dataclass(frozen=True)
class Graph:
    """The nodes that a mask is computed by.

    Attributes:
        nodes: in order; the last one is the mask.
        position, padding: inputs that are read: a number, and a mask of rows.
    """

    nodes: tuple[fx.Node, ...]
    position: fx.Node | None
    padding: fx.Node | None

    @property
    def numbers(self) -> set[int]:
        """Collect the whole numbers in it that may be a window or another border."""
        numbers = set()
        for node in self.nodes:
            numbers |= {abs(x) for x in compat.tree_leaves((node.args, node.kwargs)) if type(x) is int}
        return {x for x in numbers if 2 < x < ENDLESS}


def recognise(mask: fx.Node) -> MaskFamily | None:
    """Find the member of the family that a mask in a rank's graph is; None where it is none, or that cannot be said."""
    graph = _graph(mask)
    if graph is None or max(graph.numbers, default=0) >= LONGEST:
        return None
    sizes = _Sizes.of(mask)
    new, length = _available(mask, 2), _available(mask, 3)
    if sizes is None or new is None or length is None:
        return None
    windows = sorted({x + d for x in graph.numbers for d in (-1, 0, 1)})
    fitting = _fitting(graph, sizes, [None, *windows], list(_trials(graph, sizes)))
    return MaskFamily(new, length, graph.position, graph.padding, fitting[0]) if fitting else None


def causal(mask: fx.Node) -> bool:
    """Say whether a mask in a captured graph, over the tokens of one sequence, is causal by index and nothing else."""
    graph = _graph(mask)
    if graph is None or graph.position is not None or graph.padding is not None:
        return False
    sizes = _Sizes.of(mask)
    if sizes is None or sizes.new != sizes.whole or max(graph.numbers, default=0) >= LONGEST_CAUSAL:
        return False
    lengths = sorted({x + d for x in graph.numbers for d in (-1, 0, 1, 2)} | {1, 2, 3, 9})
    return bool(_fitting(graph, sizes, [None], [Trial(new, 0, 0) for new in lengths]))


def _fitting(graph: Graph, sizes: _Sizes, windows: list[Any], trials: Sequence[Trial]) -> list[int | None]:
    """Select the windows by which a mask is of the family in every trial; none where nothing is tried, or it fails."""
    for trial in trials:
        length = sizes.length(trial)
        padding = _padding(graph.padding, length)
        position = None if graph.position is None else torch.tensor(trial.position)
        try:
            value = _computed(graph, sizes, trial, padding)
        except Exception:  # it needs other sizes than are tried
            return []
        shape = (BATCH, 1, trial.new, length)
        members = {w: attention_mask(trial.new, length, position, padding, w, CPU) for w in windows}
        windows = [w for w, member in members.items() if _equal(value, member, shape)]
    return windows if trials else []


def _graph(mask: fx.Node) -> Graph | None:
    """Collect the mask's graph, where it is one of sizes, a position and a padding alone."""
    val = mask.meta.get("val")
    if not isinstance(val, Tensor) or val.dtype != torch.bool or val.ndim != 4 or val.shape[1] != 1:
        return None
    # All that the mask is computed from, back to inputs; a mask of more nodes takes longer to try than it may save.
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    stack = [mask]
    while stack and len(nodes) < MOST_NODES:
        node = stack.pop()
        if node in nodes or node in inputs:
            continue
        if node.op == "placeholder":
            inputs[node] = None
            continue
        if not _plain(node):
            return None
        nodes[node] = None
        # A size is known in each trial, whatever tensor it is a size of: that tensor need not be computed.
        stack += [] if _is_size(node) else node.all_input_nodes
    # The family has one position and one padding; an input that is neither could say anything.
    numbers = [n for n in inputs if is_tensor(n) and n.meta["val"].numel() == 1 and _whole(n)]
    rows = [n for n in inputs if is_tensor(n) and n.meta["val"].ndim == 2 and n not in numbers and _whole(n)]
    if stack or len(numbers) + len(rows) < len(inputs) or len(numbers) > 1 or len(rows) > 1:
        return None
    return Graph(tuple(sorted(nodes)), next(iter(numbers), None), next(iter(rows), None))


def _plain(node: fx.Node) -> bool:
    """Say whether it is an operator of torch on whole values."""
    layout = mark(node).layout
    if layout is not None and (layout.partial or layout.sharded_dim is not None or layout.groups is not None):
        return False
    of_aten = getattr(node.target, "namespace", None) == "aten"
    return node.op == "call_function" and (of_aten or node.target in (*ARITHMETIC, *KEEPING))


def _whole(node: fx.Node) -> bool:
    val, layout = node.meta["val"], mark(node).layout
    return not val.is_floating_point() and (layout is None or layout.sharded_dim is None)


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


class _Sizes(NamedTuple):
    """The symbols of a mask: of the batch, of new tokens, and of those before them."""

    symbols: Mapping[Any, str]
    new: Size
    whole: Size

    @classmethod
    def of(cls, mask: fx.Node) -> _Sizes | None:
        batch, _, new, whole = (expression(s) for s in mask.meta["val"].shape)
        kinds: dict[Any, str] = {batch: "batch"} if isinstance(batch, sympy.Symbol) else {}
        if isinstance(new, sympy.Symbol):
            kinds[new] = "new"
        elif not isinstance(new, int):
            return None
        symbols = symbols_of(whole)
        past = [s for s in symbols if s not in kinds]
        if len(past) > 1 or any(kinds.get(s) == "batch" for s in symbols):
            return None
        return cls(kinds | dict.fromkeys(past, "past"), new, whole)

    def value(self, size: Any, trial: Trial) -> int:
        """Evaluate a size in a trial.

        Raises:
            KeyError: it is another's.
        """
        if isinstance(size, int):
            return size
        values = {"batch": BATCH, "new": trial.new, "past": trial.past}
        return int(size.subs({s: values[self.symbols[s]] for s in size.free_symbols}))

    def length(self, trial: Trial) -> int:
        """Give the length of the cache."""
        return self.value(self.whole, trial)


def _trials(graph: Graph, sizes: _Sizes) -> Iterator[Trial]:
    """Try around every number of the graph, and around the ends of a cache of fixed length."""
    # A comparison changes its answer beside a number of the graph: lengths on both sides of each distinguish masks.
    news = (sizes.new,) if isinstance(sizes.new, int) else SOME_NEW
    near = sorted({max(x + d, 1) for x in graph.numbers for d in (-2, -1, 0, 1, 5)} | set(SOME_PAST))
    fixed = isinstance(sizes.whole, int)
    for new, past in product(news, [SOME_PAST[0]] if fixed else near):
        if fixed and new > sizes.whole:
            continue
        length = sizes.length(Trial(new, past, 0))
        ends = {0, 1, length // 2, *near, length - new}
        positions = [0]
        if graph.position is not None:
            positions = [p for p in sorted(ends) if 0 <= p <= length - new]
        yield from (Trial(new, past, position) for position in positions)


def _padding(node: fx.Node | None, length: int) -> Tensor | None:
    """Make rows of which one has padding at its left, another anywhere."""
    if node is None:
        return None
    draw = torch.Generator().manual_seed(length)
    rows = torch.randint(2, (BATCH, length), generator=draw)
    rows[0] = torch.arange(length) >= min(length // 2, 3)
    return rows.to(node.meta["val"].dtype)


def _computed(graph: Graph, sizes: _Sizes, trial: Trial, padding: Tensor | None) -> Tensor:
    """Compute the mask by its graph."""
    env: dict[fx.Node, Any] = {}
    if graph.padding is not None:
        env[graph.padding] = padding
    if graph.position is not None:
        val = graph.position.meta["val"]
        env[graph.position] = torch.full(tuple(val.shape), trial.position, dtype=val.dtype)
    for node in graph.nodes:
        if _is_size(node):
            source, dim = node.args
            of_padding = source is graph.padding
            env[node] = padding.shape[dim] if of_padding else sizes.value(expression(node.meta["val"]), trial)  # type: ignore
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = compat.tree_map(lambda x: CPU if isinstance(x, torch.device) else x, (args, kwargs))
        env[node] = args[0] if node.target in KEEPING else node.target(*args, **kwargs)  # type: ignore[operator]
    return env[graph.nodes[-1]]


def _equal(value: Tensor, member: Tensor, shape: Sequence[int]) -> bool:
    try:
        return torch.equal(value.expand(shape), member.expand(shape))
    except RuntimeError:
        return False


def _available(mask: fx.Node, dim: int) -> Any:
    """Give a size of a mask as a number, or as a node that stands before it."""
    size = expression(mask.meta["val"].shape[dim])
    if isinstance(size, int):
        return size
    for node in mask.graph.nodes:
        if node is mask:
            return None
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and node.op == "call_function" and expression(val) == size:
            return node
    return None
