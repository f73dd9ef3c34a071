"""`sharded.replan`: other degrees over the same ranks, in place, with the optimizer that was there."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import AutoTPError
from autotp.runtime.checkpoint import archives
from tests.helpers.models import inputs_of, transformer


def compiled(model: Any, dp: int, tp: int, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    options |= {"example_inputs": inputs_of(model), "check_capture": False}
    return autotp.compile(model, tp, dp=dp, mesh=mesh, **options)


def adamw(module: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.8, 0.9), eps=1e-4)


def step(module: Any, optimizer: Any, seed: int, model: Any) -> None:
    optimizer.zero_grad()
    module(**inputs_of(model, seed=seed)).logits.float().square().mean().backward()
    optimizer.step()


def through(rank: int, world: int, group: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """Steps at tp=4, dp=2 x tp=2, fully sharded at dp=4, and tp=4 again, one batch everywhere; and one device."""
    model = transformer(name)
    sharded = compiled(model, 1, 4)
    seen: list[Any] = []
    handle = sharded.register_forward_hook(lambda *_: seen.append(1))
    optimizer, own = adamw(sharded), adamw(model)
    before = {id(p) for p in sharded.parameters()}
    kept = len(before)
    for seed, degrees in enumerate([None, {"tp": 2, "dp": 2}, {"tp": 1, "dp": 4, "fully_shard": True}, {"tp": 4}]):
        if degrees is not None:
            sharded.replan(**degrees, optimizer=optimizer)
            kept = min(kept, len(before & {id(p) for p in sharded.parameters()}))
            assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in sharded.parameters()}
        step(sharded, optimizer, seed, model)
        step(model, own, seed, model)
    handle.remove()
    sharded(**inputs_of(model))
    assert sharded.plan.tp == 4 and len(seen) == 4
    return sharded.full_state_dict(), dict(model.state_dict()), kept, len(before)


def test_an_optimizer_goes_on(pool):
    for found, wanted, kept, all_of_them in pool.run(through, "llama-short"):
        assert kept == all_of_them
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def refused(rank: int, world: int, group: Any) -> tuple[list[str], bool]:
    model = transformer("llama-short")
    sharded = compiled(model, 1, 4)
    errors = []
    for degrees in ({"tp": 3}, {"tp": 2}, {"tp": 2, "dp": 2, "optimizer": adamw(model)}, {"tp": 2 + 2 * rank}):
        try:
            sharded.replan(**degrees)
        except AutoTPError as error:
            errors.append(str(error))
    real, rounds = archives._wait, []

    def wait(*args: Any) -> None:
        rounds.append(1)
        if rank == 3 and len(rounds) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)

    before = {name: p.detach().to_local().clone() for name, p in sharded.named_parameters()}
    with patch.object(archives, "_wait", wait):
        try:
            sharded.replan(2, dp=2, bucket=20_000)
        except AutoTPError as error:
            errors.append(str(error))
    same = all(torch.equal(p.detach().to_local(), before[name]) for name, p in sharded.named_parameters())
    return errors, same and sharded.plan.tp == 4


def test_what_is_refused_and_a_rank_that_ends(pool):
    answers = pool.ask(refused, world=4, timeout=200, grace=60)
    pool.close()
    assert sorted(answers) == [0, 1, 2]
    for well, result in answers.values():
        assert well, result
        errors, whole = result
        assert whole and len(errors) == 5 and "rank 3" in errors[4], errors
        assert all("are not the 4 ranks" in text for text in errors[:2]) and "not this module's" in errors[2]
