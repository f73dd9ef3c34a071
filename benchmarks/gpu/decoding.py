"""Decoding half of an 8B model's layers beside a hand-written compiled decoder.

With a static cache, and CUDA graphs of prefill and of decode; the same for one of 8 ranks, in torch's "fake" process
group, which sends nothing. A step takes the token after the prompt, against a cache that holds the prompt, and leaves
the cache as it found it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.cached_llama import CachedLlama, Inference
from benchmarks.helpers.llama.megatron import Llama, by_hand, frequencies, megatron_pins
from benchmarks.helpers.llama.ways import Whole
from benchmarks.helpers.performance import table

from .clock import alone, attempted, cluster, compiled, in_turns, median_ratio, settle
from .sizes import Scale
from .training import config_of

TITLE = "Decoding"
ASKED = 0.97  # of the hand-written decoder's tokens a second
HAND, OURS = "hand-written", "autotp"
STEPS = PREFILL, DECODE = "prefill", "decode"
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.1}  # of the largest logit: many layers, each rounded
Step = Callable[[], Tensor]


class Way(NamedTuple):
    """One decoder: its prefill and its decode, each of which can be repeated."""

    prefill: Step
    decode: Step


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is measured, by name."""
    name = f"8B, {scale.decoder.layers} layers, tp="
    return {f"{name}{tp}": functools.partial(decoder, scale, tp) for tp in (1, scale.tp)}


@torch.no_grad()
def decoder(scale: Scale, tp: int) -> Record:
    """Seconds of a prefill and of a decoded token of rank 0 of `tp`."""
    shape, prompt = scale.decoder, scale.prompt
    cluster(scale.device)  # measured before there is a group
    with torch.device(scale.device):
        model = Llama(shape).to(scale.device, scale.dtype).eval()
        ids = torch.randint(shape.vocabulary, (1, prompt + 1))
    with alone(tp) if tp > 1 else nullcontext("") as group:
        way = Inference(0, tp, group) if tp > 1 else Whole()
        module = ours(scale, model, ids, tp)
        made = {
            HAND: functools.partial(by_hand_way, scale, model, way, ids),
            OURS: functools.partial(our_way, module, ids),
        }
        found: Record = {"limit": limit(module.plan, scale), "fired": list(module.plan.fired)}
        ways, began = {name: make() for name, make in made.items()}, time.perf_counter()
        for what in STEPS:
            steps = {name: getattr(each, what) for name, each in ways.items()}
            found[what] = measured(scale, steps, compared=tp == 1)
        found["first"] = time.perf_counter() - began
    return found


def measured(scale: Scale, steps: Mapping[str, Step], compared: bool) -> Record:
    """Seconds of each way's step as it is called, and as a CUDA graph; and how far their logits are apart.

    Args:
        scale: how it runs. steps: by way. compared: whether logits must be equal; among ranks that send nothing they
            are no one's logits.
    """
    first = {name: [step() for _ in range(3)][-1].clone() for name, step in steps.items()}
    found: Record = {"seconds": {}, "ratio": {}, "faults": {}}
    if compared:
        found["off"] = float((first[OURS] - first[HAND]).abs().max() / first[HAND].abs().max())
        if not found["off"] <= CLOSE[scale.dtype]:
            raise RuntimeError(f"logits are {found['off']:.1e} of the largest apart")
    recorded: dict[str, Step] = {}
    for name, step in steps.items():
        tried = attempted(lambda step=step, name=name: recorded.update({name: graphed(step, scale.device)}) or {})
        found["faults"] |= {name: tried["fault"]} if tried else {}
    for kind, each in (("called", dict(steps)), ("graph", recorded)):
        times = in_turns(each, scale.device, scale.rounds)
        found["seconds"][kind] = {name: statistics.median(x) for name, x in times.items()}
        if len(times) == 2:
            found["ratio"][kind] = median_ratio(times[HAND], times[OURS])  # of speeds
    return found


def graphed(step: Step, device: str) -> Step:
    """A step recorded as a CUDA graph; on another device the step."""
    if device != "cuda":
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replayed() -> Tensor:
        graph.replay()
        return out

    replayed()
    settle(device)
    return replayed


