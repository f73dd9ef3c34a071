"""What stages cannot be made of or called with: one message for all ranks."""

from __future__ import annotations

import re

from tests.helpers.pipelines import refused
from tests.helpers.pool import Pool

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
    "called": "StateError: this module holds the stages of one rank",
}


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
