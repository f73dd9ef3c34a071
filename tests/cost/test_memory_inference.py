"""Memory and price of inference: the cache that a rank holds, a prefill, and a decoded token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.api import compile as compile_model
from autotp.api import plan as make_plan
from autotp.cost import Cluster
from autotp.driver.sweep import sweep
from autotp.errors import PlanError
from autotp.ir.program import PAIR
from tests.helpers.models import build, inputs_of, transformer
from tests.helpers.plans import staged


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("objective", ["prefill", "decode"])
def test_a_cache_holds_the_keys_and_values_of_a_ranks_heads(tp, objective):
    m = staged("llama", tp, None, objective).plan.memory
    layers, kv, width, length, batch, fp32 = 2, 4, 8, 16, 2, 4
    assert m.cache == 2 * layers * (kv / tp) * width * length * batch * fp32
    assert staged("llama", tp).plan.memory.cache == 0


@pytest.mark.parametrize(("kv", "most"), [(4, 0.5), (2, 2)])
def test_a_cache_of_fewer_heads_than_ranks_is_not_split_further(kv, most):
    """Two heads over two ranks are one each; over four ranks the fullest has one of them still, or all."""
    model = transformer("llama", num_key_value_heads=kv)
    two, four = (p.memory.cache for p in sweep(model, [2, 4], objective="decode", check_capture=False).plans.values())
    assert min(1, most) <= four / two <= most


@pytest.mark.parametrize(("causal", "masked"), [(False, ""), (True, ""), (False, "keys"), (False, "pairs")])
def test_an_encoder_keeps_no_cache(causal, masked):
    """All tokens see all: no mask, or one that only leaves out keys (padding). A mask over pairs counts as causal."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = {"": None, "keys": (x[:, None, None, :, 0] < 9), "pairs": near}[masked]
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            return self.out(y.transpose(1, 2).flatten(2))

    plan = make_plan(Attention(), 2, example_inputs=torch.randn(3, 8, 16), objective="prefill", check_capture=False)
    assert plan.memory.cache == (2 * 3 * 8 * 16 * 4 / 2 if causal or masked == "pairs" else 0)


def test_inference_counts_a_forward_and_decoding_one_token():
    train, prefill, decode = (staged("llama", 2, None, o).plan for o in ("training", "prefill", "decode"))
    assert train.totals.seconds > prefill.totals.seconds > decode.totals.seconds
    assert train.totals.backward_bytes > 0 == prefill.totals.backward_bytes == decode.totals.backward_bytes
    assert prefill.totals.flops == 16 * decode.totals.flops  # of 16 tokens a sequence
    logits = next(c for c in decode.collectives if c.source == "lm_head")  # of each row the largest: greedy generate()
    assert logits.forward_bytes == 2 * PAIR < logits.bytes / 2
    assert prefill.totals.forward_bytes == 16 * (decode.totals.forward_bytes - logits.forward_bytes + logits.bytes / 2)
    assert prefill.memory.working > decode.memory.working


@pytest.mark.parametrize(("attention", "times"), [("sdpa", 1), ("eager", 2.5)])
def test_decoding_reads_the_whole_cache(attention, times):
    """Twice the length takes longer by the time to read the keys and values that are more: as they are kept, and not
    once for each of the two heads of queries that share them. An eager attention reads and writes its scores besides.
    """
    sizes = {"max_position_embeddings": 2**22, "num_hidden_layers": 1}
    model = transformer("llama", attn_implementation=attention, **sizes).to("meta")
    options: dict[str, Any] = {"objective": "decode", "check_capture": False}
    plans = [make_plan(model, 1, example_inputs=inputs_of(model, length=n), **options) for n in (2**21, 2**22)]
    more, longer = (plans[1].memory.cache - plans[0].memory.cache), plans[1].totals.seconds - plans[0].totals.seconds
    assert 1 - 1e-9 <= longer / (more / Cluster.preset("h100").memory_bandwidth) <= times + 1e-9


def test_decoding_needs_a_length():
    with pytest.raises(PlanError, match="objective='decode' prices one new token a sequence, but no input has a sec"):
        make_plan(build("convolutions")[0], 2, example_inputs=torch.randn(2, 3, 8, 8), objective="decode")


def decoded_on_a_rank(rank: int, world: int, group: Any) -> float:
    torch.manual_seed(0)
    model, given = transformer("llama"), inputs_of(transformer("llama"))["input_ids"]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded = compile_model(model, mesh=mesh, example_inputs={"input_ids": given}, objective="decode")
    worst = 0.0
    for ids in (given, given[:, :1]):  # the second is captured by itself, with a fixed length
        ours, theirs = sharded(input_ids=ids).logits, model(input_ids=ids).logits
        worst = max(worst, float((ours - theirs).abs().max().detach()))
    ours.square().mean().backward()
    theirs.square().mean().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, found in sharded.full_grad_dict().items():
        worst = max(worst, float((found - wanted[name]).abs().max()))
    return worst


def test_a_module_planned_for_decoding_is_right_forward_and_backward(pool):
    assert max(pool.run(decoded_on_a_rank, world=2)) < 1e-4
