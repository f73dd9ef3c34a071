"""Count the bytes that transformers' hand-written tensor-parallel plans send, and autotp's for the same model.

    python -m benchmarks.lists.hand_plans  # every architecture of the list that has such a plan, at tp 2 and 4
    python -m benchmarks.lists.hand_plans --only llama

Both run forward and backward as rank 0 of torch's "fake" process group, whose collectives have the shapes of real ones
and send nothing; every collective that is called is counted. The values are wrong there, so this proves no plan right.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import autotp
from autotp.compat import tree_leaves
from autotp.cost.collective_costs import collective_bytes
from benchmarks.helpers import isolate
from benchmarks.helpers.build import Architecture, build, wide
from benchmarks.helpers.command import add_choice, choose, each, made
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.lists.page import PAGE, render
from benchmarks.helpers.measure import LENGTH, ROWS, TEXT, example, reason

RESULTS = Path(__file__).parents[1] / "results" / "hand_plans.json"
LIMIT = 200.0
SAME = 1.03  # parameters held: times which theirs may be more and still count as split alike
Distribute = Callable[[Any, Mapping[str, Any], int], nn.Module]
# operator -> the primitive, and how many times its first argument the whole tensor is, in ranks
COLLECTIVES = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}


class Counted(TorchDispatchMode):
    """Counts the collectives that are called within it, and the bytes that a rank sends by them."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.tp, self.bytes, self.calls = tp, 0.0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it calls its collectives on plain tensors, and these come here
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in SILENT:
            return
        primitive, ranks = COLLECTIVES[name]
        tensors = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
        # An exchange among few of the ranks has nothing for the others.
        among = sum(map(bool, args[2])) if primitive == "all_to_all" and args[2] else self._size(args)
        whole = sum(x.numel() * x.element_size() for x in tensors) * (among if ranks else 1)
        self.bytes += collective_bytes(primitive, whole, among)
        self.calls[f"{primitive} {'x'.join(map(str, tensors[0].shape))}"] += 1

    def _size(self, args: Any) -> int:
        """Ranks of the group that is called, of which torch.distributed's own operators take the object."""
        groups = [x for x in args if isinstance(x, torch.ScriptObject) and str(x._type()).endswith(".ProcessGroup")]
        return dist.ProcessGroup.unbox(groups[0]).size() if groups else self.tp


def compare(architecture: Architecture, tps: Sequence[int], send: Send) -> None:
    """Count both plans of one architecture, where transformers has one; for `isolate.run`.

    Twice: the small model with its inputs, and, of a text model, the wide one with long inputs, as fake tensors. Where
    autotp sends more and holds less, also its plan with the parameters pinned whole that transformers leaves whole.
    """
    try:
        model = build(architecture)
        inputs = example(model)
    except Exception as error:
        return send({"failed": reason(error)})
    plan = dict(getattr(model, "_tp_plan", None) or {})
    send({"plan": plan, "parameters": sum(p.numel() for p in model.parameters())})
    cases = {"small": (functools.partial(build, architecture), inputs)}
    if set(inputs) <= TEXT:
        long = {k: v.new_ones(ROWS, LENGTH) for k, v in inputs.items()}
        cases["wide"] = functools.partial(wide, architecture), long
    for tp in tps if plan else ():
        for name, (make, given) in cases.items():
            case = f"{name} {tp}"
            found = {"theirs": counted(theirs, make, given, tp), "ours": counted(ours, make, given, tp)}
            more = ratio({case: found}, case)
            if more is not None and more > 1 and found["theirs"]["parameters"] > SAME * found["ours"]["parameters"]:
                pins = dict.fromkeys(found["theirs"]["whole"], Replicate())
                found["pinned"] = counted(functools.partial(ours, pins=pins), make, given, tp)
            for side in found.values():
                side.pop("whole", None)
            send({case: found})
    return None


