"""The table of optimizers in docs/integrations.md: each row is what a step does at tp, and at dp x tp."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of
from tests.helpers.modules.trained import three_steps

OPTIM: Any = torch.optim
PAGE = Path(__file__).resolve().parents[4] / "docs" / "integrations.md"
APART = ("Optimizer", "SparseAdam")  # the base, and one for sparse gradients
PLACES = ("tp=2", "dp=2, tp=2", "dp=2, tp=2, fully_shard")
FOREACH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def makers() -> dict[str, Callable[[Any], Any]]:
    """Every optimizer of torch, in each of its ways to step."""
    classes = {n: c for n, c in vars(OPTIM).items() if isinstance(c, type) and issubclass(c, OPTIM.Optimizer)}
    found: dict[str, Callable[[Any], Any]] = {}
    for name in sorted(classes.keys() - set(APART)):
        found[name] = lambda p, c=classes[name]: c([x for x in p if x.ndim == 2 or c is not OPTIM.Muon], lr=0.05)
        for option in ("foreach",) * (name in FOREACH) + ("fused",) * (name in FUSED):
            found[f"{name} {option}"] = lambda p, c=classes[name], o=option: c(p, lr=0.05, **{o: True})
    return found


def outcome(model: Any, sharded: Any, x: Tensor, mine: Tensor, make: Callable[[Any], Any]) -> str:
    """What three steps are beside the model's: "right", "refused", or how far they are apart."""
    start = {n: t.clone() for n, t in model.state_dict().items()}
    with patch.object(Tensor, "bfloat16", Tensor.double):  # in which Muon iterates: its rounding would hide the rest
        three_steps(model, make, lambda m: (m(x) - 1).square().mean())
        kind, text, _ = error_of(lambda: three_steps(sharded, make, lambda m: (m(mine) - 1).square().mean()))
    wanted, found = model.state_dict(), sharded.full_state_dict()
    moved = max(float((wanted[n] - t).abs().max()) for n, t in start.items())
    apart = max(float((found[n] - t).abs().max()) for n, t in wanted.items()) / moved
    model.load_state_dict(start)
    sharded.load_state_dict(start)
    if kind:
        return "refused" if "step on this module's parameters" in text else text
    return "right" if apart < 1e-9 else f"{apart:.1e} apart"


def outcomes(rank: int, world: int, group: Any, place: str) -> dict[str, str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    x, options = torch.randn(4, 8).double(), {}
    mine = x
    if place.startswith("dp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
        options = {"dp": 2, "fully_shard": place.endswith("fully_shard")}
    else:
        mesh = mesh_of(group)
    sharded: Any = autotp.compile(model, example_inputs=mine, mesh=mesh, **options)
    return {name: outcome(model, sharded, x, mine, make) for name, make in makers().items()}


def test_the_table_of_optimizers_says_what_they_do(pool):
    found: dict[str, dict[str, dict[str, str]]] = {}
    for place in PLACES:
        each, *others = pool.run(outcomes, place, world=2 if place == PLACES[0] else 4)
        assert all(other == each for other in others), (place, each, others)
        for name, what in each.items():
            found.setdefault(name.split()[0], {}).setdefault(place, {})[name.partition(" ")[2]] = what
    rows = []
    for name, places in found.items():
        ways = ", ".join(filter(None, places[PLACES[0]]))
        cells = [" and ".join(sorted(set(places[place].values()))) for place in PLACES]
        rows.append("| " + " | ".join((name, ways, *cells)) + " |")
    shown = re.findall(r"^\| \w+ \| [\w, ]*\| \w+ \| \w+ \| \w+ \|$", PAGE.read_text(), re.MULTILINE)
    assert shown == rows, "\n".join(rows)
