"""Equal bits on any number of ranks: outputs, losses, gradients, trained weights and checkpoints, by `torch.equal`."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autotp
from autotp.comm import collectives
from autotp.comm.virtual import AllHosts, Host
from autotp.errors import InputError, StateError
from autotp.text import amount
from tests.helpers.compare import mesh_of

from .runs import Dropped, call_of, trained


def compare(pool: Any, name: str, dtype: str, virtual: int, worlds: tuple[int, ...], **options: Any) -> None:
    """Hold runs on so many ranks against that of one process."""
    alone = trained(None, name, dtype, virtual, **options)
    for world in worlds:
        for values in pool.run(on_ranks, name, dtype, virtual, options, world=world):
            assert values.keys() == alone.keys()
            odd = [key for key in alone if not torch.equal(values[key], alone[key])]
            assert not odd, (world, odd)


def on_ranks(
    rank: int, world: int, group: Any, name: str, dtype: str, virtual: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    return trained(mesh_of(group), name, dtype, virtual, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["kv2", "llama-uneven-short", "llama-tied-short"])
def test_language_models_train_to_the_same_bits(pool, name: str, dtype: str):
    compare(pool, name, dtype, 4, (4,) if dtype == "float32" else (2,))


@pytest.mark.parametrize("name", ["t5-short", "vit-short", "gpt2-short", "dropout", "lora"])
def test_other_models_train_to_the_same_bits(pool, name: str):
    compare(pool, name, "float32", 4, (2,))


@pytest.mark.parametrize("name", ["mamba", "dropout", "lora"])
def test_others_in_bfloat16_too(pool, name: str):
    compare(pool, name, "bfloat16", 4, (2,))


def test_of_six_ranks_two_and_three_send_what_they_cannot_sum(pool):
    compare(pool, "dropout", "float32", 6, (2, 3))


def summed(rank: int, world: int, group: Any, dtype: torch.dtype) -> tuple[bool, list[str]]:
    """Whether a sum of twelve in slices is that of all at once, and the collectives of it."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(7, 9999, generator=draw).to(dtype) for _ in range(12)]
    host, primitives = Host(3 * rank, 3, 12, group.group_name), list[str]()
    real = collectives.real

    def counted(primitive: Any, *args: Any, **options: Any) -> Tensor:
        primitives.append(primitive)
        return real(primitive, *args, **options)

    with patch.object(collectives, "real", counted):
        found = host.exchange("all_reduce", xs[host.first : host.first + 3], "sum")
    wanted = AllHosts(12).exchange("all_reduce", xs, "sum")[0]
    return all(torch.equal(x, wanted) for x in found), primitives


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_in_slices_have_the_same_bits(pool, dtype: torch.dtype):
    for equal, primitives in pool.run(summed, dtype, world=4):
        assert equal and primitives == ["all_to_all", "all_gather"]
    wide, narrow = Host(3, 3, 12), Host(0, 4, 8)
    assert wide.traffic("all_reduce", 100) == 600 and wide.traffic("all_reduce", 1 << 20) == 2.25 * (1 << 20)
    assert narrow.traffic("all_reduce", 100) == 100 and wide.traffic("reduce_scatter", 100) == 150
    assert wide.traffic("all_gather", 100) == 75 and narrow.traffic("all_to_all", 100) == 25


@pytest.mark.parametrize("split", [True, False])
def test_slices_of_the_sequence_are_a_choice_of_the_one_plan(pool, split: bool):
    compare(pool, "llama-short", "float32", 4, (4,), sequence_parallel=split)


