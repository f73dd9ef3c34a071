"""Estimates of a plan, as data: totals, the memory of a rank, the times of a layer, a row of a sweep over degrees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotp.cost import Cluster
from autotp.cost.collective_costs import collective_bytes
from autotp.errors import InputError
from autotp.text import BESIDE, axis_text

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Totals:
    """The sums of a plan, per rank.

    Attributes:
        parameters, local_parameters: in all, and held by the fullest rank.
        flops, local_flops: floating-point operations of a forward.
        forward_bytes, backward_bytes: sent by a rank in a step, without what it gathers again (`sent`).
        seconds: of a step by the cost model, with what dp sends and does not hide (`Axes.exposed`); `bound`: the lower
            bound that the solver proved for it, and the same of dp, which the solver does not decide over.
        parameter_bytes: of the fullest rank; `least_parameter_bytes`: the least that any legal plan reaches.
        communication: seconds of all collectives by the cost model.
        least_seconds: of the fastest plan; this one takes at most `band`, a share of it, longer to send less.
        megatron_step, megatron_bytes: seconds of a step of Megatron's plan (`autotp.passes.shard.decide`), and
            the bytes that a rank sends in it; 0 where the model is not one that it is written for.
        weights_read: bytes of weights that a rank reads in a forward, of tables the rows that are looked up.
        examples, length: of the example inputs that were priced: the first dimension, and the second where it is that
            of sequences; otherwise, and in plans saved by an earlier version, 0.
        terms: what the plan costs by the names of `autotp.cost.terms.TERMS`; under its weights they make `seconds`.
    """

    parameters: int = 0
    local_parameters: int = 0
    flops: float = 0.0
    local_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    seconds: float = 0.0
    bound: float = 0.0
    parameter_bytes: float = 0.0
    least_parameter_bytes: float = 0.0
    communication: float = 0.0
    least_seconds: float = 0.0
    band: float = 0.0
    megatron_step: float = 0.0
    megatron_bytes: float = 0.0
    weights_read: float = 0.0
    examples: int = 0
    length: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends over tp in a step, with gathers that are repeated."""
        return self.forward_bytes + self.backward_bytes + self.terms.get("regathered_bytes", 0.0)

    @property
    def exposed(self) -> float:
        """Seconds of collectives over tp that nothing hides and that no other starts with them."""
        return self.communication - self.terms.get("hidden", 0.0) - self.terms.get("bucketed", 0.0)

    @property
    def passes(self) -> float:
        """Seconds of the step without the optimizer's part: forward and backward."""
        return self.seconds - self.terms.get("optimizer", 0.0)

    @property
    def alone(self) -> float:
        """Seconds of forward and backward where nothing overlaps, without dp and surcharges: the sum of all operators
        and conversions (`Layer`)."""
        added = sum(self.terms.get(name, 0.0) for name in ("waiting", "surcharge", "regathering"))
        return self.passes + sum(self.terms.get(name, 0.0) for name in ("hidden", "bucketed")) - added


@dataclass(frozen=True)
class Axes:
    """Axes of the mesh beside tp, over which weights are whole.

    Attributes:
        dp: ranks that have a slice of the batch each; `cp`: of each of these, ranks that have a part of every sequence.
        ep: ranks of dp over which experts are sharded; the rows of the others' examples travel to them.
        fully_shard: whether weights, gradients and optimizer states are split over both too, gathered before use.
        sent: bytes that a rank sends over them in a step for gradients, and for gathering weights; `seconds`: of that,
            which can run beside the backward's `backward` seconds.
        values: bytes that it sends over them for other values in a step, such as a loss.
        imbalance: the most rows that a rank gets for its experts, over the mean, as planned for.
        experts: parameters of which each dp rank has its own part of the first dimension, by name; tp splits that.
    """

    dp: int = 1
    cp: int = 1
    fully_shard: bool = False
    sent: float = 0.0
    seconds: float = 0.0
    backward: float = 0.0
    values: float = 0.0
    ep: int = 1
    imbalance: float = 1.0
    experts: tuple[str, ...] = ()

    def owners(self, name: str) -> int:
        """Return the number of dp ranks that a parameter is sharded over; 1 where it is not, or by tp alone."""
        return self.dp if name in self.experts else 1

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks of each axis that has more than one, by name, in the mesh's order."""
        return {name: n for name in BESIDE if (n := getattr(self, name)) > 1}

    @property
    def size(self) -> int:
        """Number of ranks on them together."""
        return self.dp * self.cp

    @property
    def name(self) -> str:
        """The names of those with more than one rank, such as "dp x cp"."""
        return " x ".join(self.degrees) or "dp"

    @property
    def text(self) -> str:
        """The degrees in words, such as "dp=2 x cp=2"."""
        degrees = self.degrees | ({"ep": self.ep} if self.ep > 1 else {})
        return axis_text(degrees) or "dp=1"

    @property
    def exposed(self) -> float:
        """Seconds over them that the backward is too short to hide."""
        return max(self.seconds - self.backward, 0.0)


ALONE = Axes()
# With experts over ep: the keyword, the values that it may have, and the reason why not another.
STAYING: dict[str, tuple[Any, str]] = {
    "cp": ((None, 1), "rows of parts of sequences do not travel"),
    "precision": ((None,), "scales of float8 of rows that travel are not those of one device"),
    "backend": ((None, "eager"), "a compiler needs to know how many rows there are, which the router decides"),
    "compare": ((None,), "autotp.verify(model, tp, inputs, dp=2, ep=2) compares with the original"),
    "tp_invariant": ((None,), "which rows a product has beside each other depends on the number of ranks"),
    "dp_invariant": ((None,), "which rows a product has beside each other depends on the number of ranks"),
}


