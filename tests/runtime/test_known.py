"""The table of calls that are known: it does not grow for ever, and what it forgets is not captured again."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import autotp
from autotp.driver import compile as pipeline
from autotp.runtime import programs


def test_the_table_of_known_calls_is_bounded():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(3, 4))
    often = torch.randn(3, 4)
    with patch.object(programs, "MOST_KNOWN", 4), patch.object(pipeline, "prepare", wraps=pipeline.prepare) as prepare:
        with patch.object(sharded, "_find", wraps=sharded._find) as find:
            for rows in (*range(2, 20), 2):
                for x in (torch.randn(rows, 4), often):
                    torch.testing.assert_close(sharded(x), model(x))
            # The one that is called all along is kept.
            assert find.call_count == 19 and len(sharded._programs_by_call) == 4
        assert not prepare.called
