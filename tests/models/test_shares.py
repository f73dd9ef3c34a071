"""Plans by unlike shares: proved, saved, printed with what padding costs, and refused in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard as Split
from transformers import MixtralConfig, MixtralForCausalLM

import autotp
from autotp.cli.flags import read_ratio
from autotp.errors import InputError, PlanError
from tests.helpers.models import inputs_of, redrawn, transformer

SIX: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("llama", SIX, (2, 1)),
    ("llama", SIX, (3, 2, 1)),
    ("llama", SIX, (1, 0)),
    ("gpt2", {"n_embd": 96, "n_head": 6, "n_layer": 1}, (3, 1)),
    ("t5", {"num_layers": 1, "num_decoder_layers": 1}, (2, 1)),
]


def mlp() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def refusal(call: Any) -> str:
    with pytest.raises(InputError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize(("name", "sizes", "shares"), CASES, ids=lambda x: str(x) if isinstance(x, tuple | str) else "")
def test_proved_and_dealt(name: str, sizes: dict[str, Any], shares: tuple[int, ...]):
    """Every value and gradient over 13 tokens, and a fullest rank with about its share of the matrices."""
    model = transformer(name, **sizes)
    report = autotp.verify(model, len(shares), inputs_of(model, length=13), shares=shares)
    assert report and report.plan is not None, report
    matrices = [p for p in report.plan.parameters if len(p.shape) > 1]
    held, whole = (sum(map(math.prod, shapes)) for shapes in ([p.local for p in matrices], [p.shape for p in matrices]))
    assert abs(held / whole - shares[0] / sum(shares)) < 0.12


def test_experts_go_to_ranks_whole():
    """Of eight experts six and two; what a rank makes of its own rows is summed with the others'."""
    sizes: dict[str, Any] = {"num_local_experts": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model = redrawn(MixtralForCausalLM(MixtralConfig(**sizes, **heads))).eval()
    ids, pins = {"input_ids": torch.randint(0, 64, (2, 13))}, {"*.experts.*": Split(0)}
    report = autotp.verify(model, 2, ids, shares=(3, 1), pins=pins)
    assert report and report.plan is not None, report
    experts = [p for p in report.plan.parameters if ".experts." in p.name]
    assert experts and all(
        p.layout.local_shape(p.shape, 2, rank)[0] == (6, 2)[rank] for p in experts for rank in (0, 1)
    )


def test_a_wrong_deal_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: ranks that take their slices by equal shares."""
    model = transformer("llama", **SIX)
    plan = autotp.plan(model, 3, example_inputs=inputs_of(model), shares=(3, 2, 1))
    monkeypatch.setattr(
        "autotp.ir.windows.dealt", lambda count, rank, tp, *deal, least: (rank * count // tp, count // tp)
    )
    assert not autotp.verify(model, 3, inputs_of(model), plan=plan)


def test_saved_and_printed():
    """The file has the shares with the axis; a plan of equal ones is that without; print has a bar for each rank."""
    model, x = mlp(), torch.randn(8, 64)
    plan = autotp.plan(model, 2, example_inputs=x, shares=(4, 2))
    assert plan.shares == (2, 1) and autotp.Plan.from_json(plan.to_json()) == plan
    assert "share 2 of 3" in str(plan) and "share 1 of 3" in str(plan)
    even = autotp.plan(model, 2, example_inputs=x)
    assert even.to_json() == autotp.plan(model, 2, example_inputs=x, shares=(3, 3)).to_json()
    assert "shares" not in even.to_json() and "share 1" not in str(even)
    text = plan.to_json()
    with pytest.raises(PlanError, match="was changed"):
        autotp.Plan.from_json(text.replace('"shares"', '"parts"'))
    assert plan.memory.parameters > 1.3 * even.memory.parameters


def test_what_is_sent_padded_is_priced():
    """A sequence that is dealt 3:1 is gathered as if both had three quarters: half as much again as evenly."""
    model = transformer("llama", **SIX)
    batch, sent = inputs_of(model, length=16), []
    for shares in (None, (3, 1)):
        plan = autotp.plan(model, 2, example_inputs=batch, shares=shares, sequence_parallel=True)
        gathers = [c for c in plan.collectives if c.forward == "all_gather" and "layers.0" in c.module]
        sent.append(max(c.forward_bytes for c in gathers))
    assert sent[1] == pytest.approx(1.5 * sent[0])
    assert "1.50 times" in str(plan)


def test_refused_in_one_sentence():
    """What is no share for each rank, and what shares do not go with."""
    x: Any = {"example_inputs": torch.randn(8, 64)}
    wrong: Any = (0, 0), (-1, 2), "2:1", (True, 1), [], 3, (1.5, 1)
    for bad in wrong:
        assert "give a whole number for each rank" in refusal(lambda bad=bad: autotp.plan(mlp(), 2, shares=bad, **x))
    assert "rise from a rank" in refusal(lambda: autotp.plan(mlp(), 2, shares=(1, 2), **x))
    for call in (
        lambda: autotp.plan(mlp(), 3, shares=(2, 1), **x),
        lambda: autotp.plan(mlp(), "auto", shares=(2, 1), **x),
        lambda: autotp.plan(mlp(), devices=4, shares=(2, 1), **x),
        lambda: autotp.sweep(mlp(), [2, 4], shares=(2, 1), **x),
    ):
        assert "are of 2 ranks" in refusal(call)
    assert (
        "leave out"
        in refusal(
            lambda: autotp.verify(mlp(), example_inputs=torch.randn(8, 64), shares=(2, 1), tp_invariant=2)
        ).lower()
    )
    assert "tp_invariant" in refusal(lambda: autotp.compile(mlp(), 2, shares=(2, 1), tp_invariant=2, **x))
    assert "unlike ranks hold no copies" in refusal(lambda: autotp.plan(mlp(), (2, 2), shares=(2, 1, 1, 1), **x))
    plan = autotp.plan(mlp(), 2, shares=(2, 1), **x)
    assert "plan= is complete" in refusal(lambda: autotp.verify(mlp(), 2, torch.randn(8, 64), plan=plan, shares=(2, 1)))


def test_the_page_says_how_many_architectures_were_proved():
    """As the file of results has it: by all shares, and with some weight that `torch.chunk` would deal otherwise."""
    root = Path(__file__).resolve().parents[2]
    records = json.loads((root / "benchmarks/results/shares.json").read_text())["models"]
    models = {name: record["shares"] for name, record in records.items()}
    assert all(each.keys() == {"2:1", "3:2:1"} for each in models.values())
    assert [name for name, each in models.items() if not all(x["ok"] for x in each.values())] == []
    assert all(each["3:2:1"]["uneven"] for each in models.values())
    assert f"{len(models)} architectures" in (root / "docs/clusters.md").read_text()


def test_the_command_line_says_shares_as_a_ratio():
    assert read_ratio("3:2:1") == (3, 2, 1) and read_ratio(None) is None
    for text in ("2:x", "2:", "-1:2", "2.5:1"):
        with pytest.raises(InputError, match="give a whole number for each rank, such as 2:1"):
            read_ratio(text)
