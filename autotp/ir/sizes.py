"""Sizes: ints or sympy expressions over the graph's input sizes; their division, a rank's units of one, their JSON, and
records that keep their hash."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import Any, TypeVar, dataclass_transform

import sympy

from .files import MAX_NUMBER

Size = int | sympy.Expr
Hint = Callable[[Size], int]  # gives a number for every size
Simplicity = tuple[bool, int, bool, str]  # a key by which candidates are ordered
ToSize = Callable[[Any], Any]  # a size, or `Groups` for their ends, as what a run-time layout has in its place
T = TypeVar("T")
LONGEST, HIGHEST = 1000, 16  # characters of a size, and its highest power
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

FUNCTIONS = "Max", "Min"


def divide(a: Size, b: Size) -> Size | None:
    """Return `a / b` where that is a whole number for certain, otherwise None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    whole = quotient.is_integer and sympy.denom(quotient) == 1
    return simplify(quotient) if whole else None


TILES = 1, 2, 4, 8, 16, 32, 64  # elements that shares are whole numbers of, where a dimension has 64 of them
SYMBOL = 0  # in place of the length of a dimension, where that is a symbol
UnitsBy = tuple[
    tuple[int, tuple[int, ...]], ...
]  # length of a dimension, and what each rank has of it, or in proportion
Deal = bool | tuple[int, ...]  # how units go to ranks, as `dealt` has it


