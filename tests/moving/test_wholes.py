"""`named_tensors`: whole tensors in the names of the original's files, a bucket at a time, into another process."""

from __future__ import annotations

import pickle
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import AutoTPError
from autotp.runtime.checkpoint import wholes
from tests.helpers.models import inputs_of, transformer
from tests.helpers.processes import own_world

BUCKET = 80_000


def engine(pipe: Any, family: str) -> None:
    """Another process: it loads what comes, and says whether that is the model."""
    model: Any = transformer(family)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {}
    while (item := pipe.recv()) is not None:
        name, value = pickle.loads(item)
        state[name] = value
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    same = all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    pipe.send((sorted(set(missing) - tied), list(unexpected), same))


def to_an_engine(rank: int, family: str, dp: int) -> Any:
    """Weights of four ranks to a process beside them, by rank 0; and the most that a rank held whole."""
    model = transformer(family)
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    sharded = autotp.compile(model, 4 // dp, dp=dp, mesh=mesh, fully_shard=dp > 1, example_inputs=inputs_of(model))
    most, answer, gather = 0, None, wholes.Wholes.gather

    def noted(self: Any, *args: Any) -> Any:
        nonlocal most
        out = gather(self, *args)
        most = max(most, sum(x.nbytes for x in out.values()))
        return out

    with patch.object(wholes.Wholes, "gather", noted):
        if rank == 0:
            context = get_context("forkserver")
            ours, theirs = context.Pipe()
            process = context.Process(target=engine, args=(theirs, family))
            process.start()
            for item in sharded.named_tensors(bucket=BUCKET):
                ours.send(pickle.dumps(item))
            ours.send(None)
            answer = ours.recv()
            process.join()
        else:
            for _ in sharded.named_tensors(bucket=BUCKET):
                pass
    try:
        next(sharded.named_tensors(bucket=1000))
    except AutoTPError as error:
        return most, answer, str(error)
    return most, answer, ""


@pytest.mark.parametrize(("family", "dp"), [("llama-tied-short", 1), ("phi3-short", 2)])
def test_another_process_loads_them(family, dp):
    answers = own_world.run(to_an_engine, family, dp, world=4)
    assert answers[0][1] == ([], [], True)
    for most, _, refusal in answers:
        assert 0 < most <= BUCKET and "alone is" in refusal


def test_names_of_files_and_of_the_model():
    model = transformer("llama-tied")
    sharded = autotp.compile(model, 1, example_inputs=inputs_of(model))
    files = dict(sharded.named_tensors())
    assert set(model.state_dict()) - set(files) == {"lm_head.weight"}
    own = dict(sharded.named_tensors(names="original"))
    assert list(own) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in own.items())
    with pytest.raises(AutoTPError, match="give one of huggingface, original"):
        next(sharded.named_tensors(names="gguf"))


def test_experts_are_in_the_forms_of_files(tmp_path):
    """What is one tensor of all experts in the model is one for each in the files."""
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    sharded = autotp.compile(model, 1, example_inputs=inputs_of(model) | {"input_ids": torch.arange(8)[None]})
    found, wanted = dict(sharded.named_tensors()), load_file(tmp_path / "model.safetensors")
    assert set(found) == set(wanted) != set(model.state_dict())
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
