"""Real models in stages beside one device: loss, gradients, steps with clipping, all schedules, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from autotp import compat
from tests.helpers.pipelines import CLOSE, Case, carried_over, compared, made
from tests.helpers.processes.pool import Pool

STEPS = [Case("llama", steps=50), Case("gpt2", steps=50), Case("bert", "Schedule1F1B", steps=50)]
SCHEDULES = [
    Case("gpt2", "ScheduleInterleaved1F1B", chunks=2, layers=4, steps=2),
    Case("gpt2", "ScheduleInterleavedZeroBubble", chunks=2, layers=4, steps=2),
    Case("gpt2", "ScheduleZBVZeroBubble", chunks=2, layers=4, steps=2),
    Case("gpt2", "Schedule1F1B", pp=4, tp=1, layers=5, steps=2),
    Case("gpt2", "Schedule1F1B", tp=1, dp=2, steps=2),
    *(Case(name, options={"sequence_parallel": True}, steps=2) for name in ("gpt2", "llama")),
    Case("t5", "ScheduleInterleaved1F1B", chunks=2, steps=2),  # the encoder's states flow through a stage
]


def compare(pool: Pool, case: Case) -> None:
    for loss, gradient, weight, _ in pool.run(compared, case):
        assert max(loss, gradient, weight) < CLOSE


def test_real_models_by_every_schedule(pool: Pool) -> None:
    for case in (*STEPS, *SCHEDULES):
        if "ZeroBubble" not in case.kind or compat.VERSION >= (2, 13):  # where an older torch is refused
            compare(pool, case)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as the plain model is in one process
def test_a_checkpoint_is_for_any_stages_and_for_the_plain_model(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for off in pool.run(carried_over, str(folder)):
        assert max(off) < CLOSE
    model = made(Case("gpt2", layers=4))
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}  # what is tied is saved once
    wanted = {n: t.clone() for n, t in state.items()}
    load({"model": state}, checkpoint_id=folder, no_dist=True)
    assert not any(torch.equal(t, wanted[n]) for n, t in state.items() if t.ndim > 1)
