"""Configurations of real size: how the list says to build one on the meta device, and what planning it takes."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autotp import compat
from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import normalise
from benchmarks.helpers.isolate import Send
from benchmarks.helpers.lists import real_modules
from benchmarks.helpers.measure import reason

from .library import CLUSTER, listed, shares

LIST = Path(__file__).resolve().parents[2] / "real_sizes.toml"
DEGREES = 2, 4, 8


@dataclass(frozen=True)
class Real:
    """A configuration of the list.

    Attributes:
        name: of the configuration. library: of libraries.toml, whose imports are made; "" for none.
        build, inputs: Python expressions. dtype: of weights and floating inputs.
    """

    name: str
    build: str
    inputs: str
    library: str = ""
    dtype: str = "bfloat16"

    def make(self) -> tuple[nn.Module, Any]:
        """The model in eval mode and its inputs, on the meta device."""
        draws = {name: getattr(torch, name) for name in ("randn", "rand", "zeros", "ones")}
        known: dict[str, Any] = {"torch": torch, "modules": real_modules, "transformers": transformers, **draws}
        known["ints"] = lambda high, *shape: torch.randint(high, shape)
        setup = next((m.setup for m in listed() if m.library == self.library), "")
        exec(setup, known)
        dtype = getattr(torch, self.dtype)
        with torch.device("meta"):
            model = eval(f"({self.build})", known).eval().to(dtype)
            inputs = eval(f"({self.inputs})", known)
        return model, compat.tree_map_only(Tensor, lambda t: _cast(t, dtype), inputs)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def reals(path: Path = LIST) -> list[Real]:
    """The list, in the order of its file."""
    return [Real(name, **fields) for name, fields in tomllib.loads(path.read_text())["models"].items()]


def examine(real: Real, folder: str, send: Send) -> None:
    """CPU seconds of the capture and of the plan at each degree, with its shares; each part is sent when it is known.

    Args:
        real: of the list. folder: where packages of other libraries are. send: takes parts of the record.
    """
    if folder:
        sys.path.append(folder)
    try:
        model, inputs = real.make()
    except Exception as error:
        return send({"failed": reason(error)})
    send({"weights": sum(p.numel() for p in model.parameters())})
    began = time.process_time()
    try:
        captured, notes = capture_model(model, normalise(inputs), torch.device("cpu"), check=False)
    except Exception as error:
        return send({"failed": reason(error)})
    send({"capture": round(time.process_time() - began, 1), "nodes": len(captured.graph.nodes)})
    for tp in DEGREES:
        began = time.process_time()
        try:
            plan = solve_plan(captured, notes, Options.read(tp, Steering(cluster=CLUSTER)), real.name)
            result = shares(plan, inputs if isinstance(inputs, Mapping) else {})
        except Exception as error:
            result = {"failed": reason(error)}
        send({"tp": {str(tp): result | {"seconds": round(time.process_time() - began, 1)}}})
    return None
