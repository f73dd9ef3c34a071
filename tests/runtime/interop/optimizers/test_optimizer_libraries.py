"""The table of optimizer libraries in docs/integrations.md: what their steps do at tp, and at dp x tp."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import mesh_of

OPTIM: Any = torch.optim
PAGE = Path(__file__).resolve().parents[4] / "docs" / "integrations.md"
LIBRARIES = {
    "lion-pytorch": "lion_pytorch",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "pytorch-optimizer": "pytorch_optimizer",
}
OUTCOMES = ("right", "right with foreach=False")  # all others are refused
STEPS = 12  # some move nothing in the first five (rectified ones) or ten (AdaShift)


def classes(library: str) -> dict[str, Any]:
    """The optimizers that a library makes of a list of parameters alone."""
    found = vars(import_module(LIBRARIES[library])).items()
    kinds = {n: c for n, c in found if isinstance(c, type) and issubclass(c, OPTIM.Optimizer)}
    return {n: c for n, c in sorted(kinds.items()) if c.__module__.startswith(LIBRARIES[library])}


def maker(kind: Any, **options: Any) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        optimizer = kind(parameters, lr=0.05, **options)
        if hasattr(optimizer, "train"):  # schedulefree's
            optimizer.train()
        return optimizer

    return make


def step(module: Any, start: dict[str, Tensor], make: Callable[[Any], Any], x: Tensor) -> tuple[str, dict[str, Tensor]]:
    """What steps from `start` fail with, empty where they do not, and the parameters after them."""
    module.load_state_dict(start)
    try:
        optimizer = make(list(module.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            (module(x) - 1).square().mean().backward()
            optimizer.step()
    except Exception as error:
        return type(error).__name__, {}
    return "", module.full_state_dict() if hasattr(module, "full_state_dict") else module.state_dict()


def outcome(model: Any, sharded: Any, x: Tensor, mine: Tensor, make: Callable[[Any], Any]) -> str:
    """What an optimizer does of a sharded module: one of OUTCOMES, or empty where it fails on the model too."""
    start = {n: t.clone() for n, t in model.state_dict().items()}
    failed, wanted = step(model, start, make, x)
    wanted = {n: t.clone() for n, t in wanted.items()}
    model.load_state_dict(start)
    if failed:
        return ""
    failed, found = step(sharded, start, make, mine)
    if failed:
        return "refused" if failed == "StateError" else "torch's error"
    moved = max(float((wanted[n] - t).abs().max()) for n, t in start.items())
    apart = max(float((found[n] - t).abs().max()) for n, t in wanted.items()) / moved
    return "right" if apart < 1e-9 else f"{apart:.0e} apart"


def outcomes(rank: int, world: int, group: Any, libraries: tuple[str, ...]) -> dict[str, dict[str, str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    x = torch.randn(4, 8).double()
    mine, dp, mesh = x, None, mesh_of(group)
    if world == 4:
        mesh, dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), 2
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    sharded: Any = autotp.compile(model, example_inputs=mine, mesh=mesh, dp=dp)
    return {library: of_library(library, model, sharded, x, mine) for library in libraries}


def of_library(library: str, model: Any, sharded: Any, x: Tensor, mine: Tensor) -> dict[str, str]:
    """The outcome of each of its optimizers."""
    found: dict[str, str] = {}
    for name, kind in classes(library).items():
        torch.manual_seed(0)
        found[name] = outcome(model, sharded, x, mine, maker(kind))
        if found[name] == "refused" and "foreach" in inspect.signature(kind).parameters:
            again = outcome(model, sharded, x, mine, maker(kind, foreach=False))
            found[name] = "right with foreach=False" if again == "right" else "refused"
    return {name: what for name, what in found.items() if what}


def rows(found: dict[str, str], library: str) -> list[str]:
    """The lines of the table on the page."""
    grouped = {what: [name for name, each in found.items() if each == what] for what in dict.fromkeys(found.values())}
    assert set(grouped) <= {*OUTCOMES, "refused"}, grouped
    return [f"| {library} | {what} | {', '.join(grouped[what])} |" for what in OUTCOMES if what in grouped]


def test_the_table_of_libraries_says_what_they_do(pool):
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    both = [pool.run(outcomes, tuple(LIBRARIES), world=world) for world in (2, 4)]
    first = both[0][0]
    assert all(each == first for ranks in both for each in ranks), [r[0] for r in both]
    page = PAGE.read_text().splitlines()
    for library in LIBRARIES:
        shown = [line for line in page if line.startswith(f"| {library} |")]
        assert shown == rows(first[library], library), "\n".join(rows(first[library], library))
