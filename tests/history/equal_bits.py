"""Rows of what runs after the backward, and of groups of ranks, with `tp_invariant`: the same bits on any number.

Each check gives what one process, two ranks or four must have alike; what is refused there says so by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_, get_total_norm

import autotp
from autotp.errors import StateError

from .modules import Attention, Experts, Masked, Mlp
from .on_ranks import Speaker, adamw, backward, made, step
from .row import hidden

VIRTUAL = 4
Values = dict[str, Tensor]


def mesh_of(group: Any) -> DeviceMesh | None:
    """The mesh of a group; None in one process."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)) if group is not None else None


def sharded(make: Callable[[], nn.Module], mesh: DeviceMesh | None, given: Any = None) -> Any:
    """The model over the ranks of a mesh, or in one process, with the bits of four."""
    inputs = hidden() if given is None else given
    return autotp.compile(made(make), mesh=mesh, example_inputs=inputs, tp_invariant=VIRTUAL, check_capture=False)


def in_groups(group: Any) -> Values:
    """28: groups of ranks, each with sums of its own."""
    mesh = mesh_of(group)
    if group is not None and group.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = sharded(Mlp, mesh)
    y = model(hidden())
    y.square().sum().backward()
    return {"output": y.detach(), **model.full_grad_dict()}


def norms(make: Callable[[], nn.Module], group: Any) -> Values:
    """29 to 31: the norm of all gradients, by the module; torch's own is refused on ranks."""
    model = sharded(make, mesh_of(group))
    backward(model)
    if group is not None:
        with pytest.raises(StateError, match=r"module.clip_grad_norm_"):
            clip_grad_norm_(model.parameters(), 1.0)
    return {"norm": model.clip_grad_norm_(1.0), **model.full_grad_dict()}


def of_weights(group: Any) -> Values:
    """32: the norm of the parameters, which whole ones have on every rank."""
    return {"norm": get_total_norm(sharded(Mlp, mesh_of(group)).full_state_dict().values())}


def evaluated(group: Any) -> Values:
    """40: training again after an evaluation."""
    model, values = sharded(Masked, mesh_of(group)), Values()
    for name, mode in (("before", True), ("evaluation", False), ("again", True)):
        model.train(mode)
        torch.manual_seed(5)
        values[name] = model(hidden()).detach()
    assert torch.equal(values["again"], values["before"]) and not torch.equal(values["again"], values["evaluation"])
    return values


def sampled(group: Any) -> Values:
    """44: tokens that are drawn, by the first rank's random numbers."""
    given = torch.arange(8).view(2, 4)
    model = sharded(Speaker, mesh_of(group), given)
    torch.manual_seed(7)
    return {"tokens": model.generate(given)}


def trained(folder: Path, group: Any, steps: int, load: bool) -> Values:
    """45: steps after those that another number of ranks saved, with the optimizer's state."""
    model = sharded(Mlp, mesh_of(group))
    optimizer = adamw(model)
    if load:
        model.load_checkpoint(folder, optimizer=optimizer)
    for _ in range(steps):
        step(model, optimizer)
    model.save_checkpoint(folder, optimizer=optimizer)
    return model.full_state_dict()


ROWS: dict[int, Callable[[Any], Values]] = {
    28: in_groups, 29: partial(norms, partial(Attention, "heads")), 30: partial(norms, Experts),
    31: partial(norms, Mlp), 32: of_weights, 40: evaluated, 44: sampled,
}  # fmt: skip


def run(rank: int, world: int, group: Any, folder: str) -> dict[int, Values]:
    """What every row gives; the last goes on with what two ranks, or one process, saved."""
    torch.set_num_threads(1)
    own = None if world == 1 else group
    return {number: check(own) for number, check in ROWS.items()} | {45: trained(Path(folder), own, 1, world != 2)}
