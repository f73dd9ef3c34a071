"""`autotp.move` between real ranks: weights, optimizer states, caches; refusals; a rank that ends in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from autotp.errors import AutoTPError
from autotp.runtime.checkpoint import archives
from tests.helpers.models import inputs_of, transformer
from tests.helpers.states import same

SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven-tied": ("llama-uneven", {"tie_word_embeddings": True, "num_hidden_layers": 1, **SIX}),
    "fused": ("gpt2", {"n_layer": 1}),
}
BUCKET = 20_000  # bytes: several rounds
NEW = 6  # tokens


def original(name: str) -> Any:
    if name == "small":
        return small(0)
    family, changed = MODELS[name]
    return transformer(family, **changed)


def batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    if isinstance(model, nn.Sequential):
        return {"input": torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))}
    return inputs_of(model, seed=seed)


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def compiled(model: nn.Module, dp: int, tp: int, **options: Any) -> Any:
    inputs = autotp.Inputs(**batch_of(model))
    return autotp.compile(model, tp, dp=dp, mesh=mesh_of(dp, tp), example_inputs=inputs, check_capture=False, **options)


def adamw(sharded: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(sharded.parameters(), lr=1e-3, betas=(0.8, 0.9), eps=1e-4)


def step(sharded: Any, optimizer: Any, seed: int, model: Any) -> None:
    optimizer.zero_grad()
    outputs = sharded(**batch_of(model, seed))
    getattr(outputs, "logits", outputs).float().square().mean().backward()
    optimizer.step()


def states_of(sharded: Any, optimizer: Any) -> dict[str, Tensor]:
    out = dict(sharded.full_state_dict())
    for i, p in enumerate(sharded.parameters()):
        for key, value in optimizer.state[p].items():
            out[f"{i} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return out


# ---- weights and optimizers -----------------------------------------------------------------------------------------


def beside_a_folder(rank: int, world: int, group: Any, name: str, folder: str, shard: bool, meshes: Any) -> int:
    """A step after a move, and after a checkpoint through a folder, from tp=4 to dp=2 x tp=2 and back."""
    model = original(name)
    source = compiled(model, 1, 4)
    optimizer = adamw(source)
    step(source, optimizer, 1, model)
    source.save_checkpoint(Path(folder) / "dcp", optimizer=optimizer)
    compared, most = 0, 0
    for dp, tp in meshes:
        target = compiled(original(name), dp, tp, fully_shard=shard and dp > 1)
        by_folder, by_move = adamw(target), adamw(target)
        target.load_checkpoint(Path(folder) / "dcp", optimizer=by_folder)
        step(target, by_folder, 2, model)
        wanted = {name: value.clone() for name, value in states_of(target, by_folder).items()}
        real, most = archives._round, 0

        def noted(sends: Any, *sides: Any, real: Any = real) -> None:
            nonlocal most
            most = max(most, sum(x.nbytes for x in sends))
            real(sends, *sides)

        with patch.object(archives, "_round", noted):
            assert autotp.move(source, target, optimizer=(optimizer, by_move), bucket=BUCKET) == {}
        assert most <= BUCKET
        step(target, by_move, 2, model)
        same(states_of(target, by_move), wanted)
        compared += len(wanted)
    return compared


def test_a_step_after_a_move_is_that_after_a_checkpoint(pool, tmp_path):
    assert min(pool.run(beside_a_folder, "small", str(tmp_path), True, ((2, 2), (1, 4)))) > 20


def apart(rank: int, world: int, group: Any) -> bool:
    """From ranks 0 and 1 to ranks 1, 2 and 3, which have it on the meta device."""
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)) for ranks in ([0, 1], [1, 2, 3])]
    model, source, target = original("uneven-tied"), None, None
    if rank < 2:
        source = autotp.compile(model, mesh=meshes[0], example_inputs=inputs_of(model), check_capture=False)
    if rank:
        with torch.device("meta"):
            empty = type(model)(model.config).eval()
        target = autotp.compile(empty, mesh=meshes[1], example_inputs=inputs_of(model), check_capture=False)
    autotp.move(source, target, bucket=BUCKET)
    if target is not None:
        same(target.full_state_dict(), model.state_dict())
        assert torch.equal(target(**inputs_of(model)).logits, target(**inputs_of(model)).logits)
    return target is not None


def test_to_other_ranks(pool):
    assert pool.run(apart) == [False, True, True, True]


def with_stages(rank: int, world: int, group: Any) -> int:
    """Of a pipe's two stages each on two ranks, to tp=4, and back to another pipe."""
    model = transformer("llama-tied")
    batch = inputs_of(model, batch=1)
    pipes = [autotp.stages(original_like(model, i), 2, 2, outputs="full", example_inputs=batch) for i in range(2)]
    whole = compiled(original_like(model, 5), 1, 4)
    modules = pipes[0].module, whole, pipes[1].module
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1, momentum=0.9) for x in modules]
    pipes[0].module(**inputs_of(model, batch=1)).logits.square().mean().backward()
    optimizers[0].step()
    wanted = gathered(pipes[0])
    autotp.move(pipes[0], whole, optimizer=(optimizers[0], optimizers[1]))
    found = {name: value.clone() for name, value in whole.full_state_dict().items()}
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert len(optimizers[1].state) == len(list(whole.parameters()))
    autotp.move(whole, pipes[1], optimizer=(optimizers[1], optimizers[2]))
    same(gathered(pipes[1]), wanted)
    return len(wanted)


