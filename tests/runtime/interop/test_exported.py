"""A rank's program, saved by `program()`, runs on two ranks in processes that do not have the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import message_of
from tests.helpers.models import redrawn
from tests.helpers.processes.pool import Pool

CLOSE = 1e-6


class Tagger(nn.Module):
    """With a loss over a split vocabulary, dropout, a counter in a buffer, and an output in a class of its own."""

    class Output(dict[str, Tensor]):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(30, 8), nn.Linear(8, 32)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(32, 30)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, targets: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        scores = self.head(self.drop(nn.functional.gelu(self.up(self.embed(ids)))))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return {"loss": loss * scale, "scores": (scores, self.calls * 10)}


def saving(rank: int, world: int, group: Any, folder: str) -> list[str]:
    """Programs of this rank, and what they must give."""
    model = redrawn(Tagger())
    ids, targets = torch.randint(30, (3, 7)), torch.randint(30, (3, 7))
    example = autotp.Inputs(ids, targets=targets, scale=2.0)
    sharded: Any = autotp.compile(model, example_inputs=example, mesh=mesh_of(group), check_capture=False)
    wrong = [
        message_of(lambda: sharded.program(example)),
        message_of(lambda: sharded.eval().program(example, training=rank == 0)),
        message_of(lambda: sharded.program(example, group=group)),
        message_of(lambda: sharded.program({"ids": ids, "target": targets})),
    ]
    torch.export.save(sharded.program(example), f"{folder}/inference{rank}.pt2")
    kept = {"ids": ids, "targets": targets, "inference": model.eval()(ids, targets, 2.0)}
    torch.save(sharded.train().program(example, training=True), f"{folder}/training{rank}.pt")
    torch.manual_seed(4)
    kept["training"] = sharded(ids, targets=targets, scale=2.0)
    kept["training"]["loss"].backward()
    kept["gradients"] = {n: p.grad.to_local() for n, p in sharded.named_parameters()}
    torch.save(kept, f"{folder}/kept{rank}.pt")
    return wrong


LOADING = """
import json, os, sys
import torch, torch.distributed as dist

def gap(a, b):
    return float((a.double() - b.double()).abs().max())

def run(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kept = torch.load(f"{folder}/kept{rank}.pt")
    ids, targets = kept["ids"], kept["targets"]
    found = {}
    with torch.no_grad():
        for name, of in (("right", rank), ("swapped", 1 - rank)):
            program = torch.export.load(f"{folder}/inference{of}.pt2").module()
            out = program(ids, targets=targets)
            found[name] = [gap(out["loss"], kept["inference"]["loss"]),
                           gap(out["scores"][0], kept["inference"]["scores"][0])]
            found["calls " + name] = int(out["scores"][1])
        found["again"] = [int(program(ids[:2, :5], targets=targets[:2, :5])["scores"][1])]
    found["rows"] = program.state_dict()["up.weight"].shape[0]
    found["needs"] = [name for name in ("autotp", "transformers", "tests") if name in sys.modules]
    torch.manual_seed(4)
    program = torch.load(f"{folder}/training{rank}.pt", weights_only=False)
    out = program(ids, targets)
    out["loss"].backward()
    found["training"] = gap(out["loss"].detach(), kept["training"]["loss"])
    found["gradients"] = max(gap(p.grad, kept["gradients"][n]) for n, p in program.named_parameters())
    found["redrawn"] = gap(program(ids, targets)["loss"].detach(), kept["training"]["loss"])
    found["needs then"] = [name for name in ("autotp", "transformers", "tests") if name in sys.modules]
    json.dump(found, open(f"{folder}/found{rank}.json", "w"))
    dist.destroy_process_group()

torch.set_num_threads(1)
torch.export.load(f"{sys.argv[1]}/inference0.pt2")  # what that imports both ranks share
child = os.fork()
try:
    run(int(child == 0), sys.argv[1])
except BaseException:
    import traceback
    traceback.print_exc()
    os._exit(1)
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_programs_run_where_there_is_no_model(pool: Pool, tmp_path: Path) -> None:
    for wrong in pool.run(saving, str(tmp_path), world=2):
        mode, ranks, group, names = wrong
        assert "training=False" in mode and "eval()" in mode
        assert "training=True" in ranks or "rank 0" in ranks
        assert "group_name" in group and "targets" in names
    done = subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert max(found["right"]) < CLOSE < 1e-2 < max(found["swapped"]), found
        assert found["rows"] == 16 and found["needs"] == [] and found["needs then"] == ["autotp"]
        assert found["training"] < CLOSE and found["gradients"] < CLOSE < found["redrawn"], found
