"""Two stages of torch.distributed.pipelining, each a model compiled by hand on its submesh: losses and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import autotp
from tests.helpers.processes.pool import Pool

CLOSE, MICROBATCHES = 1e-6, 2


def error(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def staged(rank: int, world: int, group: Any, wrong: bool) -> tuple[float, float]:
    """Largest differences of a loss and of a gradient of this rank's stage; `wrong`: of another target."""
    torch.manual_seed(0)
    whole: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)))
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    pieces, targets = x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)
    wanted = [error(whole(a), b) for a, b in zip(pieces, targets, strict=True)]
    (sum(wanted) / MICROBATCHES).backward()  # type: ignore[union-attr]

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "tp"))
    at = mesh["pp"].get_local_rank()
    sharded: Any = autotp.compile(whole[at], example_inputs=pieces[0], mesh=mesh["tp"], check_capture=False)
    between = torch.empty(2, 8, requires_grad=True)  # what one stage gives the next for a microbatch
    shapes: dict[str, Any] = {"input_args": between if at else pieces[0], "output_args": between}
    stage = PipelineStage(sharded, at, 2, torch.device("cpu"), **shapes, group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=error)
    losses: list[Tensor] = []
    (schedule.step(target=target + wrong, losses=losses) if at else schedule.step(x))
    off = max((float((a - b).detach().abs()) for a, b in zip(losses, wanted, strict=bool(at))), default=0.0)
    gradients = sharded.full_grad_dict()
    far = max(float((gradients[n] - p.grad).abs().max()) for n, p in whole[at].named_parameters() if p.grad is not None)
    split = sharded.plan.totals.local_parameters < sharded.plan.totals.parameters
    dist.barrier(group)
    return (off, far) if split else (1.0, 1.0)


def test_two_stages_on_submeshes(pool: Pool) -> None:
    for loss, gradient in pool.run(staged, False):
        assert loss < CLOSE and gradient < CLOSE
    assert min(gradient for _, gradient in pool.run(staged, True)) > 100 * CLOSE
