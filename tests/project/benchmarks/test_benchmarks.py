"""The commands of benchmarks/: what they measure and count, and the page they write."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autotp
from benchmarks import models
from benchmarks.helpers.build import Architecture, architectures, build, model_class, small
from benchmarks.helpers.command import installed
from benchmarks.helpers.isolate import merge
from benchmarks.helpers.lists.page import PAGE, load, render
from benchmarks.helpers.measure import figures, layer, measure, widened
from benchmarks.lists import hand_plans
from benchmarks.results import WORDS, clean

LISTED = {a.name: a for a in architectures()}


def measured(architecture: Architecture, *tps: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    measure(architecture, tps, parts.append)
    if "tp" in parts[-1]:
        widened(architecture, tps, parts.append)
    record: dict[str, Any] = {}
    for part in parts:
        record = merge(record, part)
    return record


def test_the_page_is_what_the_results_render_to():
    assert PAGE.read_text() == render(), "docs/models.md is stale: python -m benchmarks.models --render"


def test_the_page_lists_what_fails():
    models, hand = load("models.json"), load("hand_plans.json")
    name, record = next(iter(models["models"].items()))
    record["tp"]["2"] = {"ok": False, "why": "the moon is full"}
    page = render(models, hand)
    assert f"| {name} | 2 | the moon is full |" in page and page != render()


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_an_architecture_is_measured(name):
    record = measured(LISTED[name], 2)
    result = record["tp"]["2"]
    assert result["ok"] and result["why"] is None
    assert 0.5 <= result["parameters"] < 0.55 and 0.5 <= result["flops"] < 0.55 and result["per_layer"][0] > 0
    assert ("wide" in record) == (name != "vit") == (result["megatron"] is not None)
    json.dumps(record)


def test_what_cannot_be_built_is_a_record_with_a_reason():
    record = measured(Architecture("nosuch", "decoder", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"), 2)
    assert record["failed"] == "LookupError: this transformers has no nosuch in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


class Gated(nn.Module):
    """An embedding, two feed-forward blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for block in self.layers:
            x = torch.tanh(x + block(x))
        return self.head(x)


def test_figures_of_a_plan():
    ids = {"input_ids": torch.randint(32, (4, 6))}
    found = figures(autotp.plan(Gated(), 2, example_inputs=ids), ids)
    assert found["per_layer"] is not None and found["megatron"] is None  # no attention


def test_layers_are_told_by_the_first_number():
    assert [layer(x) for x in ("model.layers.3.mlp.experts.0.up", "h.0", "0.weight", "lm_head")] == [
        "model.layers.3", "h.0", "0", "",
    ]  # fmt: skip


def test_reasons_are_short_and_name_no_folder():
    text = clean(f"at {models.RESULTS.parents[2]}/autotp/x.py and /a/b/site-packages/torch/y.py " + "word " * 200)
    assert text.startswith("at autotp/x.py and torch/y.py word") and text.endswith(" ...") and len(text) < WORDS + 5


def test_configs_become_small_and_scale():
    cls = model_class("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "llama").config_class
    config, wide = small(cls, {"rms_norm_eps": 0.5}), small(cls, {}, 16)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.rms_norm_eps) == (64, 2, 256, 0.5)
    assert (wide.hidden_size, wide.num_hidden_layers, wide.head_dim) == (1024, 2, 128)


def test_collectives_are_counted():
    dist.init_process_group("fake", store=hand_plans.FakeStore(), rank=0, world_size=4)
    try:
        with hand_plans.Counted(4) as counted:
            dist.all_reduce(torch.ones(10))  # 40 bytes, of which a rank sends 2 * 3/4
            dist.all_gather([torch.ones(10) for _ in range(4)], torch.ones(10))  # 160 bytes, of which it sends 3/4
            dist.all_reduce(torch.ones(10), group=dist.new_group([0]))  # of one rank, which sends nothing
    finally:
        dist.destroy_process_group()
    assert counted.bytes == 60 + 120
    assert counted.calls == {"all_reduce 10": 2, "all_gather 10": 1}


def test_a_hand_written_plan_is_counted():
    llama, inputs = LISTED["llama"], {"input_ids": torch.arange(32).view(2, 16)}
    case = {
        side: hand_plans.counted(distribute, functools.partial(build, llama), inputs, 2)
        for side, distribute in (("theirs", hand_plans.theirs), ("ours", hand_plans.ours))
    }
    found = hand_plans.ratio({"small 2": case}, "small 2")
    assert found is not None and 0 < found <= 1, case
    assert case["theirs"]["forward"]["calls"] == {"all_reduce 2x16x64": 5, "all_gather 2x16x128": 1}
    page = render({"made": {}, "models": {}}, {"made": {}, "models": {"llama": {"small 2": case}}})
    assert f"| {found:.2f} |" in page


def test_a_run_of_a_part_keeps_the_rest_and_says_between_which_days(tmp_path, monkeypatch):
    whole = json.loads(models.RESULTS.read_text())
    for record in whole["models"].values():
        record["date"] = "2026-11-21"
    (tmp_path / "models.json").write_text(json.dumps(whole))
    monkeypatch.setattr(models, "RESULTS", tmp_path / "models.json")
    monkeypatch.setattr(models, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(models, "run", lambda architecture, *_: whole["models"][architecture.name])
    monkeypatch.setattr(models, "installed", lambda architecture: architecture.name not in whole["skipped"])
    models.main(["--only", "llama", "gpt2", "--jobs", "2"])
    found = json.loads((tmp_path / "models.json").read_text())
    llama = found["models"]["llama"]
    assert llama["date"] > "2026-11-21" and llama["tp"] == whole["models"]["llama"]["tp"]
    changed = {name for name, record in found["models"].items() if record != whole["models"][name]}
    assert changed == {"llama", "gpt2"} and list(found["models"]) == list(whole["models"])
    head = render(found).split("- **passes**")[0]
    assert f"Made between 2026-11-21 and {llama['date']} with" in head and "--only llama gpt2 --jobs 2`." in head


@pytest.mark.zoo
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", LISTED)
def test_architecture(name, request):
    """Proved at tp=2; what docs/models.md says to fail must fail."""
    if not installed(LISTED[name]):
        pytest.skip("not in this transformers")
    known = load("models.json")["models"].get(name, {}).get("tp", {}).get("2", {"ok": True})
    if not known["ok"]:
        request.applymarker(pytest.mark.xfail(reason=known["why"], strict=True))
    record = models.run(LISTED[name], [2])
    assert record.get("failed") is None and record["tp"]["2"]["ok"], record