def refuse_travel(axes: Axes, keywords: Mapping[str, Any]) -> Axes:
    """Refuse keywords that do not go with experts over ep, and return the axes.

    Args:
        axes: beside tp. keywords: of a public function, whichever it has.
    """
    if axes.dp % axes.ep:
        raise InputError(
            f"ep={axes.ep} shards experts over groups of {axes.ep} ranks of dp, and dp is {axes.dp}. Give "
            f"dp={axes.ep} or a multiple of it, or leave out ep."
        )
    for name, (values, reason) in STAYING.items() if axes.ep > 1 else ():
        if keywords.get(name) not in values:
            raise InputError(f"ep={axes.ep} with {name}={keywords[name]!r}: {reason}. Leave out one of them.")
    return axes


@dataclass(frozen=True)
class Degree:
    """The figures of a plan for `tp` ranks, as a row of a sweep.

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


@dataclass(frozen=True)
class Timed:
    """An operator or a conversion of one rank, and the seconds that it takes by the cost model.

    Attributes:
        name: of the operator ("aten.linear"), or of the conversion ("f_star").
        module: path of the module in which it runs; `part`: "attention", "feed-forward" or "rest".
        forward, backward: seconds in each direction.
        forward_sends, backward_sends: the primitive (`all_reduce`, ...) where that direction communicates, else None.
        change: of a conversion, the layouts; `bytes`: the whole size of its value.
    """

    name: str
    module: str
    part: str
    forward: float
    backward: float = 0.0
    forward_sends: str | None = None
    backward_sends: str | None = None
    change: str = ""
    bytes: float = 0.0

    @property
    def converts(self) -> bool:
        return bool(self.change)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def ways(self) -> tuple[tuple[float, str | None], tuple[float, str | None]]:
        """Forward and backward: seconds, and the primitive where that communicates."""
        return (self.forward, self.forward_sends), (self.backward, self.backward_sends)


@dataclass(frozen=True)
class Sublayer:
    """The time of a part of a layer in a step: seconds of compute and of communication."""

    name: str
    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    @property
    def share(self) -> float:
        """The part of its seconds that is communication."""
        return self.communication / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Layer:
    """The times of one repeated block, of the kind in which a step spends most; of the model where nothing repeats.

    Attributes:
        module: path of the block, "" for the whole model.
        steps: its operators and conversions in the order of the forward. Views take no time and are left out.
        count: blocks with the same operators, this one among them; `alike`: of them those with the same times, for the
            first and the last one often convert differently.
        total: seconds of all `count` blocks in a step; `outside`: what is outside of them, such as embedding and head.
    """

    module: str
    steps: tuple[Timed, ...]
    count: int
    alike: int
    total: float
    outside: Sublayer

    @property
    def seconds(self) -> float:
        """Seconds of this block, forward and backward."""
        return sum(step.seconds for step in self.steps)

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Its parts: attention, feed-forward, and the rest; those that it has."""
        parts = []
        for name in NAMES:
            part = sublayer(name, [step for step in self.steps if step.part == name])
            parts += [part] if part.seconds else []
        return tuple(parts)


REST, OUTSIDE = "rest", "outside"
PARTS = {"attention": "attention", "mlp": "feed-forward", "experts": "feed-forward"}  # kind of block -> sublayer
NAMES = (*dict.fromkeys(PARTS.values()), REST)


def sublayer(name: str, steps: Iterable[Timed]) -> Sublayer:
    """Sum the times of these steps."""
    times = [0.0, 0.0]  # of compute, of communication
    for step in steps:
        for seconds, sends in step.ways:
            times[sends is not None] += seconds
    return Sublayer(name, *times)


# decoding

EXCHANGED = 1 / 8  # of a value's bytes: less than a narrower type would send


@dataclass(frozen=True)
class DecodeLimit:
    """The least seconds of a decode step on one rank: it reads its weights and its cache once, and communicates.

    Arithmetic is far below that for the few sequences that are decoded together, and launches of kernels can be
    recorded away, so neither is counted.

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
        """New tokens a second at the limit."""
        return self.sequences / self.limit.seconds

    @property
    def share_of_limit(self) -> float:
        """The predicted rate over the one at the limit."""
        return self.limit.seconds / self.seconds


def decoding(plan: Plan) -> Decoding | None:
    """Return the prediction of a plan; None where it is for something else, or its cluster is not known here."""
    t, bandwidth = plan.totals, of_device(plan, "memory_bandwidth")
    if plan.objective != "decode" or not (bandwidth and t.seconds and t.examples):
        return None
    limit = DecodeLimit(t.weights_read, plan.memory.cache, bandwidth, t.communication)
    ungathered = 0.0
    for c in plan.collectives:
        # Of the bytes that a rank would send for the value as it is.
        less = c.forward_bytes < EXCHANGED * collective_bytes(c.forward or "none", c.bytes, plan.tp)
        ungathered += c.bytes * less
    return Decoding(t.examples * plan.batch.size, t.seconds, limit, ungathered)


def of_device(plan: Plan, field: str) -> float:
    """Look up a number of the plan's cluster, such as `memory_size`; 0 where the cluster is not known here."""
    if plan.machines:
        return float(plan.machines[field])
    try:
        return float(getattr(Cluster.resolve(plan.cluster), field))
    except InputError:
        return 0.0
