"""Configurations of real size: how the list says to build one on the meta device, and what planning it takes."""

from __future__ import annotations

import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from autotp import compat
from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import normalise
from autotp.ir.graph import Capture, differentiable
from autotp.passes.analysis.fold import repeated
from benchmarks.helpers.isolate import Send
from benchmarks.helpers.lists import real_modules
from benchmarks.helpers.measure import reason

from .library import CLUSTER, listed, shares

LIST = Path(__file__).resolve().parents[2] / "real_sizes.toml"
DEGREES = 2, 4, 8
TIMES = 4  # that a block occurs, for its operators to count as repeated


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

    def make(self, folder: str = "") -> tuple[nn.Module, Any]:
        """The model in eval mode and its inputs, on the meta device; packages of other libraries are in the folder."""
        if folder:
            sys.path.append(folder)
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
    try:
        model, inputs = real.make(folder)
    except Exception as error:
        return send({"failed": reason(error)})
    send({"weights": sum(p.numel() for p in model.parameters())})
    began = time.process_time()
    try:
        captured, notes = capture_model(model, normalise(inputs), torch.device("cpu"), check=False)
    except Exception as error:
        return send({"failed": reason(error)})
    send({"capture": round(time.process_time() - began, 1), "nodes": len(captured.graph.nodes)})
    send({"repeated": round(repeated_share(captured), 3)})
    for tp in DEGREES:
        began = time.process_time()
        try:
            plan = solve_plan(captured, notes, Options.read(tp, Steering(cluster=CLUSTER)), real.name)
            result = shares(plan, inputs if isinstance(inputs, Mapping) else {})
        except Exception as error:
            result = {"failed": reason(error)}
        send({"tp": {str(tp): result | {"seconds": round(time.process_time() - began, 1)}}})
    return None


def repeated_share(captured: Capture) -> float:
    """The share of the operators that stand in blocks which occur at least `TIMES` times."""
    blocks = repeated(captured, differentiable(captured)).calls
    times = Counter(block.first for block in blocks)
    inside = {node for block in blocks if times[block.first] >= TIMES for node in block.nodes}
    operators = [node for node in captured.graph.nodes if node.op == "call_function"]
    return sum(node in inside for node in operators) / max(len(operators), 1)


def compare(real: Real, folder: str, send: Send) -> None:
    """CPU seconds of a capture that is compared with the model, as by default, and on what it was compared.

    Args:
        real: of the list. folder: where packages of other libraries are. send: takes the record.
    """
    model, inputs = real.make(folder)
    began = time.process_time()
    try:
        captured, _ = capture_model(model, normalise(inputs), torch.device("cpu"))
    except Exception as error:
        return send({"compare_failed": reason(error)})
    seconds = round(time.process_time() - began, 1)
    return send({"compared": seconds, "compared_on": [note for note in captured.notes if "compared" in note]})


def export(real: Real, folder: str, send: Send) -> None:
    """CPU seconds of `torch.export` alone: with every size free, or where it does not take that with none.

    Args:
        real: of the list. folder: where packages of other libraries are. send: takes the record.
    """
    model, raw = real.make(folder)
    inputs = normalise(raw)
    args, kwargs = inputs.args, dict(inputs.kwargs)
    free: Any = compat.tree_map(_free, args or kwargs)
    for shapes in [None] if args and kwargs else [free, None]:
        began = time.process_time()
        try:
            torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            send({"export_failed": reason(error)})
        else:
            return send({"export": round(time.process_time() - began, 1)})
    return None


def _free(value: Any) -> Any:
    return dict.fromkeys(range(value.ndim), Dim.AUTO) if isinstance(value, Tensor) else None
