"""Keywords of the public functions, each declared once, and the options that are read from them and checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.capture.capture_errors import refuse_scripted
from autotp.comm.ranks import PLAIN_PROCESS, Ranks, axes_of, check_degree
from autotp.cost import Cluster
from autotp.cost.objective import TRAINING, Objective
from autotp.cost.solver.band import BAND
from autotp.cost.solver.solve import SECONDS
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, bind, examples_of, for_model, normalise
from autotp.ir.sizes import UnitsBy
from autotp.passes.optimise import Switches
from autotp.passes.shard.pins import Dims, Pins, read_pins
from autotp.plans.estimates import ALONE, Axes, refuse_travel
from autotp.plans.plan import Plan
from autotp.plans.share_choice import read_shares
from autotp.text import BESIDE, BITS, counts, divisors, read_bytes

Keywords = Mapping[str, Any]  # of a public function, by name

F = TypeVar("F", bound=Callable[..., Any])


class Steering(TypedDict, total=False):
    """Keywords that steer planning; `autotp.plan` documents each."""

    pins: Pins | None
    cluster: str | Cluster | None
    objective: str
    optimizer: str
    sequence_parallel: bool | None
    memory: float | str | None
    within_node: bool
    band: float
    seconds: float
    shares: Sequence[int] | Literal["auto"] | None


class StateKeywords(TypedDict, total=False):
    """Keywords of the states that calls carry, and of the precision; `autotp.compile` documents each."""

    carried: Mapping[Any, str] | None
    precision: str | Mapping[str, Any] | None


class CaptureKeywords(StateKeywords, total=False):
    """Keywords of captures; `autotp.compile` documents each."""

    outputs: str
    random: str


class RunKeywords(TypedDict, total=False):
    """Keywords of running programs; `autotp.compile` documents each."""

    backend: str | Callable[..., Any]
    options: Mapping[str, Any] | None
    optimise: Switches
    check: bool | None
    compare: Literal["first", "every"] | None
    reduce_dtype: torch.dtype | str | None


class ExpertKeywords(TypedDict, total=False):
    """Keywords of dp, and of experts sharded over it."""

    dp: int | None
    ep: int | Literal["auto"] | None
    imbalance: float


class AxisKeywords(ExpertKeywords, total=False):
    """Keywords of the axes beside tp, and how the program of one of their ranks is checked."""

    cp: int | None
    fully_shard: bool
    check_capture: bool | None


class AxisRunKeywords(AxisKeywords, StateKeywords, total=False):
    """Keywords of axes, and of the states that calls carry over them."""


class StagedKeywords(AxisRunKeywords, RunKeywords, total=False):
    """Keywords of stages, but those that steer planning."""


class StageKeywords(Steering, StagedKeywords, total=False):
    """Keywords of `autotp.stages`."""


class SweepKeywords(Steering, ExpertKeywords, total=False):
    """Keywords of `autotp.sweep`."""


class VerifyKeywords(Steering, ExpertKeywords, total=False):
    """Keywords of `autotp.verify`."""

    cp: int | None
    tp_invariant: int | None
    dp_invariant: int | None


class CapturedAxisKeywords(CaptureKeywords, AxisKeywords, total=False):
    """Keywords of captures, and of the axes that they are sharded over."""


class PlanKeywords(Steering, CapturedAxisKeywords, total=False):
    """Keywords of `autotp.plan`."""


class ModuleKeywords(CaptureKeywords, RunKeywords, total=False):
    """Keywords of `autotp.parallelize`."""


class CompileKeywords(PlanKeywords, ModuleKeywords, total=False):
    """Keywords of `autotp.compile`."""

    tp_invariant: int | None
    dp_invariant: int | None
    resume: bool


# Keywords whose bits depend on the number of ranks, or are not known not to: the values that are allowed, and why.
UNLIKE: dict[str, tuple[Any, str]] = {
    "tp": ((), "the degree is picked by its own plan, and there is one"),
    "dp": (1, "sums over dp are torch's own, in an order of as many ranks as there are, but with dp_invariant="),
    "cp": (1, "sums over cp are in an order that depends on how many ranks there are"),
    "fully_shard": (False, "torch sums the gradients of split weights in an order of its own"),
    "backend": ("eager", "kernels that a compiler writes are of a graph, and that of several virtual ranks is another"),
    "outputs": (("full", "loss"), "what a rank has of an output depends on the number of ranks"),
    "random": ("counter", "torch's numbers depend on how often a rank draws"),
    "carried": ((), "what is carried from call to call is of as many ranks as there are"),
    "precision": ((), "scales of float8 are largest values over the ranks"),
    "reduce_dtype": ((), "gradients of slices are not added up in another type yet"),
    "shares": ((), "parts of several sizes are added up in another order"),
    "compare": ((), "autotp.verify(model, tp_invariant=8) compares the ranks"),
    "seconds": (SECONDS, "a search that its time ends has another plan in another run"),
    "optimise": (False, "rewrites of a rank's program change what it sums"),
}


# Of keywords that are left out; None of all others.
DEFAULTS: dict[str, Any] = {
    "objective": TRAINING.name, "optimizer": TRAINING.optimizer, "within_node": False, "band": BAND,
    "seconds": SECONDS, "fully_shard": False, "outputs": "full", "random": "counter", "backend": "eager",
    "resume": False, "imbalance": 1.0,
}  # fmt: skip


def with_keywords(function: F) -> F:
    """Show in the signature of a function the keywords that it takes by a TypedDict, with their defaults.

    Args:
        function: its last parameter is `**keywords: Unpack[...]`; it refuses others by `refuse_unknown`.
    """
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    (kind,) = get_args(get_type_hints(function)[last.name])
    for name, hint in kind.__annotations__.items():
        text, default = getattr(hint, "__forward_arg__", hint), DEFAULTS.get(name)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: str, keywords: Keywords, kind: type) -> None:
    """Refuse keywords that a function does not take, as Python does.

    Args:
        function: its name. keywords: that it was given. kind: the TypedDict of those that it takes.
    """
    if "pp" in keywords:
        raise InputError(
            f"{function}() takes no pp: a plan is of all stages, and autotp.stages(model, pp, tp, plan=plan) cuts it; "
            "autotp.plan(model, devices=N) chooses pp, and autotp.verify(model, tp, pp=) proves a cut."
        )
    for name in keywords:
        if name not in kind.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def pick(keywords: Keywords, kind: type) -> dict[str, Any]:
    """Return the keywords of one kind, with the defaults of those that were left out.

    Args:
        keywords: of this kind and others. kind: a TypedDict.
    """
    return {name: keywords.get(name, DEFAULTS.get(name)) for name in kind.__annotations__}


def refuse_beside(plan: Plan | None, keywords: Keywords) -> None:
    """Refuse steering beside a finished plan, which it could not change any more."""
    if plan is not None and (GROUPS in keywords or pick(keywords, Steering) != pick({}, Steering)):
        raise InputError(
            "plan= is complete: it cannot be given together with pins, cluster, objective, optimizer, "
            "sequence_parallel, memory, within_node, band, seconds, shares or a product as tp. Give them to "
            "autotp.plan, which makes the plan."
        )


@dataclass(frozen=True)
class Options:
    """Options that a plan is made for, checked.

    Attributes:
        tp: number of ranks; `cluster`: the machines that it is priced on.
        pins: a dimension for each pattern, or None for whole; `sequence`: None where the cost decides.
        objective: of a step, with the optimizer whose states count.
        memory: bytes that a rank may hold; None for no limit. batch: the axes beside tp.
        band: share of the least step that a plan may take longer to send less. seconds: of the search, CPU time.
        groups: ranks that a group with copies of a slice may have; () for those that heads and nodes suggest.
        shares: of the work, one for each rank; () for equal ones. units: of some lengths. search: find both, if unlike.
    """

    tp: int
    cluster: Cluster
    pins: Dims
    sequence: bool | None = None
    objective: Objective = TRAINING
    memory: float | None = None
    batch: Axes = ALONE
    band: float = BAND
    seconds: float = SECONDS
    groups: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    units: UnitsBy = ()
    search: bool = False

    @classmethod
    def read(cls, tp: int, keywords: Keywords | None = None, batch: Axes = ALONE) -> Options:
        """Read the options for a number of ranks from the caller's keywords.

        Args:
            tp: ranks. keywords: of a public function, those of `Steering` among them. batch: the axes beside tp.

        Raises:
            InputError: a value that is not known, or two that contradict each other.
            PlanError: `within_node`, and `tp` leaves the node.
        """
        steering = pick(keywords or {}, Steering)
        sequence, objective = steering["sequence_parallel"], Objective(steering["objective"], steering["optimizer"])
        if sequence is not None and not isinstance(sequence, bool):
            raise InputError(f"sequence_parallel={sequence!r} is {type(sequence).__name__}: give None, True or False.")
        machines = Cluster.resolve(steering["cluster"])
        machines.over(check_degree(tp))  # which refuses a degree that unlike ranks cannot form
        limit = None if steering["memory"] is None else read_bytes(steering["memory"])
        if steering["within_node"] and machines.spans_nodes(tp):
            raise PlanError(
                f"tp={tp} leaves the node: within_node=True allows at most {machines.devices_per_node} ranks "
                f"(devices_per_node of the cluster {machines.name!r}). Take a smaller tp, or let the group span nodes."
            )
        dims = read_pins(steering["pins"])
        sequence_dim = 0 if sequence else None
        if sequence is not None and dims.get("sequence", sequence_dim) != sequence_dim:
            raise InputError(f"sequence_parallel={sequence} and the pin 'sequence' contradict each other. Drop one.")
        shares, search = read_shares(steering["shares"], tp, groups := (keywords or {}).get(GROUPS, ()))
        search &= not groups and not any((keywords or {}).get(name) for name in BITS)  # those have equal parts
        numbers = read_number("band", steering), read_number("seconds", steering)
        return cls(tp, machines, dims, sequence, objective, limit, batch, *numbers, groups, shares, (), search)

    @classmethod
    def of_plan(cls, plan: Plan) -> Options:
        """Read the options that a finished plan was made with; h100 where its machines are not known here."""
        try:
            cluster = Cluster.from_dict(plan.machines) if plan.machines else Cluster.resolve(plan.cluster)
        except InputError:
            cluster = Cluster.resolve(None)
        objective = Objective(plan.objective, plan.memory.optimizer)
        copies = {x.copies for choice in plan.decisions.values() for x in (*choice.ins, *choice.outs)} - {1}
        of = {"batch": plan.batch, "groups": tuple(sorted(copies, reverse=True)), "shares": plan.shares}
        return cls(plan.tp, cluster, {}, objective=objective, band=plan.totals.band, units=plan.units, **of)


def read_invariant(keywords: Keywords, axis: str, ranks: int | None = None) -> int | None:
    """Read the number of virtual ranks that a public function's argument asks for, checked.

    Args:
        keywords: of the function. axis: "tp", or "dp".
        ranks: that are to share them; None where all that can are meant.

    Raises:
        InputError: it is no degree, or `ranks` do not divide it.
    """
    name = f"{axis}_invariant"
    virtual = keywords.get(name)
    if virtual is None:
        return None
    if not counts(virtual):
        raise InputError(
            f"{name}={virtual!r}: give the largest number of ranks that is to have the same bits as every "
            f"divisor of it, such as {name}=8."
        )
    if ranks is not None and virtual % ranks:
        raise InputError(f"{axis}={ranks} does not divide {name}={virtual}: take {axis} from {divisors(virtual)}.")
    return virtual


def refuse_unlike(keywords: Keywords) -> None:
    """Refuse keywords that do not go with equal bits at several degrees, by name.

    Args:
        keywords: of a public function, with `tp_invariant` or `dp_invariant`.
    """
    names = [name for name in BITS if keywords.get(name) is not None]
    for name, (allowed, reason) in UNLIKE.items():
        value = keywords.get(name)
        if name == "dp" and "dp_invariant" in names:
            continue
        if value is not None and value != allowed and not (isinstance(allowed, tuple) and value in allowed):
            raise InputError(f"{name}={value!r} with {names[0]}: {reason}. Leave out one of them.")
    if torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        raise InputError(
            f"{names[0]} asks for kernels that give the same bits at every run: call "
            "torch.use_deterministic_algorithms(True), by which torch refuses by name what has no such kernel."
        )


Product = int | tuple[int, ...]  # ranks of tp, or their factors
GROUPS = "groups"  # keyword that a product leaves beside those of a public function
PART_NAMES = {"dp": "one rank's slice of a batch", "cp": "of whole sequences"}
DEGREES = {"dp": "data-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
# Of keywords that are numbers: the least and the most that they may be, and what to give.
NUMBERS: dict[str, tuple[float, float, str]] = {
    "band": (0, 1, "share of the least step that a plan may take longer to send less, from 0 to 1, such as 0.02"),
    "seconds": (0, math.inf, "CPU seconds after which the best plan so far is taken, such as 60; float('inf') for all"),
    "imbalance": (1, 1e9, "rows of the rank that gets most for its experts over the mean, at least 1, such as 1.3"),
}


def read_number(name: str, keywords: Keywords) -> float:
    """Read the number that a public function's argument gives, checked by `NUMBERS`."""
    value, (least, most, words) = keywords.get(name, DEFAULTS[name]), NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InputError(f"{name}={value!r}: give the {words}.")
    return float(value)


