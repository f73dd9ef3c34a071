"""Steps beside `pipe.step`, weights that are drawn, a stage that trains nothing, two losses: as on one device.

What cannot be so is one error on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import autotp
from autotp import compat
from tests.helpers.pipelines import (
    CLOSE,
    MICROBATCHES,
    Case,
    Outcomes,
    Tower,
    apart,
    assert_refused,
    assert_right,
    batch_of,
    double,
    error,
    gradients_apart,
    made,
    off,
    on_one_device,
    outcome,
    slices,
    staged,
)  # fmt: skip
from tests.helpers.processes.pool import Pool


class WithAuxiliary(Tower):
    """A loss to which one of every block is added, and that besides."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x, auxiliary = self.embed(input_ids), torch.zeros(())
        for block in self.blocks:
            x = x + block(x)
            auxiliary = auxiliary + x.square().mean()
        return {"loss": self.head(x).square().mean() + auxiliary, "auxiliary": auxiliary}


def run_otherwise(rank: int, world: int, group: Any) -> dict[str, Any]:
    """How far gradients are from those of one device, by schedules that `pipe.step` does not call."""
    with double():
        case = Case("tower", tp=1, dp=2)
        model = made(case)
        pipe, schedule = staged(case, model)
        for lane in range(2):
            on_one_device(model, batch_of(model, seed=lane))
        for p in model.parameters():
            p.grad = p.grad / 2 if p.grad is not None else None
        tensors = pipe.feed(autotp.Inputs(**batch_of(model, seed=rank % 2)), MICROBATCHES)
        tensors |= {"target": torch.zeros(MICROBATCHES)} if rank >= 2 else {}
        schedule.eval(**tensors)
        told: dict[str, Any] = {}
        told["gradients of an evaluation"] = [n for n, p in pipe.module.named_parameters() if p.grad is not None]
        schedule.step(**tensors)
        told["schedule"] = outcome(lambda: gradients_apart(pipe, model))
        pipe.module.zero_grad()
        told["schedule of the user"] = outcome(lambda: pipe.stages)
        dist.barrier(group)
        return told


@pytest.fixture(scope="module")
def otherwise(pool: Pool) -> Outcomes:
    if compat.VERSION < (2, 12):
        pytest.skip("refused on this torch, as a test below shows")
    return pool.run(run_otherwise)


def test_a_schedule_s_own_step_sums_over_stages_and_dp(otherwise: Outcomes) -> None:
    assert_right(otherwise, "schedule")


def test_a_schedule_s_own_evaluation_leaves_no_gradients(otherwise: Outcomes) -> None:
    assert [told["gradients of an evaluation"] for told in otherwise] == [[], [], [], []]


def test_a_schedule_of_the_user_s_over_the_stages_would_not_sum_over_dp(otherwise: Outcomes) -> None:
    assert_refused(otherwise, "schedule of the user", r"StateError: .* here are \S+. pipe.schedule\(kind")


def drawn(module: nn.Module) -> None:
    """An initialiser that gives a tied weight other numbers as an embedding than as a linear layer."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


def initialised(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """How far weights that are drawn after the cut, of two blocks and one, are from those of one device."""
    with double():
        told, model = {}, made(Case("tower", layers=3))
        pipe, schedule = staged(Case("tower"), model)

        def draw(how: Callable[[Any], Any]) -> Any:
            for each in (model, pipe.module):
                torch.manual_seed(7)
                how(each)
            return outcome(lambda: apart(pipe.module.full_state_dict(), model.state_dict()))

        told["apply"] = draw(lambda m: m.apply(drawn))
        told["step"] = outcome(lambda: off(pipe, schedule, model, batch_of(model)))
        told["loop"] = outcome(lambda: [nn.init.normal_(p) for p in pipe.parameters()])
        for module in (pipe.module, model):
            module.zero_grad()
        with torch.no_grad():
            next(iter(pipe.parameters())).mul_(2 if rank < 2 else 1)  # the tied weight
        told["written"] = outcome(lambda: pipe.step(schedule, **batch_of(model)))
        told["saved"] = outcome(lambda: pipe.save_checkpoint(f"{folder}/saved"))
        with torch.no_grad():
            model.head.weight.mul_(2 if rank < 2 else 1)
        told["model"] = outcome(lambda: staged(Case("tower"), model))
        dist.barrier(group)
        return told


@pytest.fixture(scope="module")
def draws(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return pool.run(initialised, str(tmp_path_factory.mktemp("draws")))


def test_apply_draws_what_it_draws_of_the_whole_model(draws: Outcomes) -> None:
    assert_right(draws, "apply")
    assert_right(draws, "step")


def test_a_loop_over_parameters_of_one_stage_is_told_how_to_draw_those_of_all(draws: Outcomes) -> None:
    assert_refused(draws, "loop", r"StateError: numbers are drawn .* pipe.module.apply\(fn\)")


@pytest.mark.parametrize(("cell", "what"), [("written", "step of 4 "), ("saved", "a save of Tower")])
def test_a_tied_weight_that_one_stage_writes(draws: Outcomes, cell: str, what: str) -> None:
    assert_refused(draws, cell, f"RankError: At {what}.*stages that share embed.weight have other values")


def test_another_model_on_one_stage(draws: Outcomes) -> None:
    assert_refused(
        draws, "model", "RankError: The 4 pp and tp ranks do not agree on the weights .*embed.weight: ranks 0-1"
    )


def frozen_stage(rank: int, world: int, group: Any) -> list[dict[str, Any]]:
    """Of a model of 64 bits, of which the first stage trains nothing: norms by `pipe.clip_grad_norm_` and of one
    device. Steps are taken on all ranks, though the first stage's have nothing to update."""
    model = made(Case("tower", train={"tied": False}))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("blocks.1", "head")))
    pipe, schedule = staged(Case("tower"), model)
    told: list[dict[str, Any]] = []
    for norm_type in (2.0, float("inf")):
        for module in (pipe, model):
            for p in module.parameters():
                p.grad = None
        loss = outcome(lambda: float(pipe.step(schedule, **batch_of(model)) - on_one_device(model, batch_of(model))))
        norms = [clip(1e-3, norm_type) for clip in (
            pipe.clip_grad_norm_, lambda *a: nn.utils.clip_grad_norm_(model.parameters(), *a))]  # fmt: skip
        told.append({"loss": loss, "norm": float((norms[0] - norms[1]).abs())})
        told[-1]["gradients"] = outcome(lambda: gradients_apart(pipe, model)) if rank >= 2 else 0.0
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.barrier(group)
    return told


