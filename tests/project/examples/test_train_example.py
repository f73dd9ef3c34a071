"""examples/train.py goes on where it stopped, to the bit; what it cannot go on from is a sentence."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.examples import example_of

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 16}
SMALL = ["--batch", "2", "--length", "8", "--accumulate", "1", "--warm-up", "2", "--steps", "6", "--no-recompute"]


def example() -> ModuleType:
    return example_of("train")


def on_ranks(group: Any) -> ModuleType:
    """The example on some of the pool's workers: a script takes the whole world."""
    train, mesh = example(), mesh_of(group)

    class Some:
        get_rank, get_world_size = partial(dist.get_rank, group), partial(dist.get_world_size, group)
        all_gather_object = partial(dist.all_gather_object, group=group)
        barrier = partial(dist.barrier, group)

    compiled = partial(autotp.compile, mesh=mesh)
    names = {"compile": compiled, "AutoTPError": autotp.AutoTPError, "ShardedModule": autotp.ShardedModule}
    vars(train).update(dist=Some, autotp=SimpleNamespace(**names))
    return train


def losses(train: Any, *argv: str | Path) -> list[float]:
    return train.run(train.arguments([*SMALL, *map(str, argv)]))[0]


def why_not(train: Any, *argv: str | Path) -> str:
    try:
        losses(train, *argv)
    except SystemExit as error:
        return str(error)
    return "it ran"


def stopping(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """The losses of six steps in one go; of three, and of three more."""
    train, place = on_ranks(group), Path(folder)
    made = ["--config", place / "config.json"]
    found: dict[str, Any] = {"straight": losses(train, *made)}
    found["first"] = losses(train, *made, "--stop", "3", "--save", place / "last")
    found["then"] = losses(train, "--resume", place / "last")
    return found


def test_a_run_goes_on_to_the_bit(pool, tmp_path):
    """With dropout, so that random states count, from a config of another architecture than the script's own."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "other.json").write_text(json.dumps({**GPT2, "n_head": 4}))  # the same shapes
    (tmp_path / "empty").mkdir()
    both = pool.run(stopping, str(tmp_path), world=2)
    for found in both:
        assert found["straight"] == found["first"] + found["then"] and len(set(found["straight"])) == 6
    resumed = ["--config", tmp_path / "other.json", "--resume"]
    assert "of another model than --config: n_head=2 there" in why_not(example(), *resumed, tmp_path / "last")
    assert "this folder holds no checkpoint" in why_not(example(), *resumed, tmp_path / "empty")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "vit"}, "ViTConfig is the config of no causal language model"),
        ({**GPT2, "vocab_size": 100}, "the tokens are bytes, and the config's vocab_size is 100"),
        ({**GPT2, "n_positions": 4}, "--length 8: the model has 4 positions"),
        (None, "there is no such file or folder"),
    ],
)
def test_what_cannot_be_trained_is_a_sentence(config, why, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert why in why_not(example(), "--config", tmp_path / "config.json")
    shutil.rmtree(tmp_path)


def test_options_that_need_others(capsys):
    for argv, why in ((["--save-every", "5"], "needs --save"), (["--compare", "--resume", "x"], "leave out --resume")):
        with pytest.raises(SystemExit):
            example().arguments(argv)
        assert why in capsys.readouterr().err