def degrees_of(tp: Any, keywords: Any, model: nn.Module) -> tuple[Any, Any]:
    """Read the degree that is given as `tp`, and the keywords with dp and cp of a mesh, or the groups of a product.

    Args:
        tp: of a public function, a number too. keywords: of that function. model: that is to be split.

    Raises:
        InputError: the mesh cannot give degrees, or `keywords` give one too; a factor is none, or splits nothing.
    """
    if isinstance(tp, tuple):
        return _product_of(tp, keywords, model)
    if not isinstance(tp, DeviceMesh):
        return tp, keywords
    sizes = axes_of(tp)
    for name in BESIDE:
        if name in sizes and keywords.get(name) is not None:
            raise InputError(
                f"the axis {name} is named twice: the mesh has {name}={sizes[name]}, and {name}={keywords[name]} is "
                "given too. Leave out the number."
            )
    return sizes.pop("tp", 1), {**keywords, **sizes}


def _product_of(tp: tuple[Any, ...], keywords: Any, model: nn.Module) -> tuple[int, Any]:
    """Read a degree that is a product, and add its groups to the keywords: ranks that differ in the last factors."""
    if any(isinstance(n, str) for n in tp):
        raise InputError(
            f"tp={tp} names dimensions of a mesh: give compile() that mesh too, mesh=, or numbers, tp=(8, 2)."
        )
    if not tp or not all(counts(n) and n > 1 for n in tp):
        raise InputError(f"tp={tp}: the factors of a degree are ints of at least 2, such as tp=(8, 2) for 16 ranks.")
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    sizes = {n for p in parameters for n in p.shape if n}
    outer = math.prod(tp[:-1])
    if sizes and all(size % outer for size in sizes):
        raise InputError(
            f"tp={tp}: no parameter of {type(model).__name__} has a dimension that {outer} ranks share evenly, so the "
            f"factors before the last split nothing. Take others, or tp={math.prod(tp)}."
        )
    groups = tuple(math.prod(tp[i:]) for i in range(1, len(tp)))
    return math.prod(tp), {**keywords, GROUPS: groups}


