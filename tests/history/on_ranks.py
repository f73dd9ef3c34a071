"""Rows of what runs after the backward, and of groups of ranks: real processes, and each bug beside what is right.

Every check gives how far the sharded run is from one device, and how far it is with the bug put back in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_, get_total_norm

import autotp
from autotp.comm import collectives, conversions
from autotp.errors import RankError
from autotp.runtime import weight_reads
from autotp.runtime.generation import generating
from autotp.runtime.storage import unwrap
from tests.helpers.compare import gradients_differ
from tests.helpers.models import redrawn
from tests.helpers.modules.mixtures import mixture, part, tokens

from .modules import Attention, Experts, Masked, Mlp, Tied
from .row import hidden

Pair = tuple[float, float]  # relative differences from one device: as it is, and with the bug
Check = Callable[[int, Any, str], Pair]


@dataclass(frozen=True)
class OnRanks:
    """A row that takes processes: the same as in `Row`, and the check in place of a module and a mutant."""

    number: int
    where: str
    symptom: str
    bug: str
    check: Check
    world: int = 2


@cache
def trained(make: Callable[[], nn.Module]) -> nn.Module:
    """A model after the backward of one call, on one device."""
    model = made(make)
    backward(model)
    return model


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    return redrawn(make())


def backward(model: Any) -> None:
    """A step's gradients."""
    model(hidden()).square().sum().backward()


def sharded(make: Callable[[], nn.Module], group: Any) -> Any:
    """The model over the ranks of a group."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    return autotp.compile(made(make), mesh=mesh, example_inputs=hidden())


def relative(found: Any, wanted: Any) -> float:
    """The largest difference as a part of the largest value."""
    found, wanted = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def clipped(make: Callable[[], nn.Module], forgotten: str, rank: int, group: Any, folder: str) -> Pair:
    """The norm that gradients are clipped by, and the same without those of some parameters."""
    model = sharded(make, group)
    backward(model)
    wanted = get_total_norm([p.grad for p in trained(make).parameters() if p.grad is not None])
    graded = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    some: Any = get_total_norm([g for n, g in graded.items() if forgotten not in n])
    found: Any = clip_grad_norm_(model.parameters(), 1.0)
    return relative(found.full_tensor(), wanted), relative(some.full_tensor(), wanted)


def _squares(tensors: Any) -> Tensor:
    return torch.stack([t.detach().to_local().square().sum() for t in tensors]).sum()


def flat(rank: int, group: Any, folder: str) -> Pair:
    """The norm of all gradients, and that of what the first rank holds."""
    make = Mlp
    model = sharded(make, group)
    backward(model)
    wanted = get_total_norm([p.grad for p in trained(make).parameters() if p.grad is not None])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = _squares(grads)
    dist.broadcast(own, 0, group=group)
    found: Any = get_total_norm(grads)
    return relative(found.full_tensor(), wanted), relative(math.sqrt(own), wanted)


def weights(rank: int, group: Any, folder: str) -> Pair:
    """The norm of the parameters, and the sum of what all ranks hold, in which whole ones count on each."""
    make = Mlp
    model = sharded(make, group)
    wanted = get_total_norm([p.detach() for p in trained(make).parameters()])
    own = _squares(model.parameters())
    dist.all_reduce(own, group=group)
    found: Any = get_total_norm([p.detach() for p in model.parameters()])
    return relative(found.full_tensor(), wanted), relative(math.sqrt(own), wanted)


def evaluated(rank: int, group: Any, folder: str) -> Pair:
    """Training again after an evaluation: what one device's masks give, and the evaluation's result once more."""
    model = sharded(Masked, group)

    def drawn() -> Tensor:
        torch.manual_seed(5)
        return model(hidden()).detach()

    before = drawn()
    model.eval()
    evaluation = drawn()
    assert relative(evaluation, made(Masked).eval()(hidden()).detach()) < 1e-5
    model.train()
    return relative(drawn(), before), relative(evaluation, before)


def other_group(rank: int, group: Any, folder: str) -> Pair:
    """Two groups of two ranks, and sums over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = autotp.compile(made(Mlp), mesh=mesh, example_inputs=hidden())
    wanted = made(Mlp)(hidden()).detach()
    right, real = relative(model(hidden()).detach(), wanted), collectives.real

    def of_all(*args: Any, group: str, **others: Any) -> Tensor:
        everyone: Any = dist.group.WORLD
        return real(*args, group=everyone.group_name, **others)

    with patch.object(collectives, "real", of_all):
        return right, relative(model(hidden()).detach(), wanted)


