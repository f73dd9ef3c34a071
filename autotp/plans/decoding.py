"""What a plan for decoding comes to: tokens a second, and how near that is to the limit of memory and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotp.cost import Cluster, collective_bytes
from autotp.cost.decode_limit import DecodeLimit
from autotp.errors import InputError

if TYPE_CHECKING:
    from .plan import Collective, Plan

EXCHANGED = 1 / 8  # of a value's bytes: less than a narrower type would send


@dataclass(frozen=True)
class Decoding:
    """The prediction of a plan for decoding.

    Attributes:
        sequences: that get a token in each step, over all data-parallel ranks.
        seconds: of a step by the cost model; `limit`: what no step can be below.
        ungathered: bytes of the outputs that are priced as greedy `generate()` has them, which gathers none of them.
    """

    sequences: int
    seconds: float
    limit: DecodeLimit
    ungathered: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, of all sequences."""
        return self.sequences / self.seconds

    @property
    def most_tokens_per_second(self) -> float:
        """The same at the limit."""
        return self.sequences / self.limit.seconds

    @property
    def share_of_limit(self) -> float:
        """The predicted rate over the one at the limit."""
        return self.limit.seconds / self.seconds


def decoding(plan: Plan) -> Decoding | None:
    """The prediction of a plan; None where it is for something else, or where its cluster is not known here."""
    t, bandwidth = plan.totals, memory_bandwidth(plan)
    if plan.objective != "decode" or not (bandwidth and t.seconds and t.examples):
        return None
    limit = DecodeLimit(t.weights_read, plan.memory.cache, bandwidth, t.communication)
    ungathered = sum(c.bytes for c in plan.collectives if c.forward_bytes < EXCHANGED * _whole(c, plan.tp))
    return Decoding(t.examples * plan.batch.size, t.seconds, limit, ungathered)


def _whole(collective: Collective, tp: int) -> float:
    """What a rank sends for a value that is sent as it is."""
    return collective_bytes(collective.forward or "none", collective.bytes, tp)


def memory_bandwidth(plan: Plan) -> float:
    """Of a device's memory, B/s; 0 where the cluster is not known here."""
    if plan.machines:
        return float(plan.machines["memory_bandwidth"])
    try:
        return Cluster.preset(plan.cluster).memory_bandwidth
    except InputError:
        return 0.0
