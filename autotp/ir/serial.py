"""Layouts and sizes as plain data for JSON, and back."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from .files import GREATEST
from .layouts import Distribution, Grouped, Groups, I, Layout, P, Partial, Partition, R, Segment, Shard, Size, simplify

LONGEST, HIGHEST = 1000, 16  # characters of a size, and its highest power
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def plain(x: Any) -> Any:
    """Layouts, partitions, mappings and sequences as what JSON can hold."""
    if isinstance(x, Shard):
        return {"dim": x.dim, "partition": plain(x.partition)}
    if isinstance(x, Grouped):
        return {"dim": x.dim, "groups": plain(x.partition)}
    if isinstance(x, Layout):
        return str(x)
    if isinstance(x, Groups):
        return {"ends": x.ends, "of": plain(x.of)}
    if isinstance(x, Partition):
        return {"repeat": _size(x.repeat), "segments": [[_size(s.count), _size(s.unit)] for s in x.segments]}
    if isinstance(x, Mapping):
        return {k: plain(v) for k, v in x.items()}
    return [plain(v) for v in x] if isinstance(x, list | tuple) else x


def _size(size: Size) -> int | str:
    return size if isinstance(size, int) else str(size)


def _read_size(x: int | str) -> Size:
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    if not isinstance(x, str) or len(x) > LONGEST:
        raise ValueError(f"{str(x)[:40]!r} is not a size")
    try:
        return simplify(_expression(ast.parse(x, mode="eval").body))
    except (RecursionError, MemoryError, ZeroDivisionError):  # how Python says that text nests too deep
        raise ValueError(f"{x[:40]!r}... is not a size") from None


def _expression(x: ast.AST) -> Any:
    """A size as `str` wrote it. Not `sympify`, which would run whatever code a file holds."""
    if isinstance(x, ast.Constant) and type(x.value) is int and x.value <= GREATEST:
        return sympy.Integer(x.value)
    if isinstance(x, ast.Name):
        return sympy.Symbol(x.id, positive=True, integer=True)
    if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
        return -_expression(x.operand)
    if isinstance(x, ast.BinOp) and type(x.op) in OPERATORS:
        left, right = _expression(x.left), _expression(x.right)
        if isinstance(x.op, ast.Pow) and not (right.is_Integer and 0 <= right <= HIGHEST):
            raise ValueError(f"{ast.unparse(x)!r} is not a size")  # powers of numbers would never end
        made = OPERATORS[type(x.op)](left, right)
        if not made.is_Integer or abs(made) <= GREATEST:
            return made
    raise ValueError(f"{ast.unparse(x)!r} is not a size")


def read_loop(x: Any) -> Distribution | None:
    """The loop of a decision, as `plain` wrote it."""
    return _read_groups(x) if x and "ends" in x else _read_partition(x) if x else None


def _read_groups(x: Any) -> Groups:
    return Groups(x["ends"], _read_partition(x["of"]))


def _read_partition(x: Any) -> Partition:
    return Partition(tuple(Segment(_read_size(c), _read_size(u)) for c, u in x["segments"]), _read_size(x["repeat"]))


def read_layout(x: Any) -> Layout:
    """A layout, as `plain` wrote it."""
    if isinstance(x, dict):
        if "groups" in x:
            return Grouped(x["dim"], _read_groups(x["groups"]))
        return Shard(x["dim"], _read_partition(x["partition"]))
    return {"I": I, "R": R, "P": P, "P(max)": Partial("max")}[x]
