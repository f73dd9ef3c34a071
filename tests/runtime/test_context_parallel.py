"""Sequences over cp and weights over tp, on one mesh: outputs, losses and gradients are those of one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import RankError, StateError
from autotp.kernels import dealt_attention
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.two_axes import model_of

CP, TP = 2, 2


def two_axes(rank: int, world: int, group: Any, name: str, split: bool) -> dict[str, Any]:
    """Bert has its loss inside, over what is no padding, and Llama, which takes its own in float32, one of its rank."""
    mesh = init_device_mesh("cpu", (CP, TP), mesh_dim_names=("cp", "tp"))
    mine, (model, whole) = mesh["cp"].get_local_rank(), model_of(name)
    if name == "bert":
        whole["attention_mask"] = whole["input_ids"].ne(0).long()
        whole["attention_mask"][1, 11:] = 0
    else:
        whole.pop("labels")
    own = autotp.Inputs(**whole).part(mine, CP)
    sharded: Any = autotp.compile(model, cp=CP, mesh=mesh, fully_shard=split, example_inputs=own)
    found, wanted = sharded(**own.kwargs), model(**whole)
    losses = [x.loss if name == "bert" else x.logits.square().mean() for x in (found, wanted)]
    for loss in losses:
        loss.backward()
    scores = autotp.Inputs(wanted.logits).part(mine, CP).args[0]
    return {
        "loss": difference(*losses) if name == "bert" else 0.0,
        "scores": difference(found.logits, scores),
        "gradients": gradients_differ(sharded, model),
        "part": sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters()),
        "refused": refused(sharded, own, mine) if name == "bert" else "",
    }


def refused(sharded: Any, own: autotp.Inputs, mine: int) -> str:
    """Parts of different lengths, and decoding."""
    told = ""
    try:
        sharded(**{k: torch.cat([v, v], 1) if mine else v for k, v in own.kwargs.items()})
    except RankError as error:
        told = str(error)
    with pytest.raises(StateError, match=r"generate\(\) with cp"):
        sharded.generate(own.kwargs["input_ids"])
    return told


def test_outputs_losses_and_gradients_are_those_of_one_device(pool):
    for name, split in (("llama", False), ("bert", True)):
        for found in pool.run(two_axes, name, split):
            assert max(found["loss"], found["scores"], found["gradients"]) < 1e-10, found
            assert found["part"] < (0.3 if split else 0.56), found
            assert split == ("do not agree on the inputs of this call" in found["refused"]), found
    for found in pool.run(misplaced):
        assert found["scores"] > 1e-3, found


def misplaced(rank: int, world: int, group: Any) -> dict[str, Any]:
    """The negative control: queries without their places in the sequence."""
    with patch.object(dealt_attention, "attention_mask", lambda *_: None):
        return two_axes(rank, world, group, "llama", False)