def dealt(
    count: Any, rank: int, tp: int, deal: Deal = False, least: Callable[[Any, Any], Any] = min
) -> tuple[Any, Any]:
    """Return offset and number of the units that `rank` owns of `count`: the one place that says so.

    Args:
        count: units, an int or `torch.SymInt`. rank, tp: which rank, of how many.
        deal: False for `torch.chunk`'s rule, which is DTensor's `Shard`; True for that from the last rank on; shares,
            one for each rank, which are exact where they add up to `count`.
        least: the minimum of two counts.

    Example:
        >>> [dealt(32, rank, 2, (21, 11)) for rank in range(2)], dealt(6, 3, 4)
        ([(0, 21), (21, 11)], (6, 0))
    """
    if isinstance(deal, tuple):
        start, end = (-(-count * sum(deal[:n]) // sum(deal)) for n in (rank, rank + 1))
        return start, end - start
    step = (count + tp - 1) // tp
    start = least((tp - 1 - rank if deal else rank) * step, count)
    return start, least(step, count - start)


def tile_of(length: int) -> int:
    """Return the elements of a tile: shares of a dimension of this length are whole tiles."""
    return max(n for n in TILES if length % n == 0 and (length >= n * TILES[-1] or n == 1))


def shared(length: Size, shares: tuple[int, ...], units: UnitsBy) -> tuple[int, tuple[int, ...]] | None:
    """Return the unit in which a dimension of this length is sharded, and each rank's number of them; None: evenly.

    Args:
        shares: of the ranks; () for equal ones. units: of some lengths, whatever the shares are.
    """
    exact = dict(units).get(length if isinstance(length, int) else SYMBOL)
    deal = shares if exact is None else exact
    if len({*deal}) < 2:
        return None
    if exact is not None or not isinstance(length, int):
        return 1, deal
    tile = tile_of(length)
    return tile, apportion(length // tile, shares)


def largest(count: Any, tp: int, deal: Deal = False) -> Any:
    """Return the units of the rank that owns most of `count`, or of symbols a few more; `deal` as in `dealt`."""
    return -(-count * max(deal) // sum(deal)) if isinstance(deal, tuple) else (count + tp - 1) // tp


def apportion(count: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Apportion whole units to the ranks so that the slowest rank finishes its own as early as possible.

    Args:
        count: units. shares: what each rank does of them in the same time.

    Example:
        >>> apportion(8, (2, 1)), apportion(2, (3, 1))
        ((5, 3), (2, 0))
    """
    units = [count * share // sum(shares) for share in shares]
    while sum(units) < count:  # what rounding left, fewer than the ranks; a tie goes to who has least
        ranks = [rank for rank, share in enumerate(shares) if share]
        units[min(ranks, key=lambda r: (Fraction(units[r] + 1, shares[r]), shares[r]))] += 1
    return tuple(units)


def simplify(size: Size) -> Size:
    """Return the plain int where the expression is one."""
    return int(size) if isinstance(size, sympy.Integer) else size


def substitute(expression: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> Any:
    """Substitute these sizes for an expression's symbols."""
    symbols = expression.free_symbols  # sympy takes as long for each of the others
    return expression.subs([(symbol, size) for symbol, size in values.items() if symbol in symbols])


def write_size(size: Size) -> int | str:
    """Write a size as JSON: an int, or the text of an expression."""
    return size if isinstance(size, int) else str(size)


def read_size(x: int | str) -> Size:
    """Read what `write_size` gave.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    if not isinstance(x, str) or len(x) > LONGEST:
        raise ValueError(f"{str(x)[:40]!r} is not a size")
    try:
        return simplify(_expression(ast.parse(x, mode="eval").body))
    except (RecursionError, MemoryError, ZeroDivisionError):  # how Python says that text nests too deep
        raise ValueError(f"{x[:40]!r}... is not a size") from None


def read_deal(data: list[Any]) -> Deal:
    """Read from a file how units go to the ranks: nothing, True, or shares."""
    if data in ([], [True]):
        return bool(data)
    (shares,) = data
    if not all(type(n) is int and n >= 0 for n in shares) or not any(shares):
        raise ValueError(f"units are distributed by {shares!r}, should be a share for each rank")
    return tuple(shares)


def _expression(x: ast.AST) -> Any:
    """Read a size as `str` wrote it. Not `sympify`, which would run whatever code a file holds."""
    if isinstance(x, ast.Constant) and type(x.value) is int and x.value <= MAX_NUMBER:
        return sympy.Integer(x.value)
    if isinstance(x, ast.Name):
        return sympy.Symbol(x.id, positive=True, integer=True)
    # `Max(8, s0)`, as of a mask.
    if isinstance(x, ast.Call):
        return _larger(x)
    if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
        return -_expression(x.operand)
    if isinstance(x, ast.BinOp) and type(x.op) in OPERATORS:
        first, second = _expression(x.left), _expression(x.right)
        if isinstance(x.op, ast.Pow) and not (second.is_Integer and 0 <= second <= HIGHEST):
            raise ValueError(f"{ast.unparse(x)!r} is not a size")  # powers of numbers would never end
        result = OPERATORS[type(x.op)](first, second)
        # Numbers without end would be counted with: a product of a few is more than any memory holds.
        if not result.is_Integer or abs(result) <= MAX_NUMBER:
            return result
    raise ValueError(f"{ast.unparse(x)!r} is not a size")


def _larger(x: ast.Call) -> Any:
    """Read `Max` or `Min` of sizes; any other call would be code that a file brings."""
    name = x.func.id if isinstance(x.func, ast.Name) else ""
    if name not in FUNCTIONS or x.keywords:
        raise ValueError(f"{ast.unparse(x)!r} is not a size")
    # Torch's own, as captures have them; imported here, since a plan without them is read without torch.
    return getattr(import_module("autotp.compat"), name)(*map(_expression, x.args))


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose instances keep their hash, which planning asks for at every look-up."""
    frozen: Any = dataclass(frozen=True)(cls)
    of_fields = frozen.__hash__

    def cached_hash(self: Any) -> int:
        return self.__dict__.get("_hash") or self.__dict__.setdefault("_hash", of_fields(self))

    def state(self: Any) -> dict[str, Any]:  # another process has other hashes of strings
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    frozen.__hash__, frozen.__getstate__ = cached_hash, state
    return frozen
