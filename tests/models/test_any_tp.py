"""Any number of ranks: heads, widths, vocabularies and lengths that tp does not divide, and more ranks than heads."""

from __future__ import annotations

from typing import Any

import pytest

import autotp
from autotp import compat
from tests.helpers.models import inputs_of, transformer

HEADS6 = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
QWEN_05B = {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 304}
BERT12 = {"hidden_size": 96, "num_attention_heads": 12}
GPT12 = {"n_embd": 96, "n_head": 12}
MQA = {"num_key_value_heads": 1}
LAYERS = {"gpt2": "n_layer"}

CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("llama", HEADS6, 2, ""),
    ("llama", HEADS6, 4, "6 heads over 4 ranks: whole heads, at most 2 each, leave 1 rank without any"),
    ("llama", HEADS6, 5, "6 heads over 5 ranks: whole heads, at most 2 each, leave 2 ranks without any"),
    ("llama-uneven", {}, 5, "8 heads over 5 ranks: the fullest has 2"),
    ("bert", BERT12, 8, "12 heads over 8 ranks"),
    ("gpt2", GPT12, 8, "12 heads over 8 ranks"),
    ("qwen3", QWEN_05B, 4, "14 heads over 4 ranks: the fullest has 7"),
    ("llama", {}, 8, ""),
    ("llama", MQA, 2, "1 kv head for 2 ranks: each has all of k and v"),
    ("llama", MQA, 8, "1 kv head for 8 ranks: each has all of k and v"),
    ("llama", {}, 16, "8 heads over 16 ranks: the fullest has 2"),
]


def split_share(plan: autotp.Plan) -> float:
    """Part of the matrices' elements that a rank holds."""
    matrices = [p for p in plan.parameters if len(p.shape) > 1]
    held, whole = (
        sum(s[0] * s[1] for s in shapes) for shapes in ([p.local for p in matrices], [p.shape for p in matrices])
    )
    return held / whole


@pytest.mark.parametrize(
    ("name", "sizes", "tp", "limit"), CASES, ids=lambda x: str(x) if isinstance(x, int | str) else ""
)
def test_equal_and_split(name: str, sizes: dict[str, Any], tp: int, limit: str):
    """Thirteen tokens: the length does not divide either."""
    model = transformer(name, **sizes, **{LAYERS.get(name, "num_hidden_layers"): 1})
    report = autotp.verify(model, tp, inputs_of(model, length=13))
    assert report, report
    assert report.plan is not None
    assert split_share(report.plan) <= 1.15 / tp  # never "replicate everything"
    if not compat.ATTENDS_WITHOUT_HEADS:  # a rank without heads is the limit then
        limit = limit.partition(": the fullest")[0]
    limits = {b.limit for b in report.plan.blocks if b.limit}
    assert [limit in x for x in limits] == [True] if limit else not limits
    for said in limits:
        assert said[:60] in str(report.plan)


def test_a_wrong_deal_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: ranks that take their slices by another rule than the plan's."""
    model = transformer("llama", **HEADS6, num_hidden_layers=1)
    monkeypatch.setattr(
        "autotp.ir.windows.shares", lambda segments, rank, tp: [(0, -(-c // tp) * u) for c, u in segments]
    )
    assert not autotp.verify(model, 4, inputs_of(model, length=13))
