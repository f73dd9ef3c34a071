"""Ranks of other slices of the batch that part: one error on all ranks of both axes, before a sum over dp waits."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.errors import message_of


class Net(nn.Module):
    """Gives a loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y if target is None else nn.functional.mse_loss(y, target)


X = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)).double()
WORDS = {
    "labels": "structure: ranks 0-1: ",
    "examples": "examples: ranks 0-1: 4, ranks 2-3: 3",
    "training": "training: ranks 0-1: True, ranks 2-3: False",
    "frozen": "frozen parameters: ranks 0-1: none, ranks 2-3: 1: up.weight",
    "one tp rank": "input 0: ranks 0-2: (4, 4, 8) torch.float64, rank 3: (4, 2, 8) torch.float64",
    "update": "parted: ranks 0-1: step of SGD on Net, after call N of Net, ranks 2-3: forward, call N of Net",
    "backward": "parted: ranks 0-1: backward of call N of Net, ranks 2-3: step of SGD on Net, after call N of Net",
}


def step(sharded: Any, x: Tensor, optimizer: Any, what: str = "") -> None:
    loss = sharded(x).square().mean() if what == "labels" else sharded(x, x)
    if what != "backward":
        loss.backward()
    if what != "update":
        optimizer.step()
    sharded.zero_grad()


def odd(sharded: Any, x: Tensor, optimizer: Any, what: str) -> None:
    """A step as the second slice makes it, and as the first does where it is called with nothing."""
    sharded.train(what != "training")
    sharded.up.weight.requires_grad_(what != "frozen")
    mine = {"examples": x[:3], "one tp rank": x[:, :2]}.get(what, x)
    step(sharded, mine, optimizer, what)
    step(sharded, x, optimizer)


def parting(rank: int, world: int, group: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = X.chunk(2)[mesh["dp"].get_local_rank()]
    torch.manual_seed(0)
    model = Net().double().train()
    sharded: Any = autotp.compile(model, dp=2, mesh=mesh, example_inputs=(x, x))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    mine = x[:, : 3 + rank // 2]  # slices may be of other lengths
    sharded(mine).square().mean().backward()
    slices = [X[:4, :3], X[4:, :4]]
    torch.stack([model(each).square().mean() for each in slices]).mean().backward()
    got = sharded.full_grad_dict()
    wanted: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    found["apart"] = max(float((got[n] - grad).abs().max()) for n, grad in wanted.items())
    for what in WORDS:
        sharded.zero_grad()
        theirs = rank == 3 if what == "one tp rank" else rank > 1
        found[what] = message_of(partial(odd, sharded, x, optimizer, what if theirs else ""))
        sharded.train()
        sharded.up.weight.requires_grad_()
    return found


class Padded(nn.Module):
    """Attends by a mask that is looked up, as transformers does, and reads each example's last token."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.up, self.mixing = nn.Linear(8, 8), mixing

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        keep = seen.bool()[rows[:, None, None], columns[None, None]]
        y = torch.where(keep, self.up(x) @ x.mT, -1e9).softmax(-1) @ self.up(x)
        y = y - y.flip(0) if self.mixing else y
        return y[rows, seen.sum(1) - 1]


def lengths(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Slices of another length on each dp rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lane, found = mesh["dp"].get_local_rank(), dict[str, Any]()
    for mixing in (False, True):
        torch.manual_seed(0)
        model, inputs = Padded(mixing).double(), []
        for length in (4, 3):
            seen = torch.arange(length) < torch.tensor([[length], [2], [3], [1]])
            inputs.append((X[:4, :length], seen.long()))
        own: Any = {"dp": 2, "mesh": mesh, "example_inputs": inputs[0], "check_capture": False}
        sharded = autotp.compile(model, **own)
        if mixing:
            found["refused"] = message_of(partial(sharded, *inputs[lane]))
            continue
        wanted = [model(*each) for each in inputs]
        got = sharded(*inputs[lane])
        found["forward"] = float((got - wanted[lane]).detach().abs().max())
        got.square().mean().backward()
        torch.stack([each.square().mean() for each in wanted]).mean().backward()
        parts = sharded.full_grad_dict()
        grads: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
        found["backward"] = max(float((parts[n] - grad).abs().max()) for n, grad in grads.items())
    return found


def test_padded_slices_of_other_lengths_are_right_and_one_error_where_examples_mix(pool):
    for found in pool.run(lengths):
        assert found["forward"] < 1e-12 and found["backward"] < 1e-12, found
        assert "were given other lengths" in found["refused"], found


def test_a_slice_that_is_called_otherwise_is_one_error_on_all_ranks(pool):
    everyone = pool.run(parting)
    for found in everyone:
        assert found["apart"] < 1e-12
        assert found | {"apart": 0} == everyone[0] | {"apart": 0}
    for what, words in WORDS.items():
        text = re.sub(r"call \d+( of Net( \(\d+\))?)?", "call N of Net", everyone[0][what])
        assert words in text, (what, text)