def original_like(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return type(model)(model.config).eval()


def gathered(pipe: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in pipe.module.full_state_dict().items()}


def test_in_one_process():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]
    source, target = (autotp.compile(model, 1, example_inputs=torch.randn(2, 8)) for model in models)
    autotp.move(source, target, what=("weights",))
    same(target.full_state_dict(), models[0].state_dict())


# ---- caches ---------------------------------------------------------------------------------------------------------


def decoded(model: Any, kind: str, moves: Any = None) -> list[int]:
    """Tokens of greedy decoding, with a move in the middle: `moves(cache)` gives the other module and its cache."""
    from transformers import DynamicCache, StaticCache  # noqa: PLC0415

    ids = inputs_of_cache(model)
    cache: Any = StaticCache(model.config, max_cache_len=24) if kind == "static" else DynamicCache(config=model.config)
    tokens = []
    for i in range(NEW):
        if i == NEW // 2 and moves is not None:
            model, cache = moves(cache)
        with torch.no_grad():
            outputs = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = outputs.logits[:, -1:].argmax(-1), outputs.past_key_values
        tokens += ids.flatten().tolist()
    return tokens


def inputs_of_cache(model: Any) -> Tensor:
    return torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(3))


def over_slices(rank: int, world: int, group: Any) -> tuple[list[int], list[int]]:
    """From tp=4 to dp=2 x tp=2, whose slices of the batch go on with a sequence each."""
    model = transformer("llama-cache-short")
    wanted = decoded(model, "dynamic")
    source, target = compiled(model, 1, 4), compiled(model, 2, 2)
    row = rank // 2

    def moves(cache: Any) -> Any:
        past = autotp.move(source, target, cache={"past_key_values": cache})["past_key_values"]

        def own(input_ids: Tensor, **options: Any) -> Any:
            return target(input_ids=input_ids[-1 if len(input_ids) == 1 else row][None], **options)

        return own, past

    found = decoded(source, "dynamic", moves)
    half = NEW // 2 * 2
    return wanted[:half] + wanted[half + row :: 2], found


def half_and_half(rank: int, world: int, group: Any, kind: str, kv: int, warm: bool) -> tuple[list[int], list[int]]:
    model = transformer("llama-cache-short", num_key_value_heads=kv)
    wanted = decoded(model, kind)
    source = autotp.compile(model, 4, example_inputs=inputs_of(model), check_capture=False)
    meshes = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
    own = meshes[0 if rank < 2 else 1]
    target: Any = autotp.compile(model, mesh=own, example_inputs=inputs_of(model), check_capture=False)
    if warm:
        decoded(target, kind)

    def moves(cache: Any) -> Any:
        return target, autotp.move(source, target, cache={"past_key_values": cache})["past_key_values"]

    return wanted, decoded(source, kind, moves)


def test_a_sequence_half_at_one_degree_and_half_at_another(pool):
    for wanted, found in pool.run(half_and_half, "static", 4, False):
        assert found == wanted


