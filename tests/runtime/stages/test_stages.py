"""Stages of a pipeline beside the model on one device, and what they refuse; real models in `test_models.py`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules

import autotp
from tests.helpers.pipelines import (
    CLOSE,
    MICROBATCHES,
    Case,
    Tower,
    batch_of,
    compared,
    double,
    drawn,
    error,
    gradients_apart,
    refused,
    slices,
    untied,
)  # fmt: skip
from tests.helpers.processes import own_world
from tests.helpers.processes.pool import Pool

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
    "mode": "StateError: this schedule was made with training=True",
    "other": "InputError: this schedule is not of these stages",
}


def test_a_tied_gradient_that_is_dropped_shows(pool: Pool) -> None:
    assert min(pool.run(untied, Case("tower"))) > 1e-3


def test_two_stages_are_the_model(pool: Pool) -> None:
    found = pool.run(compared, Case("tower", steps=3))
    for loss, gradient, weight, _ in found:
        assert loss < CLOSE and gradient < CLOSE and weight < CLOSE
    held = [set(names) for *_, names in found]
    assert held[0] == held[1] and held[2] == held[3] and held[0] & held[2] == {"embed.weight"}
    assert "blocks.0.1.weight" in held[0] and "blocks.1.1.weight" in held[2]


@pytest.mark.parametrize("where", ["drop", "late"], ids=["in blocks", "in the last stage alone"])
def test_dropout_draws_the_same_masks_in_stages_and_evaluation_none(pool: Pool, where: str) -> None:
    for same, other, evaluated in pool.run(drawn, 7, where, timeout=120.0):
        assert same < CLOSE and evaluated < CLOSE and other > 1e-4


class Scored(Tower):
    """A tower that gives its loss, as a search over meshes plans it."""

    def forward(self, input_ids: Tensor, targets: Any = None) -> Tensor:
        return error(super().forward(input_ids), targets)


def machine(speed: float) -> autotp.Cluster:
    """The local machine so many times as fast, on a link that is slower than any work."""
    local = replace(autotp.Cluster.preset("local"), intra_bandwidth=1e6, name=f"{speed:g}")
    rates = {name: speed * rate for name, rate in local.peak_flops.items()}
    overhead, bandwidth = local.launch_overhead / speed, speed * local.memory_bandwidth
    return replace(local, peak_flops=rates, memory_bandwidth=bandwidth, launch_overhead=overhead)


def by_a_search(rank: int, speeds: tuple[float, ...]) -> tuple[set[str], list[float]]:
    """Blocks that this rank holds by the plan of the best mesh, and how far a step's loss and gradients, and a call's,
    are from one device's; the last from one where a weight that moved between stages is another."""
    with double():
        model, off = Scored(6, tied=False), list[float]()
        batch = batch_of(model)
        options: dict[str, Any] = {"example_inputs": slices(batch)[0], "check_capture": False}
        cluster = autotp.Cluster(ranks=[*map(machine, speeds)])
        choice = autotp.plan(model, devices=2, global_batch=len(batch["targets"]), cluster=cluster, **options)
        assert choice.best is not None and choice.best.mesh.pp == 2 and choice.plan is not None
        pipe = autotp.stages(model, 2, plan=choice.plan, **options)
        schedule = pipe.schedule(schedules.Schedule1F1B, MICROBATCHES)
        for do in (lambda: pipe.step(schedule, **batch), lambda: called(pipe, batch), lambda: called(pipe, batch)):
            pipe.module.zero_grad()
            model.zero_grad()
            loss = do()
            wanted = torch.stack([model(**rows) for rows in slices(batch)]).mean()
            wanted.backward()
            off.append(max(float((loss - wanted).detach().abs()), gradients_apart(pipe, model)))
            with torch.no_grad():
                model.get_parameter("blocks.3.1.weight").mul_(1.0 if len(off) == 1 else 1.1)
        return {name.split(".")[1] for name, _ in pipe.module.storages() if name.startswith("blocks")}, off


def called(pipe: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a call of the whole model, with its backward."""
    loss = pipe.module(**batch)
    loss.backward()
    return loss


def test_unlike_devices_have_blocks_by_their_speed_and_are_the_model() -> None:
    """Four and two at 2:1, and three of equal devices; a changed weight of the block that is elsewhere then shows."""
    for speeds, first in (((2.0, 1.0), 4), ((1.0, 1.0), 3)):
        found = own_world.run(by_a_search, speeds, world=2)
        assert [held for held, _ in found] == [set(map(str, own)) for own in (range(first), range(first, 6))]
        for _, (step, call, control) in found:
            assert step < CLOSE and call < CLOSE and control > 1e-4


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
