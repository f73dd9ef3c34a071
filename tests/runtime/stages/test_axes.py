"""Stages beside the other axes of the mesh: training with dp and with weights split over it is that of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autotp
from tests.helpers.pipelines import (
    APART,
    MICROBATCHES,
    Case,
    Outcomes,
    apart,
    assert_refused,
    assert_right,
    batch_of,
    double,
    error,
    made,
    on_one_device,
    outcome,
    slices,
    staged,
)  # fmt: skip
from tests.helpers.processes.pool import Pool


def trained(rank: int, world: int, group: Any, case: Case, folder: str) -> dict[str, Any]:
    """How far steps, a call and an evaluation are from one device's, and the part of the weights that a rank holds.

    Args:
        folder: for a checkpoint.
    """
    with double():
        model = made(case)
        pipe, schedule = staged(case, model)
        lane = rank // (case.tp * case.options.get("cp", 1)) % case.dp
        told: dict[str, Any] = {"loss": 0.0, "gradients": 0.0, "norm": 0.0}

        def far(cell: str, value: float) -> None:
            told[cell] = max(told[cell], value)

        mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pipe, model))
        for step in range(2):
            batches = [batch_of(model, seed=10 * step + i) for i in range(case.dp)]
            loss = pipe.step(schedule, **batches[lane])
            wanted = sum(on_one_device(model, batch) for batch in batches) / case.dp
            gradients = {n: p.grad.div_(case.dp) for n, p in model.named_parameters() if p.grad is not None}
            far("loss", float((loss - wanted).abs()))
            far("gradients", apart(pipe.module.full_grad_dict(), gradients))
            norms = [pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
            far("norm", float((norms[0] - norms[1]).abs()))
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        told["weights"] = apart(pipe.module.full_state_dict(), model.state_dict())
        told |= _called(pipe, model, lane, case.dp)
        told["evaluation"] = outcome(lambda: _evaluated(pipe, type(schedule), model, lane, case.dp))
        whole = sum(p.numel() for n, p in model.named_parameters() if n in dict(pipe.module.storages()))
        told["part"] = sum(p.to_local().numel() for p in pipe.parameters()) / whole
        told["loaded"] = _loaded(pipe, mine, folder)
        dist.barrier(group)
        return told


def clipped_after_others(rank: int, world: int, group: Any) -> float:
    """How far a norm is from one device's where another module lay over more ranks before: torch keeps its meshes."""
    case = Case("tower", "Schedule1F1B", tp=1, dp=2, options={"fully_shard": True})
    with double():
        model = made(case)
        other = autotp.compile(model, 1, dp=2, cp=2, fully_shard=True, example_inputs=batch_of(model), loss=error)
        assert apart(other.full_state_dict(), model.state_dict()) == 0.0
        pipe, schedule = staged(case, model)
        batches = [batch_of(model, seed=i) for i in range(case.dp)]
        pipe.step(schedule, **batches[rank % case.dp])
        for batch in batches:
            on_one_device(model, batch)
        return float(pipe.clip_grad_norm_(0.5) * case.dp - nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def _called(pipe: Any, model: nn.Module, lane: int, lanes: int) -> dict[str, float]:
    batches = [batch_of(model, rows=3, seed=20 + i) for i in range(lanes)]
    losses: list[Any] = []
    for rows in batches:
        rows = dict(rows)
        targets = rows.pop("targets")
        losses.append(error(model(**rows), targets))
    wanted = torch.stack(losses).mean()
    wanted.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    loss = pipe.module(**batches[lane])
    loss.backward()
    far = apart(pipe.module.full_grad_dict(), gradients)
    pipe.module(**batches[lane]).backward()
    twice = apart({n: g / 2 for n, g in pipe.module.full_grad_dict().items()}, gradients)
    return {"called": float((loss - wanted).detach().abs()), "gradients of a call": far, "of two calls": twice}


def _evaluated(pipe: Any, kind: Any, model: nn.Module, lane: int, lanes: int) -> float:
    batches = [batch_of(model, seed=30 + i) for i in range(lanes)]
    pipe.eval()
    model.eval()
    found = pipe.evaluate(pipe.schedule(kind, MICROBATCHES), **batches[lane])
    with torch.no_grad():
        losses = [error(model(rows["input_ids"]), rows["targets"]) for batch in batches for rows in slices(batch)]
    return float((found - torch.stack(losses).mean()).abs())


def _loaded(pipe: Any, optimizer: Any, folder: str) -> float:
    before = {n: t.clone() for n, t in pipe.module.full_state_dict().items()}
    pipe.save_checkpoint(folder, optimizer=optimizer)
    with torch.no_grad():
        for p in pipe.parameters():
            p.add_(1)
    pipe.load_checkpoint(folder, optimizer=optimizer)
    return apart(pipe.module.full_state_dict(), before)


def dealt(rank: int, world: int, group: Any) -> dict[str, float]:
    """How far a step of stages with experts over dp is from one device's, and the part of experts that a rank has."""
    case = Case("mixtral", "Schedule1F1B", tp=1, dp=2, options={"ep": 2})
    with double():
        model = made(case)
        pipe, schedule = staged(case, model)
        batches = [batch_of(model, seed=i) for i in range(case.dp)]
        loss = pipe.step(schedule, **batches[rank % case.dp])
        wanted = sum(on_one_device(model, batch) for batch in batches) / case.dp
        gradients = {n: p.grad.div_(case.dp) for n, p in model.named_parameters() if p.grad is not None}
        told = {"loss": float((loss - wanted).abs()), "gradients": apart(pipe.module.full_grad_dict(), gradients)}
        norms = [pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        own = {n: p.to_local().numel() / p.numel() for n, p in pipe.module.named_parameters() if ".experts." in n}
        return told | {"norm": float((norms[0] - norms[1]).abs()), "experts": max(own.values()), "of": len(own)}


CELLS = ("loss", "gradients", "norm", "weights", "called", "gradients of a call", "of two calls", "loaded")
LOOPS = {"Schedule1F1B": (1, 2), "ScheduleInterleavedZeroBubble": (2, 4), "ScheduleZBVZeroBubble": (2, 4)}


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("Schedule1F1B", True),
        pytest.param("ScheduleZBVZeroBubble", True, marks=APART),
        pytest.param("ScheduleInterleavedZeroBubble", False, marks=APART),
    ],
)
def test_steps_with_dp_are_those_of_one_device(pool: Pool, tmp_path: Path, kind: str, split: bool) -> None:
    chunks, layers = LOOPS[kind]
    case = Case("tower", kind, tp=1, dp=2, chunks=chunks, layers=layers, options={"fully_shard": split})
    found: Outcomes = pool.run(trained, case, str(tmp_path / "saved"))
    for cell in CELLS:
        assert_right(found, cell)
    if kind == "ScheduleZBVZeroBubble":
        assert_refused(found, "evaluation", r"InputError: .*order='v'.* pipe.module\(")
    else:
        assert_right(found, "evaluation")
    assert all((told["part"] < 0.6) == split for told in found), [told["part"] for told in found]


def test_clipping_with_dp_after_a_module_over_other_axes(pool: Pool) -> None:
    """Ranks are compared before torch's collectives with those of the tensor's mesh, not of an older module's."""
    pool.close()  # in new workers, as torch keeps the meshes of other tests too
    assert max(map(abs, pool.run(clipped_after_others))) < 1e-9


def test_steps_with_experts_over_dp_are_those_of_one_device(pool: Pool) -> None:
    for told in pool.run(dealt):
        assert told.pop("experts") == 0.5 and told.pop("of") == 2, "of the one layer of its stage"
        assert max(told.values()) < 1e-6, (told, "transformers' router computes in float32")


def test_steps_with_cp_are_those_of_one_device(pool: Pool, tmp_path: Path) -> None:
    case = Case("tower", "Schedule1F1B", tp=1, options={"cp": 2, "fully_shard": True})
    found: Outcomes = pool.run(trained, case, str(tmp_path / "saved"))
    for cell in (*CELLS, "evaluation"):
        assert_right(found, cell)
    assert all(told["part"] < 0.6 for told in found)
