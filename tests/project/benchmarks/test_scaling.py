"""Two nodes on one machine, and the program of one rank of a group that sends nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.cost import Cluster
from benchmarks import two_nodes
from benchmarks.helpers.nodes import NoNodesError, Traffic, joined
from benchmarks.predicted import scaling

IDS = torch.zeros(2, 32, dtype=torch.long)


def on_meta() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config)


def test_a_step_of_one_rank_sends_what_the_plan_says():
    found = scaling.dry_run(on_meta(), IDS, 2, sequence_parallel=False)
    assert found["counted"] == found["planned"] > 0
    other = scaling.dry_run(on_meta(), IDS, 4, sequence_parallel=False)
    assert other["counted"] == other["planned"] != found["planned"]
    assert 0.45 < other["held"] / found["held"] < 0.6  # 2 kv heads on 4 ranks


def test_what_is_gathered_again_is_in_the_plan(monkeypatch):
    tight = replace(Cluster.resolve("h100"), name="tight", memory_size=1.0)
    monkeypatch.setattr(scaling, "CLUSTER", tight)
    found = scaling.dry_run(on_meta(), IDS, 2, sequence_parallel=True)
    less = scaling.dry_run(on_meta(), IDS, 2, sequence_parallel=True, optimise={"regather": False})
    assert found["counted"] == found["planned"] == less["planned"] > less["counted"]
    plans = [
        autotp.plan(on_meta(), 2, example_inputs=IDS, cluster=x, sequence_parallel=True, check_capture=False)
        for x in (tight, replace(tight, memory_size=1e12))
    ]
    again, kept = (plan.totals for plan in plans)
    seconds = again.terms["regathering"]
    assert "regathering" not in kept.terms and kept.sent == kept.forward_bytes + kept.backward_bytes
    assert 0 < seconds == pytest.approx(again.seconds - kept.seconds)
    assert again.sent - kept.sent == again.terms["regathered_bytes"] > 0
    assert "gathered again backward" in plans[0].report() and "gathered again" not in plans[1].report()


def close(found: Traffic, wanted: Traffic) -> bool:
    """Within what headers, messages and one step more or less add."""
    pairs = (found.link, wanted.link), (found.inside, wanted.inside)
    return all(0.95 * b <= a <= 1.1 * b for a, b in pairs)


@pytest.mark.ranks
def test_two_nodes_send_what_the_plan_says_and_go_on_after_one_is_lost(tmp_path):
    try:
        with joined(two_nodes.RATE) as nodes:
            sent, _, loss = two_nodes.measured(nodes, tmp_path, 29400, tp=2, dp=2)
            seconds, resumed = two_nodes.lost(nodes, tmp_path, 29401, tp=2, dp=2)
    except NoNodesError as error:
        pytest.skip(f"no nodes can be made here: {error}")
    assert close(sent, two_nodes.expected(two_nodes.planned(2, 2), crossing=False))
    assert not close(sent, two_nodes.expected(two_nodes.planned(4, 1), crossing=True))
    assert resumed == loss and seconds < 120  # far less than the group's time-out
