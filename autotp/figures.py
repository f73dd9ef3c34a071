"""What a plan comes to, as data: totals, the memory of a rank, a row of a sweep over degrees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """What the plan comes to, per rank.

    Attributes:
        parameters, local_parameters: in all, and held by the fullest rank.
        flops, local_flops: floating-point operations of a forward.
        forward_bytes, backward_bytes: sent by a rank in a step.
        seconds: of a step by the cost model; `bound`: the lower bound that the solver proved for it.
        stored: bytes of the parameters held; `least_stored`: the least that any legal plan reaches.
        communication: seconds of all collectives by the cost model.
        megatron_bytes, megatron_seconds: of the collectives of Megatron's hand-written plan (`autotp.megatron`); 0
            where the model is not one that it is written for.
    """

    parameters: int = 0
    local_parameters: int = 0
    flops: float = 0.0
    local_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    seconds: float = 0.0
    bound: float = 0.0
    stored: float = 0.0
    least_stored: float = 0.0
    communication: float = 0.0
    megatron_bytes: float = 0.0
    megatron_seconds: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest rank holds.

    Attributes:
        parameters, buffers: of the rank's parts; buffers with the constants of the graph.
        gradients, states: of parameters, and the optimizer's (`Objective.optimizer`); 0 for inference.
        activations: what autograd keeps from the forward for the backward; 0 for inference.
        cache: keys and values of every attention, for as many tokens as the example inputs have; 0 for training. An
            encoder keeps none: subtract it there.
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
    phase: str = "forward"
    at: str = ""
    optimizer: str = "adamw"

    @property
    def peak(self) -> float:
        return self.steady + self.activations + self.working

    @property
    def steady(self) -> float:
        """What is held whatever runs: all but activations and the working set."""
        return self.parameters + self.buffers + self.gradients + self.states + self.cache


@dataclass(frozen=True)
class Degree:
    """What a plan for `tp` ranks comes to, as a row of a sweep.

    Attributes:
        seconds: of a step; `exposed`: of them, communication that nothing hides.
        sent: bytes that a rank sends in a step; `memory`: bytes that the fullest rank holds at its peak.
        fits: whether that is within the limit.
        throughput: `unit` ("tokens" or "samples") a second and device.
        largest_batch: the most examples in a batch that fit under this plan; None where the batch size is fixed.
    """

    tp: int
    seconds: float
    exposed: float
    sent: float
    memory: float
    fits: bool
    throughput: float
    unit: str
    largest_batch: int | None