def read_axis(dp: Any, fully_shard: Any, tp: Any, cp: Any = None, ep: Any = None) -> Axes:
    """Read the axes beside tp that a public function's arguments ask for, checked.

    Args:
        dp, cp, ep: their sizes; None for 1. fully_shard: split weights over both. tp: ranks, or "auto".

    Raises:
        InputError: a value that is none, or two that contradict each other.
    """
    sizes = {name: n for name, n in {"dp": dp, "cp": cp, "ep": ep}.items() if n is not None}
    for name, size in sizes.items():
        if not counts(size):
            raise InputError(
                f"{name}={size!r}: the {DEGREES[name]} degree counts ranks, so it is an int of at least 1."
            )
    axes = Axes(**sizes, fully_shard=bool(fully_shard))
    if fully_shard and axes.size == 1:
        raise InputError("fully_shard=True splits weights over dp and cp: give dp or cp, the size of such an axis.")
    if axes.size > 1 and tp == "auto":
        raise InputError(f"tp='auto' picks the degree for tp alone, and {axes.name} is given. Give tp as a number.")
    return axes


def axes_beside(plan: Plan | None, keywords: Keywords, tp: Any) -> Axes:
    """Read the axes beside tp: the plan's, unless some are asked for.

    Args:
        plan: that is given. keywords: of a public function. tp: ranks, or "auto".

    Raises:
        InputError: see `read_axis`. PlanError: the plan is for others.
    """
    cp, split, dp = keywords.get("cp"), keywords.get("fully_shard"), read_invariant(keywords, "dp")
    dp = keywords.get("dp") if dp is None else dp  # of which a process of the plan's has one, or several
    if plan is not None and dp is None and cp is None and keywords.get("ep") is None:
        return refuse_travel(plan.batch, keywords)
    axes = refuse_travel(read_axis(dp, split, tp, cp, keywords.get("ep")), keywords)
    if plan is None:
        return replace(axes, imbalance=read_number("imbalance", keywords))
    if axes.text != plan.batch.text or split not in (None, plan.batch.fully_shard):
        raise PlanError(
            f"the plan is for {plan.batch.text}, and {axes.text} is asked for. Leave it out, or plan again."
        )
    return plan.batch


