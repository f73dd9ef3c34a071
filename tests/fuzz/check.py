"""One module on the simulated ranks: what is right, what is refused with a reason, and what failed."""

from __future__ import annotations

import linecache
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.errors import PlanError
from autotp.inputs import Inputs
from autotp.ir.program import Planned
from autotp.proof.equality import compare
from autotp.proof.run import Values
from autotp.rules.core import function_of

from .modules import Module
from .plans import any_plan


class InvalidModule(Exception):
    """The module itself does not run; no fault of autotp's."""


@dataclass
class Failure:
    """What is wrong: `kind` stays the same while the module gets smaller, `text` is for a person."""

    kind: str
    text: str


@dataclass
class Tally:
    """What came of the modules so far.

    Attributes:
        proved: plans that were compared; `invalid`: modules that do not run.
        refused: plans that the request does not allow, by their message.
        rules: of the graphs' operators, by the names of their functions; `split`: those that some plan split.
    """

    proved: int = 0
    modules: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    split: Counter[str] = field(default_factory=Counter)

    def count(self, planned: Planned) -> None:
        """The rules of a decided graph."""
        for node, op in planned.ops.items():
            function = function_of(op.target)
            if function is not None:
                self.rules[function.__name__] += 1
                self.split[function.__name__] += planned.decisions[node].factor is not None


def built(module: Module) -> tuple[nn.Module, Any]:
    """The module and its input, by running its source.

    Raises:
        InvalidModule: it does not run, or gives what is not finite.
    """
    source, name = module.source(), f"<module {module.seed}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space: dict[str, Any] = {"__name__": "fuzzed"}
    try:
        exec(compile(source, name, "exec"), space)
        model, x = space["build"](), space["inputs"]()
        finite = all(torch.isfinite(y).all() for y in _tensors(space["build"]()(x)))
    except Exception as e:
        raise InvalidModule(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
    finally:
        linecache.cache.pop(name, None)
    if not finite:
        raise InvalidModule("not finite")
    return model, x


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(module: Module, tally: Tally | None = None) -> Failure | None:
    """Prove a module at each of its degrees; None where all is well, or the request was refused with a reason.

    Args:
        module: what to prove. tally: is added to.

    Raises:
        InvalidModule: the module itself does not run.
    """
    tally = Tally() if tally is None else tally
    with _quiet():
        model, x = built(module)
        inputs = Inputs(x)
        try:
            captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True)
        except Exception as e:
            return _raised("capture", e)
        if captured.unproved:
            return Failure("unproved", captured.unproved)
        tally.modules += 1
        for tp in module.degrees:
            try:
                options = Options.read(tp, Steering(sequence_parallel=module.sequence))
                with any_plan(module.seed) if module.plan == "any" else nullcontext():
                    plan = solve_plan(captured, notes, options, "Model")
                planned, sharded = apply_plan(captured, plan, options)
                report = compare(planned, sharded, Values.of(planned.program, model, inputs))
            except PlanError as e:
                if module.sequence is None:
                    return _raised(f"tp={tp}", e)
                tally.refused[str(e).splitlines()[0]] += 1
                continue
            except Exception as e:
                return _raised(f"tp={tp}", e)
            tally.count(planned)
            tally.proved += 1
            if not report:
                way = report.difference.direction if report.difference else "unproved"
                return Failure(f"differs {way}", f"tp={tp}: {report}")
    return None


def _raised(where: str, e: Exception) -> Failure:
    text = re.sub(r"\d+", "N", str(e).splitlines()[0] if str(e) else "")
    stage = "capture" if where == "capture" else "plan"
    return Failure(f"{stage} {type(e).__name__} {text[:40]}", f"{where}: {type(e).__name__}: {e}")
