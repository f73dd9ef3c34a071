"""Features that are combined, each as what it changes: mesh, options, model, and what is done with the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Any

import peft
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers import DynamicCache

from tests.helpers.modules.quantised import torchao

from . import uses

TRIPLES, SEED = 20, 40
Use = Callable[[Any], float]


@dataclass(frozen=True)
class Feature:
    """A feature by what it changes.

    Attributes:
        axes: degrees beside tp. options: keywords of `autotp.compile` and `autotp.stages`.
        change: what is done to the model, with whether its weights are quantised; use: what is done with the module,
            which gives the largest difference from one device; None: it is trained.
        draws: random numbers or scales are autotp's own, so that one device is autotp's at tp=1; slices: they are each
            dp rank's own.
        family: of the model. close: what counts as equal.
    """

    name: str
    axes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module] | None = None
    use: Use | None = None
    draws: bool = False
    slices: bool = False
    family: str = "llama"
    close: float = 1e-9


def dropout(model: Any) -> nn.Module:
    """Dropout in the attention and between the layers of each feed-forward that is no expert."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
        if hasattr(layer.mlp, "act_fn"):
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.2))
    return model


def checkpointing(model: Any) -> nn.Module:
    """transformers' switch."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapted(model: Any) -> nn.Module:
    """LoRA on two products of each block, with adapters that are not zero."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def quantised(model: nn.Module) -> nn.Module:
    """Integers of 8 bits in all products but those of adapters; nothing of these is trained."""
    of = torchao()
    own = {"filter_fn": lambda m, name: isinstance(m, nn.Linear) and "lora_" not in name}
    of.quantize_(model.float(), of.Int8WeightOnlyConfig(version=2), **own)  # torchao quantises no float64
    return model.double()


class ByName(nn.Module):
    """A model whose cache goes in and comes out as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor) -> tuple[Tensor, ...]:
        cache: Any = DynamicCache([(k0, v0), (k1, v1)])
        logits = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
        return logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))


WITHIN = {"*.experts.gate_up_proj": Shard(1), "*.experts.down_proj": Shard(2)}  # what is dealt by expert is not cut
CARRIED = dict(enumerate(("k0", "v0", "k1", "v1"), 1))
SMALL = {"smallest": 16}


def _float8(name: str, recipe: str, **more: Any) -> Feature:
    return Feature(name, options={"precision": {"recipe": recipe, **SMALL}}, draws=True, **more)


FEATURES = (
    Feature("dp", {"dp": 2}),
    Feature("fully_shard", {"dp": 2}, {"fully_shard": True}),
    Feature("cp", {"cp": 2}),
    Feature("pp", {"pp": 2}),
    Feature("ep", {"dp": 2}, {"ep": 2, "pins": WITHIN}, family="mixtral", close=1e-6),  # its router: float32
    Feature("sequence parallelism", options={"sequence_parallel": True}),
    Feature("dropout", change=dropout, draws=True, slices=True),
    Feature("checkpointing", change=checkpointing),
    _float8("float8", "tensorwise", slices=True),
    _float8("float8 rowwise", "rowwise", slices=True),
    _float8("float8 rowwise_with_gw_hp", "rowwise_with_gw_hp", slices=True),
    _float8("float8 delayed", "delayed"),
    Feature("LoRA", change=adapted),
    Feature("quantised weights", change=quantised),
    Feature("Inductor", options={"backend": "inductor"}, close=1e-6),  # transformers' sines are of float32
    Feature("caches by name", options={"carried": CARRIED}, change=ByName, use=uses.carry),
    Feature("generate, dynamic cache", use=uses.generate),
    Feature("generate, static cache", use=uses.generate_static),
    Feature("checkpoint at another mesh", use=uses.reload),
    Feature("compare", options={"compare": "every"}, use=uses.compare),
    Feature("certify", use=uses.certify),
    Feature("verify", use=uses.verify),
    Feature("profile", use=uses.profile),
    Feature("Trainer", use=uses.trainer),
    Feature("accelerate", use=uses.accelerate),
)  # in the order in which models are changed and modules used
BY_NAME = {feature.name: feature for feature in FEATURES}
RECIPES = tuple(name for name in BY_NAME if name.startswith("float8"))
WITHOUT_MEANING: dict[frozenset[str], str] = {
    frozenset({"dp", "fully_shard"}): "fully_shard splits over dp: its row is the one with dp",
    frozenset({"dp", "ep"}): "ep deals experts to the ranks of dp: its row is the one with dp",
    frozenset({"Trainer", "accelerate"}): "each of them prepares the module, and has the loop",
    **{frozenset(two): "a product is computed by one recipe" for two in combinations(RECIPES, 2)},
    **{frozenset({r, "quantised weights"}): "such products have a precision of their own" for r in RECIPES},
    **{frozenset({"caches by name", n}): "a forward takes its cache as tensors by name, or as transformers' object"
       for n in ("generate, dynamic cache", "generate, static cache")},
    **{frozenset({"caches by name", n}): "a training loop's batch brings no cache" for n in ("Trainer", "accelerate")},
    **{frozenset({"Inductor", check}): f"{check} reads the program, and runs nothing that is compiled"
       for check in ("certify", "verify")},
}  # fmt: skip


def meaning(names: tuple[str, ...]) -> str:
    """Why a combination has none; "" where it has."""
    return next((why for two, why in WITHOUT_MEANING.items() if two <= set(names)), "")


def pairs() -> list[tuple[str, ...]]:
    """Each feature alone, and with each other."""
    return [(name,) for name in BY_NAME] + list(combinations(BY_NAME, 2))


def triples() -> list[tuple[str, ...]]:
    """Drawn at random, of those of one model that have a meaning."""
    every = list(combinations([name for name, feature in BY_NAME.items() if feature.family == "llama"], 3))
    drawn = Random(SEED).sample(every, len(every))
    return sorted([three for three in drawn if not meaning(three)][:TRIPLES], key=every.index)
