"""Reports of `verify` and `certify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autotp.ir.graph import short_name
from autotp.ir.scopes import module_name
from autotp.plans.plan import Plan

TOLERANCE = 1e-9  # both sides run in float64


@dataclass(frozen=True)
class Difference:
    """The first value of a sharded program that differs.

    Attributes:
        direction: "forward" or "backward"; "capture" where the captured graph is not the model; where a checker refuses
            the ranks' program, "types" (R, I, V and P) or "shapes" (the program does not run).
        value: name of the captured graph's value that arrives or comes out wrong; `op`: what made it; `module`: where.
        error: largest difference over the largest reference value; inf where there is none, as an operator failed.
        detail: what was found, for a person; of a checker its own words.
    """

    direction: str
    value: str
    op: str
    module: str
    error: float
    detail: str

    @classmethod
    def at(cls, node: fx.Node, kind: str, error: float, detail: str) -> Difference:
        """Name a node of the captured graph; `kind`: the direction."""
        return cls(kind, node.name, short_name(node.target), module_name(node), error, detail)

    def __str__(self) -> str:
        operator = f" = {self.op} in {self.module or 'the model'}" if self.op else ""
        return f"({self.direction}) at {self.value}{operator}: {self.detail}"


@dataclass(frozen=True)
class Decoded:
    """Findings of `verify` on a prompt and tokens after it, decoded one by one on the simulated ranks.

    Attributes:
        tokens: how many were decoded after the prompt. calls: of the model. states: cached tensors that they carry.
        values: compared on the ranks in all calls; `error`: the largest relative difference of outputs and of cached
            tensors, each rank's parts put together, in float64.
        model_error: largest relative difference of outputs and caches, in the model's own dtype, between the captured
            graphs and the model itself; None with a precision, in which the model itself has no products.
        difference: the first that differs, None where all agree.
    """

    tokens: int
    calls: int
    states: int
    values: int
    error: float
    model_error: float | None
    difference: Difference | None = None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"differs {self.difference}"
        graphs = "were not compared with the model, which does not round so"
        if self.model_error is not None:
            graphs = f"are within {self.model_error:.1e} of the model's own calls"
        return (
            f"a prefill and {self.tokens} decoded tokens are equal: outputs and {self.states} cached tensors, each "
            f"rank's parts put together, within {self.error:.1e} (float64, {self.values} values compared); the "
            f"captured graphs {graphs}"
        )


@dataclass(frozen=True)
class Certificate:
    """The answer of spmd_types to a plan's program; true where it refuses nothing.

    Attributes:
        tp: number of ranks. checker: the package and its version.
        operators, conversions: calls whose types were inferred from their operands.
        leaves, partials, outputs: values whose types were asserted, and no others.
        refusal: the first refusal; None where there is none.
    """

    tp: int
    checker: str
    operators: int = 0
    conversions: int = 0
    leaves: int = 0
    partials: int = 0
    outputs: int = 0
    refusal: Difference | None = None

    @property
    def ok(self) -> bool:
        """True where nothing was refused."""
        return self.refusal is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.checker} refuses {self.refusal}"
        return (
            f"{self.checker} accepts the program of {self.tp} ranks: {self.operators} operators and "
            f"{self.conversions} conversions typed from {self.leaves} leaves, {self.partials} pending sums and "
            f"{self.outputs} outputs"
        )


@dataclass(frozen=True)
class Report:
    """Findings of `verify`, true where outputs and every gradient agree.

    Attributes:
        tp: number of simulated ranks; `beside`: those of the axes beside tp by name, and the number of stages as pp.
        plan: the plan that was proved.
        output_error, gradient_error: largest relative differences of the outputs and of all gradients, in float64.
        capture_error: largest relative difference, in the model's own dtype, of outputs and parameter gradients
            between the captured graph and the model itself; nan where `unproved` says why they were not compared.
        values: values compared forward and backward.
        forward_only: why no gradients were compared: the original has none; empty where they were.
        difference: the first operator that differs, None where all agree.
        inside: the first value or gradient that differs while every output and every gradient of a parameter or input
            agrees, as where rounding decides which of equal values is the largest; it is no fault.
        unproved: why the captured graph was not compared with the model; the report is then false. Empty where it was.
        decoded: what came of decoding with a cache; None where that was not asked for.
        certificate: what spmd_types says of the program; None where it was not asked.
        degrees: numbers of processes that were compared to the bit, in place of the original, and with dp those on each
            axis; empty where none were.
    """

    tp: int
    plan: Plan | None
    output_error: float
    gradient_error: float
    capture_error: float
    values: int
    difference: Difference | None = None
    tolerance: float = TOLERANCE
    forward_only: str = ""
    inside: Difference | None = None
    unproved: str = ""
    decoded: Decoded | None = None
    certificate: Certificate | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    degrees: tuple[Any, ...] = ()

    @property
    def ranks(self) -> str:
        """Return how many were simulated, in words."""
        axes = {**self.beside, "tp": self.tp}
        names = f" ({' x '.join(axes)})" if self.beside else ""
        return " x ".join(map(str, axes.values())) + names

    @property
    def ok(self) -> bool:
        """Return whether no result differs, and the captured graph is known to be the model."""
        decodes = self.decoded is None or self.decoded.difference is None
        certified = self.certificate is None or self.certificate.ok
        return self.difference is None and not self.unproved and decodes and certified

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self._numbers if self.certificate is None else f"{self._numbers}; {self.certificate}"

    @property
    def _numbers(self) -> str:
        if self.difference is not None:
            return f"differs {self.difference}"
        if self.decoded is not None and self.decoded.difference is not None:
            return f"{self.decoded}; one call by itself is {self._call}"
        return self._call if self.decoded is None else f"{self._call}; {self.decoded}"

    @property
    def _call(self) -> str:
        none = f"no gradients, for the original has none ({self.forward_only})"
        gradients = none if self.forward_only else f"gradients within {self.gradient_error:.1e}"
        if self.degrees:
            what = f"no gradients ({self.forward_only})" if self.forward_only else "gradients"
            text = ", ".join(map(str, self.degrees)) if not self.beside else ", ".join(map(_mesh, self.degrees))
            equal = f"equal bits at {' x '.join((*self.beside, 'tp'))}={text}: outputs, {what} and all between"
            return f"{equal} ({self.values} values compared)"
        inside = f"; differs inside, which reaches no result: {self.inside}" if self.inside is not None else ""
        over = "".join(f"{name}={n} x " for name, n in self.beside.items())
        ranks = (
            f"equal at {over}tp={self.tp}: outputs within {self.output_error:.1e}, {gradients} (float64, {self.values} "
            f"values compared{inside})"
        )
        if self.unproved:
            graph = "the ranks agree with the captured graph, but that was not compared with the model"
            return f"not proved: {graph}: {self.unproved} ({ranks})"
        return f"{ranks}; the captured graph is within {self.capture_error:.1e} of the model"


def _mesh(degrees: Iterable[int]) -> str:
    return " x ".join(map(str, degrees))
