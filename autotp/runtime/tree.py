"""The module tree: one rank's flat program cut up along the original's modules, so that wrapping modules works.

For a step of decoding a program is one function too, without calls of modules: its arithmetic is so short that what
surrounds it counts: calls of modules, the lookup among what was compiled, the sizes that it is given, Python between
one block and the next. Compiled, that has what equal blocks compute once. `regional.py` compiles by parts.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.comm.conversions import KEEPS
from autotp.comm.ranks import PLAIN_PROCESS, Ranks
from autotp.comm.virtual import Hosts
from autotp.ir.graph import Env, Function, Nodes, copy_node
from autotp.ir.marks import mark
from autotp.ir.scopes import block_of, is_region, module_of, recomputed, scope_path
from autotp.log import log
from autotp.passes.analysis.flows import flows
from autotp.runtime.lower import eager
from autotp.runtime.lower.eager import METHODS, WRITES, worded
from autotp.runtime.lower.regional import Compiler, Watch, either, flow, function_of, pure, renumbered, structure

from .module_hooks import Boundary
from .part import standing_for
from .storage import Storage
from .weight_reads import Read, Slices, places, reader

Fetch = tuple[Nodes, Function]  # what is read, and by what
CALL = nn.Module.__call__  # a part's own asks first whether a program calls it


@dataclass
class Scope:
    """Call of one module, or one checkpointed region: its nodes and the calls inside it, in order."""

    path: str
    items: list[fx.Node | Scope] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The region, or the module that is called."""
        return self.path if is_region(self.path) else module_of(self.path)

    def scopes(self) -> Iterator[Scope]:
        """Return the calls directly in it."""
        yield from (item for item in self.items if isinstance(item, Scope))

    def inner(self) -> Iterator[Scope]:
        """Return the calls in it, at any depth."""
        for scope in self.scopes():
            yield scope
            yield from scope.inner()

    def nodes(self) -> list[fx.Node]:
        out = []
        for item in self.items:
            out += item.nodes() if isinstance(item, Scope) else [item]
        return out


class Stretch(Scope):
    """Neighbours in a scope that are compiled together."""


def separate(scope: Scope) -> bool:
    """Return whether it is called by itself in a compiled program: a repeated block, a region, and what holds one."""
    path = module_of(scope.path)
    return is_region(scope.path) or block_of(path) == path or any(map(separate, scope.scopes()))


def scopes(graph: fx.Graph) -> Scope:
    """Return the calls of modules, nested, in the order of the program."""
    root = Scope("")
    stack = [root]
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if mark(node).scope is None and "nn_module_stack" not in node.meta:
            stack[-1].items.append(node)  # a size, computed where it is needed
            continue
        path = scope_path(node)
        depth = 0
        while depth < min(len(path), len(stack) - 1) and stack[depth + 1].path == path[depth]:
            depth += 1
        del stack[depth + 1 :]
        for p in path[depth:]:
            stack[-1].items.append(Scope(p))
            stack.append(stack[-1].items[-1])  # type: ignore[arg-type]
        stack[-1].items.append(node)
    return root


