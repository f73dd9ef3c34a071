"""Peers beside autotp: parts of weights, who is held against whom, and the page."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.peers import architectures, planners
from benchmarks.peers.legs import AUTOTP, CORE, DECODE, PLAN, SPEED, TRAIN, WRITTEN, base_of, chosen, lines
from benchmarks.peers.measured import UPDATES
from benchmarks.peers.megatron_core import parts

peers = importlib.import_module("benchmarks.peers.__main__")
TINY = Shape(hidden=64, layers=1, heads=8, kv_heads=4, wide=96, vocabulary=128)


def test_parts_of_all_ranks_are_the_whole():
    whole = untouched(TINY).state_dict()
    ranks = [dict(parts(whole, TINY, 2, rank)) for rank in range(2)]
    fused = [r["decoder.layers.0.self_attention.linear_qkv.weight"].unflatten(0, (2, 4, 8)) for r in ranks]
    queries = torch.cat([x[:, :2] for x in fused]).flatten(0, 2)  # two heads of queries, one of keys, one of values
    assert torch.equal(queries, whole["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(
        torch.cat([x[:, 3] for x in fused]).flatten(0, 1), whole["model.layers.0.self_attn.v_proj.weight"]
    )
    assert not torch.equal(fused[0], fused[1])


def test_a_peer_is_held_against_autotps_step_of_its_kind():
    assert base_of(f"{CORE}, compiled") == f"{AUTOTP}, compiled" and base_of(f"{PLAN}, by accelerate") == AUTOTP
    assert set(map(base_of, TRAIN)) <= set(TRAIN) and set(map(base_of, DECODE)) <= set(DECODE)
    assert chosen(TRAIN, [SPEED]) == [AUTOTP, SPEED, f"{AUTOTP}, compiled", f"{SPEED}, compiled"]
    assert lines(WRITTEN[AUTOTP]) == 1 < lines(WRITTEN[SPEED]) < lines(WRITTEN[CORE])


def test_ratios_are_autotps_with_their_range():
    def ranks(seconds: float) -> list[dict[str, dict[str, list[float]]]]:
        return [{AUTOTP: {"cpu": [0.9], "wall": [1.0]}, CORE: {"cpu": [seconds], "wall": [2.0]}}] * 2

    found = peers.spread([ranks(1.0), ranks(1.8), ranks(0.9)], [AUTOTP, CORE])
    assert found[CORE] == pytest.approx({"cpu_s": 2.0, "wall_s": 2.0, "ratio": 0.9, "least": 0.5, "most": 1.0})


def test_the_page_says_who_was_not_measured_and_why():
    one = {
        "losses": [1.0] * UPDATES,
        "set_up_s": 1.5,
        "sent": 2e6,
        "collectives": 3,
        "kept": 4e6,
        "peak": 5e6,
        "off": 0.0,
        "spent": {"products": 0.3, "others": 0.1, "collectives": 0.05, "step": 0.42},
        "roofline_s": 0.25,
    }
    step = {"cpu_s": 0.5, "wall_s": 0.3, "ratio": 0.95, "least": 0.9, "most": 1.1}
    made = ("command", "runs", "rounds", "cores", "machine", "torch", "transformers", "python", "date", "load_before")
    record = dict.fromkeys((*made, "packages"), "x") | {
        "alone": {AUTOTP: one, CORE: one, SPEED: {"refused": "no CUDA"}},
        "steps": {AUTOTP: step, CORE: step},
        "decoded": {AUTOTP: step},
        "not_decoded": {PLAN: "no cache"},
        "architectures": {way: {} for way in architectures.WAYS},
        "planners": {"skipped": planners.SKIPPED},
    }
    text = peers.page(record)
    assert "| Megatron-Core | 0.500 | 0.950 | 0.900 to 1.100 | 1.5 | 2.0 | 4 | 5 |" in text
    assert planners.SKIPPED in text and "| autotp | 300 | 100 | 50 | 420 |" in text and "250 ms at the rate" in text
    assert "* DeepSpeed AutoTP: no CUDA" in text and "* tp_plan, a decoded token: no cache" in text


@pytest.mark.parametrize(
    ("found", "cell"),
    [
        ({}, "no"),
        ({"off": float("nan"), "held": 0.5}, "wrong"),
        ({"off": 1e-6, "held": 1.0}, "whole"),
        ({"off": 0.0, "held": 0.5}, "0.50"),
    ],
)
def test_an_architecture_counts_where_it_is_right_and_split(found, cell):
    assert architectures._cell(found) == cell
    page = architectures.page({way: {"llama": {"2": found}} for way in architectures.WAYS})
    assert ("| run and split | 1 of 12 |" in page) == (cell == "0.50")


def test_autoparallel_is_skipped_without_a_checkout_and_its_bytes_are_counted_as_ours(monkeypatch, tmp_path):
    monkeypatch.setenv(planners.CHECKOUT, str(tmp_path))
    assert planners.run() == {"skipped": planners.SKIPPED}
    graph, x = torch.fx.Graph(), torch.empty(16, 4, device="meta")
    whole, part = graph.placeholder("whole"), graph.placeholder("part")
    whole.meta["val"], part.meta["val"] = x, x[:2]
    collectives = torch.ops._c10d_functional
    for target, args, result in (
        (collectives.all_reduce.default, (whole, "sum", "g"), x),
        (collectives.all_gather_into_tensor.default, (part, 8, "g"), x),
        (collectives.reduce_scatter_tensor.default, (whole, "sum", 8, "g"), x[:2]),
        (torch.ops.aten.relu.default, (whole,), x),
    ):
        graph.call_function(target, args).meta["val"] = result
    assert planners.sent(graph.nodes) == (2 + 1 + 1) * 7 / 8 * 256
    one = {"plan": 2.0, "sharded": 3.0, "sent": 4e6}
    found = {"commit": "abc", "models": {"small": {"autotp": one, "autoparallel": {"plan": 9.0, "refused": "no rule"}}}}
    assert "| small | 2.00 | 9.00 | 3.00 | - | 4 | - |" in planners.page(found)
    assert "* small, autoparallel: no rule" in planners.page(found)
