"""Stages on ranks that part, by calls or by updates: one error on all ranks, and then the numbers of one device.

Each call of the ranks tries many cells on few pipes, and every test looks at one of them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import autotp
from tests.helpers.pipelines import (
    MICROBATCHES,
    Case,
    Outcomes,
    apart,
    assert_refused,
    assert_right,
    batch_of,
    double,
    made,
    off,
    outcome,
    staged,
)  # fmt: skip
from tests.helpers.processes.pool import Pool


def fails(*_: Any) -> None:
    raise ValueError("of the user's hook")


# ---- on one pipe, which goes on after each error --------------------------------------------------------------------


def called_apart(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """What ranks are told that do different things, or what cannot be."""
    with double():
        model = made(Case("tower"))
        pipe, schedule = staged(Case("tower"), model)
        other_schedule = pipe.schedule(schedules.Schedule1F1B, MICROBATCHES)
        batch, other = batch_of(model), batch_of(model, seed=1)
        block = pipe.module.get_submodule(f"blocks.{rank // 2}")

        def step(which: dict[str, Tensor] = batch, by: Any = schedule) -> Tensor:
            return pipe.step(by, **which)

        told = {
            "batch of a tp rank": outcome(lambda: step(other if rank == 1 else batch)),
            "batch of a stage": outcome(lambda: step(other if rank >= 2 else batch)),
            "evaluation": outcome(lambda: pipe.evaluate(schedule, **batch) if rank >= 2 else step()),
            "schedules": outcome(lambda: step(by=other_schedule if rank >= 2 else schedule)),
            "clipping": outcome(lambda: pipe.clip_grad_norm_(1.0) if rank == 1 else step()),
            "feed": outcome(lambda: pipe.feed(autotp.Inputs(**(other if rank == 1 else batch)), MICROBATCHES)),
            "deepcopy": outcome(lambda: copy.deepcopy(pipe)),
        }
        for cell, where in (("hook on a tp rank", {2}), ("hook of a stage", {2, 3})):
            hook = block.register_forward_hook(fails) if rank in where else None
            told[cell] = outcome(step)
            if hook is not None:
                hook.remove()
        hook = block.register_full_backward_hook(fails) if rank < 2 else None
        told["hook on a backward"] = outcome(step)
        if hook is not None:
            hook.remove()
        weight = next(pipe.module.parameters())
        with torch.no_grad():
            for cell, where in (("weight written", {1}), ("which the other has written too", {0})):
                if rank in where:
                    weight.add_(0)
                told[cell] = outcome(step)
        weight.requires_grad_(rank != 1)
        told["weight frozen"] = outcome(step)
        weight.requires_grad_(True)
        told["type"] = outcome(pipe.module.float)
        pipe.module.zero_grad()
        told["and then"] = outcome(lambda: off(pipe, schedule, model, batch))
        for cell, foreach in (("torch's clipping", None), ("torch's clipping, one by one", False)):
            told[cell] = outcome(lambda f=foreach: nn.utils.clip_grad_norm_(list(pipe.parameters()), 1.0, foreach=f))
        norms = outcome(pipe.clip_grad_norm_(1.0).item), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        told["and our clipping"] = abs(norms[0] - norms[1])
        averages = outcome(lambda: torch.optim.swa_utils.AveragedModel(pipe.module))
        told["averages"] = outcome(lambda: averages.update_parameters(pipe.module))
        told["averaged"] = outcome(lambda: apart(averages.module.full_state_dict(), model.state_dict()))
        told["average's call"] = outcome(lambda: float((averages(**batch) - pipe.module(**batch)).detach().abs()))
        told["blocks"] = [pipe.module.get_submodule(f"blocks.{i}") is pipe.module.blocks[i] for i in range(2)]
        told["held"] = [any(True for _ in each.parameters()) for each in pipe.module.blocks]
        dist.barrier(group)
        return told


@pytest.fixture(scope="module")
def called(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return pool.run(called_apart, str(tmp_path_factory.mktemp("called")))


INPUTS = "RankError: The pp and tp ranks do not agree on the values of the inputs of "
PARTED = "RankError: The 4 pp and tp ranks have parted: "


REFUSALS = {
    "batch of a tp rank": f"{INPUTS}step of 4 .*ranks 0, 2-3: .* rank 1: ",
    "batch of a stage": f"{INPUTS}step of 4 .*ranks 0-1: .* ranks 2-3: ",
    "evaluation": f"{PARTED}ranks 0-1: step of 4 .*, ranks 2-3: eval of 4 ",
    "schedules": f"{PARTED}ranks 0-1: .* by ScheduleGPipe.* ranks 2-3: .* by Schedule1F1B",
    "clipping": f"{PARTED}.*rank 1: clip_grad_norm_ to 1.0",
    "feed": f"{INPUTS}feed",
    "deepcopy": r"StateError: a pipe .* cannot be copied or pickled. Copy pipe.module",
    "hook on a tp rank": "RankError: .*hooks that see whole values: ranks 0-1, 3: none, rank 2: blocks.1",
    "weight written": "RankError: Since the call before step of 4 .* ranks 0, 2-3: weights written 0 times, rank 1: ",
    "weight frozen": "RankError: .* do not agree on .*frozen parameters: ranks 0, 2-3: none, rank 1: 1: embed.weight",
    "type": "StateError: the stages were made for torch.float64: convert the model to torch.float32, and make them",
    "torch's clipping": r"StateError: torch.nn.utils.clip_grad_norm_ .* pipe.clip_grad_norm_\(max_norm\)",
    "torch's clipping, one by one": "StateError: torch.nn.utils.clip_grad_norm_ ",
}


@pytest.mark.parametrize("cell", REFUSALS)
def test_one_error_on_all_ranks(called: Outcomes, cell: str) -> None:
    assert_refused(called, cell, REFUSALS[cell])


@pytest.mark.parametrize(("cell", "first"), [("hook of a stage", 2), ("hook on a backward", 0)])
def test_the_error_of_a_hook_on_one_stage_is_told_to_the_others(called: Outcomes, cell: str, first: int) -> None:
    own = called[first : first + 2]
    assert_refused(own, cell, "ValueError: of the user's hook")
    assert_refused(
        [told for told in called if told not in own], cell, f"RankError: .*rank {first} of 4 left a hook, by ValueError"
    )


def test_after_all_these_errors_a_step_is_that_of_one_device(called: Outcomes) -> None:
    assert_right(called, "and then")
    assert_right(called, "and our clipping")


def test_averages_of_a_rank_s_stages(called: Outcomes) -> None:
    assert_right(called, "averaged")
    assert_right(called, "average's call")


def test_a_block_by_its_number_is_that_block_which_holds_weights_on_the_ranks_of_its_stage(called: Outcomes) -> None:
    for rank, told in enumerate(called):
        assert told["blocks"] == [True, True]
        assert told["held"] == [rank // 2 == 0, rank // 2 == 1]


# ---- stages that are updated differently ----------------------------------------------------------------------------


def sgd(pipe: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


def fused(pipe: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.1, fused=True)


def as_the_others(optimizer: Any, rank: int) -> None:
    optimizer.step()


def step_left_out(optimizer: Any, rank: int) -> None:
    if rank < 2:
        optimizer.step()


def another_rate(optimizer: Any, rank: int) -> None:
    optimizer.param_groups[0]["lr"] *= 1 if rank < 2 else 1.01
    optimizer.step()


def scaler_skips(optimizer: Any, rank: int) -> None:
    """An overflow on one stage: of gradients there that no other one holds."""
    if rank >= 2:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.to_local().fill_(float("inf") if p.ndim == 1 else 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


UPDATES = {
    "alike": (as_the_others, sgd),
    "step": (step_left_out, sgd),
    "rate": (another_rate, sgd),
    "scaler": (scaler_skips, sgd),
    "fused scaler": (scaler_skips, fused),
}


def updated_apart(rank: int, world: int, group: Any, tied: bool) -> dict[str, Any]:
    """A step, an update and another step, of each kind of update: how far the second step is from one device's."""
    with double():
        told: dict[str, Any] = {}
        case = Case("tower", train={"tied": tied})
        model = made(case)
        pipe, schedule = staged(case, model)
        start = copy.deepcopy(model.state_dict())
        for cell, (update, optimizer_of) in UPDATES.items():
            pipe.module.load_state_dict(start, strict=False)
            model.load_state_dict(start)
            mine, theirs = optimizer_of(pipe), optimizer_of(model)
            off(pipe, schedule, model, batch_of(model))
            refused = outcome(partial(update, mine, rank))
            theirs.step()
            for optimizer in (mine, theirs):
                optimizer.zero_grad()
            # Where ranks part at the update, those that left it out hear of it at their next step.
            told[cell] = refused or outcome(lambda: off(pipe, schedule, model, batch_of(model, seed=1)))
            pipe.module.zero_grad()
            model.zero_grad()
        dist.barrier(group)
        return told


@pytest.fixture(scope="module")
def updated(pool: Pool) -> dict[bool, Outcomes]:
    return {tied: pool.run(updated_apart, tied) for tied in (True, False)}


PARTED_AT = {
    "step": "ranks 0-1: step of SGD on Tower, after call .*, ranks 2-3: reading the inputs",
    "scaler": "ranks 0-1: step of SGD on Tower, after call .*, ranks 2-3: reading the inputs",
    "fused scaler": "ranks 0-1: step of AdamW on .*, ranks 2-3: step, of which a scaler has found an overflow, of",
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_updates_that_are_alike_are_those_of_one_device(updated: dict[bool, Outcomes], tied: bool) -> None:
    assert_right(updated[tied], "alike")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("cell", ["step", "scaler", "fused scaler"])
def test_an_update_that_is_left_out_on_one_stage(updated: dict[bool, Outcomes], cell: str, tied: bool) -> None:
    assert_refused(updated[tied], cell, PARTED + PARTED_AT[cell])


def test_another_learning_rate_for_a_tied_weight_on_one_stage(updated: dict[bool, Outcomes]) -> None:
    assert_refused(updated[True], "rate", "RankError: At step of 4 .*stages that share embed.weight have other values")
