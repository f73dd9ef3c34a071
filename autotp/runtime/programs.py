"""The programs that a sharded module runs, the keys of calls by which they are found, and what makes further ones."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.capture.rank0 import Untold, model_key
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest, Mode, serves
from autotp.comm.ranks import Ranks
from autotp.comm.virtual import Host, Hosts, Virtual
from autotp.errors import InputError, StateError
from autotp.inputs import Inputs, Leaves, bind, without_cache
from autotp.ir.graph import SEEDS, Capture, Function, SizeBounds
from autotp.ir.layouts import Layouts
from autotp.ir.precision import LATEST
from autotp.ir.program import Decided, Sharded
from autotp.passes.base import Pass
from autotp.passes.decompose.counter_random import seeds
from autotp.passes.optimise import Fired
from autotp.passes.shard.batch_axis import BatchRules
from autotp.runtime.generation.arguments import Returns
from autotp.runtime.generation.generate_methods import LEFT_ON_MODELS
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.lower.regional import Compiler

from .call_message import short
from .storage import ShardState, wrap
from .weight_reads import Read


@dataclass(frozen=True)
class Slot:
    """Stand-in for the tensor at this position of a call's flat inputs."""

    index: int


@dataclass(frozen=True)
class Form:
    """Meaning of a call but for its tensors: `key` is equal for equal meanings; `order` has the tensors' positions in
    the call's flat inputs, in the key's order."""

    key: Hashable
    order: tuple[int, ...]


class CallKey(NamedTuple):
    """The key of a kind of call: by it programs are known. Sizes are never in it.

    Attributes:
        mode: that the module is called in. of: what was set on its parts, which module of it is called, and why its
            states are refused. grad: whether gradients are recorded.
        spec: how the leaves are nested. leaves: type, dimensions and whether a gradient is wanted of each tensor, type
            and value of what is none.
    """

    mode: Mode
    of: Hashable
    grad: bool
    spec: compat.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of_call(cls, mode: Mode, of: Hashable, flat: Leaves, spec: Any) -> CallKey:
        """Return the key of a call with these leaves."""
        grad = torch.is_grad_enabled()
        leaves = [
            (x.dtype, x.ndim, grad and x.requires_grad) if isinstance(x, Tensor) else (type(x), x) for x in flat
        ]  # fmt: skip
        return cls(mode, of, grad, spec, tuple(leaves))


def form(bare: nn.Module, flat: Leaves, spec: Any) -> tuple[Form, Inputs]:
    """Return the form of a call of `bare`, and its inputs with the cache switched off.

    Args:
        bare: the module; its `forward` says the names.
        flat, spec: `tree_flatten((args, kwargs))`.

    Raises:
        InputError: the inputs do not fit `forward`.
    """
    slots = []
    for i, v in enumerate(flat):
        slots.append(Slot(i) if isinstance(v, Tensor) else v)
    args, kwargs = compat.tree_unflatten(slots, spec)
    inputs, _ = without_cache(bare, Inputs(*args, **kwargs), running=True)
    leaves, shape = compat.tree_flatten(_by_name(bare.forward, inputs))
    values = []
    for x in leaves:
        values.append(None if isinstance(x, Slot) else (type(x), x))
    key = (shape, tuple(values))
    order = tuple(x.index for x in leaves if isinstance(x, Slot))
    whole = compat.tree_map(lambda x: flat[x.index] if isinstance(x, Slot) else x, (inputs.args, dict(inputs.kwargs)))
    return Form(key, order), Inputs(*whole[0], **whole[1])


