"""The limit of decoding: for every token a rank reads its weights and its cache once, and the ranks communicate.

seconds of a step >= (weights + cache read on a rank) / memory bandwidth + collectives. Arithmetic is far below that for
the few sequences that are decoded together, and launches of kernels can be recorded away, so neither is counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeLimit:
    """The least seconds of a decode step on one rank.

    Attributes:
        weights, cache: bytes of each that a rank reads for one token of every sequence.
        bandwidth: of the device's memory, B/s.
        communication: seconds of the step's collectives.
    """

    weights: float
    cache: float
    bandwidth: float
    communication: float

    @property
    def reading(self) -> float:
        """Seconds of reading weights and cache."""
        return (self.weights + self.cache) / self.bandwidth

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.reading + self.communication
