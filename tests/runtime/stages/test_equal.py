"""Stages of a pipeline beside the model on one device."""

from __future__ import annotations

from tests.helpers.pipelines import Case, compared
from tests.helpers.pool import Pool

CLOSE = 1e-10


def test_llama_in_two_stages_is_the_model(pool: Pool) -> None:
    found = pool.run(compared, Case(steps=3))
    for loss, gradient, weight, _ in found:
        assert loss < CLOSE and gradient < CLOSE and weight < CLOSE
    held = [set(names) for *_, names in found]
    assert held[0] == held[1] and held[2] == held[3] and not held[0] & held[2]
    assert "model.embed_tokens.weight" in held[0] and "lm_head.weight" in held[2]