def _by_name(forward: Function, inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by name in the order of the signature, without those that equal their default."""
    bound = bind(forward, inputs)
    positional, by_name = [], {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        default = parameter.default
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            by_name |= dict(sorted(value.items()))
        # A number or word that came from another process as bytes is equal to the default, and not the same object.
        elif value is not default and not (type(value) is type(default) in (str, float) and value == default):
            by_name[name] = value
    if by_name.get("use_cache") is False:  # captures are without a cache, said or unsaid
        del by_name["use_cache"]
    return positional, by_name


Match = tuple["Program", list[int]]  # what runs a call, and the order in which it takes the leaves
MAX_KINDS = 256  # of calls
MAX_PROGRAMS = 64  # of one module: attributes may be set to ever other values


@dataclass(eq=False)
class Program:
    """Captured graph made runnable on this rank: for one mode, dtype and autocast state.

    Attributes:
        form: of the call that it was captured with.
        seeds: how many operators draw by counters.
        draws: whether others draw as torch does.
        fired: what became of each optimisation; `compiler`: what compiles it. reads: what it reads of the module.
        changes: what was set on the module's parts when it was captured (`autotp.runtime.changes`).
        entry: path of the module that it is the forward of.
        stages: those of this rank by their index, where it is cut.
    """

    capture: Capture
    sharded: Sharded
    graph: fx.Graph
    key: int
    form: Form
    seeds: int = 0
    draws: bool = False
    fired: Fired = ()
    compiler: Compiler | None = None
    reads: Sequence[Read] = ()
    changes: Hashable = ()
    entry: str = ""
    stages: Mapping[int, Any] = field(default_factory=dict)
    last_run: int = 0  # when it last ran, counted in runs of all

    @cached_property
    def returns(self) -> Returns:
        """The meaning of its results."""
        return Returns(self.capture.out_spec)

    @cached_property
    def _sizes(self) -> tuple[SizeBounds, Any]:
        bounds = self.capture.size_bounds()
        return bounds, bounds.code()

    def takes(self, shapes: Sequence[Any]) -> bool:
        """Return whether it accepts tensors of these shapes, in its order; they are of a kind of call that it ran."""
        if self.capture.conditions is not None:  # every call is asked whether it meets them
            return False
        bounds, code = self._sizes
        if code is None:  # which cannot be written
            return bounds.broken(shapes, [""] * len(shapes)) is None
        return code[1](*[shapes[i][d] for i, d in code[0]])

    @cached_property
    def needs_same_sizes(self) -> bool:
        """True where dp ranks exchange values that are as long as their inputs."""
        return BatchRules.needs_same_sizes(self.capture)

    @cached_property
    def delayed(self) -> bool:
        """True where it has scales of earlier calls, and leaves its own largest values to later ones."""
        names = (x.rpartition(".")[2] for x in self.capture.mutations.values() if isinstance(x, str))
        return LATEST in names

    @cached_property
    def flat(self) -> bool:
        """True where it gives its results without further containers in them."""
        result: Any = self.graph.output_node().args[0]
        return not any(isinstance(x, list | tuple | dict) for x in result)

    def order(self, call_form: Form, flat: Leaves, mode: Mode) -> list[int] | None:
        """Return the order in which it takes the leaves of a call; None where it was not captured for it or its sizes.

        Args:
            call_form: of the call. flat: its leaves, whole. mode: that the module is called in.
        """
        if self.form.key != call_form.key or not serves(self.capture.state, mode):
            return None
        at = dict(zip(self.form.order, call_form.order, strict=True))
        values = []
        for i, leaf in enumerate(self.capture.inputs):
            values.append(flat[at[i]] if i in at else leaf.node.meta.get("val"))
        if self.capture.accepts(values) is not None:
            return None
        return [at[i] for i in sorted(at)]

    def random(self, shards: ShardState, base: int) -> list[Tensor]:
        """Return seeds of a forward's random numbers, from one number of torch's default generator: the same on all
        ranks of a slice of the batch."""
        if not self.seeds:
            return []
        if len(shards.hosts) > 1:  # of each virtual micro-batch
            local = [seeds(self.seeds, place, base).to(shards.device) for place in shards.hosts[0].here]
            return [Virtual(local, "dp") if len(local) > 1 else local[0]]  # type: ignore[list-item]
        return [seeds(self.seeds, shards.ranks.along("dp").rank, base).to(shards.device)]

    def left_sharded(self, position: int, value: Any, inputs: list[Tensor], ranks: Ranks) -> Any:
        """Return an output of this rank as a DTensor."""
        if ranks.mesh is None or not isinstance(value, Tensor):
            return value
        layout, whole = self.sharded.result(position)
        return wrap(value, layout, self.capture.shape(whole, inputs), ranks.mesh)


AGAIN = (
    "this module is called in a backward, as torch.utils.checkpoint around it does to compute it again. With delayed "
    "scaling it would be computed by other scales than in its forward, which has left its largest values to the next. "
    "Put checkpoint around its layers, as docs/training.md shows, or take the recipe 'tensorwise'."
)
TABLES = ("_programs", "_boundaries")  # of a part, by program


@dataclass(eq=False)
class CallKind:
    """Calls of one key, and the programs that ran some, each with the order in which it takes their leaves.

    Attributes:
        slices: digests of what slices of the batch may not differ in, by sizes.
    """

    key: CallKey
    programs: list[Match] = field(default_factory=list)
    slices: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """The key, in short: of the same meaning in every process."""
        return short(self.key)

    def program(self, shapes: Sequence[Any]) -> Match | None:
        """Return what runs a call with leaves of these shapes, the latest first; None where it is not known yet."""
        for at, (program, order) in enumerate(self.programs):
            if program.takes([shapes[i] for i in order]):
                if at:
                    self.programs.insert(0, self.programs.pop(at))
                return program, order
        return None

    def learn(self, program: Program, order: list[int]) -> None:
        """Note a program that ran such a call."""
        if (program, order) not in self.programs:
            self.programs.insert(0, (program, order))


class Programs(list[Program]):
    """Programs of a module, as they were made: the `MAX_PROGRAMS` that ran last; and the kinds of calls that they run.

    One that was dropped is captured again when a call needs it: on all ranks at once, as they make the same calls.
    """

    total = runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[CallKey, CallKind] = {}
        self._latest: dict[CallKey, tuple[Any, CallKind]] = {}

    def kind(self, key: CallKey) -> CallKind:
        """Return the kind of call of this key.

        Raises:
            InputError: something among the leaves has no hash.
        """
        # One object in the place of the last call's, where its arguments were read as that one's: not hashed again.
        near = key._replace(spec=id(key.spec))
        try:
            latest = self._latest.get(near)
            if latest is None or latest[0] is not key.spec:
                if max(len(self.kinds), len(self._latest)) >= MAX_KINDS:
                    self.kinds.clear()
                    self._latest.clear()
                latest = self._latest[near] = key.spec, self.kinds.setdefault(key, CallKind(key))
        except TypeError as error:
            fault = next((kind.__name__ for kind, *x in key.leaves if x and not isinstance(x[0], Hashable)), str(error))
            raise InputError(
                f"an input is {fault}: inputs are tensors, numbers, strings, None, and tuples, lists or dicts of them. "
                "Turn arrays into tensors."
            ) from None
        return latest[1]

    def find(self, call: Form, flat: Leaves, mode: Mode, entry: str = "", changes: Hashable = ()) -> Match | None:
        """Return a program captured for such a call that accepts its sizes, and the order of the leaves that it takes.

        Args:
            call: its form. flat: its leaves, whole. mode: that the module is called in.
            entry, changes: as of a program.
        """
        for program in self:
            if (program.entry, program.changes) == (entry, changes):
                order = program.order(call, flat, mode)
                if order is not None:
                    return program, order
        return None

    def forget(self, parts: Iterable[nn.Module]) -> None:
        """Drop all, for what they make is on the device that the weights were on; `parts`: see `add`."""
        self.kinds, self._latest = {}, {}
        while self:
            self._let_go(self[0], parts)

    def key(self) -> int:
        """Return a key for another program."""
        self.total += 1
        return self.total - 1

    def run(self, program: Program) -> None:
        """Note that this one runs now.

        Raises:
            StateError: it is to run again in a backward, and its scales have moved on since the forward.
        """
        if program.delayed and compat.graph_task() >= 0:
            raise StateError(AGAIN)
        self.runs += 1
        program.last_run = self.runs

    def add(self, program: Program, parts: Iterable[nn.Module]) -> None:
        """Add one that the parts have; where that is one too many they lose the one that has not run for longest.

        Args:
            program: the new one. parts: modules that hold what programs call.
        """
        self.append(program)
        self.run(program)
        while len(self) > MAX_PROGRAMS:
            self._let_go(min(self, key=lambda program: program.last_run), parts)

    def _let_go(self, program: Program, parts: Iterable[nn.Module]) -> None:
        """Take one out, of the kinds of calls that run it and of the parts that hold what it calls."""
        self.remove(program)
        for kind in self.kinds.values():
            kind.programs = [match for match in kind.programs if match[0] is not program]
        for part, table in itertools.product(parts, TABLES):
            entries = vars(part).get(table, {})
            for name in [x for x in entries if _owner(x) == program.key]:
                del entries[name]


def _owner(name: Any) -> int:
    """Return the key of the program that a part's entry, for the call of a module or for a stage, belongs to."""
    while isinstance(name, tuple):
        name = name[0]
    return name


@dataclass
class Source:
    """Remainder of the original that a sharded module keeps: its skeleton, and how a further capture becomes a program.

    Attributes:
        shards: the record of this rank, which holds no tensors yet.
        decide: how the operators of a capture run under the module's plan, with states where programs before have
            them; `make`: the program of a capture that is so decided, with such outputs as are wanted.
        capture: the capture of a skeleton for inputs on a device, in a mode, by a request.
        agreed: passes of a capture that every rank has made for itself.
        want: what captures are to be.
        lowering: how programs run.
        check: compare input values between the ranks at every call; `sample`: a few of them.
        ready: captures that exist already.
        pipeline: the ranks of its stages, and sums over them; None where it is not cut.
        again: what makes a plan and all this anew for other degrees over the same ranks, of a model on the meta device,
            inputs, tp and the axes beside it; None where that cannot be.
        origin: inputs that it was planned for.
    """

    shards: ShardState
    decide: Callable[[Capture, Layouts], Decided]
    make: Callable[[Capture, Layouts, str, Decided], Sharded]
    capture: Callable[[nn.Module, Inputs, torch.device, Mode, CaptureRequest], Capture]
    agreed: Sequence[Pass[Capture]]
    want: CaptureRequest = DEFAULT_CAPTURE
    lowering: Lowering = field(default_factory=Lowering)
    check: bool = False
    sample: bool = True
    ready: list[tuple[Capture, Sharded]] = field(default_factory=list)
    pipeline: Any = None
    again: Callable[[nn.Module, Any, int, Any], tuple[nn.Module, Any, Source]] | None = None
    origin: Any = None

    def __post_init__(self) -> None:
        # Set anew by every `generate()`, and read by no forward: as a change of the model it would be another program.
        for name in LEFT_ON_MODELS:
            vars(self.shards.bare).pop(name, None)

    @cached_property
    def key(self) -> str | None:
        """Key of what captures depend on of the model, as `model_key`; None where that cannot be told."""
        try:
            return model_key(self.shards.bare)
        except Untold:
            return None

    def want_of(self, entry: str, generating: bool = False) -> CaptureRequest:
        """Request for captures of the module at this path: the user asked for outputs and states of the root's, and
        of these for a loss where the call is not one of `generate()`."""
        if entry:
            return replace(self.want, outputs="full", carried=())
        return replace(self.want, outputs="full") if generating and self.want.outputs == "loss" else self.want


def hosts_of(ranks: Ranks, virtual: Mapping[str, int], processes: Mapping[str, int]) -> Hosts:
    """Return the virtual ranks that this process runs on each axis.

    Args:
        ranks: of tp. virtual: how many there are on each axis, the outermost first and tp last; none where a rank is a
            process. processes: that share those of each axis.
    """
    hosts = []
    for axis, size in virtual.items():
        along, count = ranks if axis == "tp" else ranks.along(axis), size // processes[axis]
        hosts.append(Host(along.rank * count, count, size, along.group_name, axis))
    return tuple(hosts)


def readings(captured: Capture, graph: fx.Graph, shards: ShardState) -> tuple[list[fx.Node], list[Read], int]:
    """Return a program's inputs, what it reads off the tree, and how many operators draw by counters.

    Args:
        captured: the program of all ranks. graph: of this rank's. shards: what holds the tensors that are read.
    """
    inputs, reads, count = [], [], 0
    for leaf, node in zip(captured.leaves, graph.find_nodes(op="placeholder"), strict=True):
        if leaf.kind.passed:
            inputs += [node] if leaf.is_tensor else []
        elif leaf.kind is SEEDS:
            inputs.append(node)
            count = leaf.node.meta["val"].shape[0]
        elif node.users:
            name = shards.aliases.get(leaf.name, leaf.name)
            reads.append(
                Read(node, name, shards.storages.get(name) if leaf.kind.trained else None, shards.tables.get(name))
            )
    return inputs, reads, count


def train_as(bare: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Train the parameters of a skeleton that its parts train; return whether those were others before."""
    differed = False
    for module, part in zip(bare.modules(), parts, strict=True):
        for name, p in module._parameters.items():
            parameter = part._parameters.get(name, part._parameters.get(f"{name}_part0"))
            if p is not None and parameter is not None and p.requires_grad != parameter.requires_grad:
                p.requires_grad_(parameter.requires_grad)
                differed = True
    return differed