class Assembler:
    """Builder of one program's callables on a tree of `Part`s; `parts` are all modules of the tree by their path."""

    def __init__(
        self, parts: Mapping[str, nn.Module], graph: fx.Graph, reads: Sequence[Read], key: Any,
        constants: Mapping[str, Tensor], compiler: Compiler | None = None, ranks: Ranks = PLAIN_PROCESS,
        hosts: Hosts = (),
    ) -> None:  # fmt: skip
        self.parts, self.graph, self.key, self.constants, self.compiler = parts, graph, key, constants, compiler
        self.ranks, self.hosts = ranks, hosts
        self.read_nodes = {r.node for r in reads}
        self.whole = scopes(graph)
        self.calls = 0
        self.units: dict[str, list[Read]] = {}  # module or region -> what it reads
        for read in reads:
            self.units.setdefault(read.scope, []).append(read)

    def build(self, inputs: Nodes, one: bool = False) -> None:
        """Give every part its function; the root's takes these inputs and returns the flat outputs.

        Args:
            one: whether it is one function too, for calls without gradients.
        """
        result = self.graph.output_node().args[0]
        results = [x for x in compat.tree_leaves(result) if isinstance(x, fx.Node)]
        function = self._function(self.whole, inputs, results, result)
        root: Any = self.parts[""]
        root._programs[self.key] = self._at_once(inputs, function) if one else function

    def _at_once(self, inputs: Nodes, by_parts: Function) -> Function:
        """Return the program as one function, and by parts where that would be noticed."""
        reads = [read for unit in self.units.values() for read in unit]
        function = single(self.graph, self.whole, inputs, [*self._fetches(reads)], self.compiler)
        watch = Watch.over(self.parts, [x.path for x in self.whole.inner() if not is_region(x.path)])
        return unless_touched(function, watch, by_parts)

    def _function(self, scope: Scope, takes: Nodes, gives: Nodes, result: Any = None, inner: bool = False) -> Function:
        """Return a scope's program.

        Args:
            takes: values that it is called with. gives: values of it that others read.
            result: what it returns, in place of `gives`: the root's outputs, or always a tuple.
            inner: of a stretch of one, whose parameters flow in.
        """
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in takes}
        # Parameters and buffers are read by one call of each kind.
        for nodes, fetch in self._fetches([] if inner else self.units.get(scope.place, [])):
            env |= _items(graph, graph.call_function(fetch, ()), nodes)
        # What is compiled is compiled a stretch at a time, and then a stretch's own function is for when it cannot be.
        items = scope.items if inner or self.compiler is None else self._stretches(scope)
        for item in items:
            if isinstance(item, fx.Node):
                env[item] = copy_node(item, graph, env.__getitem__)
                # Short cuts of the interpreter, which a compiler would only see through again.
                if self.compiler is None:
                    env[item].target = eager.quick(item)
            else:
                self._write_call(scope, item, gives, graph, env)
        graph.output(_returned(env, gives, result))
        return function_of(graph, scope.path or "root")

    def _write_call(self, scope: Scope, item: Scope, gives: Nodes, graph: fx.Graph, env: Env) -> None:
        """Write a call of a module or region within the scope, or of what is compiled of it."""
        operands, results = self._flows(item, gives)
        if isinstance(item, Stretch):
            child = self._compiled(item, operands, results)
        else:
            child = self._child(scope.path, item, operands, results)
        value = graph.call_function(child, tuple(env[n] for n in operands))
        # A module returns one value as it is, as hooks expect of it; a compiled function always a tuple.
        if len(results) == 1 and not isinstance(item, Stretch):
            env[results[0]] = value
        else:
            env |= _items(graph, value, results)

    def _fetches(self, reads: Sequence[Read]) -> list[Fetch]:
        """Return what reads these off the tree, for the parameters and for the buffers among them."""
        parameters = [r for r in reads if r.storage is not None]
        buffers = [r for r in reads if r.storage is None]
        out = []
        if parameters:
            out.append(([r.node for r in parameters], self._weights(parameters)))
        if buffers:
            readers = [self._buffer(r) for r in buffers]

            def read_buffers() -> Sequence[Any]:
                return [read() for read in readers]

            out.append(([r.node for r in buffers], read_buffers))
        return out

    def _weights(self, reads: Sequence[Read]) -> Function:
        """Return a function that reads parameters in one step, each as its local tensor."""
        sources, parts = [], []
        for read in reads:
            storage: Any = read.storage
            first = len(sources)
            sources += places(storage, self.parts[read.owner], read.name, self.ranks)
            parts.append((storage, slice(first, len(sources))))
        read_all = reader(sources)
        if not self.hosts and all(storage.as_held for storage, _ in parts):  # each by one tensor, as it is
            return read_all
        slices = [(self._slices(storage), at) for storage, at in parts]

        def read_slices() -> Sequence[Any]:
            local = read_all()
            return [read(local[at]) for read, at in slices]

        return read_slices

    def _slices(self, storage: Storage) -> Function:
        """Return what makes of the pieces of a parameter what the program takes."""
        return Slices(storage, self.hosts).read if self.hosts else partial(storage.mine, ranks=self.ranks)

    def _buffer(self, buffer: Read) -> Function:
        name, table = buffer.name, buffer.table
        if name in self.constants:
            constant = self.constants[name]
            return lambda: constant
        owner, _, leaf = name.rpartition(".")
        module = self.parts[owner]
        if table is not None and self.hosts:
            slices = self._slices(table)
            return lambda: slices([compat.part_of(getattr(module, leaf))])
        if isinstance(getattr(module, leaf), DTensor):
            return lambda: compat.local_of(getattr(module, leaf))

        def read() -> Tensor:
            buffer = module._buffers.get(leaf)  # past the module's own lookup, which is Python
            return getattr(module, leaf) if buffer is None else buffer

        return read

    def _stretches(self, scope: Scope) -> list[Scope]:
        """Return what a compiled scope consists of: calls that stand by themselves, and what is between them."""
        out = []
        for item in scope.items:
            if isinstance(item, Scope) and separate(item):
                out.append(item)
            elif out and isinstance(out[-1], Stretch):
                out[-1].items.append(item)
            else:
                out.append(Stretch(scope.path, [item]))
        return out

    def _compiled(self, stretch: Scope, takes: Nodes, gives: Nodes) -> Function:
        compiler: Any = self.compiler
        graph = pure(stretch.nodes(), takes, gives)
        function = compiler.function(graph, stretch.path or "root", [flow(n) for n in takes])
        watch = Watch.over(self.parts, (x.path for x in stretch.inner()))
        return either(watch, function, partial(self._function, stretch, takes, gives, tuple(gives), inner=True))

    def _flows(self, child: Scope, gives: Nodes) -> tuple[Nodes, Nodes]:
        """Return what a call takes from outside, and what of its values is used after it."""
        calls = child.inner() if isinstance(child, Stretch) else (child, *child.inner())
        local = {r.node for call in calls for r in self.units.get(call.place, ())}
        operands, results = _crossing(child.nodes(), gives)
        return [n for n in operands if n not in local], results

    def _child(self, parent: str, scope: Scope, takes: Nodes, gives: Nodes) -> Function:
        """Return a call of a part through whatever stands in its place by then: a user may have wrapped it."""
        if is_region(scope.path):
            return recomputed(self._function(scope, takes, gives))
        path, above = module_of(scope.path), module_of(parent)
        part: Any = self.parts[path]
        inside = path.startswith(above + ".") or not above
        start, names = (self.parts[above], path[len(above) :]) if inside else (self.parts[""], path)
        steps = names.strip(".").split(".")
        self.calls += 1
        program = (self.key, self.calls)
        part._programs[program] = self._function(scope, takes, gives)
        # For hooks on the part: the layout of each value that flows in or out.
        part._boundaries[program] = Boundary(
            path, flows(takes, self.read_nodes), flows(gives, self.read_nodes), self.ranks, self.hosts
        )
        standing: Any = part

        def call(*args: Any) -> Any:
            nonlocal standing
            module = eager.submodule(start, steps, part)
            if module is not standing:
                standing = standing_for(part, module)
            # The part itself, or a wrapper that is called by itself just now: torch's own call, which runs the hooks.
            if module is part or part._alone:
                return CALL(part, *args, program=program)
            # A wrapper must hand `program` on; one that drops it would run the part as a call of its own.
            part.__dict__["_due"] = True
            try:
                return module(*args, program=program)
            finally:
                part.__dict__["_due"] = False

        call.__name__ = call.__qualname__ = re.sub(r"\W", "_", scope.path)
        return call


