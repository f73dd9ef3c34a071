"""Who decodes the Llama of `benchmarks.helpers.llama.megatron` over the ranks, each as a step that can be repeated.

A step takes the token after the prompt, against a cache that holds the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import autotp
from benchmarks.lists.hand_plans import theirs
from benchmarks.step_time import transformed

from .cached_llama import CachedLlama, Inference
from .megatron import Llama, Shape, by_hand, megatron_pins
from .storages import planned_bytes

Step = Callable[[], Tensor]
Make = Callable[[Llama, Shape, Tensor], Step]
HAND, HAND_COMPILED = "hand-written, static cache", "hand-written, static cache, compiled"
INDUCTOR = "inductor"


def hand(compiled: bool, model: Llama, shape: Shape, ids: Tensor) -> Step:
    """The hand-written one; `ids` [batch, prompt + 1]."""
    group, prompt = dist.group.WORLD, ids.shape[1] - 1
    assert group is not None
    way = Inference(dist.get_rank(), dist.get_world_size(), group.group_name)
    module = CachedLlama(by_hand(shape, way, model.state_dict()), ids.shape[0], length_of(prompt))
    positions = torch.arange(prompt + 1)
    module(ids[:, :prompt], positions[:prompt])
    called: Any = torch.compile(module, fullgraph=True) if compiled else module
    token, position = ids[:, prompt:], positions[prompt:]
    return lambda: called(token, position)


def length_of(prompt: int) -> int:
    """Positions of a cache of fixed length for this prompt: room for as many more."""
    return 2 * prompt


class Cached:
    """A module that is called as transformers' models are, with a cache of transformers.

    Args:
        module: the model. config: of its cache. ids: the prompt and the token after it, [batch, prompt + 1].
        static: whether the cache has a fixed length.
    """

    planned: float

    def __init__(self, module: Any, config: Any, ids: Tensor, static: bool) -> None:
        self.prompt, self.module, self.static = ids.shape[1] - 1, module, static
        self.cache: Any = (
            StaticCache(config, max_cache_len=length_of(self.prompt)) if static else DynamicCache(config=config)
        )
        module(input_ids=ids[:, : self.prompt], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.left = [] if static else [(layer.keys, layer.values) for layer in self.cache.layers]
        self.token, self.at, self.longer = ids[:, self.prompt :].contiguous(), torch.tensor([[self.prompt]]), False

    def __call__(self) -> Tensor:
        self.ready()
        self.longer = True
        cache = self.cache
        return self.module(input_ids=self.token, position_ids=self.at, past_key_values=cache, use_cache=True).logits

    def ready(self) -> None:
        """Put the cache back as the prompt left it, which is no part of a step of decoding."""
        if self.longer and self.static:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.prompt)
        elif self.longer:  # a crop would leave views, which no step of decoding meets
            for layer, (keys, values) in zip(self.cache.layers, self.left, strict=True):
                layer.keys, layer.values = keys, values
        self.longer = False


def whole(model: Llama, shape: Shape, ids: Tensor) -> Step:
    """transformers' own, unsharded, on rank 0 while the others wait."""
    if dist.get_rank():
        return lambda: torch.empty(0)
    module = transformed(model, shape).eval()
    return Cached(module, module.config, ids, static=False)


def tp_plan(static: bool, model: Llama, shape: Shape, ids: Tensor) -> Step:
    """transformers' under its own tensor-parallel plan."""
    module: Any = theirs(transformed(model, shape).eval(), {}, dist.get_world_size())
    return Cached(module, module.config, ids, static)


class Ours:
    """autotp's modules, each made once for both kinds of cache."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}

    def __call__(self, backend: str, static: bool, model: Llama, shape: Shape, ids: Tensor) -> Step:
        if backend not in self.modules:
            self.modules[backend] = ours(transformed(model, shape).eval(), shape, ids, backend)
        module = self.modules[backend]
        step = Cached(module, module.config, ids, static)
        prompt = ids.shape[1] - 1
        step.planned = planned_bytes(module.plan, length_of(prompt) / prompt if static else 1.0)
        return step


def ours(module: nn.Module, shape: Shape, ids: Tensor, backend: str) -> Any:
    """autotp's under Megatron's plan."""
    return autotp.compile(
        module, dist.get_world_size(), example_inputs={"input_ids": ids[:, :-1]}, objective="decode",
        sequence_parallel=False, pins=megatron_pins(shape), check_capture=False, backend=backend,
    )  # fmt: skip


def legs() -> Mapping[str, tuple[str, Make]]:
    """Name -> the hand-written one that it is held against, and how its step is made."""
    mine, eager = Ours(), "eager"
    return {
        "unsharded, dynamic cache": (HAND, whole),
        HAND: (HAND, lambda *x: hand(False, *x)),
        "transformers' tp_plan, dynamic cache": (HAND, lambda *x: tp_plan(False, *x)),
        "transformers' tp_plan, static cache": (HAND, lambda *x: tp_plan(True, *x)),
        "autotp, dynamic cache": (HAND, lambda *x: mine(eager, False, *x)),
        "autotp, static cache": (HAND, lambda *x: mine(eager, True, *x)),
        HAND_COMPILED: (HAND_COMPILED, lambda *x: hand(True, *x)),
        "autotp, dynamic cache, compiled": (HAND_COMPILED, lambda *x: mine(INDUCTOR, False, *x)),
        "autotp, static cache, compiled": (HAND_COMPILED, lambda *x: mine(INDUCTOR, True, *x)),
    }
