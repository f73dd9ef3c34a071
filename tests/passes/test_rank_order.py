"""Ranks whose processes run a forward in another order have one program."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.driver.compile import capture_model
from autotp.inputs import normalise
from autotp.passes.canonicalise.rank_order import follow, signatures

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Sets(nn.Module):
    """Makes its masks in an order that is given, as a loop over a set does."""

    def __init__(self, kinds: tuple[str, ...] = ("near", "far"), noise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.noise = kinds, noise
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        at = torch.arange(n)
        masks = {}
        for kind in self.kinds:
            reach = torch.sym_min(n, 16) if kind == "near" else n
            masks[kind] = (at[:, None] - at < reach).to(x.dtype)
            if self.noise:
                masks[kind] = masks[kind] + torch.rand(n, n)
        return masks["near"] @ self.down(self.up(masks["far"] @ x).relu())


def captured(*kinds: str, noise: bool = False) -> Any:
    return capture_model(Sets(kinds, noise), normalise(X), torch.device("cpu"))[0]


def test_another_order_is_the_same_program_afterwards():
    one, other = captured("near", "far"), captured("far", "near")
    assert one.digest() != other.digest(), "the negative control"
    assert follow(other, signatures(one)) == len(one.graph.nodes)
    assert other.digest() == one.digest() and signatures(other) == signatures(one)
    other.graph.lint()
    assert [x.node.name for x in other.leaves] == [x.node.name for x in one.leaves]
    assert {s: (n.name, d) for s, (n, d) in other.symbols.items()} == {
        s: (n.name, d) for s, (n, d) in one.symbols.items()
    }


def test_another_program_stays_another():
    one, other = captured("near", "far"), captured("far", "near", noise=True)
    before = other.digest()
    assert follow(other, signatures(one)) == 0
    assert other.digest() == before != one.digest()


def test_random_numbers_drawn_in_another_order_are_another_program():
    one, other = captured("near", "far", noise=True), captured("far", "near", noise=True)
    assert follow(other, signatures(one)) == 0
    assert other.digest() != one.digest()


def test_the_digest_does_not_hold_an_address():
    program = captured("near", "far")
    before = program.digest()
    node = next(n for n in program.graph.nodes if n.target is torch.sym_min)
    node.target = types.FunctionType(torch.sym_min.__code__, {}, torch.sym_min.__name__)  # as in another process
    assert program.digest() == before


def run_on_a_rank(rank: int, world: int, group: Any) -> float:
    model = Sets(("near", "far") if rank else ("far", "near"))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded = autotp.compile(model, example_inputs=X, mesh=mesh)
    worst = float((sharded(X) - model(X)).abs().max().detach())
    sharded.train()  # captured again
    model.train()
    sharded(X).square().mean().backward()
    model(X).square().mean().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return max(worst, *(float((g - wanted[n]).abs().max()) for n, g in sharded.full_grad_dict().items()))


def test_ranks_that_run_in_another_order_agree(pool):
    assert max(pool.run(run_on_a_rank, world=2)) < 1e-5