def _items(graph: fx.Graph, value: fx.Node, nodes: Nodes) -> Env:
    """Write the reading of a tuple, which has what these nodes have."""
    return {node: graph.call_function(operator.getitem, (value, i)) for i, node in enumerate(nodes)}


def _returned(env: Mapping[fx.Node, fx.Node], gives: Nodes, result: Any) -> Any:
    """Return a function's output: `result` of the nodes of its own graph, or the values that others read."""
    if result is not None:
        return compat.tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, result)
    values = tuple(env[node] for node in gives)
    return values[0] if len(values) == 1 else values


WRITTEN = frozenset(WRITES.values())
NOTHING = type(None)
TRAINED = attrgetter("requires_grad")


def single(graph: fx.Graph, scope: Any, inputs: Nodes, fetches: Sequence[Fetch], compiler: Compiler | None) -> Function:
    """Make a whole program one function of its inputs; it gives None where a module is to read its own weights.

    Args:
        graph: of one rank. scope: the calls that it is made of (`tree.Scope`). inputs: what it is called with.
        fetches: what it reads of the module, and what reads that. compiler: knows the backend; None where it runs as
            it is.
    """
    # Weights come as arguments, for a user may change them between calls; each is read as its module would read it.
    takes = [*inputs, *(node for nodes, _ in fetches for node in nodes)]
    whole = fx.Graph()
    env = {node: whole.placeholder(node.name) for node in takes}
    if compiler is None:
        _write_operators(whole, graph, env)
    else:
        _write_blocks(whole, list(_parts(scope)), env)
    whole.output(_returned(env, (), graph.output_node().args[0]))
    function = worded(function_of(whole, "program")) if compiler is None else compiler.whole(whole)
    reads = [read for _, read in fetches]

    def run(*arguments: Tensor) -> Any:
        values = [*arguments]
        for read in reads:
            values += read()
        return None if NOTHING in map(type, values) else function(*values)

    return run


