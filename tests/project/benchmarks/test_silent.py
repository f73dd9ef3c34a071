"""A share of the table of ways into a module by ways in which one rank parts, and what its judge must tell apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.silent.cells import MESHES, Cell, cells
from benchmarks.silent.judge import ERROR, KNOWN, LATE, RIGHT, judged
from benchmarks.silent.page import page
from benchmarks.silent.rank import Report
from benchmarks.silent.table import Table
from benchmarks.silent.ways_in import WAYS_IN
from benchmarks.silent.ways_to_part import WAYS_TO_PART
from tests.helpers.processes.pool import Pool

SEED = 0
FEW = ("forward", "optimizer step", "generate, greedy")  # what `make test` tries of `share`
SLOW = ("late", "stopped", "gone for long", "death")  # what waits, or ends processes
TP, DP, CP, PP = MESHES
ALL = {mesh: {cell.name: cell for cell in cells(mesh, SEED)} for mesh in MESHES}


def share() -> list[Cell]:
    """One cell of each way in at tp=2, in another way to part each, which the seed draws."""
    found = []
    for way_in in (name for name, way in WAYS_IN.items() if "tp" in way.axes):
        those = [c for c in ALL[TP].values() if c.way_in == way_in and c.way_to_part not in SLOW]
        found.append(random.Random(f"{SEED} {way_in}").choice(those))
    return found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Table]]:
    """Of ranks that stay up between cells; the libraries' ways in take all that there are."""
    tables: dict[int, Table] = {}

    def of(world: int) -> Table:
        if world not in tables:
            for other in tables.values():
                other.pool.close()
            tables[world] = Table(Pool(), tmp_path_factory.mktemp("silent"))
            tables[world].pool.start(world)
        return tables[world]

    of(TP.world)
    yield of
    for each in tables.values():
        each.pool.close()


@pytest.mark.ranks
@pytest.mark.parametrize("ways_in", ["few", "all"])
def test_a_rank_that_parts_is_right_or_one_error(table, ways_in):
    for cell in (cell for cell in share() if ways_in == "all" or cell.way_in in FEW):
        outcome = table(2).tried(cell)
        assert outcome.fine, f"{cell}: {outcome.what}: {outcome.text}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way_to_part", "variant", "wanted"),
    [("death", "before", ERROR), ("exception", "amid ValueError at hook", ERROR), ("stopped", "amid at hook", RIGHT)],
)
def test_a_rank_that_fails_is_named(table, way_to_part, variant, wanted):
    outcome = table(2).tried(ALL[TP][f"backward / {way_to_part} / {variant}"])
    assert outcome.what in (wanted, LATE if wanted == ERROR else wanted), outcome


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "way_in"), [(DP, "forward"), (CP, "backward"), (PP, "pipe.step")], ids=str)
def test_a_rank_that_parts_beside_a_further_axis(table, mesh, way_in):
    outcome = table(4).tried(Cell(mesh, way_in, "batch", rank=1))
    assert outcome.what in (ERROR, LATE), outcome


@pytest.mark.ranks
def test_without_the_comparison_of_ranks_it_is_silent(table):
    cell = Cell(TP, "forward", "batch", warm=True)
    assert table(2).tried(cell, blind=True).what == "silent"


def test_the_judge_tells_faults_apart():
    cell = replace(ALL[TP]["backward / exception / amid ValueError at hook"], rank=1)
    batch = Cell(TP, "backward", "batch", rank=1)
    right, own = Report(began=1.0, ended=2.0), Report("ValueError", "", raised=True, began=1.0, ended=2.0)
    refused = Report("RankError", "rank 1 left", refused=True, began=1.0, ended=2.0)

    def what(of: Cell, zero: Any, one: Any, ended: set[int] = set(), parted: float = 1.0) -> str:  # noqa: B006
        return judged(of, {rank: r for rank, r in ((0, zero), (1, one)) if r is not None}, ended, parted).what

    assert what(batch, right, right) == RIGHT and what(batch, refused, refused) == ERROR
    assert what(cell, refused, own) == ERROR
    assert what(batch, replace(refused, ended=60.0), refused) == LATE
    assert what(batch, replace(right, wrong="logits is off by 1.0e+00"), right) == "silent"
    assert what(batch, refused, right) == "silent"
    assert what(batch, replace(refused, text="no answer in time"), refused) == "hang"
    late = replace(refused, text="no answer in time", ended=61.0)
    assert what(replace(batch, way_to_part="threads"), late, refused) == LATE  # of a rank that has stopped
    assert what(replace(batch, way_to_part="threads"), late, late) == "hang"
    assert what(batch, None, right) == "hang" and what(batch, None, right, {0}) == "crash"
    assert what(batch, replace(own, raised=False), refused) == "crash"
    assert what(cell, replace(refused, text="somebody left"), own) == "unnamed"
    assert what(replace(batch, way_to_part="seed"), refused, refused) == "refused"
    assert what(batch, right, right, parted=0.0) == "nothing"


def test_each_cell_has_a_place_on_the_page():
    assert {c.way_to_part for c in ALL[TP].values()} == set(WAYS_TO_PART)
    assert {c.way_in for mesh in MESHES for c in ALL[mesh].values()} == set(WAYS_IN)
    assert {axis for axis, *_ in KNOWN} <= {mesh.axis for mesh in MESHES}
    record = {"seed": SEED, "command": "a", "date": "b", "machine": "c", "load": 1, "cores": 2, "results": {}}
    record |= {"autotp": "0", "torch": "0", "transformers": "0", "python": "0"}
    name = next(name for name in ALL[TP] if name.startswith("forward / batch"))
    record["results"] = {str(TP): {name: {"what": "silent", "seconds": 1.0, "cpu": 1.0}}}
    assert "| forward | F |" in page(record)
