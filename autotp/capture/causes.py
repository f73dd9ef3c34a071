"""Why an attempt to capture a model failed, as far as it says which other attempts fail likewise.

A decision on a value stops `torch.export`, and what was traced up to there tells what the value is computed from. If
that is data, and the decision stays open for any sizes, then neither fixed sizes nor tracing all blocks can help; if it
is weights or random numbers, a draft export cannot either, as its conditions read nothing but the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import resolve

from .export import Attempt
from .messages import kinds_of, line_of_error
from .repeated_blocks import handed_on

INPUTS, WEIGHTS, RANDOM = "inputs", "weights", "random numbers"
SMALL = (0, 1)  # numbers that a size told by the data may be, for whatever sizes the inputs have
MOST = 4  # symbols of one decision


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed.

    Attributes:
        kinds: those of `messages.KINDS` that the error is of.
        line: file and number of the user's innermost line; None where the error has none.
        reads: what a decision is computed from that no sizes make: inputs, weights, random numbers. Empty where that
            is not known, or the failure is no such decision.
        blocks: whether equal blocks were traced once in the attempt.
        disproved: whether the model itself refuted what the attempt assumes of it.
        recurs: whether fixed sizes left a decision open that was met with symbolic ones.
    """

    kinds: Set[str]
    line: tuple[str, int] | None
    reads: Set[str] = frozenset()
    blocks: bool = False
    disproved: bool = False
    recurs: bool = False

    @classmethod
    def of(cls, error: Exception, attempt: Attempt) -> Cause:
        """The cause of an error of this attempt."""
        blocks = bool(attempt.repeats and attempt.repeats.blocks)
        return cls(kinds_of(error), line_of_error(error), _reads(error, attempt), blocks, attempt.assumes)


def _reads(error: Exception, attempt: Attempt) -> Set[str]:
    """What the decision that stopped a trace is computed from; empty where other sizes might decide it."""
    undecided = compat.undecided(error)
    if undecided is None:
        return frozenset()
    condition, graph = undecided
    sources = compat.data_sources(graph)
    symbols = compat.data_symbols(condition)
    # A symbol of the inputs' sizes among them: with fixed sizes it is another condition.
    if not symbols or symbols != condition.free_symbols or not symbols <= sources.keys() or not _open(condition):
        return frozenset()
    weight_count = len([*attempt.bare.named_parameters(), *attempt.bare.named_buffers()])
    each = [_leaves(sources[symbol], sources, weight_count) for symbol in symbols]
    # A number without data, such as `torch.tensor(x.shape[0]).item()`, is known where sizes are.
    return frozenset().union(*each) if all(each) else frozenset()


def _open(condition: sympy.Basic) -> bool:
    """Whether a condition may hold or not for small numbers already; what is no condition has a value for each."""
    symbols = sorted(condition.free_symbols, key=str)
    if len(symbols) > MOST:
        return False
    choices = itertools.product(SMALL, repeat=len(symbols))
    values = {condition.subs(dict(zip(symbols, numbers, strict=True))) for numbers in choices}
    return len(values) > 1


def _leaves(node: fx.Node, sources: dict[sympy.Symbol, fx.Node], weight_count: int) -> Set[str]:
    """The kinds of data that a node is computed from, not counting what only the sizes of data make.

    Args:
        weight_count: number of the parameters and buffers, which are the first placeholders of a trace.
    """
    weights = set(list(node.graph.find_nodes(op="placeholder"))[:weight_count])
    kinds: set[str] = set()
    visited, todo = {node}, [node]
    while todo:
        each = todo.pop()
        if each.op == "placeholder" and isinstance(each.meta.get("val"), Tensor):
            kinds.add(WEIGHTS if each in weights else INPUTS)
        if torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ()):
            kinds.add(RANDOM)
        fresh = {x for x in _operands(each, sources) if x not in visited}
        visited |= fresh
        todo += fresh
    return kinds


def _operands(node: fx.Node, sources: dict[sympy.Symbol, fx.Node]) -> Iterator[fx.Node]:
    """What a node's value is computed from: of a size, what makes the numbers in it that the data tell."""
    if str(node.target).startswith("aten.sym_"):
        yield from (sources[s] for s in compat.data_symbols(node.meta.get("val")) if s in sources)
        return
    maker, index = resolve(node)
    through = handed_on(maker, index) if maker is not node else None
    yield from node.all_input_nodes if through is None else through