def by_hand_way(scale: Scale, model: Llama, way: Whole, ids: Tensor) -> Way:
    """The hand-written decoder, compiled; `ids` [1, prompt + 1]."""
    prompt = ids.shape[1] - 1
    with torch.device(scale.device):
        module = CachedLlama(by_hand(scale.decoder, way, model.state_dict()), 1, 2 * prompt).to(scale.dtype)
        positions = torch.arange(prompt + 1)
    module.llama.model.frequencies = frequencies(scale.decoder).to(scale.device)  # float32, as transformers has it
    called = compiled(module, scale.backend)
    before, token = ids[:, :prompt].contiguous(), ids[:, prompt:].contiguous()
    first, last = positions[:prompt].contiguous(), positions[prompt:].contiguous()
    return Way(lambda: called(before, first), lambda: called(token, last))


def ours(scale: Scale, model: Llama, ids: Tensor, tp: int) -> Any:
    """autotp's, of transformers' Llama with the same weights, under Megatron's plan."""
    with torch.device("meta"):
        module: Any = transformers.LlamaForCausalLM(config_of(scale.decoder))
        module.to(scale.dtype)
    module.load_state_dict(model.state_dict(), assign=True)
    with torch.device(scale.device):  # what no state dict holds
        module.model.rotary_emb = type(module.model.rotary_emb)(module.config)
    described = cluster(scale.device)
    mesh = init_device_mesh(scale.device, (tp,), mesh_dim_names=("tp",)) if tp > 1 else None
    degree: dict[str, Any] = {"mesh": mesh, "pins": megatron_pins(scale.decoder)} if mesh is not None else {"tp": 1}
    return autotp.compile(
        module.eval(), **degree, example_inputs={"input_ids": ids[:, :-1]}, objective="decode", cluster=described,
        sequence_parallel=False, check_capture=False, backend=scale.backend,
    )  # fmt: skip


def our_way(module: Any, ids: Tensor) -> Way:
    """The sharded module's calls with transformers' static cache; `ids` [1, prompt + 1]."""
    prompt = ids.shape[1] - 1
    caches: list[Any] = [transformers.StaticCache(module.config, max_cache_len=2 * prompt) for _ in range(2)]
    before, token = ids[:, :prompt].contiguous(), ids[:, prompt:].contiguous()
    first, last = (x[None] for x in torch.arange(prompt + 1, device=ids.device).split([prompt, 1]))

    def call(tokens: Tensor, positions: Tensor, cache: Any, length: int) -> Tensor:
        rewind(cache, length)
        options = {"use_cache": True, "logits_to_keep": 1}
        return module(input_ids=tokens, position_ids=positions, past_key_values=cache, **options).logits

    call(before, first, caches[1], 0)
    return Way(lambda: call(before, first, caches[0], 0), lambda: call(token, last, caches[1], prompt))


def rewind(cache: Any, length: int) -> None:
    """So many positions of a cache are taken."""
    for layer in cache.layers:
        if isinstance(taken := getattr(layer, "cumulative_length", None), Tensor):
            taken.fill_(length)


def limit(plan: Any, scale: Scale) -> float:
    """Seconds to read what a rank reads for a token, at the device's bandwidth: its weights and its cache."""
    read = plan.totals.weights_read + 2 * plan.memory.cache  # a static cache of twice the prompt
    return read / cluster(scale.device).memory_bandwidth


def section(results: Mapping[str, Record]) -> str:
    """A table of what was found."""
    head = [
        "",
        "hand-written, ms",
        "autotp, ms",
        f"speed, asked {ASKED}",
        "of the limit, hand-written",
        "of the limit, autotp",
    ]
    rows, faults = [], []
    for name, r in results.items():
        for what in (step for step in STEPS if step in r):
            for kind in ("called", "graph"):
                seconds, speed = r[what]["seconds"][kind], r[what]["ratio"].get(kind)
                ms = [f"{1e3 * seconds[n]:.3f}" if n in seconds else "-" for n in (HAND, OURS)]
                shares = [
                    f"{r['limit'] / seconds[n]:.0%}" if n in seconds and what == DECODE else "-" for n in (HAND, OURS)
                ]
                told = f"{speed:.3f}{' missed' * (speed < ASKED)}" if speed else "-"
                rows.append([f"{name}, {what}, {'a CUDA graph' if kind == 'graph' else kind}", *ms, told, *shares])
            faults += [f"{name}, {what}, {way}: no CUDA graph: {why}." for way, why in r[what]["faults"].items()]
    more = "".join(f"\n{fault}\n" for fault in faults)
    return f"""\
A token after the prompt, by 16 of an 8B model's 32 layers, with a static cache of twice its length, both compiled; the
limit reads weights and cache once at the bandwidth that was measured. One of several ranks sends nothing here.

{table(head, rows)}{more}"""
