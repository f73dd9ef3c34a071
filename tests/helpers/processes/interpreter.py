"""A process in which Triton interprets kernels on the CPU: the switch must be set before they are decorated.

The interpreter of Triton 3.6 needs numpy before 2.4: it makes an int of an array of one element.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch


def _prepare() -> None:
    """Once in the process: memory that nothing wrote is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


class Interpreter:
    """Calls functions that the process can import, with picklable arguments."""

    def __init__(self) -> None:
        with patch.dict(os.environ, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}):
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare)
            self._pool.submit(torch.get_num_threads).result()  # starts it, in this environment

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` there; in it `torch.empty` gives NaN."""
        return self._pool.submit(function, *args).result(timeout=900)

    def close(self) -> None:
        self._pool.shutdown()
