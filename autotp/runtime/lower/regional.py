"""Regional compilation: stretches of one rank's program as pure functions, and one compiled function for equal ones.

A repeated block is one stretch, compiled whole (`fullgraph=True`); what stands between the blocks makes others. Only
tensors and sizes flow in: parameters are read off the tree outside, so that all blocks can share what one compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import starmap
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from autotp.ir.graph import Function, Nodes, copy_graph
from autotp.ir.marks import mark
from autotp.ir.scopes import module_of
from autotp.runtime.revision import Revision

from .eager import WRITES, worded

HOOKS_OF = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Compiler:
    """Compiler of stretches of programs, equal ones once.

    Attributes:
        compile: what compiles one function; told whether that is a whole program.
        functions: structure of a stretch -> what was compiled for it.
        stretches: how many were asked for.
        one: whether the program is one function too, for calls without gradients.
    """

    compile: Callable[[Function, bool], Function]
    functions: dict[Any, Function] = field(default_factory=dict)
    stretches: int = 0
    one: bool = False

    def function(self, graph: fx.Graph, name: str, shapes: Sequence[Any]) -> Function:
        """Compile a graph, or return the function of an equal one.

        Args:
            graph: of one stretch: placeholders, calls, output.
            name: for tracebacks; that of the first of equal stretches is kept.
            shapes: what flows in, one for each placeholder: stretches that differ in it are not shared.
        """
        if not any(n.op == "call_function" and isinstance(n.meta.get("val"), Tensor) for n in graph.nodes):
            return function_of(graph, name)  # sizes alone
        self.stretches += 1
        key = (renumbered(shapes), structure(graph))
        if key not in self.functions:
            self.functions[key] = self._by_mode(graph, name)
        return self.functions[key]

    def _by_mode(self, graph: fx.Graph, name: str) -> Function:
        """Compile separately with and without gradients: torch keeps a few variants of one function only."""
        writes = any(node.target in WRITES.values() for node in graph.nodes)

        @cache
        def of_mode(graded: bool) -> Function:
            compiled = self.compile(function_of(graph, name), False)
            return worded(compiled) if writes else compiled

        return lambda *args: of_mode(torch.is_grad_enabled())(*args)

    def whole(self, graph: fx.Graph) -> Function:
        """Compile a program that runs without gradients as one function (`tree.single`)."""
        self.one = True
        return worded(self.compile(function_of(graph, "program"), True))

    @property
    def summary(self) -> str:
        """Summary in words of what was compiled until now."""
        one = "; without gradients one function, with equal blocks compiled once" if self.one else ""
        parts = f"{self.stretches} parts of the program; equal ones are compiled once: {len(self.functions)} functions"
        return parts + one


def function_of(graph: fx.Graph, name: str) -> Function:
    """Make a graph a function."""
    return fx.GraphModule(nn.Module(), graph, name).forward


def structure(graph: fx.Graph) -> tuple[Any, ...]:
    """Describe what a graph computes, free of names: equal for equal graphs."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def plain(node: fx.Node) -> str:
        return repr(map_arg((node.args, node.kwargs), lambda x: ("node", number[x])))

    def target(node: fx.Node) -> Any:
        return node.target if node.op == "call_function" else ""

    return tuple((n.op, target(n), plain(n)) for n in graph.nodes)


def flow(node: fx.Node) -> Any:
    """Describe what flows along an edge, as far as a compiled function depends on it."""
    val = node.meta.get("val")
    whole = (tuple(map(str, val.shape)), val.dtype) if isinstance(val, Tensor) else type(val).__name__
    return whole, str(mark(node).layout)


def renumbered(shapes: Sequence[Any]) -> str:
    """Describe what flows into a stretch, with size symbols named in the order of their use: a cache of a block has its
    own, and blocks that differ in nothing else share what is compiled."""
    numbers = {}
    return re.sub(r"\b[su]\d+\b", lambda x: f"s{numbers.setdefault(x[0], len(numbers))}", repr(tuple(shapes)))


def pure(nodes: Iterable[fx.Node], takes: Nodes, gives: Nodes) -> fx.Graph:
    """Copy these nodes to a graph of their own, a function from `takes` to the tuple of `gives`."""
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in takes}
    copy_graph(nodes, env, graph)
    graph.output(tuple(env[n] for n in gives))
    return graph


@dataclass
class Watch:
    """Modules whose calls a compiled function leaves out: owner, name there, and the module.

    Where one is hooked or wrapped, the function runs uncompiled, through the modules.
    """

    places: Sequence[tuple[nn.Module, str, nn.Module]]
    revision: int = -1  # in which they were untouched

    @staticmethod
    def over(parts: Mapping[str, nn.Module], paths: Iterable[str]) -> Watch:
        """Watch the modules with these paths of calls, among all by their path."""
        places = []
        for path in dict.fromkeys(map(module_of, paths)):
            owner, _, leaf = path.rpartition(".")
            places.append((parts[owner], leaf, parts[path]))
        return Watch(places)

    def untouched(self) -> bool:
        """Return whether nobody would notice that the modules are not called; looked for again after any change."""
        if self.revision != Revision.number and all(starmap(_is_own, self.places)):
            self.revision = Revision.number
        return self.revision == Revision.number


def _is_own(owner: nn.Module, leaf: str, module: nn.Module) -> bool:
    """Return whether a module stands in its place, without hooks and a forward of its own."""
    attributes = vars(module)
    return vars(owner)["_modules"].get(leaf) is module and not any(HOOKS_OF(attributes)) and "forward" not in attributes


def either(watch: Watch, compiled: Function, through: Callable[[], Function]) -> Function:
    """Make a function that runs the compiled one, and where a module in it is hooked or wrapped another.

    Args:
        watch: sees hooks and wrappers. compiled: of the stretch. through: makes the other, at its first call.
    """
    uncompiled = cache(through)

    def stretch(*args: Any) -> Any:
        return (compiled if watch.untouched() else uncompiled())(*args)

    return stretch
