"""Sharded modules of `compare=`: a call and its backward are compared with the original's, on the user's real ranks.

Three runs are compared. The *call* is the user's: parts with their hooks, compiled or not. The *program* is this
rank's, run operator by operator on its shards. The *original* is the captured graph on whole weights with the same
random numbers; and, where nothing is drawn by counters, the user's own module beside it. A rank's shard of a value is
cut out of the original's by its layout, so comparing sends nothing but the verdict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autotp import compat
from autotp.comm.ranks import agree, by_value, from_all, together
from autotp.errors import CompareError, InputError, StateError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import draws, shape_of, short_name
from autotp.ir.layouts import I
from autotp.ir.marks import mark
from autotp.ir.op import dtype_name
from autotp.ir.program import Sharded
from autotp.ir.scopes import module_of, module_path
from autotp.log import log
from autotp.passes.decompose.counter_random import base_seed
from autotp.plans.plan import Plan
from autotp.proof.differences import (
    Parts,
    Rounding,
    differences,
    grad_or_zeros,
    has_grad,
    largest,
    rounding_of,
)
from autotp.proof.run import CallLayouts, Here, Simulated, Values, leaf_values, run
from autotp.runtime import data_parallel, state
from autotp.runtime.module import ShardedModule
from autotp.runtime.program_search import match_of
from autotp.runtime.programs import Program, Source

from .compared_call import (
    Call,
    Candidates,
    PartValues,
    again,
    by_shape,
    errors_of,
    joined,
    listening,
    noting,
    tensors_of,
)

CAUSE = "Ranks hold other values of what is whole on each, or a collective gave other numbers there"
AROUND = (
    "Run operator by operator the program agrees: look at what stands around the modules (hooks, wrappers, modules and "
    "attributes that were replaced), or leave out the compiler and the optimisations (backend='eager', optimise=False)"
)
ROUNDED = (
    "compare= with precision: the original has no products in float8, and of two runs that do, a difference of one "
    "rounding before a cast may be one of an eighth behind it, which nothing tells from a fault. autotp.verify proves "
    "such a program in float64. Leave out precision, or compare."
)
SUMMED = 10  # a gradient is a sum over rows, which may be zero by mathematics: that many of the largest round to it
STALE = "The sharded module runs what was captured of the model, which was in another state then, or was captured wrong"


class ComparedModule(ShardedModule):
    """A `ShardedModule` whose first call, or every one, is compared with the original, and so is its backward.

    Attributes:
        compared: a line for each forward and backward that was equal.
    """

    how: ClassVar[str]
    compared: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, plan: Plan, source: Source) -> None:
        if source.want.outputs == "sharded":
            raise InputError("compare= compares whole outputs: it takes outputs='full' or 'loss'. Leave out one.")
        if source.want.precision is not None:
            raise InputError(ROUNDED)
        super().__init__(model, plan, source)
        self.__dict__["_compared_with"] = model  # beside this module, not a part of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded module, then the original; a CompareError says where they differ (collective)."""
        if self._generation is not None or (self.how == "first" and self.compared):
            return super().__call__(*args, **kwargs)
        with self._calls.turn():
            return self._compared(args, kwargs)

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._arguments(args, kwargs, "")
        if arguments.state_objects or kwargs.get("use_cache"):
            raise InputError("compare= compares calls without a cache. Leave out the cache and use_cache, or compare.")
        if not self._shards.summing:
            raise StateError(
                "compare= compares a backward with its sum over dp and cp. Leave out no_sync(), or compare."
            )
        call = Call.of(self, arguments)
        with listening(self) as call.part_values:
            outputs = super().__call__(*args, **kwargs)
        data_parallel.show_gradients(self._shards)  # its own weights, where torch has gathered others for the call
        match = match_of(self, arguments)
        assert match is not None  # it has just run
        comparison = _Comparison(self, *match, call)
        with call.undisturbed():
            self._note(comparison.forward(compat.tree_leaves(outputs)))
        if not torch.is_grad_enabled():
            return outputs
        leaves, spec = compat.tree_flatten(outputs)
        # Where an output is read within the model too, its own gradient is that of both: the user gets another name.
        for i, x in enumerate(leaves):
            leaves[i] = x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x
        comparison.await_backward(leaves)
        return compat.tree_unflatten(leaves, spec)

    def _note(self, text: str) -> None:
        self.compared = (*self.compared, text)
        log.info("%s", text)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._compared_with)] = self._compared_with
        return super().__deepcopy__(memo)


