"""A rank that leaves a call by an exception: all ranks hear of it at that token, and the next call is right."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.comm import turn
from autotp.errors import AutoTPError, RankError
from tests.helpers.compare import mesh_of
from tests.helpers.models import transformer

IDS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))

POSITIONS = torch.arange(6).expand(2, 6)


class Fails:
    """A logits processor, streamer, stopping criterion or hook that fails when it is used for the nth time."""

    def __init__(self, at: int, here: bool) -> None:
        self.at, self.here, self.count = at, here, 0

    def used(self) -> None:
        self.count += 1
        if self.here and self.count == self.at:
            raise OSError("the disk is full")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.used()
        return scores

    def put(self, value: Any) -> None:
        self.used()

    def end(self) -> None:
        if self.here and self.at < 0:
            raise OSError("the disk is full")


def criterion(fails: Fails) -> Any:
    """A stopping criterion that goes on."""

    def stops(ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        fails.used()
        return torch.zeros(len(ids), dtype=torch.bool)

    return stops


def generate(sharded: Any, **options: Any) -> Tensor:
    return sharded.generate(IDS, **{"max_new_tokens": 5, "do_sample": False} | options)


def with_hook(sharded: Any, fails: Any, path: str, kind: str, run: Any) -> None:
    hook = lambda *_: fails.used()  # noqa: E731
    handle = getattr(sharded.get_submodule(path), f"register_{kind}")(hook)
    try:
        run()
    finally:
        handle.remove()


def train(sharded: Any) -> None:
    sharded(IDS).logits.square().mean().backward()


def ways(sharded: Any, here: bool) -> dict[str, Any]:
    """What a rank may fail in, by name; `here` where it is this one."""
    fails, block = partial(Fails, here=here), "model.layers.0.mlp"
    streamed = partial(sharded.generate, IDS[:1], max_new_tokens=5, do_sample=False)
    hooked = partial(with_hook, sharded)
    return {
        "processor": lambda: generate(sharded, logits_processor=[fails(3)]),
        "first token": lambda: streamed(streamer=fails(1)),
        "a token": lambda: streamed(streamer=fails(3)),
        "end": lambda: streamed(streamer=fails(-1)),
        "criterion": lambda: generate(sharded, stopping_criteria=[criterion(fails(2))]),
        "last criterion": lambda: generate(sharded, stopping_criteria=[criterion(fails(5))]),
        "hook": lambda: hooked(fails(2), block, "forward_hook", partial(generate, sharded)),
        "pre-hook of a layer": lambda: hooked(
            fails(1), f"{block}.up_proj", "forward_pre_hook", partial(train, sharded)
        ),
        "hook of the root": lambda: hooked(fails(2), "", "forward_hook", partial(generate, sharded)),
        "backward hook": lambda: hooked(fails(1), block, "full_backward_hook", partial(train, sharded)),
    }  # fmt: skip


def outcome(call: Any) -> str:
    try:
        call()
    except (OSError, AutoTPError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leaving(rank: int, world: int, group: Any) -> dict[str, tuple[str, bool]]:
    """What a rank raises in each way, and whether it generates the same tokens afterwards."""
    sharded: Any = autotp.compile(transformer("llama"), example_inputs=IDS, mesh=mesh_of(group))
    wanted, found = generate(sharded), {}
    for name, call in ways(sharded, rank == 1).items():
        text = outcome(call)
        found[name] = text, torch.equal(generate(sharded), wanted)
    for name, own in {"options": {"max_new_tokens": 4 + rank}, "streamer": {"streamer": Fails(99, True)}}.items():
        options = own if name == "options" or rank else {}
        text = outcome(lambda options=options: sharded.generate(IDS[:1], **{"max_new_tokens": 5} | options))
        found[name] = text, torch.equal(generate(sharded), wanted)
    return found


def test_a_rank_that_leaves_a_call_is_one_error_on_all_ranks_at_that_token(pool):
    first, second = pool.run(leaving, world=2)
    assert len(first) == 12
    for name in first:
        assert first[name][1] and second[name][1], name
        if name == "streamer":
            assert first[name][0] == second[name][0] == ""
        elif name == "options":
            assert "do not agree on the options of generate()" in first[name][0] and "4" in first[name][0]
            assert first[name][0] == second[name][0]
        else:
            assert second[name][0] == "OSError: the disk is full", name
            assert first[name][0].startswith("RankError"), name
            assert "tp rank 1 of 2 left" in first[name][0] and "OSError: the disk is full" in first[name][0], name


def silent(rank: int, world: int, group: Any) -> str:
    """The error of rank 0 where the others say nothing when they leave, as a control."""
    sharded: Any = autotp.compile(transformer("llama"), example_inputs=IDS, mesh=mesh_of(group))
    turn.depart = lambda text: None
    try:
        text = outcome(ways(sharded, rank == 1)["processor"])
        if rank:  # else rank 0 would wait for as long as the process group lets it
            text = outcome(partial(sharded, IDS))
    finally:
        turn.depart = _LEAVE
    return text


_LEAVE = turn.depart


def test_without_a_word_the_other_rank_hears_of_it_at_another_call(pool):
    first, second = pool.run(silent, world=2)
    assert first == second and "do not agree on the inputs" in first and "the disk is full" not in first


def on_two_axes(rank: int, world: int, group: Any) -> dict[str, tuple[str, bool]]:
    """Likewise with dp: those of the other slice hear of it too, and of ranks that part within one slice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = transformer("llama-short", hidden_size=16, intermediate_size=16, vocab_size=64, num_key_value_heads=8)
    # What generate() calls the model with: one program, which four ranks build.
    example = {"input_ids": IDS, "position_ids": POSITIONS, "logits_to_keep": 1, "return_dict": True}
    sharded: Any = autotp.compile(model, dp=2, mesh=mesh, example_inputs=example, check_capture=False)
    mine = IDS[rank // 2 : rank // 2 + 1]
    tokens = partial(sharded.generate, mine, max_new_tokens=3, do_sample=False)
    wanted, found = tokens(), {}
    for name, call in {
        "processor": lambda: tokens(logits_processor=[Fails(2, rank == 3)]),
        "a slice's own": lambda: sharded.full_state_dict() if rank == 1 else tokens(),
        "options": lambda: tokens(top_k=5 + (rank == 2)),
    }.items():
        text = outcome(call)
        found[name] = text, torch.equal(tokens(), wanted)
    return found


def test_ranks_of_another_slice_hear_of_it_too(pool):
    everyone = pool.run(on_two_axes)
    for rank, found in enumerate(everyone):
        assert all(right for _, right in found.values()), found
        wanted = "OSError: the disk is full" if rank == 3 else "rank 3 of 4 left generate()"
        assert wanted in found["processor"][0]
        assert found["a slice's own"][0].startswith("RankError"), found
        assert found["options"][0].startswith("RankError") and "options of generate()" in found["options"][0]


class Net(nn.Module):
    """Split in two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def threaded(rank: int, world: int, group: Any) -> list[str]:
    """Errors of four threads that call two modules of the same ranks, and whether all other calls were right."""
    torch.manual_seed(0)
    nets, x, texts = [Net(), Net()], torch.randn(4, 8), list[str]()
    sharded = [autotp.compile(net, example_inputs=x, mesh=mesh_of(group)) for net in nets]

    def work(net: Any, own: Any) -> None:
        for _ in range(20):
            try:
                out = own(x)
            except RankError as error:
                texts.append(str(error))
            else:
                torch.testing.assert_close(out, net(x))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(nets * 2, sharded * 2, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for net, own in zip(nets, sharded, strict=True):
        torch.testing.assert_close(own(x), net(x))
    return texts


def test_calls_of_threads_queue(pool):
    first, second = pool.run(threaded, world=2)
    assert len(first) == len(second) and all("have parted" in text for text in first + second)
