"""Compositions of features beside one device: a sample of them, and that the page shows what came of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.processes.pool import Pool

from .cells import Names, outcome, outcomes
from .features import BY_NAME, FEATURES, WITHOUT_MEANING, meaning, pairs, triples
from .page import PAGE, key, page, results
from .run import Run, told

KNOWN = results()["cells"]
SAMPLE: list[Names] = [
    ("dropout", "float8 delayed"),
    ("LoRA", "quantised weights"),
    ("compare", "profile"),
    ("sequence parallelism", "accelerate"),
    ("fully_shard", "compare"),
]
PARTS = 5


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two workers, which are a world."""
    pool = Pool()
    yield pool
    pool.close()


def same(names: Names, found: dict[str, Any]) -> None:
    """A composition does what the results say."""
    wanted = KNOWN.get(key(names), {"kind": "equal"})
    assert found["kind"] == wanted["kind"], f"{key(names)}: {found}"
    if found["kind"] == "refused":
        assert found["said"] == wanted["said"]


@pytest.mark.ranks
@pytest.mark.parametrize("names", SAMPLE[:4], ids=key)
def test_a_sample_does_what_the_page_says(pair: Pool, names: Names) -> None:
    same(names, outcome(pair, names))


@pytest.mark.ranks
def test_a_sample_of_four_ranks(pool: Pool) -> None:
    same(SAMPLE[4], outcome(pool, SAMPLE[4]))


@pytest.mark.ranks
@pytest.mark.timeout(7200)  # 750 CPU seconds on a slow machine, where others run beside it
@pytest.mark.parametrize("part", range(PARTS))  # a long test in several, so that a slow machine ends each in time
def test_all_of_it_does_what_the_page_says(part: int) -> None:
    for names, found in outcomes([n for n in [*pairs(), *triples()] if not meaning(n)][part::PARTS]):
        same(names, found)


def wrong(rank: int, world: int, group: Any, folder: str) -> Any:
    """A composition whose ranks have other rows than one device."""
    mine = Run.mine
    with patch.object(Run, "mine", lambda run, step=0: {k: v.roll(1, 1) for k, v in mine(run, step).items()}):
        return told(rank, world, group, ("checkpointing",), folder)


@pytest.mark.ranks
def test_other_rows_are_no_equal_numbers(pair: Pool, tmp_path: Any) -> None:
    for kind, said, _ in pair.run(wrong, str(tmp_path), world=2):
        assert kind == "equal" and said > 1e-3


def test_every_combination_has_an_answer_and_the_page_shows_it() -> None:
    assert page(results()) == PAGE.read_text(encoding="utf-8"), "python -m tests.composition --render"
    every = [*pairs(), *triples()]
    assert KNOWN.keys() <= {key(n) for n in every if not meaning(n)}
    for names in every:
        found = KNOWN.get(key(names), {"kind": "missing", "said": meaning(names)})
        if found["kind"] == "equal":
            assert found["said"] < max(BY_NAME[name].close for name in names)
        else:
            assert "not yet" not in found["said"], names


def test_triples_are_the_same_each_time_and_what_has_no_meaning_is_a_pair() -> None:
    assert triples() == triples() and len({*triples()}) == 20
    assert all(len(two) == 2 and two <= BY_NAME.keys() and why for two, why in WITHOUT_MEANING.items())
    assert len(pairs()) == len(FEATURES) * (len(FEATURES) + 1) / 2
