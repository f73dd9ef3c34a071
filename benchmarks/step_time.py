"""Step time on local gloo ranks beside a hand-written module: `python -m benchmarks.step_time [--write]`.

Two processes of one thread each train the same Llama (`helpers.llama.megatron`) made tensor-parallel by
autotp, by hand, by torch's `parallelize_module` and by transformers' `tp_plan`, eager and compiled by Inductor. All
compute the same loss and gradients, which is checked first; then each takes a step in turn.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import Times, interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import difference, dtensor, hand, local_gradients, ours, sent, training_step
from benchmarks.helpers.measure import reason
from benchmarks.helpers.performance import table, write_section
from benchmarks.helpers.together import together
from benchmarks.lists.hand_plans import theirs

HEADING = "Step time beside a hand-written module"
SHAPE, LENGTH, RANKS, ROUNDS = Shape(), 256, 2, 15
CLOSE = 2e-4  # of the largest gradient: float32 sums in another order
PLAIN, SEQUENCE = "hand-written", "hand-written, sequence-parallel"
Make = Callable[[nn.Module, Tensor], nn.Module]


def compiled_by_hand(model: nn.Module, sequence: bool, shape: Shape) -> nn.Module:
    """The hand-written one under `torch.compile`."""
    return torch.compile(hand(model, shape, sequence), fullgraph=True)  # type: ignore[return-value]


def transformed(model: nn.Module, shape: Shape) -> nn.Module:
    """transformers' own Llama with these weights."""
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.wide, vocab_size=shape.vocabulary, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM._from_config(config)
    made.to_empty(device="cpu")
    made.load_state_dict(model.state_dict())
    rotary: Any = transformers.LlamaForCausalLM._from_config(_tiny(config)).model.rotary_emb
    made.model.rotary_emb = rotary
    return made


def _tiny(config: Any) -> Any:
    """The same heads in a model of no layers and one word: for the buffers that no state dict holds."""
    return type(config).from_dict(config.to_dict() | {"num_hidden_layers": 0, "vocab_size": 1})


def variants(shape: Shape) -> dict[str, tuple[str, Make]]:
    """Name -> the hand-written one of the same plan, and how it is made."""
    inductor = {"backend": "inductor"}
    return {
        PLAIN: (PLAIN, lambda m, x: hand(m, shape, False)),
        "autotp": (PLAIN, lambda m, x: ours(m, x, False, shape)),
        "DTensor": (PLAIN, lambda m, x: dtensor(m, shape, False)),
        "transformers' tp_plan": (PLAIN, lambda m, x: theirs(transformed(m, shape), {}, dist.get_world_size())),
        "autotp, transformers' Llama": (PLAIN, lambda m, x: ours(transformed(m, shape), x, False, shape)),
        SEQUENCE: (SEQUENCE, lambda m, x: hand(m, shape, True)),
        "autotp, sequence-parallel": (SEQUENCE, lambda m, x: ours(m, x, True, shape)),
        "DTensor, sequence-parallel": (SEQUENCE, lambda m, x: dtensor(m, shape, True)),
        "hand-written, compiled": (PLAIN, lambda m, x: compiled_by_hand(m, False, shape)),
        "autotp, compiled": (PLAIN, lambda m, x: ours(m, x, False, shape, **inductor)),
        "hand-written, sequence-parallel, compiled": (SEQUENCE, lambda m, x: compiled_by_hand(m, True, shape)),
        "autotp, sequence-parallel, compiled": (SEQUENCE, lambda m, x: ours(m, x, True, shape, **inductor)),
    }


def compared(shape: Shape, length: int, rounds: int, only: Sequence[str] = ()) -> Record:
    """This rank's times of every variant, first-call times, what it sends and how far its gradients are off."""
    model = untouched(shape)
    ids, targets = torch.randint(shape.vocabulary, (2, 1, length), generator=torch.Generator().manual_seed(1))
    steps: dict[str, Callable[[], Tensor]] = {}
    found: Record = {"first": {}, "off": {}, "sent": {}, "refused": {}}
    wanted: dict[str, Tensor] = {}
    for name, (_, make) in variants(shape).items():
        if only and name not in only and name not in (PLAIN, SEQUENCE):
            continue
        try:
            module = make(model, ids)
            step = training_step(module, ids, targets)
            began = time.perf_counter()
            loss = step()
        except Exception as error:
            found["refused"][name] = reason(error)
            continue
        found["first"][name] = time.perf_counter() - began
        mine = {"loss": loss.detach(), **_named(local_gradients(module))}
        wanted = wanted or {k: x.clone() for k, x in mine.items()}
        found["off"][name] = difference(mine, wanted)
        found["sent"][name] = (None, None) if "compiled" in name else sent(step, RANKS)  # torch counts eager calls only
        steps[name] = step
        for p in module.parameters():
            p.grad = None
    found["times"] = {k: t._asdict() for k, t in interleaved(steps, rounds, before=dist.barrier).items()}
    return found


