"""Sequences over cp and weights over tp, on one mesh: outputs, losses and gradients are those of one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.kernels import attention
from autotp.runtime import calls
from autotp.runtime.call_message import NOTHING, Sample, sampled
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.errors import message_of
from tests.helpers.modules.two_axes import model_of

CP, TP = 2, 2


def two_axes(rank: int, world: int, group: Any, name: str, split: bool) -> dict[str, Any]:
    """Bert has its loss inside, over what is no padding, and Llama, which takes its own in float32, one of its rank.

    Bert is passed parts of the sequences, and Llama whole ones.
    """
    mesh = init_device_mesh("cpu", (CP, TP), mesh_dim_names=("cp", "tp"))
    mine, (model, whole) = mesh["cp"].get_local_rank(), model_of(name)
    if name == "bert":
        whole["attention_mask"] = whole["input_ids"].ne(0).long()
        whole["attention_mask"][1, 11:] = 0
    else:
        whole.pop("labels")
    given = autotp.Inputs(**whole)
    own = given.part(mine, CP) if name == "bert" else given
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
        "refused": refused(sharded, whole, mine) if name == "bert" else "",
        "tokens": decoded(rank, sharded, model, whole["input_ids"]) if name == "llama" else [],
    }


def decoded(rank: int, sharded: Any, model: Any, ids: torch.Tensor) -> list[list[int]]:
    """Drawn tokens of a prompt, after those that are most likely were the model's."""
    options = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    likely = [each.eval().generate(ids[:, :5], do_sample=False, **options) for each in (sharded, model)]
    assert torch.equal(*likely)
    torch.manual_seed(rank)
    return sharded.generate(ids[:, :5], do_sample=True, **options).tolist()


def refused(sharded: Any, whole: dict[str, torch.Tensor], mine: int) -> str:
    """Parts of different lengths."""
    longer = {k: torch.cat([v, v], 1) if mine else v for k, v in whole.items()}
    part = autotp.Inputs(**longer).part(mine, CP)
    return message_of(lambda: sharded(**part.kwargs))


def test_outputs_losses_and_gradients_are_those_of_one_device(pool):
    for name, split in (("llama", False), ("bert", True)):
        ranks = pool.run(two_axes, name, split)
        assert all(found["tokens"] == ranks[0]["tokens"] for found in ranks)
        for found in ranks:
            assert max(found["loss"], found["scores"], found["gradients"]) < 1e-10, found
            assert found["part"] < (0.3 if split else 0.56), found
            assert split == ("do not agree on the inputs of this call" in found["refused"]), found
    for found in pool.run(misplaced):
        assert found["scores"] > 1e-3, found


def misplaced(rank: int, world: int, group: Any) -> dict[str, Any]:
    """The negative control: queries without their places in the sequence."""
    with patch.object(attention, "attention_mask", lambda *_: None):
        return two_axes(rank, world, group, "llama", False)


def read_on_a_device(flat: Any, anywhere: bool = False) -> Sample:
    """Samples where all inputs are on a device, which is not read but where that is asked for."""
    return sampled(flat) if anywhere else NOTHING


def given_otherwise(rank: int, world: int, group: Any) -> dict[str, str]:
    """The first line of what this rank is told of inputs that are not the same whole sequences on all ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    model, whole = model_of("bert")
    given = autotp.Inputs(**whole)
    own, other = given.part(rank, 2).kwargs, given.part(1 - rank, 2).kwargs
    halves = {name: x.chunk(2, 1)[rank] for name, x in whole.items()}
    cases = {
        "halves": halves,
        "copies of parts": {name: x.clone() for name, x in own.items()},
        "another batch": {**whole, "input_ids": whole["input_ids"].roll(rank, 0)},
        "others on one": whole if rank else own,
        "another rank's": other if rank else own,
        "labels forgotten": {**own, "labels": whole["labels"]},
        "derived labels": {**own, "labels": own["labels"].clone()},
    }
    sharded: Any = autotp.compile(model, cp=2, mesh=mesh, example_inputs=given)
    with torch.no_grad():  # torch warns of outputs that are views, where weights are whole
        told = {name: message_of(lambda case=case: sharded(**case)).splitlines()[:1] for name, case in cases.items()}
        with patch.object(calls, "sampled", read_on_a_device):
            told["a new kind on a device"] = message_of(lambda: sharded(**cases["another batch"])).splitlines()[:1]
        losses = [difference(sharded(**x).loss, model(**whole).loss) for x in (whole, own)]
    return {name: "".join(lines) for name, lines in told.items()} | {"right": str(max(losses) < 1e-10)}


SAID = {
    "halves": "do not agree on the values", "copies of parts": "do not agree on the values",
    "another batch": "do not agree on the values", "others on one": "rank 0: a part of them, rank 1: whole sequences",
    "another rank's": "parts 0 of 2 of their sequences, and this is cp rank 1",
    "a new kind on a device": "do not have the same sequences",
    "labels forgotten": "some inputs are part", "derived labels": "some inputs are part", "right": "True",
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_no_whole_sequence_is_refused_on_all_ranks(otherwise, case):
    everyone = [told[case] for told in otherwise]
    assert SAID[case] in everyone[1] and all(everyone), everyone


@pytest.fixture(scope="module")
def otherwise(pool):
    return pool.run(given_otherwise, world=2)
