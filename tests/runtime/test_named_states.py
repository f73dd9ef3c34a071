"""A model that takes its cache as tensors and returns it: every rank gets its part, and passes that on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.errors import InputError
from tests.helpers.errors import error_of
from tests.helpers.modules.carried import CARRIED, KV, Attention, Nested, past, tokens

pytestmark = pytest.mark.ranks


def decoded(rank: int, world: int, group: Any, kv: int) -> dict[str, Any]:
    """Whole tensors of length 0 first, then what came back, in pieces of several lengths."""
    torch.manual_seed(0)
    model, x, none = Attention(kv), tokens(9), past(0, kv)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=(x[:, :3], *past(5, kv)), carried=CARRIED)
    found, cache, wrong = [], none, 0.0
    with torch.no_grad():
        whole = model(x, *none)[0]
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
            if start == 5:
                changed = [t.clone() for t in cache]
                changed[1].view(-1)[:1] += 1.0
                wrong = float((sharded(x[:, 5:6], *changed)[0] - whole[:, 5:6]).abs().max())
            y, *cache = sharded(x[:, start:stop], *cache)
            found.append(y)
        again = sharded(x[:, 6:], *(t[:, :, :6] for t in model(x, *none)[1:]))[0]  # of the original, whole
        several = sharded(x[:1, 6:], *(t[:1, :, :6] for t in cache))[0]  # fewer sequences, cropped
    return {
        "difference": float((torch.cat(found, 1) - whole).abs().max()),
        "whole": float((again - whole[:, 6:]).abs().max()),
        "selected": float((several - whole[:1, 6:]).abs().max()),
        "changed": wrong,
        "shapes": [tuple(t.shape) for t in cache],
        "programs": len(sharded._programs_made),
    }


@pytest.mark.parametrize(("world", "kv", "held"), [(2, 2, 1), (3, 2, 2)])
def test_a_cache_that_comes_back_as_tensors_is_a_ranks_part(pool, world, kv, held):
    results = pool.run(decoded, kv, world=world)
    for found in results:
        assert max(found["difference"], found["whole"], found["selected"]) < 1e-6, found
        assert found["shapes"][0] == (2, held, 9, 4)
        assert found["programs"] == 4  # without a token before, with one new, with several, and those of one sequence
    assert max(found["changed"] for found in results) > 1e-3  # a changed entry shows


def refused(rank: int, world: int, group: Any) -> list[tuple[str, str, float]]:
    """Parts that are none of this plan's; on one rank alone."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    sharded: Any = autotp.compile(Attention(), mesh=mesh, example_inputs=(tokens(3), *past(5)), carried=CARRIED)
    k, v = past(6, KV + 1)
    with torch.no_grad():
        mine = sharded(tokens(3), *past(5))[1:]
        told = [error_of(lambda: sharded(tokens(3), k, v))]
        told.append(error_of(lambda: sharded(tokens(3), *((k, v) if rank else mine))))
        sharded(tokens(3), *mine)  # and goes on
    return told


def test_a_state_of_another_plan_is_refused_on_every_rank(pool):
    for told in pool.run(refused, world=2):
        assert "past_k has 3 of 2 in dimension 1, and this rank's part of it are 1" in told[0][1], told
        assert "this state was made by the unsharded model, or under another plan" in told[0][1]
        assert told[1][0] in ("InputError", "RankError"), told


def in_containers(rank: int, world: int, group: Any) -> tuple[float, Any]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model, x = Nested(), tokens(4)
    plan = autotp.plan(model, world, example_inputs=(x, list(past(5))), carried={"cache": "past"})
    sharded: Any = autotp.parallelize(model, autotp.Plan.from_json(plan.to_json()), mesh, carried={"cache": "past"})
    with torch.no_grad():
        first = sharded(x, list(past(5)))
        second = sharded(x[:, :2], list(first["cache"]))
        wanted = model(x[:, :2], list(model(x, list(past(5)))["cache"]))
    return float((second["y"] - wanted["y"]).abs().max()), tuple(second["cache"][0].shape)


def test_containers_and_saved_plans(pool):
    for difference, shape in pool.run(in_containers, world=2):
        assert difference < 1e-6 and shape == (2, 1, 11, 4)


def test_what_is_no_argument_is_refused():
    with pytest.raises(InputError, match="carried names 'keys', and forward has no such argument"):
        autotp.compile(Attention(), 1, example_inputs=(tokens(3), *past(5)), carried={1: "keys"})
