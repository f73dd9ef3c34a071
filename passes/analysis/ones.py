"""Sizes of 1 in a program that was traced for larger ones: which symbols may stand for 1 too.

Torch takes a size that it does not know for one that is larger than 1. A size of 1 would be another program's where the
forward branches on it, or where an operator does something else for it, as `squeeze` does. So the branches are asked
again with 1, and the operator of every node, on the meta device, for the shape of its result. What torch's kernels
asked to know strides is then no condition of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import Capture
from autotp.ir.op import expression
from autotp.ir.sizes import substitute
from autotp.log import log


def allow_ones(program: Capture, branches: Sequence[Any]) -> None:
    """Let symbols stand for 1 that can, each by itself and all of them together; all others are at least 2.

    Args:
        program: traced with sizes of 1 like any other. branches: the conditions on sizes that its forward branched on.
    """
    ones = {s for s in program.symbols if program.ranges[s][0] <= 1}
    groups, fit = [group for group in _equal(program) if group <= ones], ones
    # Keys may be as long as values: no guard says so, and with other lengths an operator fails for the model too.
    if not _same(program, branches, ones) or not all(_same(program, branches, group, fails=True) for group in groups):
        groups = [group for group in groups if _same(program, branches, group)]
        fit = set().union(*groups)
        fit = fit if _same(program, branches, fit) else set()
    values = {**program.hints, **dict.fromkeys(fit, 1)}
    program.ranges = {**program.ranges, **{s: (2, program.ranges[s][1]) for s in ones - fit}}
    program.guards = [g for g in program.guards if not g.free_symbols <= fit or substitute(g, values) != sympy.false]


def _equal(program: Capture) -> list[set[sympy.Symbol]]:
    """Group the symbols that the program's guards say to be equal."""
    groups = {s: {s} for s in program.symbols}
    for guard in program.guards:
        # As `Eq(s0 + 1, s1 + 1)` says too.
        sides: Any = guard
        terms = (sides.lhs - sides.rhs).as_coefficients_dict() if isinstance(guard, sympy.Eq) else {}
        if sorted(terms.values()) == [-1, 1] and terms.keys() <= groups.keys():
            joined = set().union(*(groups[s] for s in terms))
            groups |= dict.fromkeys(joined, joined)
    return list({id(group): group for group in groups.values()}.values())


def _same(program: Capture, branches: Sequence[Any], ones: Set[sympy.Symbol], fails: bool = False) -> bool:
    """Return whether the program is that of a trace with these symbols as 1; or there `fails` too, if it may."""
    values = {**program.hints, **dict.fromkeys(ones, 1)}
    if any(substitute(x, values) != substitute(x, program.hints) for x in {*branches} if x.free_symbols & ones):
        return False
    return _fits(program, values, fails)


@dataclass(frozen=True)
class Like:
    """A tensor by what makes one like it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _fits(program: Capture, values: Mapping[sympy.Symbol, int], fails: bool) -> bool:
    """Return whether every node's result has the shape that the program has for it, where symbols have these values;
    or none at all, if it may have none."""

    @cache
    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(substitute(size, values))

    def numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
        return tuple(number(expression(n)) for n in sizes)

    def in_numbers(x: Any) -> Any:
        if isinstance(x, Tensor):
            return Like(numbers(x.shape), numbers(x.stride()), x.dtype)
        return number(expression(x)) if isinstance(x, torch.SymInt) else x

    # Equal blocks have equal calls: each is made once, or a deep model would take as long as its trace.
    calls: set[str] = set()
    for node in program.graph.nodes:
        results = [numbers(x.shape) for x in compat.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        # What computes a size, or takes one of several results, has no other meaning for a size of 1.
        if node.op != "call_function" or node.target is getitem or not results:
            continue
        # By its numbers alone: the same operator may be called with other sizes or other options elsewhere.
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: compat.tree_map(in_numbers, n.meta.get("val")))
        call = repr((node.target, args, kwargs, results))
        if call not in calls and _shapes(node.target, args, kwargs) not in (results, None if fails else results):
            return False
        calls.add(call)
    return True


def _shapes(target: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]] | None:
    """List the shapes of the results of a call on the meta device; None where it fails."""

    def on_meta(x: Any) -> Any:
        if isinstance(x, torch.device):  # by position, as `to` takes it
            return torch.device("meta")
        if isinstance(x, Like):
            return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        return x

    args, kwargs = compat.tree_map(on_meta, (args, {k: x for k, x in kwargs.items() if k != "device"}))
    try:
        with torch.no_grad(), torch.device("meta"):
            return [tuple(x.shape) for x in compat.tree_leaves(target(*args, **kwargs)) if isinstance(x, Tensor)]
    except Exception as error:  # whatever an operator may raise that has no meta kernel, or is none for this size
        log.debug("%s with a size of 1: %s", target, error)
        return None
