"""Memory of a rank, as figures of a plan: `memory.py` measures them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest rank holds.

    Attributes:
        parameters, buffers: of the rank's parts; buffers with the constants of the graph.
        gradients, states: of parameters, and the optimizer's (`Objective.optimizer`); 0 for inference.
        activations: what autograd keeps from the forward for the backward; 0 for inference.
        cache: what the program carries to the next call. Of a program that carries nothing, and is for inference: what
            the model's own call that begins a cache leaves of the example inputs; of a model that has none to ask for,
            keys and values as they enter every attention, but one in which every token sees every other.
        cache_token: by which the cache grows with each token of a sequence; `cache_sequence`: the part that does not
            grow, for each sequence.
        working: what lives at the fullest moment beside all that.
        peak: the sum; `phase`: "forward" or "backward", `at`: module and operator of the fullest moment.
        optimizer: whose states these are.
    """

    parameters: float = 0.0
    buffers: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    activations: float = 0.0
    cache: float = 0.0
    working: float = 0.0
    cache_token: float = 0.0
    cache_sequence: float = 0.0
    phase: str = "forward"
    at: str = ""
    optimizer: str = "adamw"

    @property
    def peak(self) -> float:
        return self.steady + self.activations + self.working

    @property
    def steady(self) -> float:
        """Bytes that are there whatever runs: all but activations and the working set."""
        return self.parameters + self.buffers + self.gradients + self.states + self.cache