def refuse_undealt(inputs: Inputs, axes: Axes) -> None:
    """Refuse a whole batch, or whole sequences, that axes beside tp do not divide.

    Args:
        inputs: of a call on one device. axes: beside tp.
    """
    count = examples_of((inputs.args, inputs.kwargs))
    if axes.dp > 1 and count % axes.dp:
        raise InputError(
            f"a batch of {count} is not divided into slices of one size by dp={axes.dp} ranks: the first dimension of "
            f"the first input must be a multiple of {axes.dp}."
        )
    if axes.cp > 1:
        inputs.part(0, axes.cp)


def refuse_late(axes: Axes, inputs: Any, resume: bool = False) -> None:
    """Refuse to wait for the first call where weights are sharded over axes, or loaded, before an optimizer."""
    if resume and inputs is None:
        raise InputError("resume=True loads weights before the first call: give example_inputs.")
    if axes.size > 1 and inputs is None:
        raise InputError(
            f"{axes.text} needs example_inputs, {', '.join(map(PART_NAMES.__getitem__, axes.degrees))}: which weights "
            "are gathered together is decided before the first call."
        )


def example(model: nn.Module, example: Any, axes: Axes = ALONE, ranks: Ranks = PLAIN_PROCESS) -> Inputs | None:
    """Read the example inputs, checked against `forward`; None where none were given and no config says enough.

    Args:
        model: that they are for. example: as the user gave them.
        axes: beside tp; of whole sequences over cp they are this rank's part. ranks: by default the first one's.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type(model).__name__}; autotp shards an nn.Module.")
    refuse_scripted(model)
    inputs = for_model(model) if example is None else normalise(example)
    if inputs is not None:
        bind(model.forward, inputs)
    if inputs is not None and axes.cp > 1:
        inputs, _ = inputs.own_part(ranks.along("cp").rank, axes.cp)
    return inputs


def required_inputs(
    model: nn.Module, example_inputs: Any, function: str, axes: Axes = ALONE, ranks: Ranks = PLAIN_PROCESS
) -> Inputs:
    """Read the example inputs of a public function that needs them.

    Args:
        model, example_inputs, axes, ranks: see `example`. function: its name.
    """
    inputs = example(model, example_inputs, axes, ranks)
    if inputs is None:
        raise InputError(
            f"{function} needs example_inputs for {type(model).__name__}: only transformers models get theirs from the "
            "config. Pass a tensor, a tuple of arguments, a mapping of keyword arguments, or autotp.Inputs(...)."
        )
    return inputs
