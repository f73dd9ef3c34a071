"""Captured programs as data, and queries of their graphs that several stages share."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from autotp import compat

from .marks import copy_graph, copy_node, mark, write  # noqa: F401  others have them from here
from .op import Op, Ops, aten, expression, sizes
from .scopes import Blocks, module_name
from .sizes import Size, substitute

Function = Callable[..., Any]  # what a graph calls, or is
Emit = Callable[..., fx.Node]  # writes a call, of a function with its arguments
Nodes = Sequence[fx.Node]
Env = dict[fx.Node, fx.Node]  # a node -> what stands for it in another graph
Alike = Mapping[fx.Node, fx.Node]  # a node -> the equal one that stands for it, of the first repeated block
NamedTensors = dict[str, Tensor]
Mutations = dict[int, str | int]  # position of an output -> buffer, or tensor among the inputs, that takes it
Symbols = dict[sympy.Symbol, tuple[fx.Node, int]]  # where each is read: an input, and a dimension of it
Place = tuple[int, int]  # a tensor's place among the inputs that are tensors, and the dimension
MAX_ELEMENTS = 2**62  # elements in a dimension whose symbol has no range


@dataclass(frozen=True)
class SizeBounds:
    """Bounds of the sizes that a program takes.

    Attributes:
        symbols: symbol -> the dimension that it is read from, the first that is this symbol alone.
        sizes: every other dimension, and its size.
        ranges: least and greatest value of each symbol. guards: relations that hold between symbols.
    """

    symbols: Mapping[sympy.Symbol, Place]
    sizes: Sequence[tuple[Place, Size]]
    ranges: Mapping[sympy.Symbol, tuple[int, int]]
    guards: Sequence[sympy.Basic]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], ranges: Mapping[sympy.Symbol, tuple[int, int]], guards: Sequence[sympy.Basic]
    ) -> SizeBounds:
        """Derive the bounds from inputs.

        Args:
            tensors: the (fake) tensors among the inputs, in order. ranges, guards: as in `Capture`.
        """
        dimensions = [((i, d), expression(n)) for i, value in enumerate(tensors) for d, n in enumerate(value.shape)]
        symbols: dict[sympy.Symbol, Place] = {}
        for place, size in dimensions:
            if isinstance(size, sympy.Symbol):
                symbols.setdefault(size, place)
        first = set(symbols.values())
        others = [(place, size) for place, size in dimensions if place not in first]
        # A size in symbols that no dimension gives by itself may be any; so may what is said of such symbols.
        derived = [
            (place, size) for place, size in others if isinstance(size, int) or size.free_symbols <= symbols.keys()
        ]
        within = {s: ranges.get(s, (0, MAX_ELEMENTS)) for s in symbols}
        return cls(symbols, derived, within, [g for g in guards if g.free_symbols <= symbols.keys()])

    def broken(self, shapes: Sequence[Sequence[int]], names: Sequence[str]) -> str | None:
        """Say why these shapes do not fit, in words; None where they do.

        Args:
            shapes: of the tensors among the inputs, each with as many dimensions as was captured.
            names: of these inputs.
        """
        values = {symbol: int(shapes[i][d]) for symbol, (i, d) in self.symbols.items()}
        for (i, d), size in self.sizes:
            if (size if isinstance(size, int) else int(substitute(size, values))) != shapes[i][d]:
                return f"input {names[i]!r} has size {shapes[i][d]} in dimension {d}, captured with {size}"
        for symbol, (low, high) in self.ranges.items():
            if not low <= values[symbol] <= high:
                return f"size {values[symbol]} is outside the captured range [{low}, {high}]"
        broken = next((g for g in self.guards if substitute(g, values) == sympy.false), None)
        return None if broken is None else f"the captured program needs {broken}"

    def code(self) -> tuple[list[Place], Callable[..., bool]] | None:
        """Return places of sizes, and a predicate of the sizes there; None where it cannot be written as code."""
        tests: list[Any] = [s >= low for s, (low, _) in self.ranges.items()]
        tests += [s <= high for s, (_, high) in self.ranges.items()]
        tests += self.guards
        code = compat.size_code(list(self.symbols), tests, [size for _, size in self.sizes])
        if code is None:
            return None
        return [*self.symbols.values(), *(place for place, _ in self.sizes)], code


# ---- leaves by kind --------------------------------------------------------------------------------------------------

# The leaves of a program, by kind, each with what may be done with a tensor of that kind.


@dataclass(frozen=True)
class LeafKind:
    """Policy of the leaves of one kind.

    Attributes:
        name: what messages call it.
        splits: the solver may split it.
        trained: it has a gradient and an optimizer's states.
        passed: a call passes it; the others are the module's own.
        steady: a rank holds it all the time.
        carried: what the program makes of it comes back in the next call, so that its layout is the same going in and
            out, and in every program of a plan.
        saved: it is in a checkpoint, under its own name.
    """

    name: str
    splits: bool = False
    trained: bool = False
    passed: bool = False
    steady: bool = False
    carried: bool = False
    saved: bool = False

    def __reduce__(self) -> Any:
        """Pickle a kind by its name: kinds are compared by identity, in other processes too."""
        return next((name for name, kind in globals().items() if kind is self), super().__reduce__())

    def __str__(self) -> str:
        return self.name

    @property
    def weight(self) -> bool:
        """Return whether a rank holds a part of it all the time, trained or not."""
        return self.splits and self.steady


PARAMETER = LeafKind("parameter", splits=True, trained=True, steady=True, saved=True)
BUFFER = LeafKind("buffer", steady=True, saved=True)
TABLE = LeafKind(
    "buffer", splits=True, steady=True, saved=True
)  # a weight that is never trained, such as a quantised one
CONSTANT = LeafKind("constant", steady=True)
INPUT = LeafKind("input", passed=True)
STATE = LeafKind("state", splits=True, passed=True, carried=True)  # a cached key or value, a convolution's
SEEDS = LeafKind("seeds")  # what counter-based random numbers come from


# ---- graph -----------------------------------------------------------------------------------------------------------


Value = tuple[fx.Node, int]  # a node and which of its results
CUTS = (aten.detach.default, aten.detach_.default)


class Conditions(Protocol):
    """Conditions that a capture decided by the values of its inputs (`autotp.capture.export_passes`)."""

    def broken(self, values: Sequence[Any]) -> str | None:
        """Return the condition that these flat inputs break, in words, or None."""
        ...


@dataclass
class Leaf:
    """A placeholder of the graph: the kind of its value, and its name in the model."""

    node: fx.Node
    kind: LeafKind
    name: str  # a parameter's or buffer's, an input's, or the state's that the input holds

    @property
    def is_tensor(self) -> bool:
        """Return whether it holds a tensor, and no number or other value."""
        return isinstance(self.node.meta.get("val"), Tensor)


@dataclass
class Capture:
    """A captured program: its graph, what its placeholders and outputs mean, and the sizes that it accepts."""

    graph: fx.Graph
    leaves: list[Leaf]
    mutations: Mutations
    in_spec: compat.TreeSpec
    out_spec: compat.TreeSpec
    constants: dict[str, Any]
    symbols: Symbols
    hints: dict[sympy.Symbol, int]
    ranges: dict[sympy.Symbol, tuple[int, int]]
    guards: list[sympy.Basic]
    training: bool
    aliases: dict[str, str] = field(default_factory=dict)
    state: tuple[Any, ...] = ()  # (training, dtypes, grad mode, trained, autocast) that it was captured in
    asks_grad_mode: bool = False  # whether the forward asks if gradients are recorded
    asks_gradients: bool = False  # whether it asks tensors if they want one
    autocast: bool = False  # whether the model itself switches autocast on somewhere
    notes: list[str] = field(default_factory=list)
    conditions: Conditions | None = None  # what must hold of the values of the inputs
    origin: tuple[Any, Any] | None = None  # the skeleton that was captured, and the example inputs
    begun: Any = None  # what its call that begins a cache was captured as, once that was asked (`driver/begun_cache`)
    error: float = float("nan")  # largest relative difference from the model, where it was compared
    unproved: str = ""  # why it was not
    carried: dict[int, str] = field(default_factory=dict)  # position of the graph's output -> state that it becomes
    owned: dict[str, int] = field(default_factory=dict)  # parameter -> ranks of dp, each with a part of its dimension 0
    blocks: Blocks = field(default=Blocks(), init=False)  # found once (`passes/analysis/fold`), in each record anew
    readings: dict[bool, Any] = field(default_factory=dict, init=False, repr=False)  # as planned, over several ranks

    @property
    def inputs(self) -> list[Leaf]:
        """Leaves that a call passes, in its order: inputs and states."""
        return [leaf for leaf in self.leaves if leaf.kind.passed]

    @property
    def names(self) -> dict[fx.Node, str]:
        """Names of the leaves, by their placeholders."""
        return {leaf.node: leaf.name for leaf in self.leaves}

    @property
    def results(self) -> list[Any]:
        """Outputs of the graph, one by one: nodes, and constants."""
        return compat.tree_leaves(self.graph.output_node().args)

    @property
    def tensor_inputs(self) -> list[Leaf]:
        """Inputs and states that are tensors, which the program of a rank takes."""
        return [leaf for leaf in self.inputs if leaf.is_tensor]

    @property
    def has_states(self) -> bool:
        """Say whether a call takes or gives states."""
        return bool(self.carried) or any(leaf.kind.carried for leaf in self.leaves)

    def becomes(self, position: int) -> str | None:
        """Return the name of the state that the output at this position becomes; None where it becomes none."""
        taker = self.mutations.get(position)
        if position in self.carried or not isinstance(taker, int):
            return self.carried.get(position)
        leaf = self.tensor_inputs[taker]
        return leaf.name if leaf.kind.carried else None

    def write_back(self, values: Mapping[str, fx.Node]) -> None:
        """Assign these values to buffers after a call, as further outputs.

        Args:
            values: by name of the buffer.
        """
        output: Any = self.graph.output_node()
        first = len(output.args[0])
        output.args = ((*output.args[0], *values.values()),)
        self.mutations = {**self.mutations, **dict(enumerate(values, first))}

    def accepts(self, values: list[Any]) -> str | None:
        """Return None where these flat inputs fit the captured sizes, otherwise the reason why not."""
        for leaf, value in zip(self.inputs, values, strict=True):
            reason = _unlike(leaf.name, leaf.node.meta.get("val"), value, self.asks_gradients)
            if reason:
                return reason
        names, shapes = [], []
        for leaf, value in zip(self.inputs, values, strict=True):
            if leaf.is_tensor:
                names.append(leaf.name)
                shapes.append(value.shape)
        reason = self.size_bounds().broken(shapes, names)
        if reason or self.conditions is None:
            return reason
        broken = self.conditions.broken(values)
        return None if broken is None else f"the captured program needs {broken}"

    def size_bounds(self) -> SizeBounds:
        """Return the conditions of the program on the sizes of the tensors among its inputs."""
        tensors = [leaf.node.meta["val"] for leaf in self.tensor_inputs]
        return SizeBounds.of(tensors, self.ranges, self.guards)

    def sizes_of(self, tensors: Sequence[Tensor]) -> dict[sympy.Symbol, int]:
        """Return the values of the program's symbols for these input tensors."""
        tensor_of = dict(zip([x.node for x in self.tensor_inputs], tensors, strict=True))
        return {s: tensor_of[node].shape[dim] for s, (node, dim) in self.symbols.items() if node in tensor_of}

    def shape(self, value: Tensor, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the shape that a (fake) value of the program has for these input tensors."""
        bound = self.sizes_of(tensors)
        out = []
        for n in map(expression, value.shape):
            out.append(n if isinstance(n, int) else int(substitute(n, bound)))
        return tuple(out)

    def own_graph(self) -> None:
        """Give this record a graph of its own, which may then be changed; other records keep theirs."""
        graph, env = copy_graph(self.graph.nodes)
        graph.owning_module, self.blocks = self.graph.owning_module, Blocks()
        self.move(graph, env)

    def move(self, graph: fx.Graph, env: Mapping[fx.Node, Any]) -> None:
        """Take another graph, in which these nodes stand for the placeholders of this one."""
        self.graph = graph
        self.leaves = [replace(leaf, node=env[leaf.node]) for leaf in self.leaves]
        self.symbols = {symbol: (env[node], dim) for symbol, (node, dim) in self.symbols.items()}

    def digest(self) -> str:
        """Return a SHA-256 over operators, wiring, literals and shapes, equal for equal programs on all ranks."""
        h = hashlib.sha256()
        graded = [leaf.name for leaf in self.inputs if getattr(leaf.node.meta.get("val"), "requires_grad", False)]
        carried = self.carried, [leaf.name for leaf in self.inputs if leaf.kind.carried]
        h.update(repr(graded).encode() if graded else b"")
        h.update(repr(carried).encode() if any(carried) else b"")
        for n in self.graph.nodes:
            h.update(described(n, (n.args, n.kwargs)).encode())
        return h.hexdigest()[:16]


def described(node: fx.Node, arguments: Any) -> str:
    """Describe what a node computes from these arguments, and the shapes of its results, alike on every rank."""
    text = str(arguments)
    if "device(" in text:  # which differ between ranks
        text = str(compat.tree_map(on_meta, arguments))
    return repr((node.op, short_name(node.target), text, [(str(v.shape), v.dtype) for v in tensors(node)]))


def on_meta(argument: Any) -> Any:
    """Replace a device by the meta device; anything else stays."""
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _unlike(name: str, expected: Any, value: Any, asks: bool) -> str | None:
    """Describe how an input differs from the captured one, other than in sizes; None where it does not."""
    if not isinstance(expected, Tensor):
        same = type(value) is type(expected) and value == expected
        return None if same else f"input {name!r} was captured as {expected!r}, now {value!r}"
    if not isinstance(value, Tensor) or value.dtype != expected.dtype or value.ndim != expected.ndim:
        return f"input {name!r} was captured as {expected.ndim}-d {expected.dtype}"
    if value.requires_grad and not expected.requires_grad and torch.is_grad_enabled():
        return f"input {name!r} requires a gradient, and was captured without"
    if asks and value.requires_grad != expected.requires_grad:
        return f"the forward asks whether input {name!r} requires a gradient, and was captured with another answer"
    return None


def computed(node: fx.Node) -> Any:
    """Run a call on the fake values of its operands."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def caller(node: fx.Node) -> Emit:
    """Return a writer of calls at the graph's insertion point, in the module of this node, with their fake values."""

    def call(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = node.graph.call_function(function, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k == "nn_module_stack"}
        write(new, no_grad=mark(node).no_grad)
        with compat.mode_of(node.meta.get("val")):  # what is made of numbers alone is fake too
            value = computed(new)
        # As torch.export leaves it: a view that holds its base has no form in bytes (`capture/rank0.py`).
        new.meta["val"] = compat.tree_map_only(Tensor, Tensor.detach, value)
        return new

    return call


@contextmanager
def before(node: fx.Node) -> Iterator[Emit]:
    """Context that gives the `caller` of a node, and in which what is written stands before it."""
    with node.graph.inserting_before(node):
        yield caller(node)


def differentiable(program: Capture) -> set[fx.Node]:
    """Return the nodes whose value may carry a gradient: floating or complex, and reached from a leaf that has one."""
    carries: set[fx.Node] = set()
    for leaf in program.leaves:
        val = leaf.node.meta.get("val")
        trainable = leaf.kind.trained or (leaf.kind.passed and getattr(val, "requires_grad", False))
        if trainable and floating(val):
            carries.add(leaf.node)
    for n in program.graph.nodes:
        if n.op != "call_function" or mark(n).no_grad or n.target in CUTS:
            continue
        if any(i in carries for i in n.all_input_nodes) and floating(n.meta.get("val")):
            carries.add(n)
    return carries


def tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensor values of a node."""
    return tensors_in(node.meta.get("val"))


def tensors_in(val: Any) -> list[Tensor]:
    """Return the tensors of a value; most are one tensor, so that is checked first."""
    if isinstance(val, Tensor):
        return [val]
    if not isinstance(val, list | tuple | dict):
        return []
    return [v for v in compat.tree_leaves(val) if isinstance(v, Tensor)]


def tensor_at(value: Any) -> Tensor:
    """Return the tensor of a `Value`."""
    node, index = value
    return tensors(node)[index]


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """Return the shape of a node's first tensor value."""
    values = tensors(node)
    return sizes(values[0]) if values else ()


def replace_node(node: fx.Node, result: Any) -> None:
    """Replace a node's value by this, and erase the node."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def replace_results(node: fx.Node, results: Sequence[Any]) -> None:
    """Replace a call's results, which readers take by their position, and erase the call."""
    for user in list(node.users):
        replace_node(user, results[user.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)


def reached(starts: Iterable[Any], step: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield everything that steps lead to from these, breadth first, beginning with these."""
    visited = dict.fromkeys(starts)
    order = [*visited]
    for x in order:
        yield x
        fresh = dict.fromkeys(y for y in step(x) if y not in visited)
        visited |= fresh
        order += fresh


def resolve(node: fx.Node) -> Value:
    """Return the value behind a node: `getitem` nodes name a result of the operator before them."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], int(node.args[1])  # type: ignore[arg-type]
    return node, 0


def draws(node: fx.Node) -> bool:
    """Say whether the operator draws random numbers in this call; dropout outside training does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    args = Op.of(node).args
    live = args.get("dropout_p", args.get("p", args.get("dropout", 1.0))) if args.get("train", True) else 0.0
    return live is None or live > 0


def floating(val: Any) -> bool:
    """Say whether a value (or any of several) can carry a gradient."""
    return any(v.is_floating_point() or v.is_complex() for v in tensors_in(val))


def short_name(target: Any) -> str:
    """Return `aten.linear` for the overload `aten.linear.default`, a function's own name otherwise."""
    text = str(target)
    return text.removesuffix(".default") if hasattr(target, "_schema") else getattr(target, "__name__", text)


def size_hint(size: Size, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return the size that the example inputs had; used for costs only, never for legality."""
    if isinstance(size, int):
        return size
    value = substitute(size, hints)
    return int(value) if value.is_number else 1


def outputs_of(program: Capture) -> list[fx.Node]:
    """Return the graph's tensor outputs, in order."""
    return [node for _, node in placed_outputs(program)]


def placed_outputs(program: Capture) -> list[tuple[int, fx.Node]]:
    """Return the graph's tensor outputs, each with its position among all outputs."""
    return [(i, x) for i, x in enumerate(program.results) if isinstance(x, fx.Node) and tensors(x)]


def read(maker: fx.Node, ops: Ops) -> Iterator[tuple[fx.Node, int, Any]]:
    """Yield the operators that read a node's values, the operand slot, and the value."""
    work = [maker]
    while work:
        node = work.pop()
        for user in node.users:
            if user in ops:
                slots = enumerate(ops[user].slots) if tensors(user) else ()  # its size is no use of a value
                yield from ((user, i, s.meta["val"]) for i, s in slots if s is node)
            elif resolve(user)[0] is maker:
                work.append(user)


def where(node: fx.Node) -> str:
    """Name an operator with its module."""
    if node.op != "call_function":
        return node.name
    return f"{short_name(node.target)} in {module_name(node) or 'the model'}"
