"""Stages of a pipeline beside the model on one device, and what they refuse; real models in `test_models.py`."""

from __future__ import annotations

import re

import pytest

from tests.helpers.pipelines import CLOSE, Case, compared, drawn, refused, untied
from tests.helpers.processes.pool import Pool

WORDS = {
    "world": "InputError: pp=3 .* makes 6 ranks; the world has 4",
    "blocks": "InputError: pp=4 makes 4 stages, and .* has 2 repeated blocks, blocks.0 to blocks.1",
    "chunks": "InputError: pp=2 x chunks=2 makes 4 stages",
    "none": "InputError: Sequential has no repeated blocks",
    "pp": "InputError: pp=0",
    "memory": "PlanError: no division into 2 stages fits memory=100 B",
    "dividing": "InputError: 4 micro-batches do not divide a batch of 6",
    "sizes": "InputError: micro-batches of",
    "loss": "InputError: the model gives its loss already",
    "mode": "StateError: this schedule was made with training=True",
    "other": "InputError: this schedule is not of these stages",
}


def test_a_tied_gradient_that_is_dropped_shows(pool: Pool) -> None:
    assert min(pool.run(untied, Case("tower"))) > 1e-3


def test_two_stages_are_the_model(pool: Pool) -> None:
    found = pool.run(compared, Case("tower", steps=3))
    for loss, gradient, weight, _ in found:
        assert loss < CLOSE and gradient < CLOSE and weight < CLOSE
    held = [set(names) for *_, names in found]
    assert held[0] == held[1] and held[2] == held[3] and held[0] & held[2] == {"embed.weight"}
    assert "blocks.0.1.weight" in held[0] and "blocks.1.1.weight" in held[2]


@pytest.mark.parametrize("where", ["drop", "late"], ids=["in blocks", "in the last stage alone"])
def test_dropout_draws_the_same_masks_in_stages_and_evaluation_none(pool: Pool, where: str) -> None:
    for same, other, evaluated in pool.run(drawn, 7, where, timeout=120.0):
        assert same < CLOSE and evaluated < CLOSE and other > 1e-4


def test_what_cannot_be_is_said_on_all_ranks(pool: Pool) -> None:
    found = pool.run(refused)
    for told in found:
        for name, words in WORDS.items():
            assert re.search(words, told[name], re.DOTALL), (name, told[name])
    assert found[3]["on one rank"].startswith("InputError: 4 micro-batches")
    assert all(told["on one rank"].startswith("RankError") for told in found[:3])
    printed = found[0]["printed"]
    assert "2 stages over pp=2 x tp=2" in printed and "blocks.0 with what is before" in printed
    assert "idle share of a step (1F1B)" in printed