def _write_operators(whole: fx.Graph, graph: fx.Graph, env: Env) -> None:
    """Write the program's operators, as Python calls them at least cost where there are no gradients."""
    for node in graph.nodes:
        if node.target in KEEPS:
            env[node] = env[node.args[0]]
        elif node.op not in ("placeholder", "output"):
            env[node] = copy_node(node, whole, env.__getitem__)
            if (summed := eager.summed(node)) is not None:
                env[node].target, env[node].args, env[node].kwargs = summed, env[node].args[:1], {}
            else:
                env[node].target = METHODS.get(node.target) or eager.quick(node)


def _write_blocks(whole: fx.Graph, parts: Sequence[Any], env: Env) -> None:
    """Write the program's operators, and calls of what equal blocks share."""
    # A block that occurs once gains nothing by a function of its own, and inlined it is fused with what is around it.
    blocks = {id(part): _block(part.nodes()) for part in parts if not isinstance(part, fx.Node)}
    counts = Counter(key for key, *_ in blocks.values())
    shared = {}
    for part in parts:
        key, operands, gives = blocks.get(id(part), (None, [], []))
        if counts[key] < 2:
            for node in [part] if isinstance(part, fx.Node) else part.nodes():
                env[node] = copy_node(node, whole, env.__getitem__)
            continue
        if key not in shared:
            function = function_of(pure(part.nodes(), operands, gives), part.path)
            shared[key] = compat.compiled_once(function, __name__, "block")
        value = whole.call_function(shared[key], tuple(env[n] for n in operands))
        env |= _items(whole, value, gives)
        # A state that the block writes to in place is read afterwards as the same tensor, not as a result.
        env.update((node, env[node.args[0]]) for node in part.nodes() if node.target in WRITTEN)  # type: ignore[index]


def _parts(scope: Any) -> Iterator[Any]:
    """Iterate over operators and repeated blocks, in order."""
    for item in scope.items:
        if isinstance(item, fx.Node) or block_of(path := module_of(item.path)) == path != "":
            yield item
        else:
            yield from _parts(item)


def _block(nodes: Nodes) -> tuple[Any, Nodes, Nodes]:
    """Return what equal blocks share, and what one takes and gives but for states that it writes to."""
    takes, read = _crossing(nodes)
    gives = [n for n in read if n.target not in WRITTEN]
    return (renumbered([flow(n) for n in takes]), structure(pure(nodes, takes, gives))), takes, gives


def _crossing(nodes: Nodes, gives: Nodes = ()) -> tuple[Nodes, Nodes]:
    """Return what nodes take from outside of them, and those that are read there, by `gives` or later calls."""
    inside = dict.fromkeys(nodes)
    takes = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    return list(takes), [n for n in nodes if n in gives or not n.users.keys() <= inside.keys()]


def unless_touched(whole: Function, watch: Watch, by_parts: Function) -> Function:
    """Make a program run as one function without gradients, and else by parts.

    By parts it runs too where a module in it, or every module, is hooked or wrapped, and from then on where torch
    cannot compile it as one; both are the same operators and collectives in the same order.

    Args:
        whole: the one function. watch: over all modules of the program. by_parts: the same with a function for each.
    """
    compiles = True

    def run(*inputs: Tensor) -> Any:
        nonlocal compiles
        graded = torch.is_grad_enabled() or any(map(TRAINED, inputs))
        if graded or not compiles or not watch.untouched() or compat.hooks_all_modules():
            return by_parts(*inputs)
        try:
            with compat.below_autograd():  # above it torch's wait for a collective is a Python function, at every one
                outputs = whole(*inputs)
            if outputs is not None:
                return outputs
        except compat.CannotCompile as error:
            log.warning("the program is compiled by parts, since torch cannot compile it as one: %s", error)
            compiles = False
        return by_parts(*inputs)

    return run
