"""Executor of programs: on whole values, on simulated ranks of this process, or on this rank of several."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autotp import compat
from autotp.comm import conversions
from autotp.comm.virtual import Host, Hosts, Virtual, at_rank, every, on_all
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import SEEDS, Capture, Leaf, Value, draws, resolve
from autotp.ir.layouts import Groups, I, Layout, R, Size
from autotp.ir.marks import mark
from autotp.ir.op import aten
from autotp.ir.program import MeshPlace, Sharded
from autotp.ir.specs import Spec
from autotp.passes.shard.deal import Dealt
from autotp.passes.shard.rewrite import specialise

from .differences import Parts, grad_or_zeros, largest

HANDS_ON = (operator.getitem, aten.detach.default)  # what these give is made where their operand is
Env = Mapping[fx.Node, list[Any]]  # of each node, its value on every rank that runs here


@dataclass
class Simulated:
    """All ranks of a mesh in this process, in lockstep: no launcher, no devices, differentiable.

    Attributes:
        tp: ranks of the inner axis. beside: the axes beside it, the outermost first; ranks that follow each other are a
            tp group, and such groups the next axis's.
        virtual: virtual ranks of one process on an axis, by its name, of which it runs one program
            (`autotp.comm.virtual`); by default one.
    """

    tp: int
    beside: Sequence[Dealt] = ()
    virtual: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """The number of ranks and the stride of each axis."""
        axes, stride = {"tp": (self.tp, 1)}, self.tp
        for axis in reversed(self.beside):
            axes[axis.axis] = axis.ranks, stride
            stride *= axis.ranks
        return axes

    @property
    def world(self) -> int:
        """All ranks."""
        return math.prod(n for n, _ in self.axes.values())

    @cached_property
    def hosts(self) -> list[Hosts]:
        """The processes, each by its place on every axis, in the order of their ranks."""
        places = []
        for axis, (size, _) in reversed(self.axes.items()):
            virtual = self.virtual.get(axis, 1)
            places.append([Host(first, virtual, size, axis=axis) for first in range(0, size, virtual)])
        return [*product(*places)]

    def step(self, node: fx.Node, env: Env) -> list[Any]:
        """Run one node in every process."""
        marks = mark(node)
        if marks.conversion is not None or marks.batch is not None:
            axis = "tp" if marks.batch is None or marks.conversion is not None else marks.batch.axis
            specs = [node.args[1:3]] * self.world
            if len(node.all_input_nodes) > 1:  # sizes, or ends of groups of rows
                specs = self.each_rank([_at(node.args[1:3], env, place) for place in range(len(self.hosts))])
            return self.converted(env[node.args[0]], specs, axis, node.kwargs.get("wire"))  # type: ignore[index, arg-type]
        random_state, results = torch.get_rng_state() if draws(node) else None, []
        for place, hosts in enumerate(self.hosts):
            if random_state is not None:  # the generators of all ranks are in the same state
                torch.set_rng_state(random_state)
            args, kwargs = _at(node.args, env, place), _at(node.kwargs, env, place)
            call, random = partial(_call, node.target), random_state is not None
            results.append(on_all(call, args, kwargs, hosts, marks.axis, random))
        return results

    def converted(
        self, values: Sequence[Any], specs: Sequence[Any], axis: str, wire: torch.dtype | None = None
    ) -> list[Any]:
        """Convert a value over an axis, and return each process's part of the result.

        Args:
            values: the parts of the processes. specs: layouts before and after, of each rank. axis: its name.
            wire: see the functions of the table.
        """
        ranks, (n, stride) = self.each_rank(values), self.axes[axis]
        groups = {}  # one value that processes share is converted once
        results = [*ranks]
        for first in range(self.world):
            if first // stride % n == 0:
                group = slice(first, first + n * stride, stride)
                of = tuple(map(id, ranks[group])) if self.virtual else first
                if of not in groups:
                    src, dst = specs[first]
                    groups[of] = conversions.simulate(ranks[group], src, dst, wire, self.virtual.get(axis, 1))
                results[group] = groups[of]
        return self.of_hosts(results)

    def of_hosts(self, values: Sequence[Any]) -> list[Any]:
        """Return each process's value from the parts of the ranks: a single one where its ranks have the same."""
        return [self._of_host(values, hosts, 0) for hosts in self.hosts]

    def _of_host(self, values: Sequence[Any], hosts: Hosts, first: int) -> Any:
        if not hosts:
            return values[first]
        host, stride = hosts[0], self.axes[hosts[0].axis][1]
        parts = [self._of_host(values, hosts[1:], first + rank * stride) for rank in host.here]
        return parts[0] if _alike(parts) else Virtual(parts, host.axis)

    def each_rank(self, values: Sequence[Any]) -> list[Any]:
        """Return each rank's part of a value of the processes."""
        ranks: list[Any] = [None] * self.world
        for value, hosts in zip(values, self.hosts, strict=True):
            self._to_ranks(value, hosts, 0, ranks)
        return ranks

    def _to_ranks(self, value: Any, hosts: Hosts, first: int, ranks: list[Any]) -> None:
        if not hosts:
            ranks[first] = value
            return
        host, stride = hosts[0], self.axes[hosts[0].axis][1]
        for at, rank in enumerate(host.here):
            self._to_ranks(at_rank((value,), at, host.axis)[0], hosts[1:], first + rank * stride, ranks)


