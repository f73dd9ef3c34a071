"""Adapters of PEFT by the row of the batch: what PEFT hooks to modules for one call belongs to what the call is."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

IDS = torch.randint(3, 30, (3, 5), generator=torch.Generator().manual_seed(1))
NAMES = ["default", "second", "__base__"]


def adapted() -> Any:
    """Two adapters that differ, on a column-parallel and a row-parallel layer."""
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by peft (transformers 5.23)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(config).eval(), lora)
    model.add_adapter("second", lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.mul_(8)  # so that each adapter gives tokens of its own
    return model.eval()


def calls(model: Any, *names: str) -> dict[str, Any]:
    """What these calls give, in this order: ordinary ones, and such with an adapter for each row."""
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ways = {
        "mixed": lambda: model.generate(input_ids=IDS, adapter_names=NAMES, **options).logits,
        "plain": lambda: model.generate(input_ids=IDS, **options).logits,
        "turned": lambda: model(input_ids=IDS, adapter_names=NAMES[::-1]).logits,
        "forward": lambda: model(input_ids=IDS, adapter_names=NAMES).logits,
        "plain forward": lambda: model(input_ids=IDS).logits,
    }
    with torch.no_grad():
        return {name: ways[name]() for name in names}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, logits in found.items():
        torch.testing.assert_close(logits, wanted[name], rtol=1e-4, atol=1e-4)


def mixing(rank: int, world: int, group: Any) -> list[Any]:
    example = {"input_ids": IDS}
    sharded: Any = autotp.compile(adapted(), example_inputs=example, mesh=mesh_of(group), check_capture=False)
    # A set of strings, as PEFT makes of the names, has another order in every process that is started with torchrun.
    with patch("peft.tuners.lora.layer.set", lambda names: sorted({*names}, reverse=bool(rank)), create=True):
        out = [calls(sharded, *names) for names in (("plain forward", "mixed"), ("mixed", "plain forward"))]
    made = len(sharded._programs_made)
    calls(sharded, "mixed")
    return [*out, len(sharded._programs_made) - made]


def test_each_row_gets_its_adapter_in_any_order_of_calls(pool):
    wanted = calls(adapted(), "mixed", "plain forward", "plain")
    assert not torch.allclose(wanted["mixed"][0], wanted["plain"][0])
    for *rounds, more in pool.run(mixing, world=2):
        assert more == 0  # the same adapters are the same kind of call
        for found in rounds:
            same(found, wanted)


def test_decoded_tokens_get_the_adapters_of_their_call():
    example, order = {"input_ids": IDS}, ("plain", "mixed", "turned")
    wanted = calls(adapted(), *order, "forward")
    assert not torch.allclose(wanted["forward"], wanted["turned"])
    sharded: Any = autotp.compile(adapted(), 1, example_inputs=example, check_capture=False)
    for names in (order, order[::-1]):
        same(calls(sharded, *names), wanted)


def refused(rank: int, world: int, group: Any) -> tuple[list[tuple[str, str, float]], Any, Any]:
    """Errors of calls that ranks make with other adapters, then a call that all make alike, beside the original's."""
    sharded: Any = autotp.compile(adapted(), example_inputs={"input_ids": IDS}, mesh=mesh_of(group))
    names = NAMES if rank else NAMES[::-1]
    with torch.no_grad():
        errors = [
            error_of(lambda: sharded.generate(input_ids=IDS, adapter_names=names, max_new_tokens=3)),
            error_of(lambda: sharded(input_ids=IDS, adapter_names=names)),
            error_of(lambda: sharded(input_ids=IDS, adapter_names=["nothing"] * 3)),
        ]
        own, wanted = [model(input_ids=IDS, adapter_names=NAMES).logits for model in (sharded, adapted())]
    return errors, own, wanted


def test_a_refused_call_leaves_the_module_usable(pool):
    for errors, own, wanted in pool.run(refused, world=2):
        assert [error for error, _, _ in errors] == ["RankError", "RankError", "CaptureError"], errors
        assert "nothing" in errors[2][1]
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