def test_the_norm_where_a_stage_trains_nothing(pool: Pool) -> None:
    found = pool.run(frozen_stage)
    for i in range(2):
        for cell, most in (("loss", 1e-6), ("norm", 1e-6), ("gradients", CLOSE)):
            assert all(abs(told[i][cell]) < most for told in found), (cell, [told[i][cell] for told in found])


def by_an_older_torch(rank: int, world: int, group: Any, version: tuple[int, int]) -> dict[str, Any]:
    """What becomes of schedules that older versions of torch compute wrongly or hang in, were this torch that one."""
    told: dict[str, Any] = {}
    with double(), mock.patch.object(compat, "VERSION", version):
        zero = Case("tower", "ScheduleInterleavedZeroBubble", chunks=2, layers=4)
        told["apart"] = outcome(lambda: staged(zero, made(zero)) and 0.0)
        model = made(Case("tower"))
        pipe, schedule = staged(Case("tower"), model)
        tensors = pipe.feed(autotp.Inputs(**batch_of(model)), MICROBATCHES)
        tensors |= {"target": torch.zeros(MICROBATCHES)} if rank >= 2 else {}

        def step() -> float:
            schedule.step(**tensors)
            on_one_device(model, batch_of(model))
            return gradients_apart(pipe, model)

        schedule.eval(**tensors)
        told["mode"] = outcome(step)
        dist.barrier(group)
        return told


REFUSED = {
    "apart": r"InputError: ScheduleInterleavedZeroBubble .* counts some of them several times\. .* or torch 2\.13",
    "mode": r"StateError: this schedule began with an evaluation, .* pipe\.schedule",
}


@pytest.mark.parametrize(("version", "cells"), [((2, 11), "apart mode"), ((2, 12), "apart"), ((2, 13), "")])
def test_what_an_older_torch_gets_wrong_is_refused(pool: Pool, version: tuple[int, int], cells: str) -> None:
    if version > compat.VERSION:
        pytest.skip("this torch would hang in what that one can")
    found: Outcomes = pool.run(by_an_older_torch, version)
    for cell, words in REFUSED.items():
        if cell in cells:
            assert_refused(found, cell, words)
        else:
            assert_right(found, cell)


def by_the_schedule(rank: int, world: int, group: Any) -> tuple[float, float]:
    """How far a loss that a schedule computes of the model's outputs, and its gradients, are from one device's."""
    with double():
        model = made(Case("tower"))
        batch = batch_of(model)
        micro = {"input_ids": slices(batch)[0]["input_ids"]}
        pipe = autotp.stages(model, 2, 2, example_inputs=micro, outputs="full", check_capture=False)
        schedule = pipe.schedule(schedules.Schedule1F1B, MICROBATCHES, loss=error)
        loss = pipe.step(schedule, input_ids=batch["input_ids"], target=batch["targets"])
        return float((loss - on_one_device(model, batch)).abs()), gradients_apart(pipe, model)


def test_a_schedule_s_own_loss_of_the_model_s_outputs(pool: Pool) -> None:
    assert all(max(apart) < CLOSE for apart in pool.run(by_the_schedule))


def with_auxiliary(rank: int, world: int, group: Any) -> dict[str, Any]:
    """A model of two losses, without and with a word on which of them counts."""
    with double():
        model = WithAuxiliary().double().train()
        batch = batch_of(model)
        few, wanted = slices(batch)[0], torch.stack([model(r["input_ids"])["loss"] for r in slices(batch)]).mean()

        def loss(chosen: Any, **inputs: Tensor) -> float:
            pipe = autotp.stages(model, 2, 2, example_inputs=inputs, loss=chosen, check_capture=False)
            given = {name: batch[name] for name in inputs}
            found = pipe.step(pipe.schedule(schedules.ScheduleGPipe, MICROBATCHES), **given)
            return float((found - wanted.detach()).abs())

        told = {
            "two": outcome(lambda: loss(None, input_ids=few["input_ids"])),
            "one": outcome(lambda: loss(lambda outputs, targets: outputs["loss"], **few)),
        }
        dist.barrier(group)
        return told


def test_a_model_with_an_auxiliary_loss_is_told_how_to_say_which_counts(pool: Pool) -> None:
    found = pool.run(with_auxiliary)
    assert_refused(
        found, "two", r"InputError: .*this one gives 2\. Say which .* loss=lambda outputs, targets: outputs\.loss"
    )
    assert_right(found, "one")
