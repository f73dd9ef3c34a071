"""Times calls, on all ranks alike where there are some."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autotp.comm.ranks import Ranks

BATCH = 10e-3  # seconds that calls are timed for together: many launches, and turns on a shared core
MOST = 1000  # calls in a batch
SAMPLES = (3, 9)  # batches, of which the median counts


@dataclass(frozen=True)
class Clock:
    """Times calls, on all ranks alike where there are some."""

    ranks: Ranks | None
    device: torch.device
    budget: float

    def time(self, call: Callable[[], object]) -> float:
        """Median seconds of one call; the slowest rank's, on every rank."""
        self._batch(call, 1)
        once = max(self._worst(self._batch(call, 1)), 1e-7)
        calls = min(max(int(BATCH / once), 1), MOST)
        count = min(max(int(self.budget / (once * calls)), SAMPLES[0]), SAMPLES[1])
        return self._worst(statistics.median(self._batch(call, calls) for _ in range(count)))

    def cpu(self, call: Callable[[], object], calls: int = 3) -> float:
        """CPU seconds that one call takes of this thread, whatever else runs on the cores; the most of all ranks."""
        begun = time.thread_time()
        for _ in range(calls):
            call()
        return self._worst((time.thread_time() - begun) / calls)

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        self._worst(0.0)  # every rank starts now
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begun) / calls

    def _worst(self, seconds: float) -> float:
        if self.ranks is None or self.ranks.tp == 1:
            return seconds
        worst = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.ranks.group)
        return float(worst)
