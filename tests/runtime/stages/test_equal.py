"""Stages of a pipeline beside the model on one device; real models in `test_models.py`."""

from __future__ import annotations

from tests.helpers.pipelines import Case, compared, drawn, untied
from tests.helpers.pool import Pool

CLOSE = 1e-9


def test_two_stages_are_the_model(pool: Pool) -> None:
    found = pool.run(compared, Case("tower", steps=3))
    for loss, gradient, weight, _ in found:
        assert loss < CLOSE and gradient < CLOSE and weight < CLOSE
    held = [set(names) for *_, names in found]
    assert held[0] == held[1] and held[2] == held[3] and held[0] & held[2] == {"embed.weight"}
    assert "blocks.0.1.weight" in held[0] and "blocks.1.1.weight" in held[2]


def test_a_tied_gradient_that_is_dropped_shows(pool: Pool) -> None:
    assert min(pool.run(untied, Case("tower"))) > 1e-3


def test_dropout_draws_the_same_masks_in_stages_and_evaluation_none(pool: Pool) -> None:
    for same, other, evaluated in pool.run(drawn, 7):
        assert same < CLOSE and evaluated < CLOSE and other > 1e-4
