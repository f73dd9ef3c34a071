"""Updates that are others on one rank, and torch's own collectives that one rank leaves out: one error on all."""

from __future__ import annotations

import copy
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotp
from autotp.runtime import optimizer_steps
from tests.helpers.compare import mesh_of
from tests.helpers.errors import message_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
STEP = "step of SGD on copy of Sequential"
WORDS = {
    "rate": "lr of group 0: rank 0: 0.1, rank 1: 0.2",
    "zero_grad": f"do not agree on the gradients of the {STEP}",
    "scaled": "do not agree on the gradients for the backward of call 3 of copy of Sequential",
    "no gradient": f"do not agree on the gradients of the {STEP}",
    "clip": f"rank 0: collective of torch, (4,) from _NormP(2.0) to R, rank 1: {STEP}",
    "whole": "rank 0: collective of torch, (4,) from _NormP(2.0) to R, rank 1: collective of torch, (32, 8) from S(0)",
    "state": f"rank 0: {STEP}, after call 4, rank 1: full_state_dict of copy of Sequential",
    "by hand": "rank 0: weights written 0 times, rank 1: weights written 1 times",
    "by a list": "rank 0: weights written 0 times, rank 1: weights written 1 times",
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def odd(sharded: Any, what: str) -> None:
    """Two steps, of which rank 1 makes something another way; rank 0 is called with nothing."""
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.2 if what == "rate" else 0.1)
    for _ in range(2):
        sharded(X)
        if what == "by hand":
            with torch.no_grad():
                sharded[2].bias.zero_()
        if what == "by a list":
            with torch.no_grad():
                torch.ops.aten._foreach_zero_([sharded[0].weight])
    for i in range(2):
        (sharded(X).square().mean() * (1 + (what == "scaled"))).backward()
        if what == "whole":
            sharded[0].weight.full_tensor()
        if what != "clip":
            nn.utils.clip_grad_norm_(sharded.parameters(), 10.0)
        if what == "no gradient":
            sharded[2].bias.grad = None
        if what == "state" and i:
            sharded.full_state_dict()
        optimizer.step()
        if what != "zero_grad":
            optimizer.zero_grad()


def parting(rank: int, world: int, group: Any) -> dict[str, str]:
    sharded = autotp.compile(model(), example_inputs=X, mesh=mesh_of(group))
    found = {what: message_of(partial(odd, copy.deepcopy(sharded), what if rank else "")) for what in WORDS}
    with patch.object(optimizer_steps, "_compare", lambda *args: None):  # what is compared makes the difference
        found["control"] = message_of(partial(odd, copy.deepcopy(sharded), "rate" if rank else ""))
    return found | {"": message_of(partial(odd, copy.deepcopy(sharded), ""))}


def test_an_update_that_is_another_on_one_rank_is_one_error_on_all(pool):
    one, other = pool.run(parting, world=2)
    assert one == other
    assert one[""] == "" and one["control"] == ""
    for what, words in WORDS.items():
        assert words in one[what], (what, one[what])


def within(rank: int, world: int, group: Any) -> tuple[str, str]:
    """A step amid which another thread makes a call: between the same collectives on all ranks, and not so."""
    sharded: Any = autotp.compile(model(), example_inputs=X, mesh=mesh_of(group))
    heard = []

    def call() -> None:
        thread = Thread(target=lambda: heard.append(message_of(lambda: sharded(X))))
        thread.start()
        thread.join()
        if heard[-1]:
            raise autotp.AutoTPError(heard[-1])

    def step(first: bool) -> None:
        weight = sharded[0].weight
        sharded(X).square().mean().backward()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

        def between(*_: Any) -> None:
            whole = weight.grad.full_tensor().norm()
            if first:
                call()
            assert abs(weight.grad.norm().item() - float(whole)) < 1e-6  # a number, as within a step alone
            if not first:
                call()

        optimizer.register_step_pre_hook(between)
        optimizer.step()

    return message_of(partial(step, True)), message_of(partial(step, rank == 0))


def test_a_call_of_another_thread_amid_a_step_is_right_or_one_error(pool):
    (even, odd), (other_even, other_odd) = pool.run(within, world=2)
    assert even == other_even == "" and odd == other_odd
    assert "rank 0: forward, call 4 of Sequential" in odd and "rank 1: collective of torch, () from _NormP(2" in odd


def late(rank: int, world: int, group: Any) -> str:
    """A step left out where the weights of all layers are gathered before the forward."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    mine = X.chunk(2)[rank]
    sharded = autotp.compile(model(), dp=2, fully_shard=True, mesh=mesh, example_inputs=mine)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def steps() -> Tensor:
        for i in range(2):
            sharded(mine).square().mean().backward()
            if not (i == 0 and rank):
                optimizer.step()
        return X

    return message_of(steps)


def test_weights_that_are_gathered_are_no_trap(pool):
    one, other = pool.run(late, world=2)
    assert one == other
    assert "rank 0: step of SGD on Sequential" in one and "rank 1: forward, call 2 of Sequential" in one


def test_a_module_whose_group_is_gone_stops_no_other_optimizer():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sharded = autotp.compile(model(), 2, example_inputs=X)
    dist.destroy_process_group()
    other = model()
    other(X).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="not initialized"):  # its own
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
