"""A flat program as the calls that it is made of: modules and checkpointed regions, nested, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from autotp.ir.marks import mark
from autotp.ir.scopes import block_of, is_region, module_of, scope_path


@dataclass
class Scope:
    """One call of one module, or one checkpointed region: its nodes and the calls inside it, in order."""

    path: str
    items: list[fx.Node | Scope] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The region, or the module whichever of its calls this is."""
        return self.path if is_region(self.path) else module_of(self.path)

    def scopes(self) -> Iterator[Scope]:
        """The calls directly in it."""
        yield from (item for item in self.items if isinstance(item, Scope))

    def inner(self) -> Iterator[Scope]:
        """The calls in it, at any depth."""
        for scope in self.scopes():
            yield scope
            yield from scope.inner()

    def nodes(self) -> list[fx.Node]:
        out: list[fx.Node] = []
        for item in self.items:
            out += item.nodes() if isinstance(item, Scope) else [item]
        return out


class Stretch(Scope):
    """Neighbours in a scope that are compiled together."""


def apart(scope: Scope) -> bool:
    """Whether it is called by itself in a compiled program: a repeated block, a region, and what holds one."""
    path = module_of(scope.path)
    return is_region(scope.path) or block_of(path) == path or any(map(apart, scope.scopes()))


def scopes(graph: fx.Graph) -> Scope:
    """The calls of modules, nested, in the order of the program."""
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
