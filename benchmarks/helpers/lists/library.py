"""Models of other libraries: how the list says to build one, and what autotp makes of it."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
import torch.export
from torch import nn

import autotp
from autotp.plans.plan import Plan
from benchmarks.helpers.build import redraw
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.measure import figures, reason
from benchmarks.results import clean

LIST = Path(__file__).resolve().parents[2] / "libraries.toml"
WIDTH, CLUSTER, TOP = 512, "h100", 3


@dataclass(frozen=True)
class Listed:
    """A model of the list.

    Attributes:
        library, name: of the model. packages: what pip installs for it.
        setup: Python that runs before it is built.
        build, call: Python expressions of the model and of its inputs, a tuple or a dict.
        width: `w` in them. proof: the width at which the plan is proved.
        recurrent: whether it steps through time, and is counted apart.
    """

    library: str
    name: str
    packages: tuple[str, ...]
    setup: str
    build: str
    call: str
    width: int = WIDTH
    proof: int = WIDTH
    recurrent: bool = False

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.library}/{self.name}"

    def make(self, width: int) -> tuple[nn.Module, Any]:
        """The model in eval mode, with random weights, and its inputs; the same whenever it is called."""
        torch.manual_seed(0)
        draws = {name: getattr(torch, name) for name in ("randn", "rand", "zeros", "ones")}
        known: dict[str, Any] = {"torch": torch, "w": width, **draws}
        known["ints"] = lambda high, *shape: torch.randint(high, shape)
        exec(self.setup, known)
        model = redraw(eval(f"({self.build})", known)).eval()
        return model, eval(f"({self.call})", known)


def listed(path: Path = LIST) -> list[Listed]:
    """The list, in the order of its file."""
    whole = tomllib.loads(path.read_text())
    first, shared = whole.get("prelude", ""), whole.get("shared", [])
    return [
        Listed(
            library["name"],
            name,
            (*shared, *library.get("packages", ())),
            f"{first}\n{library.get('imports', '')}",
            model["build"],
            model["inputs"],
            model.get("width", WIDTH),
            model.get("proof", model.get("width", WIDTH)),
            model.get("recurrent", False),
        )
        for library in whole["library"]
        for name, model in library["models"].items()
    ]


def examine(model: Listed, folder: str, send: Send) -> None:
    """Export, prove at tp=2 and plan at tp=4; each part of the record is sent as soon as it is known.

    Args:
        model: of the list. folder: where its packages are. send: takes parts of the record.
    """
    if folder:
        sys.path.append(folder)  # last: what this environment has is taken from it
    try:
        own, inputs = model.make(model.width)
    except Exception as error:
        return send({"failed": reason(error)})
    send({"weights": sum(p.numel() for p in own.parameters())})
    send({"export": exported(own, inputs)})
    began = time.process_time()
    result, plan = proved(model)
    if plan is not None and model.proof != model.width:
        result |= planned(model, 2) | {"ok": result["ok"]}
    send({"tp": {"2": result | {"cpu_seconds": round(time.process_time() - began, 1)}}})
    if plan is not None:
        began = time.process_time()
        result = planned(model, 4)
        send({"tp": {"4": result | {"cpu_seconds": round(time.process_time() - began, 1)}}})
    return None


def exported(own: nn.Module, inputs: Any) -> str | None:
    """Why `torch.export.export` does not take the call with static shapes; None where it does."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        torch.export.export(own, args, dict(kwargs))
    except Exception as error:
        return reason(error)
    return None


def proved(model: Listed) -> tuple[Record, Plan | None]:
    """Verdict and figures at tp=2, and the plan that was proved."""
    own, inputs = model.make(model.proof)
    try:
        report = autotp.verify(own, 2, inputs, cluster=CLUSTER)
    except Exception as error:
        return {"ok": False, "why": reason(error)}, None
    assert report.plan is not None
    why = None if report.ok else clean(str(report))
    return {"ok": report.ok, "why": why, **shares(report.plan, inputs)}, report.plan


def planned(model: Listed, tp: int) -> Record:
    """Figures of a plan; the capture was checked where the model was proved."""
    own, inputs = model.make(model.width)
    try:
        return shares(autotp.plan(own, tp, example_inputs=inputs, cluster=CLUSTER, check_capture=False), inputs)
    except Exception as error:
        return {"failed": reason(error)}


def shares(plan: Plan, inputs: Any) -> Record:
    """Shares of parameters and flops on the fullest rank, operators without a rule, and the largest whole weights."""
    told = figures(plan, inputs if isinstance(inputs, Mapping) else {})
    whole = [p for p in plan.parameters if p.local == p.shape]
    largest = sorted(whole, key=lambda p: -torch.Size(p.shape).numel())[:TOP]
    kept = {key: told[key] for key in ("parameters", "flops", "without_rule")}
    return kept | {"whole": [f"{p.name} {'x'.join(map(str, p.shape))}" for p in largest]}
