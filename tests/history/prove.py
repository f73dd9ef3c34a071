"""A row proved: the module as it is at each degree, and its mutant, with what each witness says of that."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from autotp.capture.request import CaptureRequest
from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.program import Planned, Sharded
from autotp.passes import schema
from autotp.proof.bits import same_bits
from autotp.proof.certificate import certificate
from autotp.proof.equality import compare
from autotp.proof.report import Certificate, Report
from autotp.proof.run import Values
from benchmarks.helpers.lists.mutants import copied
from tests.fuzz.plans import any_plan
from tests.helpers.models import redrawn

from .row import Row

SEQUENCE = (None, True)
CHECKER = find_spec("spmd_types") is not None


@dataclass
class Found:
    """What the witnesses say of one program.

    Attributes:
        types: values whose layout is not what a reader was decided to read (`passes/schema.py`).
        numbers: `verify`'s report.
        certificate: what spmd_types says; None where it is not installed.
    """

    types: list[schema.Fault]
    numbers: Report
    certificate: Certificate | None

    @property
    def witnesses(self) -> tuple[str, ...]:
        """Those that refuse the program."""
        refused = {
            "types": bool(self.types),
            "certificate": self.certificate is not None and not self.certificate.ok,
            "numbers": not self.numbers.ok,
        }
        return tuple(name for name, no in refused.items() if no)

    def named(self, value: str) -> bool:
        """Whether the first difference is at, or of, this value."""
        report = self.numbers.difference
        return report is not None and bool(re.search(value, report.value) or re.search(value, report.detail))


class Proved:
    """A row's module, captured once."""

    def __init__(self, row: Row) -> None:
        self.row = row
        torch.manual_seed(0)
        self.model = redrawn(row.module())
        given = row.inputs()
        self.inputs = Inputs(*given) if isinstance(given, tuple) else Inputs(given)
        request = CaptureRequest.read(precision=row.precision)
        self.capture, self.notes = capture_model(self.model, self.inputs, torch.device("cpu"), True, request)
        self.programs: dict[Any, tuple[Planned, Sharded]] = {}

    def program(self, tp: int, sequence: bool | None, pinned: bool = True) -> tuple[Planned, Sharded]:
        """The program of the ranks, with the row's pins or without, made once."""
        key = tp, sequence, pinned
        if key not in self.programs:
            self.programs[key] = self._program(*key)
        return self.programs[key]

    def _program(self, tp: int, sequence: bool | None, pinned: bool) -> tuple[Planned, Sharded]:
        pins: Any = dict(self.row.pins) if pinned else None
        options = Options.read(tp, Steering(sequence_parallel=sequence, pins=pins))
        with any_plan(self.row.seed) if pinned and self.row.seed is not None else nullcontext():
            plan = solve_plan(self.capture, self.notes, options, "Module")
        return apply_plan(self.capture, plan, options)

    def judged(self, planned: Planned, sharded: Sharded) -> Found:
        """What the witnesses say."""
        values = Values.of(planned.program, self.model, self.inputs)
        types = list(schema.sharded(sharded, planned))
        outside = certificate(planned, sharded) if CHECKER else None
        return Found(types, compare(planned, sharded, values), outside)

    def bits(self, tp: int) -> Report:
        """Whether every number of processes that divides these ranks has the same bits."""
        planned, sharded = self.program(tp, self.row.sequence)
        values = Values.of(planned.program, self.model, self.inputs)
        return same_bits(planned, sharded, values, planned.program, ())

    def mutated(self, tp: int) -> Found:
        """What they say of the mutant."""
        planned, sharded = self.program(tp, self.row.sequence)
        changed, _ = copied(sharded)
        self.row.mutant(changed, planned)
        return self.judged(planned, changed)