def _alike(values: Sequence[Any]) -> bool:
    """Return whether virtual ranks share the same object."""
    return all([*map(id, every(x))] == [*map(id, every(values[0]))] for x in values[1:])


@dataclass(frozen=True)
class Here:
    """This rank, whose conversions are collectives.

    Attributes:
        places: its place on each mesh axis.
    """

    places: Mapping[str, MeshPlace]
    tp = 1
    world = 1
    hosts = ((),)

    def step(self, node: fx.Node, env: Env) -> list[Any]:
        """Run one node."""
        return [_call(node.target, *_at(node.args, env, 0), **_at(node.kwargs, env, 0))]

    def each_rank(self, values: Sequence[Any]) -> list[Any]:
        """Return this rank's part of a value."""
        return list(values)


WHOLE = Simulated(1)  # a captured program, which has no conversions


@dataclass
class Values:
    """Values of a program.

    Attributes:
        nodes: of each node, a list with one for each rank that runs here; before a run, those of the leaves, whole.
        outputs: for each rank its flat outputs.
    """

    nodes: dict[fx.Node, list[Any]] = field(default_factory=dict)
    outputs: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Capture, model: nn.Module, inputs: Inputs) -> Values:
        """Take the model's own parameters and buffers, and these inputs, as the leaves, on the CPU.

        Args:
            program: the capture. model: whose values they are; random ones on the meta device. inputs: of one call.
        """
        state = {**program.constants, **weights_of(model)}
        tensors = [x.cpu() for x in without_cache(model, inputs)[0].leaves if isinstance(x, Tensor)]
        return cls({n: [v] for n, v in leaf_values(program, tensors, lambda name: real(state[name]).cpu()).items()})

    def doubled(self) -> dict[fx.Node, Any]:
        """Return whole values in float64 (and complex128)."""
        return {n: double(v) for n, (v,) in self.nodes.items()}

    def whole(self, value: Value) -> Any:
        """Return a value of a run of the whole, by node and place in its results; None where there is none."""
        results = self.nodes.get(value[0], [None])[0]
        return results[value[1]] if isinstance(results, list | tuple) else results


def leaf_values(
    program: Capture, tensors: Iterable[Tensor], state: Callable[[str], Any], seeds: Tensor | None = None
) -> dict[fx.Node, Any]:
    """Return the value of every leaf.

    Args:
        program: the capture. tensors: of a call, in order. state: gives a parameter, buffer or constant by its name.
        seeds: of random numbers; by default 0, 1, and so on.
    """
    inputs, values = iter(tensors), dict[fx.Node, Any]()
    for x in program.leaves:
        value: Any = x.node.meta.get("val")  # of what is no tensor, such as a number
        if x.kind is SEEDS:
            value = torch.arange(len(value)) if seeds is None else seeds
        elif not x.kind.passed:
            value = state(x.name)
        elif isinstance(value, Tensor):
            value = next(inputs)
        values[x.node] = value
    return values


