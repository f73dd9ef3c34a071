"""One call of a sharded module against the original: values, then gradients, up to the first module that differs.

Three runs are held against each other. The *call* is what the user gets: parts with their hooks, compiled or not. The
*program* is this rank's, run operator by operator on what it holds. The *original* is the captured graph on whole
weights with the same random numbers; and, where nothing is drawn by counters, the user's own module beside it. What a
rank should hold of a value is cut out of the original's by its layout, so comparing sends nothing but the verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.comm.ranks import together
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import short_name
from autotp.ir.layouts import Groups, Layout
from autotp.ir.marks import mark
from autotp.ir.scopes import module_of, module_path
from autotp.passes.shard.rewrite import specialise
from autotp.proof.numerics import largest, relative
from autotp.runtime import state
from autotp.runtime.programs import Program, Source
from autotp.runtime.shard_state import ShardState

from .replay import Replay
from .runs import (  # fmt: skip
    Call,
    Gap,
    Rounding,
    Run,
    again,
    by_shape,
    module_name,
    nearest,
    tensors_of,
    verdict,
    wide,
)

CAUSE = "Ranks hold other values of what is whole on each, or a collective gave other numbers there"
AROUND = (
    "Run operator by operator the program agrees: look at what stands around the modules (hooks, wrappers, modules and "
    "attributes that were replaced), or leave out the compiler and the optimisations (backend='eager', optimise=False)"
)
SUMMED = 10  # a gradient is a sum over rows, which may be zero by mathematics: that many of the largest round to it
STALE = "The sharded module runs what was captured of the model, which was in another state then, or was captured wrong"


class Trial(Replay):
    """A call that is compared; `note` is told what was found equal in its backward."""

    def __init__(
        self, shards: ShardState, source: Source, modules: Sequence[nn.Module], program: Program, order: Sequence[int],
        model: nn.Module, call: Call, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(shards, program, order, call)
        self.source, self.modules, self.model, self.note = source, modules, model, note
        self.place = source.places()["tp"]
        self.nodes = list(program.sharded.graph.nodes)
        self.own = Run()
        self.arrived: dict[int, Tensor] = {}
        self.were: dict[str, list[Tensor | None]] = {}
        self.finished = False
        kinds = [p.dtype for p in shards.root.parameters() if p.is_floating_point()]
        kinds += [self.capture.state[-1]] if self.capture.state[-1] is not None else []
        self.rounding = Rounding(max(kinds, key=lambda d: torch.finfo(d).eps, default=torch.float32))
        self.tolerance = self.rounding.allowed
        self.compared = 0

    # ---- the forward -----------------------------------------------------------------------------------------------

    def forward(self, outputs: Sequence[Any]) -> str:
        """Run all, and compare values: of the program, of the call, and of the user's own module."""
        self.read_weights()
        graph = specialise(self.sharded, self.source.places())
        olds = dict(zip(graph.nodes, self.nodes, strict=True))
        self.here.outputs = self.run(graph, self.here, lambda n, v: self.here.keep(olds[n], v))
        original = next(iter(self.sharded.origin.values()))[0].graph
        self._together(lambda: setattr(self.whole, "outputs", self.run(original, self.whole, self._keep_whole)))
        self.positions = [i for i in range(len(self.whole.outputs)) if i not in self.capture.mutations]
        self._verdict(self._program(), CAUSE)
        self._verdict(self._outputs(outputs), AROUND)
        random = self.program.seeds > 0
        if not random:
            self._verdict(self._together(self._users), STALE)
        unlike = (
            " (the original's own random numbers are others: its graph was run with the module's)" if random else ""
        )
        return self._equal(f"{self.compared} values") + unlike

    def _keep_whole(self, node: fx.Node, value: Any) -> None:
        for i, v in enumerate(value if isinstance(value, list | tuple) else [value]):
            self.whole.keep((node, i), v)

    def _program(self) -> Gap | None:
        """The first value of this rank's program that is not its part of the original's."""
        for at, node in enumerate(self.nodes):
            local, origin = self.here.values.get(node), self.sharded.origin.get(node)
            whole = self.whole.values.get(origin) if origin is not None else None
            if local is None or whole is None or origin is None:
                continue
            operands = [self.whole.values[n, 0] for n in origin[0].all_input_nodes if (n, 0) in self.whole.values]
            scale = max(
                (largest(x) for x in operands if x.is_floating_point()), default=0.0
            )  # a sum of these may be zero
            error = self._error(node, local.detach(), whole.detach(), self.sharded.layouts[node], scale)
            if not error <= self.tolerance:
                return Gap(at, self._value_name(node), error)
        return None

    def _error(self, node: fx.Node, local: Tensor, whole: Tensor, layout: Layout, scale: float) -> float:
        """How far this rank's part is from what it should be; a summand says nothing until it is summed."""
        if layout.partial:
            return 0.0
        self.compared += 1
        if layout.split:
            spec, place = layout.to_runtime(partial(self._size, node)), (self.place.rank, self.place.size)
            local, whole = spec.own(local, *place), spec.take(whole, *place)
        return relative(wide(local), wide(whole), scale)

    def _size(self, node: fx.Node, size: Any) -> Any:
        """A size of a layout as a number, or the ends of its groups."""
        if isinstance(size, int):
            return size
        if isinstance(size, Groups):
            return self.whole.values[self.sharded.origin[self.sharded.ends[node]]]
        sizes = {str(s): self.leaf_values[owner].shape[dim] for s, (owner, dim) in self.capture.symbols.items()}
        return int(size.subs({s: sizes[str(s)] for s in size.free_symbols}))

    def _value_name(self, node: fx.Node) -> str:
        """A value by the module that makes it."""
        origin = self.sharded.origin[node][0]
        leaf = next((x for x in self.capture.leaves if x.node.name == origin.name), None)
        if origin.op == "placeholder" and leaf is not None:
            return f"{module_name(leaf.name.rpartition('.')[0])} (its {leaf.kind} {leaf.name})"
        path = module_path(origin)
        after = f", after {short_name(node.target)}" if mark(node).conversion is not None else ""
        return (
            f"{module_name(module_of(path[-1]) if path else '')} ({origin.name} = {short_name(origin.target)}{after})"
        )

    def _outputs(self, outputs: Sequence[Any]) -> Gap | None:
        """An output of the call that is not the original's; by the first part that gave what its program does not."""
        for i, (position, output) in enumerate(zip(self.positions, outputs, strict=True)):
            expected = self.whole.outputs[position]
            if not isinstance(output, Tensor) or not isinstance(expected, Tensor):
                continue
            error = relative(wide(output.detach()), wide(expected.detach()))
            if not error <= self.tolerance:
                candidates = by_shape((set(), v) for v in self.here.values.values())
                for at, (path, values) in enumerate(self.call.part_values):
                    if any(not self._has_like(v, candidates, None) for v in values):
                        return Gap(at, f"{module_name(path)} (by what it gives; so output {i})", error)
                return Gap(len(self.call.part_values) + i, f"the model (its output {i})", error)
        return None

    def _has_like(
        self, value: Tensor, candidates: Mapping[Any, list[tuple[set[str], Tensor]]], module: str | None
    ) -> bool:
        """Whether this is one of the values of its shape: those that were made in this module, if any were."""
        alike = candidates.get(tuple(value.shape), [])
        alike = [x for x in alike if module in x[0]] or alike
        return not alike or any(relative(wide(v), wide(value.detach())) <= self.tolerance for _, v in alike)

    def _users(self) -> Gap | None:
        """The first module of the user's own that gives what the captured graph does not compute."""
        memo: dict[int, Any] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            first = self.shards.aliases[name]
            self.own.leaves.setdefault(first, nn.Parameter(self.whole.leaves[first].detach(), p.requires_grad))
            memo[id(p)] = self.own.leaves[first]
            self.own.leaves[first].requires_grad_(self.whole.leaves[first].requires_grad)
        for name, b in self.model.named_buffers(remove_duplicate=False):
            memo[id(b)] = self.buffers[self.shards.aliases[name]].clone()
        model = copy.deepcopy(self.model, memo)
        names = {m: name for name, m in model.named_modules()}
        for module, part in zip(model.modules(), self.modules, strict=True):
            module.training = part.training
        gave: list[tuple[str, list[Tensor]]] = []
        for m in names:
            m.register_forward_hook(lambda m, _, out: gave.append((names[m], tensors_of(out))), always_call=False)
        args, kwargs = compat.tree_unflatten(again(self.call.flat, clone=True), self.call.spec)
        inputs = without_cache(model, Inputs(*args, **kwargs))[0]
        self.call.rewind()
        self.own.outputs = compat.tree_leaves(model(*inputs.args, **inputs.kwargs))
        candidates = by_shape(
            ({module_of(p) for p in module_path(n)}, v.detach()) for (n, _), v in self.whole.values.items()
        )
        for at, (name, values) in enumerate(gave):
            if any(not self._has_like(v, candidates, name) for v in values):
                return Gap(at, module_name(name), nearest(values, candidates))
        return None

    # ---- the backward ----------------------------------------------------------------------------------------------

    def await_backward(self, outputs: Sequence[Any]) -> None:
        """Compare the gradients when a backward reaches these outputs."""
        for position, output in zip(self.positions, outputs, strict=True):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._arrive, position))

    def _arrive(self, position: int, grad: Tensor) -> None:
        if self.finished:
            return
        if not self.arrived:
            self.were = {n: self._grads(n, clone=True) for n in self.shards.storages}
            compat.after_backward(self._backward)
        self.arrived[position] = grad.detach().clone()

    def _grads(self, name: str, clone: bool = False) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for p in state.pieces(self.shards, name):
            gradient = None if p.grad is None else compat.part_of(p.grad)
            gradients.append(gradient.clone() if clone and gradient is not None else gradient)
        return gradients

    def _backward(self) -> None:
        self.finished, self.compared = True, 0
        with self.call.undisturbed(), torch.autograd.set_multithreading_enabled(False):
            self.here.backward(self.arrived)
            self._together(lambda: self.whole.backward(self.arrived))
            grads = [x.grad for x in self.whole.values.values() if x.grad is not None]
            self.most = SUMMED * max(map(largest, grads), default=0.0)
            self._verdict(self._gradients(), CAUSE, "the gradients of")
            self._verdict(self._parameters(self._gained, self.here), AROUND, "the gradients of")
            if len(self.own.outputs) == len(self.positions):
                mine = {self.positions.index(i): g for i, g in self.arrived.items()}
                self._together(lambda: self.own.backward(mine))
                own = self._parameters(lambda n: self.own.leaves[n].grad, self.whole)
                self._verdict(own, STALE, "the gradients of")
        self.note(self._equal(f"the gradients of {self.compared} values"))
        self.here, self.whole, self.own = Run(), Run(), Run()

    def _gradients(self) -> Gap | None:
        """The last value whose gradient on this rank is not its part of the original's."""
        for at in reversed(range(len(self.nodes))):
            node = self.nodes[at]
            local, origin = self.here.values.get(node), self.sharded.origin.get(node)
            whole = self.whole.values.get(origin) if origin is not None else None
            if local is None or whole is None or whole.grad is None or mark(node).conversion is not None:
                continue  # a converted value has the gradients of some readers, the value itself has all
            mine = local.grad if local.grad is not None else torch.zeros_like(local)
            error = self._error(node, mine, whole.grad, self.sharded.layouts[node].dual, self.most)
            if not error <= self.tolerance:
                return Gap(-at, self._value_name(node), error)
        return None

    def _parameters(self, gradient_of: Callable[[str], Tensor | None], run: Run) -> Gap | None:
        """The last parameter whose gradient is not that of a run."""
        for at, name in enumerate(reversed(run.leaves)):
            mine, expected = gradient_of(name), run.leaves[name].grad
            if mine is None:
                continue
            error = relative(wide(mine), wide(torch.zeros_like(mine) if expected is None else expected), self.most)
            if not error <= self.tolerance:
                return Gap(at, f"{module_name(name.rpartition('.')[0])} (its parameter {name})", error)
        return None

    def _gained(self, name: str) -> Tensor | None:
        """What the user's backward has added to a parameter's gradient on this rank; None where nothing."""
        now = self._grads(name)
        if all(g is None for g in now):
            return None
        pieces: list[Tensor] = []
        for p, before, after in zip(state.pieces(self.shards, name), self.were[name], now, strict=True):
            gain = torch.zeros_like(compat.part_of(p)) if after is None else after
            pieces.append(gain if after is None or before is None else gain - before)
        return self.shards.storages[name].local(pieces)

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def _together(self, run: Callable[[], Any]) -> Any:
        return together(self.shards.ranks, "running the original (compare=)", run)

    def _verdict(self, mine: Gap | None, advice: str, what: str = "the values of") -> None:
        self.finished = self.finished or mine is not None
        verdict(self.shards.ranks, mine, what, advice, self.rounding)

    def _equal(self, what: str) -> str:
        return f"compare: {what} of this call are the original's within {self.tolerance:.1e} ({self.rounding.name})"
