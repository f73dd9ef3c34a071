"""What a rank holds of the states that a program carries from call to call: keys and values, recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp.ir.graph import placed_outputs, resolve, tensors
from autotp.ir.op import sizes
from autotp.ir.program import Planned

from .prices import nbytes, sizer


@dataclass(frozen=True)
class Cache:
    """Bytes of states on the fullest rank.

    Attributes:
        bytes: as they are after the call. values: what the program leaves of each.
        token: by which they grow with each token of a sequence; `sequence`: of those that do not grow, for each
            sequence.
    """

    bytes: float
    token: float
    sequence: float
    values: dict[str, fx.Node]


def cache_of(planned: Planned, hints: Mapping[Any, int]) -> Cache | None:
    """The states of a planned program, with these sizes for symbols; None where it carries nothing."""
    if not planned.states:
        return None
    program, hint = planned.program, sizer(hints)
    before = {x.name: x.node for x in program.leaves if x.kind.carried}
    after = {program.becomes(i): node for i, node in placed_outputs(program)}
    total = token = sequence = 0.0
    for name, layout in planned.states.items():
        ends = [_value(n) for n in (before.get(name), after.get(name)) if n is not None]
        val = ends[-1]
        part = nbytes(val, hint) * layout.share(planned.tp, hint)
        total += part
        shape = [hint(s) for s in sizes(val)]
        each = part / max(shape[0], 1) if len(shape) > 1 else part
        grows = growing(ends)
        token, sequence = (token, sequence + each) if grows is None else (token + each / max(shape[grows], 1), sequence)
    return Cache(total, token, sequence, {n: x for n, x in after.items() if n is not None})


def growing(ends: list[Tensor]) -> int | None:
    """The dimension along which a state grows: of any size, or of another one after the call than before; not the
    first, the batch's."""
    for d, each in enumerate(zip(*(sizes(v) for v in ends), strict=True)):
        if d > 0 and (not isinstance(each[0], int) or len(set(each)) > 1):
            return d
    return None


def _value(node: fx.Node) -> Tensor:
    maker, index = resolve(node)
    return tensors(maker)[index]
