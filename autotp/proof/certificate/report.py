"""The words of a certificate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A place where the checker refuses a rank's program.

    Attributes:
        kind: "types" (R, I, V and P) or "shapes" (the program does not run).
        value: name of the value of the rank's program; `op`: what makes it; `module`: where.
        detail: the checker's own words.
    """

    kind: str
    value: str
    op: str
    module: str
    detail: str

    def __str__(self) -> str:
        return f"({self.kind}) at {self.value} = {self.op} in {self.module or 'the model'}: {self.detail}"


@dataclass(frozen=True)
class Certificate:
    """An answer of spmd_types to a plan's program; true where it refuses nothing.

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
    refusal: Refusal | None = None

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
