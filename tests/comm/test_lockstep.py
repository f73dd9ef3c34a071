"""Ranks that part: all of them hear of it at once, by name, before a collective of the one meets another's."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.comm.lockstep import channel_of, meet
from tests.helpers.compare import gradients_differ, mesh_of
from tests.helpers.errors import error_of, message_of


class Net(nn.Module):
    """Split in two; `drop` draws when training."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.relu(self.up(x))))


AGAIN = 60_000  # failures in a row, of which no connection could hold the messages
X = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0))


def made(group: Any, drop: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    return autotp.compile(Net(drop).train(), example_inputs=X[0], mesh=mesh_of(group), **options)


def step(sharded: Any, x: Tensor, optimizer: Any = None, backward: bool = True) -> None:
    loss = sharded(x).square().mean()
    if backward:
        loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def odd_step(sharded: Any, what: str) -> None:
    """A step as rank 1 makes it, and as rank 0 does where it is called with nothing."""
    x, optimizer = X[4], torch.optim.SGD(sharded.parameters(), lr=0.1)
    step(sharded, X[3], optimizer)
    x = {"length": x.repeat(2, 1), "shape": x.reshape(2, 2, 8), "new": x[:3]}.get(what, x)
    sharded.train(what != "train")
    sharded.up.weight.requires_grad_(what != "frozen")
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        if what != "step":
            step(sharded, x, None if what == "update" else optimizer, what != "backward")
    step(sharded, X[5], optimizer)
    step(sharded, X[6], optimizer)


def whole_state(sharded: Any, what: str) -> None:
    """The whole state, of which rank 1 asks for what it already has."""
    step(sharded, X[4])
    if not what:
        sharded.full_state_dict()
    step(sharded, X[5])


WORDS = {
    "backward": "rank 0: backward of call 2 of copy of Net, rank 1: step of SGD on copy of Net, after call 2",
    "step": "do not agree on the values of the inputs of call 2 of copy of Net",
    "update": "rank 0: step of SGD on copy of Net, after call 2, rank 1: forward, call 3 of copy of Net",
    "length": "input 0: rank 0: (4, 8) torch.float32, rank 1: (8, 8) torch.float32",
    "shape": "input 0: rank 0: (4, 8) torch.float32, rank 1: (2, 2, 8) torch.float32",
    "new": "input 0: rank 0: (4, 8) torch.float32, rank 1: (3, 8) torch.float32",
    "train": "training: rank 0: True, rank 1: False",
    "autocast": "autocast: rank 0: off, rank 1: torch.bfloat16",
    "frozen": "frozen parameters: rank 0: none, rank 1: 1: up.weight",
}


def parting(rank: int, world: int, group: Any) -> dict[str, str]:
    """What ranks hear of a step that is another on rank 1; of every kind of call there is a program on both by then."""
    sharded = made(group)
    step(sharded, X[0])
    for x in (X[0].repeat(2, 1), X[0].reshape(2, 2, 8)):
        sharded(x)
    sharded.eval()(X[0])
    sharded.train()
    with torch.autocast("cpu", torch.bfloat16):
        sharded(X[0])
    found = {what: message_of(partial(odd_step, copy.deepcopy(sharded), what if rank else "")) for what in WORDS}
    return found | {"state": message_of(partial(whole_state, copy.deepcopy(sharded), "state" if rank else ""))}


def test_a_step_that_is_another_on_one_rank_is_one_error_on_all(pool):
    one, other = pool.run(parting, world=2)
    assert one == other
    state = {"state": "rank 0: full_state_dict of copy of Net, after call 1, rank 1: forward, call 2 of copy of Net"}
    for what, words in (WORDS | state).items():
        assert words in re.sub(r" \(\d+\)", "", one[what]), (what, one[what])  # its place among others


def narrower(rank: int, world: int, group: Any) -> tuple[str, float]:
    """What a rank hears where a call over two of four ranks fails on one; and of a call over all after it."""
    torch.manual_seed(0)
    model, wide, pair, heard = Net(), made(group), dist.new_group([0, 1]), ""
    if rank < 2:
        narrow = made(pair)
        step(narrow, X[0])
        heard = message_of(partial(narrow, X[1] if rank else "no tensor"))
    return heard, (wide(X[2]) - model(X[2])).abs().max().item()


def test_what_fails_over_some_ranks_is_nothing_to_a_module_over_more(pool):
    (one, apart), (other, _), (third, away), _ = pool.run(narrower, world=4)
    assert one and other and not third
    assert max(apart, away) < 1e-6


def leaving_twice(rank: int, world: int, group: Any) -> list[str]:
    """What ranks hear of two that part in a smaller group, and again while the others have not met them since."""
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], range(4))]
    (*pairs, every), cpu = groups, torch.device("cpu")
    wide, narrow = channel_of(every, rank, 4, cpu, "cp and tp"), channel_of(pairs[rank // 2], rank % 2, 2, cpu)
    assert wide and narrow
    narrow.around.add(wide)
    apart = [message_of(partial(meet, narrow if rank == 2 else wide, "first"))]
    if rank > 1:
        apart.append(message_of(partial(meet, narrow if rank == 3 else wide, "second")))
    heard = message_of(partial(meet, wide, "third")) if rank < 2 else ""
    meet(wide, "fourth")
    return [*apart, heard]


def test_ranks_that_part_again_keep_nobody_waiting(pool):
    *others, one, other = pool.run(leaving_twice, world=4)
    assert "have parted: rank 0: first over tp, rank 1: first over" in one[0] and "rank 0: second over" in other[1]
    for first, heard in others:
        assert "stops at the first" in first and "stops at the third, for others have stopped" in heard


def failing_again(rank: int, world: int, group: Any) -> tuple[list[str], float]:
    """What ranks hear where rank 1 fails in several calls in a row, before it meets them; and then all ranks, often."""
    sharded, failing = made(group), set[int]()

    def hook(*_: Any) -> None:
        if rank in failing:
            raise autotp.AutoTPError(f"not this one{400 * '.'}")

    sharded(X[0])
    sharded.register_forward_pre_hook(hook)
    call = partial(message_of, lambda: sharded(X[1]))
    failing.add(1)
    heard = [call() for _ in range(3)]
    failing.clear()
    heard.append(call())
    failing.update((0, 1))
    for _ in range(AGAIN):
        call()
    failing.clear()
    return heard, float((sharded(X[2]) - made(group)(X[2])).detach().abs().max())


def test_a_rank_that_fails_again_before_it_meets_others_tells_them_each_time(pool):
    (heard, far), (own, other_far) = pool.run(failing_again, world=2)
    assert all(text.startswith("not this one") for text in own[:3]) and own[3] == heard[3] == ""
    assert all("rank 1 of 2 left call" in text and "not this one" in text for text in heard[:3])
    assert far == other_far == 0.0


def alike(rank: int, world: int, group: Any) -> float:
    """What ranks may do together: the largest difference of gradients to the model's."""
    model, sharded = Net(), made(group)
    model.load_state_dict(sharded.full_state_dict())
    apart = 0.0
    for use in (accumulated, together, kept, without_gradients, checkpointed, in_place):
        for module in (model, sharded):
            module.zero_grad()
            use(module)
        apart = max(apart, gradients_differ(sharded, model))
    return apart


def accumulated(module: Any) -> None:
    for x in X[:3]:
        step(module, x)


def together(module: Any) -> None:
    """Several forwards before one backward, and before several in another order."""
    (module(X[0]).square().mean() + module(X[1]).square().mean()).backward()
    first, second = module(X[2]).square().mean(), module(X[3]).square().mean()
    second.backward()
    first.backward()


def kept(module: Any) -> None:
    loss = module(X[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def without_gradients(module: Any) -> None:
    loss = module(X[0]).square().mean()
    with torch.no_grad():
        module.eval()(X[1])
    module.train()(X[2])  # and nothing is made of it
    loss.backward()


def checkpointed(module: Any) -> None:
    for reentrant in (False, True):
        x = X[0].clone().requires_grad_()
        module(x)  # not captured within
        checkpoint(module, x, use_reentrant=reentrant).square().mean().backward()


def in_place(module: Any) -> None:
    module(X[0]).mul_(2).square().mean().backward()


def test_what_ranks_may_do_together_is_no_error(pool):
    assert max(pool.run(alike, world=2)) < 1e-5


def drawing(rank: int, world: int, group: Any) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Outputs by counters where ranks have drawn other numbers than each other; errors of what draws as torch does."""
    found, refused = [], []
    for random in ("counter", "torch"):
        sharded = made(group, 0.5, random=random)
        torch.manual_seed(rank)
        calls: list[Any] = [lambda m=sharded: m(X[0]), lambda m=sharded: torch.rand(rank) is None or m(X[1])]
        for call in calls:  # the first call of a kind, and then one that is known
            if random == "counter":
                found.append(call().detach())
            else:
                refused.append(error_of(call)[:2])
                torch.manual_seed(0)
                sharded(X[0])
    return found, refused


def test_random_numbers_are_rank_0s_or_refused_at_every_call(pool):
    (found, refused), (others, _) = pool.run(drawing, world=2)
    assert all(map(torch.equal, found, others))
    for kind, text in refused:
        assert kind == "RankError" and "the ranks' generators are in different states" in text, text
