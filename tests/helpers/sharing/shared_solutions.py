"""Solutions shared by tests: many plan the same tiny model, and solving takes most of planning.

An integer program is solved once where all that a solution depends on is equal: columns, rows and objectives, by
content, and the layouts of choices. The files of the captures' folder share them between processes.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotp.cost.solver import solve as solver
from autotp.cost.solver.problem import Item, Problem
from autotp.ir.program import Solution
from autotp.passes.shard import decide
from autotp.plans import explain

from .capture_files import FOLDER
from .patches import Patches

PATCHES = Patches(("autotp.cost.solver.",))
WORTH = 0.05  # CPU seconds from which on a solution is written
SOLUTIONS: dict[str, Solution] = {}


@contextmanager
def shared_solutions() -> Iterator[None]:
    """Within this context plans of equal programs are solved once."""
    with ExitStack() as stack:
        for module in (decide, explain):
            stack.enter_context(patch.object(module, "solve", _sharing(module.solve)))
        yield


def _sharing(solve: Callable[..., Solution]) -> Callable[..., Solution]:
    def shared(
        problem: Problem, slack: float = solver.SLACK, band: float | None = None, seconds: float = math.inf
    ) -> Solution:
        if any(PATCHES.now()):  # a test that changes the solver has it solve
            return solve(problem, slack, band, seconds)
        built = solver.build(problem)
        name = _name(problem, built, (slack, band, seconds))
        if name not in SOLUTIONS:
            earlier = _read(name)
            SOLUTIONS[name] = earlier or _solved(name, lambda: solve(problem, slack, band, seconds), built)
        return SOLUTIONS[name]

    return shared


def _solved(name: str, solve: Callable[[], Solution], built: Any) -> Solution:
    """What `solve` gives, with the program that is built already; other processes find it under this name."""
    began = time.process_time()
    with patch.object(solver, "build", lambda problem: built):
        solution = solve()
    path = _path(name)
    if path is not None and time.process_time() - began > WORTH:
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(solution))
        own.replace(path)
    return solution


def _name(problem: Problem, built: Any, options: Any) -> str:
    """All that `solve` reads: equal for equal programs, in every process."""
    program, picks = built
    items = [(item.count, item.kind, _layouts(item)) for item in problem.items]
    uses = [(use.consumers, use.count) for use in problem.uses]
    facts = vars(program), picks, items, uses, problem.limit, sorted(map(sorted, problem.rivals)), options
    return hashlib.sha256(pickle.dumps(facts)).hexdigest()


def _layouts(item: Item) -> list[str]:
    """In words, with how dimensions are dealt."""
    return [repr((choice.ins, choice.outs)) for choice in item.choices]


def _path(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, f"{name}.solution") if folder else None


def _read(name: str) -> Solution | None:
    path = _path(name)
    return pickle.loads(path.read_bytes()) if path is not None and path.exists() else None
