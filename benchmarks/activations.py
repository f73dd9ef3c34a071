"""What autograd keeps for the backward, beside plain Megatron: `python -m benchmarks.activations [--write]`.

As rank 0 of torch's "fake" process group, which sends nothing: the storages that a forward saves, each counted once and
without those of parameters and buffers, and the parameters that a rank holds.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from benchmarks.helpers.command import made
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Llama, Shape, untouched
from benchmarks.helpers.llama.variants import hand, ours
from benchmarks.helpers.performance import table, write_section
from benchmarks.lists.hand_plans import FakeStore

HEADING = "Saved activations"
SHAPE, LENGTH, TP = Shape(), 512, 2
HAND = "hand-written, plain"
Make = Callable[[nn.Module, Tensor, Shape], nn.Module]
Kind = tuple[str, tuple[int, ...]]  # dtype and shape

MODULES: dict[str, Make] = {
    HAND: lambda model, ids, shape: hand(model, shape, False),
    "hand-written, sequence-parallel": lambda model, ids, shape: hand(model, shape, True),
    "autotp, plain": lambda model, ids, shape: ours(model, ids, False),
    "autotp, sequence-parallel": lambda model, ids, shape: ours(model, ids, True, optimise={"regather": False}),
    "autotp, sequence-parallel, regathered": lambda model, ids, shape: ours(
        model, ids, True, optimise={"regather": True}
    ),
}


def kept(module: nn.Module, ids: Tensor) -> tuple[dict[Kind, int], int]:
    """Bytes of the storages that a forward saves, by dtype and shape of what was saved first; and with a loss, in all.

    What parameters and buffers own is not counted: a rank holds it anyway. The loss is the cross entropy of the logits,
    which are whole on every rank.
    """
    own = {_address(_local(x)) for x in (*module.parameters(), *module.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        local = _local(x)
        if _address(local) not in own:
            saved.setdefault(_address(local), local)  # held, so that no address is used twice
        return x

    found: Counter[Kind] = Counter()
    with saved_tensors_hooks(pack, lambda x: x):
        logits = module(ids)
        for x in saved.values():
            found[str(x.dtype).removeprefix("torch."), tuple(x.shape)] += x.untyped_storage().nbytes()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    with_loss = sum(x.untyped_storage().nbytes() for x in saved.values())
    del loss
    return dict(found), with_loss


def _local(x: Tensor) -> Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def held(module: nn.Module) -> int:
    """Elements of the parameters that this rank holds."""
    return sum(_local(p.detach()).numel() for p in module.parameters())


def measure(shape: Shape = SHAPE, length: int = LENGTH, only: Sequence[str] = ()) -> dict[str, Record]:
    """Bytes saved in all and by what, and elements held, for each module."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    try:
        model, ids = untouched(shape), torch.randint(shape.vocabulary, (1, length))
        found = {}
        for name, make in MODULES.items():
            if only and name not in only and name != HAND:
                continue
            module = make(model, ids, shape)
            module(ids)  # the first call compares the ranks
            by_kind, with_loss = kept(module, ids)
            sizes = {"bytes": sum(by_kind.values()), "with_loss": with_loss, "parameters": held(module)}
            found[name] = {**sizes, "by_kind": by_kind}
        return found
    finally:
        dist.destroy_process_group()


def summary(found: Mapping[str, Record], shape: Shape = SHAPE) -> Record:
    """MiB kept, over the plain hand-written one's; the part of the parameters that a rank holds."""
    with torch.device("meta"):
        whole = sum(p.numel() for p in Llama(shape).parameters())
    base = found[HAND]
    return {
        name: {
            "mib": round(r["bytes"] / 2**20, 2),
            "ratio": round(r["bytes"] / base["bytes"], 3),
            "mib_with_loss": round(r["with_loss"] / 2**20, 2),
            "ratio_with_loss": round(r["with_loss"] / base["with_loss"], 3),
            "parameters": round(r["parameters"] / whole, 4),
        }
        for name, r in found.items()
    }


def details(found: Mapping[str, Record]) -> str:
    """What each keeps, the largest first, as text."""
    lines = []
    for name, record in found.items():
        lines.append(f"{name}: {record['bytes'] / 2**20:.2f} MiB")
        for (dtype, shape), size in sorted(record["by_kind"].items(), key=lambda x: -x[1])[:12]:
            lines.append(f"  {size / 2**20:8.2f} MiB  {dtype} {list(shape)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--details", action="store_true", help="print what is kept, by dtype and shape")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure()
    record: Record = {
        "benchmark": "activations",
        **made("benchmarks.activations", arguments),
        "results": summary(found),
    }
    if given.details:
        print(details(found))
    print(page(record))
    print(json.dumps(record))
    if given.write:
        write_section(HEADING, page(record))


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    keys = {"mib": 1, "ratio": 2, "mib_with_loss": 1, "ratio_with_loss": 2, "parameters": 3}
    cells = [[n, *(f"{r[k]:.{digits}f}" for k, digits in keys.items())] for n, r in record["results"].items()]
    head = ["", "kept, MiB", "ratio", "with the loss, MiB", "ratio", "parameters"]
    s = SHAPE
    return f"""\
`{record["command"]}`: storages that autograd keeps of a forward, each once and without those of
parameters and buffers, of a Llama (hidden {s.hidden}, {s.layers} layers, {s.heads} heads with {s.kv_heads} of keys and
values, feed-forward {s.wide}, {s.vocabulary} words) for {LENGTH} tokens on one of {TP} ranks, float32, and their ratio
to Megatron's plain scheme written by hand; then with what the cross entropy of the gathered logits keeps, the same for
all. Of all parameters a rank holds the part in the last column. torch {record["torch"]}, Python {record["python"]},
{record["date"]}.

{table(head, cells)}"""


if __name__ == "__main__":
    main()
