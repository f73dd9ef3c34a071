"""Bugs as changes of the ranks' program: a conversion that is left out, done twice, or another one's dual, and more."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autotp.comm import conversions
from autotp.ir.layouts import I, Layout, Partition, Segment, Shard
from autotp.ir.marks import conversion_of, mark, write
from autotp.ir.op import aten
from autotp.ir.program import Planned, Sharded
from autotp.ir.specs import Spec
from benchmarks.helpers.lists import mutants

Mutant = Callable[[Sharded, Planned], None]  # changes a copy of the program


def converting(sharded: Sharded, names: str, value: str) -> fx.Node:
    """The first conversion of one of these names, of a value whose name in the captured graph fits."""
    found = []
    for node in sharded.graph.nodes:
        if mark(node).conversion is not None:
            name, origin = node.target.__name__, sharded.origin[node][0].name
            found.append(f"{name} of {origin}")
            if re.fullmatch(names, name) and re.search(value, origin):
                return node
    raise LookupError(f"no {names} of {value}; there are {', '.join(found)}")


def computing(sharded: Sharded, value: str) -> fx.Node:
    """The node that computes, or is, the value whose name in the captured graph fits."""
    for node, (origin, _) in sharded.origin.items():
        if mark(node).conversion is None and re.search(value, origin.name):
            return node
    raise LookupError(f"no {value} among {', '.join(n.name for n, _ in sharded.origin.values())}")


def drop(names: str, value: str) -> Mutant:
    """A conversion is left out."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        mutants.drop(sharded, converting(sharded, names, value))

    return mutant


def twice(names: str, value: str) -> Mutant:
    """A conversion is done to its own result once more."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        mutants.double(sharded, converting(sharded, names, value))

    return mutant


def becomes(names: str, value: str, layout: Layout) -> Mutant:
    """A conversion's result is taken for another layout of the same numbers: its backward is another one."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        node = converting(sharded, names, value)
        source = conversion_of(node)[0]
        spec: Any = layout.to_runtime(lambda n: n)
        node.target = conversions.function_for(node.args[1], spec)  # type: ignore[arg-type]
        node.args = (*node.args[:2], spec)
        write(node, conversion=(source, layout))

    return mutant


def instead(names: str, value: str, function: Callable[[Tensor], Tensor]) -> Mutant:
    """Something local in place of a conversion."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        node = converting(sharded, names, value)
        with sharded.graph.inserting_before(node):
            local = sharded.graph.call_function(function, (node.args[0],))
        node.replace_all_uses_with(local)
        sharded.graph.erase_node(node)
        del sharded.layouts[node], sharded.origin[node]

    return mutant


def changed(value: str, function: Callable[[Tensor], Tensor], reader: str = "") -> Mutant:
    """What reads a value (or the one reader that fits) reads a function of it."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        node = computing(sharded, value)
        readers = [n for n in node.users if not reader or re.search(reader, n.name)]
        assert readers, (value, reader, list(node.users))
        with sharded.graph.inserting_after(node):
            new = sharded.graph.call_function(function, (node,))
        for user in readers:
            user.replace_input_with(node, new)

    return mutant


def first_slice(value: str) -> Mutant:
    """Every rank has the first rank's slice of a value."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        node = computing(sharded, value)
        layout = sharded.layouts[node]
        assert layout.sharded_dim is not None
        spec: Any = layout.to_runtime(lambda n: n)
        target: Any = I.to_runtime(lambda n: n)
        with sharded.graph.inserting_after(node):
            whole = sharded.graph.call_function(conversions.gather, (node, spec, target))
        write(whole, conversion=(layout, I), layout=I)
        with sharded.graph.inserting_after(whole):
            part = sharded.graph.call_function(_first, (whole, spec, planned.tp))
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user is not whole)

    return mutant


def _first(x: Tensor, spec: Spec, tp: int) -> Tensor:
    return spec.take(x, 0, tp)


def redealt(leaf: str, repeat: int = 1, unit: int = 1) -> Mutant:
    """A weight's slices are of another distribution, of the same lengths: in one piece, or in finer ones."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        node = computing(sharded, leaf)
        layout = sharded.layouts[node]
        dim = layout.sharded_dim or 0
        length = sharded.origin[node][0].meta["val"].shape[dim]
        dealt = Shard(dim, Partition.of([Segment(length // repeat // unit, unit)], repeat, planned.tp))
        assert dealt != layout, dealt
        sharded.layouts[node] = dealt
        write(node, layout=sharded.layouts[node])

    return mutant


def as_first_rank(target: str) -> Mutant:
    """What takes its rank takes the first one's on all ranks."""

    def mutant(sharded: Sharded, planned: Planned) -> None:
        nodes = [n for n in sharded.graph.nodes if target in str(n.target) and mark(n).axis == "tp"]
        assert nodes, target
        for node in nodes:
            node.args = (node.target, *node.args)
            node.target = _of_first

    return mutant


def _of_first(function: Callable[..., Any], *args: Any, rank: int, tp: int, **kwargs: Any) -> Any:
    return function(*args, rank=0, tp=tp, **kwargs)


def gradient_twice(x: Tensor) -> Tensor:
    """The value itself, whose gradient counts twice."""
    return x + (x - x.detach())


def detached(x: Tensor) -> Tensor:
    """The value itself, without a gradient."""
    return aten.detach.default(x)


def halved(x: Tensor) -> Tensor:
    """What a rank's summand is where two of them are added."""
    return torch.div(x, 2)
