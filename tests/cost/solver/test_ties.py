"""What tells plans of equal seconds apart: a test for each tie-break that the head of the solver's file names."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotp.cost.solver import rows, solve
from autotp.cost.solver.problem import Choice, Item, Problem, Use
from autotp.cost.solver.search import Search
from autotp.ir.layouts import Layout, P, Partition, R, Shard

S = Shard(0, Partition.plain(8, 2))
FOLDER = Path(solve.__file__).parent


def chain(*steps: Sequence[Choice]) -> Problem:
    """Items of which each reads what the one before produces; a conversion takes a second."""
    items = [Item(f"op{i}", list(c), [frozenset([i - 1])] if i else [], [i]) for i, c in enumerate(steps)]
    uses = [Use(i, ((i + 1, 0),), 1) for i in range(len(steps) - 1)]
    return Problem(items, uses, lambda value, a, b: 1.0)


def picks(problem: Problem) -> list[Choice]:
    """The choices that are taken."""
    return [item.choices[k] for item, k in zip(problem.items, solve.solve(problem).choices, strict=True)]


def always(problem: Problem, want: Sequence[Choice]) -> bool:
    """Whether these are taken whatever the order of the choices, which is no tie-break."""
    backward = replace(problem, items=[replace(i, choices=i.choices[::-1]) for i in problem.items])
    return picks(problem) == picks(backward) == list(want)


def source(outs: Layout = R, seconds: float = 1.0, **amounts: Any) -> Choice:
    return Choice((), (outs,), seconds, **amounts)


LEAN, FULL = source(activation_bytes=8.0), source(S, activation_bytes=9.0)
SIMPLE, UNEVEN = source(penalty=1), source(S, penalty=2)
DIRECT, CONVERTED = source(R, seconds=2.0), source(S)
READS = Choice((R,), (R,))
EARLY, LATE = Choice((R,), (R,)), Choice((S,), (S,))
# name: the weight that decides, the problem, the choices that it takes
TIES = {
    "less activations": ("ACTIVATIONS", chain([FULL, LEAN]), [LEAN]),
    "simpler partitions": ("PARTITIONS", chain([UNEVEN, SIMPLE]), [SIMPLE]),
    "fewer conversions": ("CONVERSIONS", chain([CONVERTED, DIRECT], [READS]), [DIRECT, READS]),
    "early conversions": ("CONVERSIONS", chain([source(S)], [LATE, EARLY], [READS]), [source(S), EARLY, READS]),
}


@pytest.mark.parametrize("name", TIES)
def test_a_tie_is_broken_as_the_solver_says(name, monkeypatch):
    weight, problem, want = TIES[name]
    assert always(problem, want)
    monkeypatch.setattr(rows, weight, 0.0)  # the negative control: nothing else prefers them
    assert not always(problem, want)


def test_activations_come_before_partitions_and_those_before_conversions():
    lean, simple = source(activation_bytes=99.0, penalty=50), source(S, activation_bytes=100.0)
    assert always(chain([simple, lean]), [lean])
    one, none = source(S), source(R, seconds=2.0, penalty=1)
    assert always(chain([none, one], [READS]), [one, READS])


def test_a_tie_never_costs_seconds(monkeypatch):
    """A plan that is slower by a millionth saves all activations: the second order alone would take it."""
    fast, lean = source(seconds=1.0, activation_bytes=100.0), source(S, seconds=1.0 + 1e-6)
    assert always(chain([fast, lean]), [fast])
    monkeypatch.setattr(Search, "below", lambda self, cost, cutoff: (cutoff, None))
    assert always(chain([fast, lean]), [lean])


def test_time_comes_before_every_tie_and_parameters_before_time():
    fast, lean = source(seconds=1.0, activation_bytes=9.0), source(P, seconds=2.0)
    assert always(chain([fast, lean]), [fast])
    split = source(S, seconds=3.0, parameter_bytes=4.0)
    assert always(chain([replace(fast, parameter_bytes=8.0), split]), [split])


def test_every_function_that_the_symbols_name_is_there():
    modules = {name: ast.parse((FOLDER / f"{name}.py").read_text()) for name in ("solve", "rows")}
    functions = {n.name for tree in modules.values() for n in tree.body if isinstance(n, ast.FunctionDef)}
    head = ast.get_docstring(modules["solve"]) or ""
    table = head[: head.index("Plans of equal seconds")]
    named = set(re.findall(r"`(_?[a-z_]+)`$", table, re.MULTILINE))
    assert {"add_items", "conserved", "within", "_cheapest"} <= named and named <= functions
