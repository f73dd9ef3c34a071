"""Planning beside AutoParallel (meta-pytorch/autoparallel), from a checkout that `AUTOPARALLEL` names.

Both plan the same Llama on the meta device, in bfloat16 over eight ranks. AutoParallel asks a GPU what it is called and
has no rule for the attention that torch picks on a CPU: where there is no GPU it is told "NVIDIA H100", and its model
computes attention by products. It places parameters and gradients over the ranks as it likes, as autotp does.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotp
from autotp.cost.collective_costs import collective_bytes
from benchmarks.helpers import isolate
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.measure import reason
from benchmarks.helpers.performance import table
from benchmarks.plan_time import build
from benchmarks.results import git

CHECKOUT, TP, TOKENS, LIMIT = "AUTOPARALLEL", 8, 2048, 1800.0
MODELS = ("8B shape, 2 layers", "8B shape, 8 layers", "Llama-8B")
SKIPPED = f"AutoParallel was not measured: the environment variable {CHECKOUT} names no checkout of its source."
PRIMITIVES = {  # whether the whole is the result, and autotp's name
    "all_reduce": (False, "all_reduce"), "all_gather_into_tensor": (True, "all_gather"),
    "reduce_scatter_tensor": (False, "reduce_scatter"), "all_to_all_single": (False, "all_to_all"),
}  # fmt: skip


def seconds() -> float:
    """CPU seconds of this process and of those that it has waited for, as AutoParallel's solver."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def ours(name: str, send: Send) -> None:
    """Send CPU seconds from the module to the plan and to the sharded module, and the bytes a rank sends in a step."""
    ids, began = torch.zeros(1, TOKENS, dtype=torch.long), seconds()
    plan = autotp.plan(build(name), TP, example_inputs=ids)
    send({"plan": seconds() - began, "sent": plan.totals.sent})
    began = seconds()
    autotp.compile(build(name), TP, example_inputs=ids)
    send({"sharded": seconds() - began})


def its(name: str, send: Send) -> None:
    """Send likewise AutoParallel's, as its `examples/example_hf.py` calls it; or its error."""
    model, device = build(name), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.cpu.get_device_name = lambda *_: "NVIDIA H100"  # type: ignore[attr-defined]
        model.set_attn_implementation("eager")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    try:
        planner: Any = importlib.import_module("autoparallel.api").AutoParallel
        mesh = init_device_mesh(device, (TP,), mesh_dim_names=("tp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        began = seconds()
        with planner(model, lambda: torch.zeros((1, TOKENS), dtype=torch.long, device=device), mesh, policy) as run:
            run.add_input_constraints([(Replicate(),)])
            run.add_output_constraints([(Replicate(),)])  # as a user's loss takes logits
            run.add_parameter_memory_constraint(low=None, high=None)
            placement = run.optimize_placement()
            send({"plan": seconds() - began})
            run.apply_placement(placement)
            send({"sharded": seconds() - began, "sent": sent(run.parallel_gm.graph.nodes)})
    except Exception as error:
        send({"refused": reason(error)})
    finally:
        dist.destroy_process_group()


def sent(nodes: Iterable[fx.Node]) -> float:
    """Bytes that a rank sends in a graph by torch's collectives, as autotp counts them: what rings send."""
    total = 0.0
    for node in nodes:
        name = str(node.target).partition(".")[2].partition(".")[0]
        if "c10d" not in str(node.target) or name not in PRIMITIVES:
            continue
        of_result, primitive = PRIMITIVES[name]
        whole: Tensor = (node if of_result else node.args[0]).meta["val"]  # type: ignore[union-attr]
        ranks = next((x for x in node.args[1:] if isinstance(x, int)), TP)  # a sum does not say how many
        total += collective_bytes(primitive, whole.numel() * whole.element_size(), ranks)
    return total


def run() -> Record:
    """Measure both for each model, or say why AutoParallel is not."""
    folder = os.environ.get(CHECKOUT, "")
    if not (Path(folder) / "autoparallel" / "api.py").is_file():
        return {"skipped": SKIPPED}
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    found: Record = {"commit": git(Path(folder), "rev-parse", "--short=8", "HEAD") or "unknown", "models": {}}
    for name in MODELS:
        both = {}
        for who, work in (("autotp", ours), ("autoparallel", its)):
            record, why = isolate.run(work, name, limit=LIMIT, parent=True)
            both[who] = record | ({"refused": why} if why else {})
        found["models"][name] = both
    return found


def page(found: Record) -> str:
    """The table, or the sentence that there is none."""
    if "skipped" in found:
        return f"{found['skipped']}\n"
    rows, refused = [], []
    for name, both in found["models"].items():
        mine, other = both["autotp"], both["autoparallel"]
        pairs = [(mine.get(key), other.get(key)) for key in ("plan", "sharded", "sent")]
        cells = [f"{x / unit:.{digits}f}" if x is not None else "-"
                 for pair, unit, digits in zip(pairs, (1, 1, 1e6), (2, 2, 0), strict=True) for x in pair]  # fmt: skip
        rows.append([name, *cells])
        refused += [f"* {name}, {who}: {one['refused']}" for who, one in both.items() if "refused" in one]
    head = ["", "plan, CPU s: autotp", "AutoParallel", "sharded, CPU s: autotp", "AutoParallel", "sent, MB: autotp",
            "AutoParallel"]  # fmt: skip
    return "\n".join([
        f"Beside AutoParallel (a checkout of {found['commit']}), over {TP} ranks and {TOKENS} tokens, bfloat16: CPU",
        "seconds from the module to a plan, and to the sharded module, its solver's process in them; bytes that a rank",
        "sends in a training step by both programs' collectives, counted as rings send. On a CPU AutoParallel is told",
        "that it has an H100, and computes attention by products.\n", table(head, rows), *refused,
    ])  # fmt: skip


if __name__ == "__main__":
    print(page(run()))
