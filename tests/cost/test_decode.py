"""The limit of decoding against the formula by hand: what a rank reads over the bandwidth, and the collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.cost import Cluster
from autotp.cost.collective_costs import call_seconds, collective_bytes
from autotp.ir.program import PAIR
from autotp.plans.estimates import DecodeLimit
from tests.helpers.models import BATCH, DECODER, HIDDEN, LENGTH, VOCABULARY, inputs_of, transformer

H100 = Cluster.preset("h100")
FP32 = 4
LAYERS, KV_HEADS, WIDTH = 2, DECODER["num_key_value_heads"], HIDDEN // DECODER["num_attention_heads"]


def planned(name: str, tp: int, objective: str = "decode", **changed: Any) -> autotp.Plan:
    model = transformer(name, **changed)
    return autotp.plan(model, tp, example_inputs=inputs_of(model), objective=objective)


def limit_of(plan: autotp.Plan) -> DecodeLimit:
    found = plan.decoding
    assert found is not None and found.seconds == plan.totals.seconds > found.limit.seconds
    assert found.tokens_per_second == pytest.approx(BATCH / plan.totals.seconds)
    assert found.share_of_limit == pytest.approx(found.limit.seconds / plan.totals.seconds)
    return found.limit


def matrices(model: nn.Module, tp: int) -> float:
    """Bytes of a rank's matrices, of which each is split, and of the norms, which are whole."""
    sizes = [(p.ndim, p.numel()) for n, p in model.named_parameters() if "embed_tokens" not in n]
    return FP32 * sum(count / (tp if dims == 2 else 1) for dims, count in sizes)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_limit_is_the_formula_by_hand(tp):
    plan = planned("llama", tp)
    limit = limit_of(plan)
    rows = FP32 * BATCH * HIDDEN / tp  # of the embedding, one for each new token
    assert 0 <= limit.weights - matrices(transformer("llama"), tp) - rows <= 64  # and the frequencies of positions
    assert limit.cache == FP32 * 2 * LAYERS * BATCH * LENGTH * (KV_HEADS / tp) * WIDTH
    sums = 2 * LAYERS * call_seconds("all_reduce", FP32 * BATCH * HIDDEN, tp, H100)
    table = call_seconds("all_gather", FP32 * BATCH * HIDDEN, tp, H100)
    logits = call_seconds("all_gather", tp * PAIR * BATCH, tp, H100)  # the largest of each row: greedy generate()
    by_hand = (limit.weights + limit.cache) / H100.memory_bandwidth + sums + table + logits
    assert limit.seconds == pytest.approx(by_hand, rel=1e-9)


def test_logits_are_priced_as_they_are_sent():
    model = transformer("llama")
    plan = planned("llama", 2)
    gathers = [c for c in plan.collectives if c.forward == "all_gather" and c.bytes == FP32 * BATCH * VOCABULARY]
    assert [c.forward_bytes for c in gathers] == [collective_bytes("all_gather", 2 * PAIR * BATCH, 2)]
    assert plan.decoding is not None and plan.decoding.ungathered == FP32 * BATCH * VOCABULARY
    printed = " ".join(str(plan).split()).replace("\xa0", " ")
    assert "priced as greedy generate(), which gathers none of" in printed
    # What has no generate() gathers them, and so does what is planned for prefill.
    alone = type("Alone", (nn.Module,), {"forward": lambda self, ids: self.model(ids, use_cache=False).logits})()
    alone.model = transformer("llama", num_hidden_layers=1)
    others = [
        autotp.plan(alone, 2, example_inputs=inputs_of(model)["input_ids"], objective="decode", check_capture=False),
        planned("llama", 2, "prefill"),
    ]
    for other in others:
        whole = [collective_bytes("all_gather", c.bytes, 2) for c in other.collectives if c.name == "gather"]
        assert whole and whole == [c.forward_bytes for c in other.collectives if c.name == "gather"]
    assert others[0].decoding is not None and others[0].decoding.ungathered == 0 and "greedy" not in str(others[0])


def test_a_tied_table_is_read_whole_by_the_head():
    limit = limit_of(planned("llama-tied", 2))
    head = FP32 * VOCABULARY * HIDDEN / 2
    assert limit.weights - head - matrices(transformer("llama-tied"), 2) <= 64


class Experts(nn.Module):
    """Three rows, each by one of sixteen experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.flatten().unsqueeze(-1).expand(-1, 8).to(torch.bfloat16)
        ends = torch.full((16,), x.shape[0], dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.weight.to(torch.bfloat16), offs=ends)


def test_of_experts_no_more_are_read_than_there_are_rows():
    experts = Experts().to(torch.bfloat16).requires_grad_(False)
    ids = torch.zeros(3, 5, dtype=torch.long)
    read = {
        objective: autotp.plan(
            experts, 1, example_inputs=ids, objective=objective, check_capture=False
        ).totals.weights_read
        for objective in ("prefill", "decode")
    }
    assert read == {"prefill": 15 / 16 * 2048, "decode": 3 / 16 * 2048}


def test_what_is_printed():
    plan = planned("llama", 2)
    found = plan.decoding
    assert found is not None
    printed = " ".join(str(plan).replace("\n", " ").split())
    assert f"{found.share_of_limit:.0%} of the limit" in printed
    assert f"{BATCH / found.limit.seconds / 1e3:.2f}k tokens/s: " in printed and "of cache at 3.35 TB/s;" in printed
    other = planned("llama", 2, "prefill")
    assert other.decoding is None and "limit" not in str(other)
    assert autotp.Plan.from_json(plan.to_json()).decoding == found