def step(model: Any, optimizer: Any) -> None:
    """One step of training."""
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def adamw(model: Any) -> torch.optim.AdamW:
    """An optimizer with moments."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved(rank: int, group: Any, folder: str) -> None:
    """Two ranks train a step and save."""
    model = sharded(Mlp, group)
    optimizer = adamw(model)
    step(model, optimizer)
    model.save_checkpoint(Path(folder) / "saved", optimizer=optimizer)


def resumed(rank: int, group: Any, folder: str) -> Pair:
    """Four ranks go on with what two saved; and with the moments of one weight at another of the same shape."""
    alone = made(Mlp)
    optimizer = adamw(alone)
    step(alone, optimizer)
    step(alone, optimizer)
    wanted = torch.cat([p.detach().flatten() for p in alone.parameters()])
    pair = []
    for swapped in (False, True):
        model = sharded(Mlp, group)
        optimizer = adamw(model)
        step(model, optimizer)
        model.load_checkpoint(Path(folder) / "saved", optimizer=optimizer)
        if swapped:
            first, second = (dict(model.named_parameters())[f"first.{n}"] for n in ("weight", "bias"))
            optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
        step(model, optimizer)
        full = model.full_state_dict()
        pair.append(relative(torch.cat([full[n].flatten() for n, _ in alone.named_parameters()]), wanted))
    return pair[0], pair[1]


class Speaker(Tied):
    """Says twenty tokens more, each drawn from what the model gives."""

    def generate(self, ids: Tensor) -> Tensor:
        for _ in range(20):
            drawn = torch.multinomial(self(ids)[:, -1].softmax(-1), 1)
            ids = torch.cat([ids, drawn], 1)
        return ids


def sampled(rank: int, group: Any, folder: str) -> Pair:
    """Tokens drawn by the first rank's random numbers, where each rank has others; and by each rank's own.

    Tokens that differ are refused by name at the next call, which counts as endless.
    """
    alone, given = made(Speaker), torch.arange(8).view(2, 4)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    parts: Any = autotp.compile(made(Speaker), mesh=mesh, example_inputs=given)

    def drawn(model: Any, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(given)

    wanted = drawn(alone, 7)
    right = relative(drawn(parts, 7 + rank), wanted)
    with patch.object(generating, "one_generator", lambda *_: nullcontext()):
        try:
            return right, relative(drawn(parts, 7 + rank), wanted)
        except RankError:
            return right, math.inf


@cache
def dealt_experts(rank: int) -> Callable[[], float]:
    """How far gradients are from one device's, of experts that are dealt over dp, two for a rank."""
    model, mesh = mixture("by hand"), init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    own: Any = {"dp": 4, "ep": 2, "mesh": mesh, "example_inputs": part(tokens(), rank, 4)}
    parts: Any = autotp.compile(mixture("by hand"), **own)
    model(**tokens()).square().mean().backward()

    def off() -> float:
        parts.zero_grad()
        parts(**own["example_inputs"]).square().mean().backward()
        return gradients_differ(parts, model)

    return off


def undivided(rank: int, group: Any, folder: str) -> Pair:
    """Gradients of experts, and those without the mean's divisor."""
    off = dealt_experts(rank)
    right = off()
    with patch.object(weight_reads, "unwrap", lambda found, owners: unwrap(found, [1] * len(owners))):
        return right, off()


def unsorted(way: tuple[str, str], left: str, rank: int, group: Any, folder: str) -> Pair:
    """Rows that travel, and such as are left in the order in which they came, or in which their experts had them."""
    off = dealt_experts(rank)
    right, nothing = off(), {left: conversions.nothing}
    with patch.dict(conversions.KINDS, {way: replace(conversions.KINDS[way], **nothing)}):
        return right, off()


ROWS = [
    OnRanks(28, "Megatron#7452", "tokens are scattered over the wrong group", "sums are of all ranks",
            other_group, world=4),
    OnRanks(29, "Megatron#7452", "a parameter of each head is left out of the clipping norm",
            "the norm is without that of the heads", partial(clipped, partial(Attention, "heads"), "q_norm")),
    OnRanks(30, "Megatron#5916, Megatron#6080", "the gradients' norm is without that of the experts",
            "the norm is without that of the experts", partial(clipped, Experts, "down")),
    OnRanks(31, "DeepSpeed#5411", "the norm is of the first rank's part: wrong by the square root of tp",
            "the first rank's own norm", flat),
    OnRanks(32, "Megatron efd25df", "the parameters' norm counts whole ones tp times",
            "the sum over ranks of all that they hold", weights),
    OnRanks(40, "Megatron 7cc8d83", "dropout is off for ever after an evaluation", "the evaluation's result again",
            evaluated),
    OnRanks(44, "transformers#36634, gpt-oss#270", "each rank samples a token of its own",
            "every rank draws from its own generator; a RankError names the inputs that differ", sampled),
    OnRanks(45, "transformers#48569, Megatron#7452", "the optimizer's state is another parameter's after a resume",
            "the moments of two parameters are exchanged", resumed, world=4),
    OnRanks(47, "pytorch#160285, Megatron#5956", "gradients of experts over ep are ep times too large",
            "the divisor of the mean over dp is left out", undivided, world=4),
    OnRanks(48, "vllm#52639, torchtitan#3604", "what experts made of a token comes back to another",
            "rows come back in their experts' order", partial(unsorted, ("T", "S"), "pre"), world=4),
    OnRanks(49, "torchtitan#1237", "products by expert read other rows than came for them",
            "counted by expert, and left in their senders' order", partial(unsorted, ("S", "T"), "post"), world=4),
]  # fmt: skip


def run(rank: int, world: int, group: Any, folder: str) -> list[Pair | None]:
    """The checks of a world, in the rows' order."""
    if world == 2:
        saved(rank, group, folder)
    return [row.check(rank, group, folder) if row.world == world else None for row in ROWS]
