"""The table of calls that are known: it does not grow for ever, and what it forgets is not captured again."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import autotp
from autotp.driver import compile as pipeline
from autotp.errors import InputError
from autotp.runtime import program_search, programs


def test_the_table_of_known_calls_has_no_sizes_and_is_bounded():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(3, 4))
    kinds, often = sharded._programs_made.kinds, torch.randn(3, 4)
    with patch.object(programs, "MAX_KINDS", 4), patch.object(pipeline, "prepare", wraps=pipeline.prepare) as prepare:
        with patch.object(program_search, "find", wraps=program_search.find) as find:
            for rows in range(2, 20):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(sharded(x), model(x))
            assert find.call_count == 1 and len(kinds) == 1
        assert not prepare.called
        for n in range(6):
            sharded[0].limit = n
            torch.testing.assert_close(sharded(often), model(often))
            assert len(kinds) <= 4


def test_what_has_no_hash_is_refused():
    sharded: Any = autotp.compile(nn.Linear(4, 4), 1, example_inputs=torch.randn(3, 4))
    with pytest.raises(InputError, match="an input is ndarray: inputs are tensors"):
        sharded(np.ones((3, 4)))
