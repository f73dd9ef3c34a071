"""What the program of a rank really sends, counted call by call, is what its plan says: exactly."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import autotp
from autotp.plans.plan import Plan
from benchmarks.lists.hand_plans import Counted, FakeStore
from tests.helpers.models import inputs_of, transformer

CASES = [
    ("llama", 2, None),
    ("llama", 4, True),
    ("gpt2", 4, None),
    ("bert", 2, None),
    ("gpt_neox", 2, True),
]


ALONE = {"bucket": False}  # a plan counts a call for each conversion


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks that sends nothing; this process is rank 0."""
    world = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    yield world
    dist.destroy_process_group()


def of_plan(plan: Plan) -> tuple[list[Counter[str]], list[float]]:
    """Calls by primitive, and bytes, forward and backward, as the plan says."""
    calls = [Counter(c.forward for c in plan.collectives), Counter(c.backward for c in plan.collectives)]
    for side in calls:
        del side[None]  # type: ignore[arg-type]
    return calls, [plan.totals.forward_bytes, plan.totals.backward_bytes]  # type: ignore[return-value]


def counted(module: nn.Module, inputs: dict[str, Any], tp: int) -> tuple[list[Counter[str]], list[float]]:
    """The same as it runs: every call of a collective in the second step, for the first one compares the ranks."""
    step(module, inputs, tp)
    sides = step(module, inputs, tp)
    return [by_primitive(side) for side in sides], [side.bytes for side in sides]


def step(module: nn.Module, inputs: dict[str, Any], tp: int) -> tuple[Counted, Counted]:
    with Counted(tp) as forward:
        outputs = module(**inputs)
    loss = sum(x.float().square().mean() for x in outputs.values() if torch.is_tensor(x) and x.requires_grad)
    with Counted(tp) as backward:
        loss.backward()  # type: ignore[union-attr]
    return forward, backward


def by_primitive(side: Counted) -> Counter[str]:
    out: Counter[str] = Counter()
    for call, times in side.calls.items():
        out[call.split()[0]] += times
    return out


@pytest.mark.parametrize(("name", "fake", "sequence"), CASES, indirect=["fake"])
def test_a_rank_sends_what_the_plan_says(name, fake, sequence):
    model = transformer(name)
    inputs = inputs_of(model)
    plan = autotp.plan(model, fake, example_inputs=inputs, sequence_parallel=sequence, check_capture=False)
    found = counted(autotp.parallelize(model, plan, example_inputs=inputs, optimise=ALONE), inputs, fake)
    assert found == of_plan(plan)
    assert all(found[1]) and all(found[0])


@pytest.mark.parametrize("fake", [2], indirect=True)
def test_another_plans_figures_differ(fake):
    """The negative control."""
    model = transformer("llama")
    inputs = inputs_of(model)
    plans = [
        autotp.plan(model, fake, example_inputs=inputs, sequence_parallel=s, check_capture=False) for s in (True, False)
    ]
    found = counted(autotp.parallelize(model, plans[0], example_inputs=inputs, optimise=ALONE), inputs, fake)
    assert found == of_plan(plans[0]) != of_plan(plans[1])
    calls, sent = counted(autotp.parallelize(model, plans[0], example_inputs=inputs), inputs, fake)
    assert sent == found[1] and calls[0] == found[0][0]
    assert calls[1]["all_reduce"] == found[0][1]["all_reduce"] - 2  # a block's norms send their gradients at once


def on_a_rank(rank: int, world: int, group: Any, name: str) -> tuple[dict[str, int], dict[str, int], str]:
    """Calls that torch's own CommDebugMode counts in a real run on gloo, forward and backward; and the plan."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = transformer(name)
    inputs = inputs_of(model)
    sharded = autotp.compile(model, mesh=mesh, example_inputs=inputs, check_capture=False)
    sides = []
    sharded(**inputs)
    warnings.filterwarnings("ignore", "For backward hooks to be called")  # CommDebugMode has hooks on every module
    with CommDebugMode() as mode:
        loss = sharded(**inputs).logits.square().mean()
    sides.append(named(mode))
    with CommDebugMode() as mode:
        loss.backward()
    return (*sides, named(mode), sharded.plan.to_json())  # type: ignore[return-value]


def named(mode: CommDebugMode) -> dict[str, int]:
    out: Counter[str] = Counter()
    for op, times in mode.get_comm_counts().items():
        short = str(op).rsplit(".", 1)[-1]
        out[short.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")] += times
    return {k: v for k, v in out.items() if v}


def test_a_real_run_calls_what_the_plan_says(pool):
    for forward, backward, text in pool.run(on_a_rank, "llama", world=2):
        want = of_plan(Plan.from_json(text))[0]
        assert [forward, backward] == [dict(side) for side in want]