def _named(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): grad for name, grad in gradients.items()}


def run(shape: Shape = SHAPE, length: int = LENGTH, rounds: int = ROUNDS, only: Sequence[str] = ()) -> Record:
    """What all ranks found, put together: a row for every variant."""
    everyone = on_ranks(functools.partial(compared, shape, length, rounds, only), RANKS)
    return {"rows": rows(everyone, variants(shape)), "refused": everyone[0]["refused"]}


def rows(everyone: Sequence[Record], known: Mapping[str, tuple[str, Make]]) -> dict[str, Record]:
    """By variant: CPU seconds of all ranks together, seconds of the slowest, medians of each and of their ratios."""
    times = {name: [Times(**found["times"][name]) for found in everyone] for name in everyone[0]["times"]}
    out = {}
    for name, mine in times.items():
        calls, sent_bytes = everyone[0]["sent"][name]
        out[name] = {
            **together(mine, times[known[name][0]]),
            "first_s": round(max(found["first"][name] for found in everyone), 1),
            "off": float(f"{max(found['off'][name] for found in everyone):.1e}"),
            "collectives": calls and sum(calls.values()),
            "bytes": sent_bytes and round(sent_bytes),
        }
    return out


def check(found: Record) -> None:
    """Refuse figures of what does not compute the same, or does not communicate by the same plan.

    Raises:
        RuntimeError: gradients differ, or autotp sends other bytes than the hand-written module.
    """
    for name, row in found["rows"].items():
        if row["off"] > CLOSE:
            raise RuntimeError(f"{name} computes something else: loss or gradients are {row['off']} off")
    for name, base in (("autotp", PLAIN), ("autotp, sequence-parallel", SEQUENCE)):
        mine, other = found["rows"].get(name), found["rows"].get(base)
        if mine and other and mine["bytes"] != other["bytes"]:
            raise RuntimeError(f"{name} runs another plan: {mine['bytes']} bytes a step, and {other['bytes']} by hand")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, and the hand-written ones")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    found = run(rounds=given.rounds, only=given.only)
    record = {"benchmark": "step_time", **made("benchmarks.step_time", arguments), "cores": os.cpu_count()}
    record |= {"rounds": given.rounds, "load_before": round(before, 1), "shape": asdict(SHAPE), **found}
    print(page(record))
    print(json.dumps(record))
    check(found)
    if given.write:
        write_section(HEADING, page(record))


def page(record: Record) -> str:
    """The section of docs/performance.md."""
    head = ["", "CPU, s", "ratio", "wall, s", "ratio", "first step, s", "collectives", "sent, MB"]
    cells = [
        [name, f"{r['cpu_s']:.3f}", f"{r['cpu_ratio']:.3f}", f"{r['wall_s']:.3f}", f"{r['wall_ratio']:.3f}",
         f"{r['first_s']:.1f}", str(r["collectives"] or "-"), f"{r['bytes'] / 1e6:.1f}" if r["bytes"] else "-"]
        for name, r in record["rows"].items()
    ]  # fmt: skip
    refused = "".join(f"\nNot measured: {name}: {why}.\n" for name, why in record["refused"].items())
    s = SHAPE
    return f"""\
`{record["command"]}`: forward, cross entropy and backward of a Llama (hidden {s.hidden}, {s.layers} layers,
{s.heads} heads with {s.kv_heads} of keys and values, feed-forward {s.wide}, {s.vocabulary} words, {LENGTH} tokens),
float32, over {RANKS} gloo processes of one thread each; logits are gathered. All split by Megatron's plan, and loss and
gradients are compared before anything is timed. CPU seconds of both ranks together, clock of the slower one: medians
of {record["rounds"]} interleaved rounds, and the median of the ratios to the hand-written module of the same plan in
the same round. {record["cores"]} cores of {record["machine"]}; torch {record["torch"]}, transformers
{record["transformers"]}, Python {record["python"]}, {record["date"]}, load average {record["load_before"]} before.

{table(head, cells)}{refused}"""


if __name__ == "__main__":
    main()
