"""Collectives, priced by the cost model: bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotp.cost import call_seconds, collective_bytes
from autotp.passes.shard.planner import Builder
from autotp.plans.plan import Collective


@dataclass(frozen=True)
class CollectiveSend:
    """One collective: its primitive, the whole value's bytes, and whether it runs in the backward."""

    primitive: str
    bytes: float
    backward: bool


def sends_of(c: Collective, tp: int) -> list[CollectiveSend]:
    """What an inserted conversion sends; forward a value may be sent in fewer bytes than it has."""
    sends = []
    for primitive, nbytes, back in ((c.forward, c.forward_bytes, False), (c.backward, c.backward_bytes, True)):
        if primitive:
            own = collective_bytes(primitive, c.bytes, tp)
            sends.append(CollectiveSend(primitive, c.bytes * nbytes / own if own else c.bytes, back))
    return sends


def priced(sends: Sequence[CollectiveSend], builder: Builder) -> tuple[float, float]:
    """Bytes that a rank sends by these collectives, and seconds; those of the backward only where the plan trains."""
    counted = [s for s in sends if builder.objective.training or not s.backward]
    nbytes = sum(collective_bytes(s.primitive, s.bytes, builder.tp) for s in counted)
    return nbytes, sum(call_seconds(s.primitive, s.bytes, builder.tp, builder.cluster) for s in counted)