class First(ComparedModule):
    """A module that compares the first call."""

    how = "first"


class Every(ComparedModule):
    """A module that compares every call."""

    how = "every"


KINDS: dict[Any, type[ShardedModule]] = {None: ShardedModule, "first": First, "every": Every}


def kind_of(compare: Any) -> type[ShardedModule]:
    """Return the class of module that the `compare=` of a public function asks for.

    Raises:
        InputError: it is not known.
    """
    if not isinstance(compare, str | None) or compare not in KINDS:
        raise InputError(f"compare={compare!r} is not known; choose None, 'first' or 'every'.")
    return KINDS[compare]


class _Comparison:
    """One call of a sharded module against the original: values, then gradients, to the first module that differs."""

    def __init__(self, module: ComparedModule, program: Program, order: Sequence[int], call: Call) -> None:
        self.module, self.program, self.order, self.call = module, program, order, call
        self.shards, self.capture, self.sharded = module._shards, program.capture, program.sharded
        self.ranks = self.shards.planners
        self.places = module._shards.places()
        self.place = self.places["tp"].rank, self.places["tp"].size  # over tp
        # The graph that the ranks' program was made from, which is not always the captured one.
        self.original = Sharded(next(iter(self.sharded.origin.values()))[0].graph)
        self.beside = bool(self.shards.ranks.beside)
        self.parameters = {name: state.pieces(self.shards, name) for name in self.shards.storages}
        self.local: dict[str, Tensor] = {}  # parameters by first name: what this rank holds of each
        self.whole: dict[str, Tensor] = {}  # whole
        self.users: dict[str, Tensor] = {}  # and those of a copy of the user's model
        self.users_outputs: list[Any] = []
        self.arrived: dict[int, Tensor] = {}  # gradients of outputs, by position
        self.before: dict[str, list[Tensor | None]] = {}  # gradients before the backward
        self.finished = False
        dtypes = [self.capture.state[-1], *(p.dtype for p in self.shards.root.parameters() if p.is_floating_point())]
        # What is compiled rounds otherwise than operators one by one, in whichever type a value is computed.
        if module._source.lowering.name != "eager":
            values = [x for n in self.original.graph.nodes for x in tensors_of(n.meta.get("val"))]
            dtypes += [x.dtype for x in values if x.is_floating_point()]
        self.dtype = max(filter(None, dtypes), key=lambda d: torch.finfo(d).eps, default=torch.float32)
        self.tolerance = rounding_of([self.dtype])

    def forward(self, outputs: Sequence[Any]) -> str:
        """Run all, and compare the values of the program, of the call, and of the user's module; return a summary."""
        self._read_weights()
        self.ours = self._run(self.sharded, self.call.flat, self.local, self.call.buffers)
        whole = self._whole_states()
        self.theirs = self._together(lambda: self._run(self.original, whole, self.whole, self.buffers))
        self.positions = [i for i in range(len(self.theirs.outputs[0])) if i not in self.capture.mutations]
        origin = self.sharded.origin
        values = Rounding(self.tolerance, lambda node: self.layouts.made_of(self.theirs, origin[node][0]))
        self._verdict(self._program(values), CAUSE)
        self._verdict(self._outputs(outputs), AROUND)
        unlike = " (the original's own random numbers are others: its graph was run with the module's)"
        random = bool(self.program.seeds) or self.beside and any(map(draws, self.original.graph.nodes))
        if not random:
            flat, outputs = self._whole_call(whole) if self.beside else (whole, [])
            self._verdict(self._together(lambda: self._user_model(flat, outputs)), STALE)
            unlike = ""
        return self._equal(f"{values.compared} values") + unlike

    def _read_weights(self) -> None:
        """Read the weights of now: this rank's, and all of them, rank 0's where each rank has them whole."""
        for name, storage in self.shards.storages.items():
            parameters = self.parameters[name]
            trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            whole = storage.full([p.detach() for p in parameters])
            local = storage.layout.to_runtime().take(whole, *self.place) if storage.split else whole.clone()
            whole = whole if storage.split and not self.beside else self._rank_0(whole)
            self.local[name] = local.detach().requires_grad_(trained)
            self.whole[name] = whole.detach().requires_grad_(trained)
        self.buffers = {name: self._rank_0(b) for name, b in self.call.buffers.items()}

    def _rank_0(self, value: Tensor) -> Tensor:
        if self.ranks.tp == 1:
            return value
        value = value.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(value, group=self.ranks.group, group_src=0)
        return value

    def _whole_states(self) -> list[Any]:
        """Return the inputs with whole states, such as a cache, from the shards that the tp ranks have passed."""
        flat = list(self.call.flat)
        for at, name in self.call.states.items():
            layout = self.sharded.states.get(name, I)
            if layout.sharded_dim is not None:
                parts = from_all(self.shards.ranks, flat[at].detach(), "states of a call (compare=)")
                flat[at] = layout.to_runtime().recombine(parts)
        return flat

    def _whole_call(self, flat: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
        """All-gather inputs and outputs over the axes beside tp: of the whole batch, with whole sequences."""
        flat, shapes = list(flat), [getattr(x, "shape", None) for x in flat]
        agree(
            self.ranks,
            "the sizes of slices of the batch, which compare= joins (pad them alike)",
            {"sizes": shapes},
        )
        for at, leaf in zip(self.order, self.capture.tensor_inputs, strict=True):
            flat[at], _ = self._joined(flat[at], leaf.node)
        nodes = self.capture.results
        outputs = [(x, nodes[i]) for i, x in enumerate(self.theirs.outputs[0]) if i in self.positions]
        return flat, [self._joined(x, node)[0] for x, node in outputs if isinstance(x, Tensor)]

    def _joined(self, part: Tensor, node: fx.Node) -> tuple[Tensor, int]:
        return joined(part, shape_of(node), self.capture, self.shards.ranks)

    def _run(
        self, program: Sharded, flat: Sequence[Any], weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> Values:
        """Run a program as the call ran, with these inputs, and with weights and buffers by first name."""
        self.call.rewind()
        tensors, state = again([flat[i] for i in self.order]), {**self.capture.constants, **buffers, **weights}
        seeds = self.program.random(self.shards, base_seed() if self.program.seeds else 0)
        aliases = self.shards.aliases  # a tied parameter is held once, under its first name
        leaves = leaf_values(self.capture, tensors, lambda name: state[aliases.get(name, name)], *seeds)
        self.layouts = CallLayouts(self.capture, self.sharded, leaves, Simulated(1))
        placeholders = zip(program.graph.find_nodes(op="placeholder"), leaves.values(), strict=True)
        # The graph holds its casts: under autocast they would be made again.
        cast = self.capture.state[-1] is not None
        with torch.autocast(self.call.device.type, enabled=False) if cast else nullcontext():
            return run(program, {n: [v] for n, v in placeholders}, Here(self.places), watch=True)

    def _program(self, rounding: Rounding, backward: bool = False) -> _Fault | None:
        """Find the first value of this rank's program, or last gradient, that is not its shard of the original's."""
        nodes = list(self.ours.nodes)
        order = reversed(nodes) if backward else nodes
        pairs = self.layouts.paired(self.ours, self.theirs, order, backward, self.place)
        gap = differences(*pairs, rounding)
        if gap is None:
            return None
        return _Fault((-1 if backward else 1) * nodes.index(gap.key), self._value_name(gap.key), gap.error)

    def _value_name(self, node: fx.Node) -> str:
        """Name a value by the module that makes it."""
        origin = self.sharded.origin[node][0]
        leaf = next((x for x in self.capture.leaves if x.node.name == origin.name), None)
        if origin.op == "placeholder" and leaf is not None:
            return f"{_module_name(leaf.name.rpartition('.')[0])} (its {leaf.kind} {leaf.name})"
        path = module_path(origin)
        after = f", after {short_name(node.target)}" if mark(node).conversion is not None else ""
        module = _module_name(module_of(path[-1]) if path else "")
        return f"{module} ({origin.name} = {short_name(origin.target)}{after})"

    def _outputs(self, outputs: Sequence[Any]) -> _Fault | None:
        """Find an output that is not the original's, by the first part whose values its program does not have."""
        ours, theirs = {}, {}
        for i, (position, x) in enumerate(zip(self.positions, outputs, strict=True)):
            if isinstance(x, Tensor):
                spec = self.layouts.spec(self.layouts.output_layout(position))
                ours[i], theirs[i] = Parts([x], spec, self.place), self.theirs.outputs[0][position]
        gap = differences(ours, theirs, Rounding(self.tolerance))
        if gap is None:
            return None
        candidates = by_shape((set(), x) for (x,) in self.ours.nodes.values() if isinstance(x, Tensor))
        at, path = self._first_unlike(self.call.part_values, candidates, by_module=False)
        if path is None:
            return _Fault(len(self.call.part_values) + gap.key, f"the model (its output {gap.key})", gap.error)
        return _Fault(at, f"{_module_name(path)} (by what it gives; so output {gap.key})", gap.error)

    def _first_unlike(
        self, module_values: Sequence[tuple[str, list[Tensor]]], candidates: Candidates, by_module: bool
    ) -> tuple[int, str | None]:
        """Find the first module that gave a value unlike every candidate of its shape."""
        for at, (path, values) in enumerate(module_values):
            module = path if by_module else None
            for x in values:
                if all(not e <= self.tolerance for e in errors_of(x, candidates, module)):
                    return at, path
        return 0, None

    def _user_model(self, flat: Sequence[Any], outputs: list[Tensor]) -> _Fault | None:
        """Find the first module of the user's that gives a value which the captured graph does not compute; with axes
        beside tp, where ranks have parts of a module's values, compare the whole outputs alone.

        Args:
            flat: the inputs, whole. outputs: of the captured graph, likewise.
        """
        original: nn.Module = self.module._compared_with  # type: ignore[assignment]
        memo: dict[int, Any] = {}
        # A copy of the module by deepcopy, in whose memo its weights are the whole ones of now: tied ones stay tied.
        for name, p in original.named_parameters(remove_duplicate=False):
            first = self.shards.aliases[name]
            trained = self.whole[first].requires_grad
            copied = nn.Parameter(self.whole[first].detach(), p.requires_grad).requires_grad_(trained)
            memo[id(p)] = self.users.setdefault(first, copied)
        for name, b in original.named_buffers(remove_duplicate=False):
            memo[id(b)] = self.buffers[self.shards.aliases[name]].clone()
        model = copy.deepcopy(original, memo)
        for module, part in zip(model.modules(), self.module._order, strict=True):
            module.training = part.training
        module_values: PartValues = []
        for name, module in model.named_modules():
            noting(module, name, module_values)
        args, kwargs = compat.tree_unflatten(again(flat), self.call.spec)
        inputs = without_cache(model, Inputs(*args, **kwargs))[0]
        self.call.rewind()
        self.users_outputs = compat.tree_leaves(model(*inputs.args, **inputs.kwargs))
        values = (
            ({module_of(p) for p in module_path(node)}, x)
            for node, (value,) in self.theirs.nodes.items()
            for x in compat.tree_leaves(value)
            if isinstance(x, Tensor)
        )
        users = [(set[str](), x) for x in tensors_of(self.users_outputs)]
        candidates = by_shape(users if self.beside else values)
        if any(tuple(x.shape) not in candidates for x in outputs):
            return _Fault(0, "the model", math.inf)
        module_values = [("", outputs)] if self.beside else module_values
        at, path = self._first_unlike(module_values, candidates, by_module=True)
        if path is None:
            return None
        return _Fault(at, _module_name(path), max(min(errors_of(x, candidates, None)) for x in module_values[at][1]))

    def await_backward(self, outputs: Sequence[Any]) -> None:
        """Compare the gradients when a backward reaches these outputs."""
        for position, output in zip(self.positions, outputs, strict=True):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._arrive, position))

    def _arrive(self, position: int, grad: Tensor) -> None:
        if self.finished:
            return
        if not self.arrived:
            self.before = {n: again(self._grads(n)) for n in self.shards.storages}
            # The sums over dp and cp end by a call after the backward too, and are asked for later than this.
            last = partial(compat.after_backward, self._backward) if self.beside else self._backward
            compat.after_backward(last)
        self.arrived[position] = grad.detach().clone()

    def _grads(self, name: str) -> list[Tensor | None]:
        """Return the gradients of the pieces of a parameter on this rank."""
        return [p.grad for p in self.parameters[name]]

    def _backward(self) -> None:
        self.finished = True
        with self.call.undisturbed(), torch.autograd.set_multithreading_enabled(False):
            self._differentiate(self.ours.outputs[0], self.arrived)
            self._together(lambda: self._differentiate(self.theirs.outputs[0], self.arrived))
            leaves = [x for value in self.theirs.nodes.values() for x in compat.tree_leaves(value)]
            top = SUMMED * max((largest(x.grad) for x in leaves if has_grad(x)), default=0.0)
            values, parameters = Rounding(self.tolerance, top), Rounding(self.tolerance, top)
            self._verdict(self._program(values, backward=True), CAUSE, "the gradients of")
            self._average()
            gained = {n: self._gained(n) for n in reversed(self.local)}
            self._verdict(self._parameters(gained, self.whole, parameters), AROUND, "the gradients of")
            if len(self.users_outputs) == len(self.positions):
                mine = {self.positions.index(i): self._whole_gradient(i, g) for i, g in self.arrived.items()}
                self._together(lambda: self._differentiate(self.users_outputs, mine))
                users = {n: self.users[n].grad for n in reversed(self.whole)}
                self._verdict(self._parameters(users, self.whole, parameters), STALE, "the gradients of")
        self.module._note(self._equal(f"the gradients of {values.compared} values"))
        self.ours = self.theirs = Values()
        self.users_outputs = []

    def _average(self) -> None:
        """Average the gradients of weights over axes beside tp, as the backward does."""
        batch = self.shards.ranks.batch
        for x in self.whole.values():
            if x.requires_grad and batch is not None:
                x.grad = grad_or_zeros(x).contiguous()
                dist.all_reduce(x.grad, group=batch.group)
                x.grad.div_(batch.tp)

    def _whole_gradient(self, position: int, grad: Tensor) -> Tensor:
        """All-gather the gradient of a whole output over the axes beside tp."""
        whole, count = self._joined(grad, self.capture.results[position])
        return whole / count

    def _differentiate(self, outputs: Sequence[Any], grads: Mapping[int, Tensor]) -> None:
        """Run the backward, from the gradients of the outputs at these positions."""
        pairs = [(outputs[i], g.to(outputs[i].dtype)) for i, g in grads.items() if outputs[i].requires_grad]
        if pairs:
            ys, upstream = zip(*pairs, strict=True)
            torch.autograd.backward(ys, upstream)

    def _parameters(
        self, gradients: Mapping[str, Tensor | None], leaves: Mapping[str, Tensor], rounding: Rounding
    ) -> _Fault | None:
        """Find the last parameter whose gradient differs from a run's."""
        ours = {n: g for n, g in gradients.items() if g is not None}
        theirs = {n: grad_or_zeros(leaves[n]) for n in ours}
        gap = differences(ours, theirs, rounding)
        if gap is None:
            return None
        what = f"{_module_name(gap.key.rpartition('.')[0])} (its parameter {gap.key})"
        return _Fault(list(gradients).index(gap.key), what, gap.error)

    def _gained(self, name: str) -> Tensor | None:
        """Return the increase of a parameter's gradient by the user's backward, whole; None where there is none."""
        now = self._grads(name)
        if all(g is None for g in now):
            return None
        pieces: list[Tensor] = []
        for p, before, after in zip(self.parameters[name], self.before[name], now, strict=True):
            gain = after if before is None or after is None else after - before
            pieces.append(torch.zeros_like(p) if gain is None else gain)
        return self.shards.storages[name].full(pieces)

    def _together(self, run: Callable[[], Any]) -> Any:
        return together(self.ranks, "running the original (compare=)", run)

    def _equal(self, what: str) -> str:
        return f"compare: {what} of this call are the original's within {self.tolerance:.1e} ({dtype_name(self.dtype)})"

    def _verdict(self, mine: _Fault | None, advice: str, what: str = "the values of") -> None:
        """Raise the same CompareError on every rank if one has a difference: that of the first (collective)."""
        self.finished = self.finished or mine is not None
        every = from_all(self.ranks, mine, "what compare= found")
        first = min((fault for fault in every if fault is not None), default=None)
        if first is None:
            return
        here = ["equal"] * len(every)
        for rank, fault in enumerate(every):
            if fault is not None and fault.order == first.order:
                here[rank] = f"off by {fault.error:.1e}"
        raise CompareError(
            f"compare: {what} {first.what} are not the original's ({by_value(here)}, as a part of the largest; "
            f"rounding in {dtype_name(self.dtype)} allows {self.tolerance:.1e}), and all before them are. {advice}."
        )


class _Fault(NamedTuple):
    """A difference on this rank; `order` compares between ranks, the smallest is the first."""

    order: int
    what: str
    error: float


def _module_name(path: str) -> str:
    return path or "the model"