@dataclass
class CallLayouts:
    """Layouts of a call's values on the ranks, with numbers for its sizes.

    Attributes:
        captured, sharded: a program, unsharded and for all ranks. leaves: the captured one's values, whole.
        on: the ranks.
    """

    captured: Capture
    sharded: Sharded
    leaves: Mapping[fx.Node, Any]
    on: Simulated

    @cached_property
    def sizes(self) -> list[dict[str, int]]:
        """Sizes of every symbol, by name (a plan that was read has symbols of its own): of the whole, and after each
        axis beside tp of the part that is sharded over the next."""
        sizes = [{str(s): self.leaves[node].shape[d] for s, (node, d) in self.captured.symbols.items()}]
        for axis in self.on.beside:
            name = str(axis.symbol)
            sizes.append({**sizes[-1], name: sizes[-1][name] // axis.ranks})
        return sizes

    def spec(self, layout: Layout, ends: Any = None, axis: int = -1) -> Spec:
        """Return a layout with numbers.

        Args:
            layout: of a value. ends: of its groups of rows, where it is sharded by these. axis: that it is over, by its
                place among those beside tp; by default tp.
        """
        sizes = self.sizes[axis]

        def number(size: Size | Groups) -> Any:
            if isinstance(size, int | Groups):
                return size if isinstance(size, int) else ends
            return int(size.subs({s: sizes[str(s)] for s in size.free_symbols}))  # type: ignore[arg-type]

        return layout.to_runtime(number)

    def output_layout(self, position: int) -> Layout:
        """Return the layout over tp of the output at this position: whole, but where it becomes a state."""
        name = self.captured.becomes(position)
        return I if name is None else self.sharded.states.get(name, I)

    def pairs(self) -> list[tuple[Leaf, fx.Node]]:
        """Return every leaf with its placeholder in the program of the ranks."""
        return list(zip(self.captured.leaves, self.sharded.graph.find_nodes(op="placeholder"), strict=True))

    def over(self, leaf: Leaf) -> list[Layout]:
        """Return the layouts of a leaf over each axis beside tp."""
        kind = "inputs" if leaf.kind.passed else "weights"
        return [getattr(axis, kind).get(leaf.name, R) for axis in self.on.beside]

    def split(self, value: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        """Return the ranks' parts of a whole value, in their order.

        Args:
            layouts: over each axis beside tp, and after them over tp.
        """
        parts, ranks = [value], [*(axis.ranks for axis in self.on.beside), self.on.tp]
        for axis, layout in enumerate(layouts):
            spec = self.spec(layout, axis=axis)
            parts = [x for part in parts for x in spec.split(part, ranks[axis])]
        return parts

    def paired(
        self, ours: Values, theirs: Values, nodes: Iterable[fx.Node], backward: bool = False, place: Any = None
    ) -> tuple[dict[fx.Node, Parts], dict[fx.Node, Tensor]]:
        """Pair values of nodes of the ranks' program, or their gradients, with those of the whole.

        Args:
            ours, theirs: values of the ranks, and of the whole. nodes: of which the original has the value, and others.
            backward: pair gradients. place: of one rank alone, which it is of how many; its summands are left out.
        """
        parts = {}
        wholes = {}
        for node in nodes:
            value = theirs.whole(self.sharded.origin[node]) if node in self.sharded.origin else None
            # A converted value has the gradients of some readers, the value itself has all.
            if not isinstance(value, Tensor) or backward and (value.grad is None or mark(node).conversion is not None):
                continue
            layout, ends, ranks = self.sharded.layouts[node], self.sharded.ends.get(node), ours.nodes[node]
            if backward:
                layout, ranks, value = layout.dual, [grad_or_zeros(x) for x in ranks], grad_or_zeros(value)
            if place is None or not layout.partial:
                spec = self.spec(layout, ends and theirs.whole(self.sharded.origin[ends]))
                parts[node], wholes[node] = Parts(ranks, spec, place), value
        return parts, wholes

    def made_of(self, theirs: Values, node: fx.Node) -> float:
        """Return the largest operand that a value of the captured graph is made of: a sum of these may be zero.

        A buffer that an operator writes to is made of what that reads.
        """
        while node.target in HANDS_ON:
            node = node.all_input_nodes[0]
        makers = list(node.users) if node.op == "placeholder" else [node]
        read = [theirs.whole(resolve(i)) for maker in makers for i in maker.all_input_nodes]
        return max((largest(v) for v in read if isinstance(v, Tensor) and not v.is_complex()), default=0.0)

    def dealt(self, leaf: Leaf, node: fx.Node) -> list[Any]:
        """Return a leaf's value on every rank."""
        value = self.leaves[leaf.node]
        if not isinstance(value, Tensor):
            return [value] * self.on.world
        return self.split(value, [*self.over(leaf), self.sharded.layouts.get(node, R)])


class StepError(RuntimeError):
    """An operator of a program failed.

    Attributes:
        node: where. values: of the nodes before it.
    """

    def __init__(self, node: fx.Node, error: Exception, values: Values) -> None:
        super().__init__(f"{node.format_node()}: {error}")
        self.node, self.values = node, values


def run(
    program: Capture | Sharded, leaves: Mapping[fx.Node, Sequence[Any]], on: Simulated | Here = WHOLE,
    watch: bool = False,
) -> Values:  # fmt: skip
    """Run a program node by node.

    Args:
        program: a capture, or the program of the ranks before the rank is known. leaves: for every placeholder its
            value on each rank that runs.
        on: what runs it. watch: have every value keep its gradient.

    Raises:
        StepError: an operator failed on some rank.
    """
    graph = specialise(program, on.places) if isinstance(on, Here) and isinstance(program, Sharded) else program.graph
    values, env = Values(), dict[fx.Node, list[Any]]()
    for node, step in zip(program.graph.nodes, graph.nodes, strict=True):
        if node.op == "output":
            values.outputs = [compat.tree_leaves(_at(step.args[0], env, rank)) for rank in range(len(on.hosts))]
            break
        try:
            env[step] = list(leaves[node]) if node.op == "placeholder" else on.step(step, env)
        except Exception as error:
            raise StepError(node, error, values) from error
        values.nodes[node] = env[step]
        for value in on.each_rank(env[step]) if watch else ():
            if isinstance(value, Tensor) and value.requires_grad:
                value.retain_grad()
    return values


def _at(args: Any, env: Env, rank: int) -> Any:
    """Return the arguments with a rank's values."""
    return fx.map_arg(args, lambda n: env[n][rank])


# What torch itself has no derivative for; the rules of these operators write the same into the program of the ranks.
DERIVABLE: dict[Any, Callable[..., Tensor]] = {
    aten.copy.default: lambda like, value, non_blocking=False: value.to(like.dtype).expand_as(like),
}
UNINITIALISED = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_permuted, aten.empty_strided)


def _call(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the operator, and make its result comparable: uninitialised memory is zero, and an operand that it returns
    is an alias, so that every value has a gradient of its own."""
    function: Any = DERIVABLE.get(target, target)
    result = function(*args, **kwargs)
    if getattr(target, "overloadpacket", None) in UNINITIALISED:
        return torch.zeros_like(result)
    if isinstance(result, Tensor) and any(result is a for a in args):
        return result.view_as(result)
    return result


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers and parameters under every name."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return buffers | dict(model.named_parameters(remove_duplicate=False))


def double(value: Any) -> Any:
    """Return a tensor in float64 (or complex128), cut off from autograd; anything else as it is."""
    return value.detach().to(_wide(value.dtype)) if isinstance(value, Tensor) else value


def real(value: Any) -> Any:
    """Return a tensor with random values where it has none; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_meta:
        return value.detach()
    draw = torch.Generator().manual_seed(value.numel())
    return (torch.randn(value.shape, generator=draw, dtype=torch.float64) * 0.1).to(value.dtype)


WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def _wide(x: Any) -> Any:
    """Return the dtype in double precision; anything else as it is."""
    if not isinstance(x, torch.dtype) or x.itemsize == 1:  # in which numbers are stored, and not computed with
        return x
    return torch.float64 if x.is_floating_point else WIDE.get(x, x)


def _has_dtype(node: fx.Node) -> bool:
    """Return whether a dtype stands in a node's arguments, at any depth."""
    return any(isinstance(x, torch.dtype) for x in compat.tree_leaves((node.args, node.kwargs)))


def _grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Compute products by group: of rows, of columns, of what is summed over, or of matrices; the rest is zero."""
    if offs is None:
        return torch.bmm(x, weight)
    starts = [0, *offs.tolist()]
    spans = [slice(a, b) for a, b in pairwise(starts)]
    if x.ndim == weight.ndim == 2:
        return torch.stack([x[:, s] @ weight[s] for s in spans])
    if x.ndim == 3:
        parts = [a @ weight[:, s] for a, s in zip(x, spans, strict=True)]
        return torch.cat([*parts, x.new_zeros(x.shape[1], weight.shape[1] - starts[-1])], 1)
    parts = [x[s] @ w for s, w in zip(spans, weight, strict=True)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - starts[-1], weight.shape[2])])


def _scaled_mm(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Compute the product of scaled float8 values, without derivative; scales are of all, or of rows and columns."""
    product = (x.double() @ weight.double()) * scale_x * scale_weight
    return (product if bias is None else product + bias).detach()


# What torch computes in narrower dtypes only.
NARROW: dict[Any, Callable[..., Tensor]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._scaled_mm.default: _scaled_mm,
}


class _InFloat64(TorchFunctionMode):
    """Mode in which the operators of `NARROW` compute in float64, wherever they are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = func in NARROW and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
        return (NARROW[func] if wide else func)(*args, **(kwargs or {}))


@contextmanager
def promoted(*graphs: fx.Graph) -> Iterator[None]:
    """Have the graphs compute in float64 within this context: every floating dtype among their literals is float64."""
    nodes = [n for g in graphs for n in g.nodes]
    narrow = {str(target) for target in NARROW}
    operators = {x for n in nodes for x in (n.target, *n.args) if callable(x) or isinstance(x, str)}
    # Only these are written to, and put back: the graphs are the plan's own.
    saved = [(n, n.args, n.kwargs) for n in nodes if _has_dtype(n)]
    default = torch.get_default_dtype()
    for node, args, kwargs in saved:
        node.args, node.kwargs = compat.tree_map(_wide, args), compat.tree_map(_wide, kwargs)
    # Factories without a dtype take the default one.
    torch.set_default_dtype(torch.float64)
    try:
        # The mode costs every call of torch, so that only graphs with such operators run in it.
        with nullcontext() if narrow.isdisjoint(map(str, operators)) else _InFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for node, args, kwargs in saved:
            node.args, node.kwargs = args, kwargs
