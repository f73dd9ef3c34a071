"""What a public function is asked for, read and checked once at the door: how to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotp.comm.ranks import check_degree
from autotp.cost import Cluster
from autotp.cost.objective import TRAINING, Objective
from autotp.cost.solver.band import BAND
from autotp.errors import InputError, PlanError
from autotp.passes.shard.pins import Dims, Pins, read_pins
from autotp.plans.estimates import ALONE, Axis
from autotp.plans.plan import Plan
from autotp.text import read_bytes


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What steers planning, as the caller gave it and not yet checked; `autotp.plan` documents each field.

    The defaults are those of the public functions, so that `Steering()` is a caller who steers nothing.
    """

    pins: Pins | None = None
    cluster: str | Cluster | None = None
    objective: str = TRAINING.name
    optimizer: str = TRAINING.optimizer
    sequence_parallel: bool | None = None
    memory: float | str | None = None
    within_node: bool = False
    band: float = BAND

    def refuse_beside(self, plan: Plan | None) -> None:
        """Refuse steering beside a finished plan, which it could not change any more."""
        if plan is not None and self != UNSTEERED:
            raise InputError(
                "plan= is complete: it cannot be given together with pins, cluster, objective, optimizer, "
                "sequence_parallel, memory, within_node or band. Give them to autotp.plan, which makes the plan."
            )


UNSTEERED = Steering()


@dataclass(frozen=True)
class Options:
    """What a plan is made for, checked.

    Attributes:
        tp: number of ranks; `cluster`: the machines that it is priced on.
        pins: a dimension for each pattern, or None for whole; `sequence`: None where the cost decides.
        objective: what a step is, and whose optimizer's states count.
        memory: bytes that a rank may hold; None for no limit.
        batch: the data-parallel axis beside tp.
        band: share of the least step that a plan may take longer to send less.
    """

    tp: int
    cluster: Cluster
    pins: Dims
    sequence: bool | None = None
    objective: Objective = TRAINING
    memory: float | None = None
    batch: Axis = ALONE
    band: float = BAND

    @classmethod
    def read(cls, tp: int, steering: Steering = UNSTEERED, batch: Axis = ALONE) -> Options:
        """Options for a number of ranks, from what the caller gave.

        Args:
            tp: ranks. steering: of the public functions' arguments those that steer a plan. batch: the dp axis.

        Raises:
            InputError: a value that is not known, or two that contradict each other.
            PlanError: `within_node`, and `tp` leaves the node.
        """
        sequence = steering.sequence_parallel
        if sequence is not None and not isinstance(sequence, bool):
            raise InputError(
                f"sequence_parallel={sequence!r} is {type(sequence).__name__}: give None (the cost decides), True or "
                "False."
            )
        machines = Cluster.resolve(steering.cluster)
        limit = None if steering.memory is None else read_bytes(steering.memory)
        if steering.within_node and machines.spans_nodes(check_degree(tp)):
            raise PlanError(
                f"tp={tp} leaves the node: within_node=True allows at most {machines.devices_per_node} ranks "
                f"(devices_per_node of the cluster {machines.name!r}). Take a smaller tp, or let the group span nodes."
            )
        dims = read_pins(steering.pins)
        sequence_dim = 0 if sequence else None
        if sequence is not None and dims.get("sequence", sequence_dim) != sequence_dim:
            raise InputError(f"sequence_parallel={sequence} and the pin 'sequence' contradict each other. Drop one.")
        objective = Objective(steering.objective, steering.optimizer)
        return cls(check_degree(tp), machines, dims, sequence, objective, limit, batch, read_band(steering.band))

    @classmethod
    def of_plan(cls, plan: Plan) -> Options:
        """What a finished plan was made with; h100 where its machines are not known here."""
        try:
            cluster = Cluster.from_dict(plan.machines) if plan.machines else Cluster.resolve(plan.cluster)
        except InputError:
            cluster = Cluster.resolve(None)
        objective = Objective(plan.objective, plan.memory.optimizer)
        return cls(plan.tp, cluster, {}, None, objective, batch=plan.batch, band=plan.totals.band)


PART = {"dp": "one rank's slice of a batch", "cp": "of whole sequences"}


def read_band(band: Any) -> float:
    """The band that a public function's argument asks for, checked."""
    if isinstance(band, bool) or not isinstance(band, int | float) or not 0 <= band <= 1:
        raise InputError(
            f"band={band!r}: give the share of the least step that a plan may take longer to send less, from 0 to 1, "
            "such as 0.02."
        )
    return float(band)


def read_axis(dp: Any, fully_shard: Any, tp: Any, cp: Any = 1) -> Axis:
    """The axis beside tp that a public function's arguments ask for, checked.

    Args:
        dp, cp: its size, one of them. fully_shard: split weights over it. tp: ranks, or "auto".

    Raises:
        InputError: a value that is none, or two that contradict each other.
    """
    for name, size, what in (("cp", cp, "context-parallel"), ("dp", dp, "data-parallel")):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{name}={size!r}: the {what} degree counts ranks, so it is an int of at least 1.")
    if cp > 1 and dp > 1:
        raise InputError(f"dp={dp} and cp={cp}: one axis beside tp is planned. Give dp or cp, and leave out the other.")
    axis = Axis(cp, bool(fully_shard), name="cp") if cp > 1 else Axis(dp, bool(fully_shard))
    if fully_shard and axis.size == 1:
        raise InputError("fully_shard=True splits weights over dp or cp: give dp or cp, the size of that axis.")
    if axis.size > 1 and tp == "auto":
        raise InputError(f"tp='auto' picks the degree for tp alone, and {axis.name} is given. Give tp as a number.")
    return axis


def refuse_late(axis: Axis, inputs: Any) -> None:
    """Refuse to wait for the first call where weights are to be spread over an axis before an optimizer holds them."""
    if axis.size > 1 and inputs is None:
        raise InputError(
            f"{axis.name}={axis.size} needs example_inputs, {PART[axis.name]}: which weights are gathered "
            "together is decided before the first call."
        )