def test_another_order_of_one_sum_shows(pool, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    send = Host.send
    swap = [0, 2, 1, 3]
    monkeypatch.setattr(Host, "send", lambda self, p, xs, r: send(self, p, [xs[i] for i in swap], r))
    with pytest.raises(AssertionError, match="gradient of"):
        compare(pool, "llama-short", "float32", 4, (4,), sequence_parallel=False)


def saved(rank: int, world: int, group: Any, folder: str, steps: int, load: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model, inputs = call_of("dropout")
    mesh = mesh_of(group) if group is not None else None
    module = autotp.compile(model, mesh=mesh, example_inputs=inputs, tp_invariant=4, check_capture=False).eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if load:
        module.load_checkpoint(folder, optimizer=optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        module(**inputs).square().mean().backward()
        module.clip_grad_norm_(1.0)
        optimizer.step()
    module.save_checkpoint(folder, optimizer=optimizer)
    return module.full_state_dict()


def test_a_run_goes_from_four_ranks_to_two_to_one_and_back(pool, tmp_path: Path):
    whole = saved(0, 1, None, str(tmp_path / "whole"), 8, load=False)
    folder = str(tmp_path / "moved")
    pool.run(saved, folder, 2, False, world=4)
    pool.run(saved, folder, 2, True, world=2)
    saved(0, 1, None, folder, 2, load=True)
    for values in pool.run(saved, folder, 2, True, world=4):
        assert all(torch.equal(values[name], whole[name]) for name in whole)


def test_hooks_see_whole_values_and_backward_hooks_are_refused():
    model, inputs = call_of("llama-short")
    module = autotp.compile(model, example_inputs=inputs, tp_invariant=4, check_capture=False)
    shapes: dict[str, torch.Size] = {}
    for name in ("gate_proj", "down_proj"):
        layer: Any = module.get_submodule(f"model.layers.0.mlp.{name}")
        layer.register_forward_hook(lambda _, args, out, name=name: shapes.update({name: out.shape}))
    module(**inputs)
    assert shapes == {"gate_proj": (2, 16, 128), "down_proj": (2, 16, 64)}
    module.model.layers[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(StateError, match="backward hooks on modules, with tp_invariant"):
        module(**inputs)


def torchs_norm(rank: int, world: int, group: Any) -> str:
    model, inputs = call_of("llama-short")
    module = autotp.compile(model, mesh=mesh_of(group), example_inputs=inputs, tp_invariant=4, check_capture=False)
    module(**inputs).loss.backward()
    with pytest.raises(StateError, match="module.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    return ""


def test_torchs_own_norm_is_refused(pool):
    pool.run(torchs_norm, world=2)


def test_optimizers_that_sum_are_refused():
    module = autotp.compile(Dropped(), example_inputs={"x": torch.randn(4, 8, 32)}, tp_invariant=4)
    module(x=torch.randn(4, 8, 32)).sum().backward()
    optimizer = torch.optim.Adafactor(module.parameters())
    with pytest.raises(StateError, match="Adafactor is not among the optimizers that update each element by itself"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp": 3}, r"tp=3 does not divide tp_invariant=4: take tp from \[1, 2, 4\]"),
        ({"tp_invariant": True}, "tp_invariant=True: give the largest number of ranks"),
        ({"dp": 2}, "dp=2 with tp_invariant: sums over dp"),
        ({"backend": "inductor"}, "backend='inductor' with tp_invariant: kernels that a compiler writes"),
        ({"precision": "float8"}, "precision='float8' with tp_invariant: scales of float8"),
        ({"optimise": {"overlap": True}}, "rewrites of a rank's program"),
        ({"outputs": "sharded"}, "outputs='sharded' with tp_invariant"),
        ({"compare": "first"}, "autotp.verify"),
        ({"seconds": 5.0}, "seconds=5.0 with tp_invariant: a search that its time ends"),
        ({"tp": "auto"}, "tp='auto' with tp_invariant: the degree is picked"),
    ],
)
def test_what_has_other_bits_is_refused_by_name(options: dict[str, Any], text: str):
    model, inputs = call_of("llama-short")
    asked: Any = {"example_inputs": inputs, "tp_invariant": 4, **options}
    with pytest.raises(InputError, match=text):
        autotp.compile(model, **asked)


def sending(rank: int, world: int, group: Any) -> tuple[float, str]:
    """Bytes that this rank sends in a forward and a backward, and what the plan says of that."""
    torch.set_num_threads(1)
    model, inputs = call_of("llama-short")
    module = autotp.compile(model, mesh=mesh_of(group), example_inputs=inputs, tp_invariant=8, check_capture=False)
    real, sent = collectives.real, list[float]()

    def counted(primitive: Any, x: Tensor, *args: Any, tp: int, **options: Any) -> Tensor:
        sent.append(x.nbytes * (tp - 1) / (1 if primitive == "all_gather" else tp))
        return real(primitive, x, *args, tp=tp, **options)

    with patch.object(collectives, "real", counted):
        module(**inputs).loss.backward()
    return sum(sent), str(module.plan.report())


def test_the_plan_counts_what_the_tree_sends_at_each_degree(pool):
    counts = set[float]()
    for world in (2, 4):
        for sent, report in pool.run(sending, world=world):
            words = " ".join(report.split())
            assert f"{8 // world} of the plan's 8 tp ranks in each of {world} processes" in words
            assert f"which sends {amount(sent)} in a step of the example inputs" in words, (sent, words)
            counts.add(sent)
    assert len(counts) == 2
