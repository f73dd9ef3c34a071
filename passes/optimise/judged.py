"""Which of an optimisation's changes are used: those that were measured to be faster, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from autotp.ir.copying import copy_graph
from autotp.ir.marks import mark

from .alternatives import Alternative, alternative
from .base import Optimisation, RankProgram, Verdict
from .matching import value_of

Position = tuple[fx.Node, int]  # where a change begins or ends, and which of those that could be there


class Change(NamedTuple):
    """What was put into a graph: its name in words, where, and its call; `beside`: calls that are measured with it."""

    name: str
    position: Position
    new: fx.Node
    beside: tuple[fx.Node, ...] = ()


Changing = Callable[[fx.Graph, Container[Position]], Iterator[Change]]  # makes all changes that are not refused


class _AllBut:
    def __init__(self, position: Position) -> None:
        self.position = position

    def __contains__(self, position: object) -> bool:
        return position != self.position


class Judged:
    """What measuring says of every change.

    Attributes:
        refused: places in which what is there stays.
        why: of changes that are used somewhere (True) or not used somewhere, in words.
    """

    def __init__(self, program: RankProgram, of: Optimisation, changing: Changing) -> None:
        """Ask the program's judge, where the optimisation is to be measured. A collective call then.

        Args:
            program: which stays as it is.
            of: the optimisation. changing: what it does.
        """
        self.refused: set[Position] = set()
        self.why: dict[tuple[str, bool], str] = {}
        self._program, self._changing, self._sends = program, changing, of.sends
        self._verdicts: dict[Hashable, Verdict] = {}
        self._judge = program.setting.judges.get(of.name)
        while self._judge is not None and (bad := self._round() - self.refused):
            self.refused |= bad  # which may leave another change its place

    def summary(self, fired: Counter[str]) -> list[str]:
        """What fired, how often and how much faster, and what was refused."""
        parts = [_times(name, n, self.why.get((name, True), "")) for name, n in sorted(fired.items())]
        return parts + [f"{name} not used ({why})" for (name, on), why in sorted(self.why.items()) if not on]

    def _round(self) -> set[Position]:
        """Places of changes that are refused, of all that would be made now."""
        graph = self._program.graph
        copy, into = copy_graph(graph.nodes)
        back = {c: g for g, c in into.items()}
        changes: list[tuple[Hashable, str, Position]] = []
        alternatives: dict[Hashable, Alternative | None] = {}
        for name, (node, number), new, beside in self._changing(copy, {(into[g], k) for g, k in self.refused}):
            if node not in back:  # made by another change
                continue
            literals = str(fx.map_arg((new.args, dict(new.kwargs)), lambda _: None))
            kind = name, new.target, literals, tuple(map(_kind, (*new.all_input_nodes, *beside)))
            changes.append((kind, name, (back[node], number)))
            if kind not in self._verdicts and kind not in alternatives:
                alternatives[kind] = self._alternative(name, (back[node], number), [back[x] for x in beside])
        self._ask(alternatives)
        bad: set[Position] = set()
        for kind, name, position in changes:
            on, why = self._verdicts[kind]
            self.why[name, on] = why
            if not on:
                bad.add(position)
        return bad

    def _ask(self, alternatives: Mapping[Hashable, Alternative | None]) -> None:
        assert self._judge is not None
        if count := sum(x is not None for x in alternatives.values()):
            self._judge.ahead(count)
        for kind, x in alternatives.items():
            self._verdicts[kind] = Verdict(False, "it cannot be run by itself") if x is None else self._judge(x)

    def _alternative(self, name: str, position: Position, beside: Sequence[fx.Node]) -> Alternative | None:
        graph, place = self._program.graph, self._program.setting.place

        def rewrite(copy: fx.Graph, into: Any) -> None:
            node, number = position
            for _ in self._changing(copy, _AllBut((into[node], number))):
                pass

        return alternative(name, graph, rewrite, place, self._sends, beside)


def _kind(node: fx.Node) -> tuple[Any, ...]:
    value = value_of(node)
    return str(tuple(getattr(value, "shape", ()))), getattr(value, "dtype", None), mark(node).layout


def _times(name: str, n: int, why: str) -> str:
    times = name if n == 1 else f"{name} {n} times"
    return times + (f" ({why})" if why else "")