def counted(distribute: Distribute, make: Callable[[], nn.Module], inputs: Mapping[str, Any], tp: int) -> Record:
    """Count a step of the model that `make` gives, distributed over `tp` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        module = distribute(make(), inputs, tp)
        named = dict(module.named_parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in named.values())
        whole = [n for n, p in named.items() if not isinstance(p, DTensor) or p.placements == (Replicate(),)]
        with ExitStack() as stack:
            if any(p.is_meta for p in module.parameters()):
                inputs = _faked(module, inputs, stack)
            _step(module, inputs, tp)  # the first call compares the ranks, and may attach hooks
            forward, backward = _step(module, inputs, tp)
        return {"parameters": held, "whole": whole, "forward": forward, "backward": backward}
    except Exception as error:
        return {"failed": reason(error)}
    finally:
        dist.destroy_process_group()


def _faked(module: nn.Module, inputs: Mapping[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Give a meta module fake tensors, which compute nothing; the inputs as such tensors too."""
    mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    module.to_empty(device="cpu")
    if isinstance(module, PreTrainedModel):
        module.tie_weights()
    return {k: mode.from_tensor(v) for k, v in inputs.items()}


def _step(module: nn.Module, inputs: Mapping[str, Any], tp: int) -> list[dict[str, Any]]:
    sides = []
    with Counted(tp) as forward:
        outputs = module(**inputs)
    sides.append({"bytes": round(forward.bytes), "calls": dict(forward.calls)})
    found = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    loss = sum((x.float().square().mean() for x in found if isinstance(x, Tensor) and x.requires_grad), torch.zeros(()))
    with Counted(tp) as backward:
        loss.backward()
    return [*sides, {"bytes": round(backward.bytes), "calls": dict(backward.calls)}]


def theirs(model: Any, inputs: Mapping[str, Any], tp: int) -> nn.Module:
    """The model under transformers' plan, distributed as `from_pretrained(..., distributed_config=...)` does it."""
    for module in model.modules():  # it is applied before weights are tied
        for name, p in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(p.detach().clone(), p.requires_grad))
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=tp))
    model = type(model).maybe_distribute_model(model, config, mesh)
    model.tie_weights()
    return model


def ours(
    model: nn.Module, inputs: Mapping[str, Any], tp: int, pins: Mapping[str, Replicate] | None = None
) -> nn.Module:
    """The model under autotp's plan for these inputs."""
    inputs = dict(inputs)
    plan = autotp.plan(model, tp, example_inputs=inputs, pins=pins)
    return autotp.parallelize(model, plan, example_inputs=inputs)


def ratio(record: Mapping[str, Any], case: str) -> float | None:
    """Our bytes over theirs, forward and backward; None where either was not counted."""
    sides = [record.get(case, {}).get(side, {}) for side in ("ours", "theirs")]
    if not all("backward" in side for side in sides):
        return None
    ours, theirs = (side["forward"]["bytes"] + side["backward"]["bytes"] for side in sides)
    return ours / theirs if theirs else None


def line(record: Mapping[str, Any]) -> str:
    """One result, for the terminal."""
    if not record.get("plan"):
        return record.get("failed", "no plan")
    parts = []
    for case, sides in record.items():
        if case.startswith(("small", "wide")):
            found = ratio(record, case)
            failed = [f"{k} FAILED {v['failed']}" for k, v in sides.items() if "failed" in v]
            parts.append(f"{case}: " + (f"{found:.3f}" if found is not None else "; ".join(failed)))
    return "  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4], help="degrees (default: 2 4)")
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, Any] = {"made": made("benchmarks.lists.hand_plans", arguments), "models": kept.get("models", {})}

    def one(architecture: Architecture) -> Record:
        record, why = isolate.run(compare, architecture, given.tp, limit=given.limit * len(given.tp))
        return {**record, "failed": why} if why else record

    def keep(architecture: Architecture, record: Record) -> str:
        if record.get("plan"):
            results["models"][architecture.name] = record
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        return line(record)

    each(choose(given, results["models"], "hand-written-plans"), one, keep, given.jobs)
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
