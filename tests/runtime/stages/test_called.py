"""Calls of the whole model through stages, beside one device: outputs, gradients, `generate()`, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import autotp
from tests.helpers.modules.trained import model_of
from tests.helpers.pipelines import (
    APART,
    Case,
    Outcomes,
    assert_refused,
    assert_right,
    batch_of,
    double,
    error,
    gradients_apart,
    made,
    outcome,
    staged,
)  # fmt: skip
from tests.helpers.processes.pool import Pool


def called(rank: int, world: int, group: Any, case: Case) -> dict[str, Any]:
    """How far a call, and two backwards of it, are from one device's, and one without gradients."""
    with double():
        model, told = made(case), {}
        pipe, schedule = staged(case, model)
        lane = rank % (case.dp * case.tp) // case.tp
        batches = [batch_of(model, rows=3, seed=i) for i in range(case.dp)]

        def loss(which: Any, rows: dict[str, Any]) -> Any:
            rows = dict(rows)
            return error(which(**{k: v for k, v in rows.items() if k != "targets"}), rows["targets"])

        def both(backward: bool) -> float:
            mine = pipe.module(**batches[lane])
            theirs: Any = sum(loss(model, rows) for rows in batches) / case.dp  # a loss in the model is of all slices
            if backward:
                mine.backward()
                theirs.backward()
            return float((mine - theirs).detach().abs())

        told["forward"] = outcome(lambda: both(True))
        told["gradients"] = outcome(lambda: gradients_apart(pipe, model))
        told["again"] = outcome(lambda: both(True))
        told["gradients again"] = outcome(lambda: gradients_apart(pipe, model))
        with torch.no_grad():
            told["without"] = outcome(lambda: both(False))
        told["step"] = outcome(lambda: float(pipe.step(schedule, **batch_of(model, seed=lane)).isfinite()) - 1)
        pipe.eval()
        model.eval()
        with torch.no_grad():
            told["evaluation"] = outcome(lambda: both(False))
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(9))
        for i in range(case.layers):
            blocks = [m.get_submodule(f"blocks.{i}") for m in (pipe.module, model)]
            told[f"block {i}"] = outcome(lambda b=blocks: float((b[0](x) - b[1](x)).detach().abs().max()))
        told["own"] = outcome(lambda: fully_shard(pipe.module.get_submodule("blocks.0.1")))
        told["no_sync"] = outcome(lambda: pipe.module.no_sync().__enter__())
        dist.barrier(group)
        return told


@pytest.mark.parametrize(
    "case",
    [
        Case("tower"),
        Case("tower", tp=1, dp=2),
        Case("tower", "ScheduleInterleaved1F1B", chunks=2, layers=4),
        pytest.param(Case("tower", "ScheduleZBVZeroBubble", chunks=2, layers=4), marks=APART),
    ],
    ids=["tp", "dp", "interleaved", "v"],
)
def test_a_call_and_its_gradients_are_those_of_one_device(pool: Pool, case: Case) -> None:
    found = pool.run(called, case)
    cells = ("forward", "gradients", "again", "gradients again", "without", "step", "evaluation")
    for cell in cells:
        assert_right(found, cell)
    for i in range(case.layers):
        assert_right(found, f"block {i}")
    around = "that divides the batch over dp already" if case.dp > 1 else "in stages"
    assert_refused(found, "own", f"StateError: fully_shard or replicate around a module {around}")
    assert_refused(found, "no_sync", r"StateError: no_sync\(\) with stages")


def generated(rank: int, world: int, group: Any, name: str, folder: str) -> dict[str, Any]:
    """Tokens of stages beside one device's, before and after a step, and a folder that transformers reads."""
    layers = {"num_hidden_layers" if name == "llama" else "n_layer": 4}
    model = model_of(name, torch.float32, **layers).eval()
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"outputs": "full", "example_inputs": {"input_ids": ids}}
    if name == "gpt2":  # its tokens are made without targets
        options = {"loss": error, "example_inputs": {"input_ids": ids, "targets": ids}}
    pipe = autotp.stages(model, 2, 2, check_capture=False, **options)
    told: dict[str, Any] = {}

    def tokens(which: Any, **options: Any) -> Any:
        return which.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, **options).tolist()

    cells: dict[str, dict[str, Any]] = {
        "dynamic": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 2},
    }  # fmt: skip
    for cell, options in cells.items():
        told[cell] = outcome(lambda o=options: (tokens(pipe.module, **o), tokens(model, **o)))
    told["saved"] = outcome(lambda: pipe.save_checkpoint(folder, format="huggingface"))
    told["held"] = sum(p.numel() for p in pipe.parameters()) / sum(p.numel() for p in model.parameters())
    dist.barrier(group)
    return told


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_are_those_of_one_device_and_the_folder_is_read_by_transformers(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "saved"
    found: Outcomes = pool.run(generated, name, str(folder))
    for told in found:
        for cell in ("dynamic", "static", "beams"):
            mine, theirs = told[cell]
            assert mine == theirs, cell
        assert told["saved"] is None and told["held"] < 0.9
    model = model_of(name, torch.float32, **{"num_hidden_layers" if name == "llama" else "n_layer": 4})
    kind: Any = type(model)
    again = kind.from_pretrained(folder)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())
