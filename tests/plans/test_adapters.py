"""Adapters in a plan: of any spelling, with rank and target; the layer beside is named as without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.plans.plan import Plan

WIDTH, INNER, RANK = 16, 32, 4


class Adapted(nn.Module):
    """A product with what is put beside it; no name says which is which."""

    def __init__(self, rows: int, columns: int, form: str) -> None:
        super().__init__()
        self.form, self.a = form, nn.Parameter(torch.randn(columns, rows))
        if form == "rotation":
            self.b = nn.Parameter(torch.randn(rows // RANK, RANK, RANK))
        elif form == "rank":
            self.b, self.c = nn.Parameter(torch.randn(RANK, rows)), nn.Parameter(torch.randn(columns, RANK))
        elif form != "none":
            self.b = nn.Parameter(torch.randn(columns) if form == "scale" else torch.randn(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "rotation":  # blocks of what comes in, each by the exponential of a skew-symmetric matrix
            turn = torch.matrix_exp(self.b - self.b.mT)
            return torch.einsum("...br,brc->...bc", x.unflatten(-1, (-1, RANK)), turn).flatten(-2) @ self.a.T
        y = x @ self.a.T
        if self.form == "rank":
            return y + 0.5 * ((x @ self.b.T) @ self.c.T)
        if self.form == "scale":
            return y * self.b
        return y if self.form == "none" else y + x @ self.b.T


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = Adapted(WIDTH, INNER, form), Adapted(WIDTH, INNER, "none")
        self.down = Adapted(INNER, WIDTH, form)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


def planned(form: str, frozen: bool = True) -> Plan:
    model = Net(form).train()
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or name.endswith((".b", ".c")))
    return autotp.plan(model, 2, example_inputs=torch.randn(2, 4, WIDTH), check_capture=False)


def parts(plan: Plan) -> list[tuple[str, str, str]]:
    return [(b.kind, b.module, b.detail) for b in plan.blocks]


def test_adapters_are_named_with_rank_and_target() -> None:
    without = parts(planned("none"))
    assert ("mlp", "", f"gated, {INNER} wide") in without
    details = {"rank": f"rank {RANK} beside a", "full": "beside a", "scale": "scales a", "rotation": "before a"}
    for form, detail in details.items():
        plan = planned(form)
        own = [("adapter", "up", detail), ("adapter", "down", detail)]
        assert [x for x in parts(plan) if x[0] == "adapter"] == own
        assert [x for x in parts(plan) if x[0] != "adapter"] == without
        held = {n for b in plan.blocks if b.kind == "adapter" for n in b.parameters}
        assert held == {n for n in (p.name for p in plan.parameters) if n.endswith((".b", ".c"))}
        assert f"adapter down  {detail}" in plan.report()
    # The same sums with nothing frozen are no adapters: that is a model with two branches.
    for form in ("rank", "rotation"):
        assert not [x for x in parts(planned(form, frozen=False)) if x[0] == "adapter"]


class Table(nn.Module):
    """Frozen rows and a trained layer behind them, or trained ones beside them."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(32, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.behind, self.more = behind, nn.Embedding(32, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        return x + self.layer(x if self.behind else self.more(ids))


def test_a_layer_behind_a_frozen_table_is_no_adapter() -> None:
    for behind in (True, False):
        ids = torch.zeros(2, 4, dtype=torch.long)
        plan = autotp.plan(Table(behind).train(), 2, example_inputs=ids, check_capture=False)
        assert any(b.kind == "adapter" for b in plan.blocks) is not behind


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # read by peft (transformers 5.23)
def test_those_of_peft_are_named() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    wanted = {"embedding", "norm", "attention", "adapter", "mlp"}
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    low_rank = peft.LoraConfig(r=RANK, target_modules=["q_proj", "down_proj"], use_dora=True)
    rows = peft.LoraConfig(r=RANK, target_modules=["embed_tokens"])
    rotation = peft.OFTConfig(oft_block_size=RANK, r=0, target_modules=["q_proj", "down_proj"])
    layers, ids = "base_model.model.layers.0", {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
    plans = []
    for chosen in (low_rank, rotation, rows):
        model = peft.get_peft_model(transformers.LlamaModel(config), chosen)
        plans.append(autotp.plan(model, 2, example_inputs=ids, check_capture=False))
    turned = {(kind, module): detail for kind, module, detail in parts(plans[1])}
    assert turned["adapter", f"{layers}.self_attn.q_proj"] == "before base_layer.weight"
    assert turned["adapter", f"{layers}.mlp.down_proj"] == "before base_layer.weight"
    assert turned["attention", f"{layers}.self_attn"] == "2 heads, 8 wide"
    assert turned["mlp", f"{layers}.mlp"] == "gated, 32 wide" and {b.kind for b in plans[1].blocks} == wanted
    found = {(kind, module): detail for kind, module, detail in parts(plans[0])}
    assert ("adapter", "base_model.model.embed_tokens", f"rank {RANK} beside base_layer.weight") in parts(plans[2])
    assert {b.kind for b in plans[2].blocks} == wanted
    assert found["adapter", f"{layers}.self_attn.q_proj"] == f"rank {RANK} beside base_layer.weight"
    assert found["adapter", f"{layers}.mlp.down_proj"] == f"rank {RANK} beside base_layer.weight"
    assert found["attention", f"{layers}.self_attn"] == "2 heads, 8 wide"
    assert found["mlp", f"{layers}.mlp"] == "gated, 32 wide"
    assert {b.kind for b in plans[0].blocks} == wanted