def test_more_layouts_caches_and_stages(pool, tmp_path):
    assert min(pool.run(beside_a_folder, "uneven-tied", str(tmp_path), False, ((2, 2), (1, 4)))) > 40
    assert min(pool.run(beside_a_folder, "fused", str(tmp_path), True, ((2, 2),))) > 20
    for case in (("dynamic", 4, False), ("dynamic", 2, True), ("static", 8, True)):
        for wanted, found in pool.run(half_and_half, *case):
            assert found == wanted, case
    for wanted, found in pool.run(over_slices):
        assert found == wanted
    assert min(pool.run(with_stages)) > 5


# ---- what is refused ------------------------------------------------------------------------------------------------


def small(seed: int, width: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))


def over(model: nn.Module, dp: int, tp: int) -> Any:
    x = torch.randn(2, model[0].in_features, dtype=model[0].weight.dtype)  # type: ignore[index]
    return autotp.compile(model, tp, dp=dp, mesh=mesh_of(dp, tp), example_inputs=x, check_capture=False)


def refused(rank: int, world: int, group: Any) -> list[str]:
    """One error on every rank, for each of these, after which all is as it was."""
    model = small(0)
    source, target = over(model, 1, 4), over(small(1), 2, 2)
    other, half = over(small(2, 16), 2, 2), over(small(1).bfloat16(), 2, 2)
    before = dict(target.full_state_dict())
    optimizer = adamw(source)
    errors = []

    def said(move: Any) -> None:
        try:
            move()
        except AutoTPError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("nothing")

    said(lambda: autotp.move(source, other))
    said(lambda: autotp.move(source, half))
    said(lambda: autotp.move(source, target, what=("weights", "grads")))
    said(lambda: autotp.move(source, target, what="weights" if rank else ("weights",)))
    said(lambda: autotp.move(source, None))
    said(lambda: autotp.move(source if rank < 3 else None, target if rank < 3 else None))
    said(lambda: autotp.move(source if rank else None, target))
    said(lambda: autotp.move(source, target, optimizer=(optimizer, None)))
    said(lambda: autotp.move(source, target, bucket=4))
    said(lambda: autotp.move(source, target, cache={"past_key_values": [1]}))
    said(lambda: autotp.move(source, model))

    def hook(*_: Any) -> None:
        autotp.move(source, target)

    handle = source[0].register_forward_hook(hook)
    said(lambda: source(torch.randn(2, 32)))
    handle.remove()
    same(target.full_state_dict(), before)
    autotp.move(source, target)
    same(target.full_state_dict(), model.state_dict())
    return errors


WANTED = (
    "does not fit the model, and nothing was loaded", "bfloat16", "give some of weights", "", "of the target no rank",
    "rank 3 has a part of neither", r"of the source ranks [0] have not", "where both sides have one", "at least 16",
    "no object with state", "got Sequential", "within a call of a sharded module",
)  # fmt: skip


def test_what_is_refused(pool):
    every = pool.run(refused)
    for i, text in enumerate(WANTED):
        for rank, errors in enumerate(every):
            assert errors[i].split(":")[0].endswith("Error") and text in errors[i], (rank, errors[i])


def cut_off(rank: int, world: int, group: Any) -> tuple[str, bool]:
    """Rank 3 is killed in the second round."""
    source, target = over(small(0), 1, 4), over(small(1), 2, 2)
    real, rounds = archives._wait, []

    def wait(*args: Any) -> None:
        rounds.append(1)
        if rank == 3 and len(rounds) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)

    before, text = {name: p.detach().to_local().clone() for name, p in source.named_parameters()}, ""
    with patch.object(archives, "_wait", wait):
        try:
            autotp.move(source, target, bucket=4000)
        except AutoTPError as error:
            text = f"{type(error).__name__}: {error}"
    whole = all(torch.equal(p.detach().to_local(), before[name]) for name, p in source.named_parameters())
    return text, whole


def test_a_rank_that_ends_in_the_middle(pool):
    answers = pool.ask(cut_off, world=4, timeout=120, grace=60)
    pool.close()
    assert sorted(answers) == [0, 1, 2]
    for well, (text, whole) in answers.values():
        assert well and whole and text.startswith("RankError") and "rank 3" in text, text
