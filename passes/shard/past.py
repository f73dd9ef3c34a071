"""Reads of earlier tokens in a step of decoding, in a program of whole sequences that is priced for one new token.

Such a program carries no cache. Which values the model keeps is known from its own call that begins a cache
(`cache_parts`); where it is not, they are taken to be what enters an attention. What is computed from them is as long
as the cache, in every step, and all else is one token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autotp.cost.compute import node_flops
from autotp.cost.prices import is_free, lengths, sizer
from autotp.ir.graph import Capture, Value, placed_outputs, reached, resolve, short_name, tensor_at, tensors
from autotp.ir.layouts import Size
from autotp.ir.op import Op, Ops, Rule, aten, expression, factors_of, packet_of, sizes, symbols_of
from autotp.ir.program import Parts, Past
from autotp.ir.scopes import block_of, module_name

from .states import moves

CacheParts = Mapping[Value, Parts]
Numbers = dict[Hashable, int]  # equal computations within equal blocks have one number


# ---- which values a cache keeps --------------------------------------------------------------------------------------


def cache_parts(program: Capture, begun: Capture, like: Mapping[str, str]) -> dict[Value, Parts] | None:
    """Find the values of a program that the model keeps in a cache, one for each token; None where some are not found.

    A value is known again by what its repeated block computes it from: outside of the blocks, as in masks, calls with
    a cache and without one differ.

    Args:
        program: of a call without a cache. begun: of the call that begins one, for inputs of the same sizes.
        like: path of a block of the first -> path of one of the second that is of its kind, where it is another.
    """
    # Both programs number their computations in one table, so that equal numbers are equal computations.
    numbers: Numbers = {}
    values: dict[Hashable, list[Value]] = defaultdict(list)
    for (maker, index), number in _numbered(program, numbers, like):
        values[number].append((maker, index))
    begun_numbers = dict(_numbered(begun, numbers, {}))
    symbols, hint, theirs = lengths(program), sizer(program.hints), sizer(begun.hints)
    parts_of = {}
    for node in (n for position, n in placed_outputs(begun) if begun.becomes(position) is not None):
        state = resolve(node)
        source, length = _source(state, begun_numbers, values), sizes(tensor_at(state))
        # A state that grows with the tokens and is not found would be priced as if nothing were kept; one of a fixed
        # size (a convolution's, a recurrence's) costs the same in every step, and is passed over.
        if source is None and any(symbols_of(s) & lengths(begun) for s in length):
            return None
        state_sizes = [theirs(s) for s in length]
        for value in values[begun_numbers[source]] if source is not None else ():
            shape = sizes(tensor_at(value))
            grown = [d for d, s in enumerate(shape) if symbols_of(s) & symbols]
            parts = dict.fromkeys(grown, 1.0)
            if len(state_sizes) == len(shape):  # what is kept of a window is less than what is there
                parts = {d: state_sizes[d] / max(hint(shape[d]), 1) for d in grown}
            if parts:
                parts_of[value] = parts
    return parts_of


def _source(state: Value, numbers: Mapping[Value, Hashable], values: Mapping[Hashable, Any]) -> Value | None:
    """Find what a state keeps: the first value behind it, through what only moves, that the other program computes
    too."""
    behind = reached([state], lambda value: map(resolve, value[0].all_input_nodes) if moves(value[0]) else ())
    return next((value for value in behind if numbers.get(value) in values), None)


def _numbered(program: Capture, numbers: Numbers, like: Mapping[str, str]) -> Iterator[tuple[Value, Hashable]]:
    """Yield the values that repeated blocks compute, each with its block and the number of its computation in it."""
    names = program.names
    hint = sizer(program.hints)
    blocks = {n: block_of(module_name(n)) for n in program.graph.nodes}  # the outermost repeated ones
    number_of: dict[fx.Node, int] = {}

    def shape(value: Any) -> list[int]:
        return [hint(s) for s in sizes(value)]

    def operand(x: fx.Node, block: str) -> str:
        val, name = x.meta.get("val"), names.get(x, "")
        # Symbols have other names in each capture, and the same sizes.
        if isinstance(val, int | torch.SymInt):
            return repr(hint(expression(val)))
        # Of what comes from outside of the block, as masks do, the shape counts alone: it differs where a cache begins.
        if x in number_of and blocks[x] == block:
            return f"%{number_of[x]}"
        in_block = name.removeprefix(block) if block and name.startswith(f"{block}.") else ""
        return f"{in_block} {[(shape(v), v.dtype) for v in tensors(x)]}"

    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        block = blocks[node]
        # Equal computations have one number whatever block they are in, and values are distinguished by their blocks.
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda x, at=block: operand(x, at))
        key = short_name(node.target), repr(arguments)
        number_of[node] = numbers.setdefault(key, len(numbers))
        if block:
            yield from (((node, i), (like.get(block, block), number_of[node], i)) for i in range(len(tensors(node))))


# ---- what follows from them ------------------------------------------------------------------------------------------


def past_of(
    program: Capture, calls: Sequence[fx.Node], ops: Ops, rules: Mapping[fx.Node, Rule | None],
    parts: CacheParts | None,
) -> Past:  # fmt: skip
    """Find what the operators of a program read of earlier tokens.

    Args:
        program: of whole sequences. calls: its operators, in order; `ops`, `rules`: of each.
        parts: values that a cache keeps, with the parts of their lengths that it does; None where that is not known.
    """
    past, symbols = Past(dict(parts or {})), lengths(program)
    if not symbols:
        return past
    reader = _Reader(past, symbols, program.hints)
    for node in calls:
        if parts is None:
            reader.enter(ops[node])
        reader.read(ops[node], rules[node])
    past.stored = frozenset({*(parts or {}), *reader.entered})
    return past


class _Reader:
    """Walks over a program, and notes what is as long as the cache."""

    def __init__(self, past: Past, symbols: set[Any], hints: Mapping[Any, int]) -> None:
        self.past, self.symbols, self.entered = past, symbols, set[Value]()
        self.whole, self.one = sizer(hints), sizer({**hints, **dict.fromkeys(symbols, 1)})

    def enter(self, op: Op) -> None:
        """Take what enters an attention for kept."""
        for value in self._entering(op, [resolve(x) for x in op.slots]):
            grown = [d for d, s in enumerate(sizes(tensor_at(value))) if self._long(s)]
            if grown and value not in self.past.values:
                self.past.values[value] = dict.fromkeys(grown, 1.0)
                self.entered.add(value)

    def read(self, op: Op, rule: Rule | None) -> None:
        """Note what an operator reads, and what its results are then."""
        operands = [resolve(x) for x in op.slots]
        sides = [dict(self.past.values.get(v, {})) for v in operands]
        if not any(sides):
            return
        sides += [{} for _ in op.outs]
        self.past.steps[op.node] = self._loops(op, rule, sides)
        self.past.sides[op.node] = list(sides)
        for i, side in enumerate(sides[len(operands) :]):
            if side:
                self.past.values[op.node, i] = side
        self._repeats(op, sides)

    def _loops(self, op: Op, rule: Rule | None, sides: list[dict[int, float]]) -> float:
        """Make operands and results of a loop over what is kept as long; gives the part of all loops that is run.

        Loops that no rule splits are read off dimensions: of a causal attention those over queries and over keys.
        """
        steps, operands, split = 1.0, len(op.slots), set[tuple[int, int]]()
        for factor in factors_of(rule):
            if not self._long(factor.size):
                continue
            # A loop over tokens runs over what its operands keep of them; where none keeps any, over the new one alone.
            carried = [(i, c.dim) for i, c in enumerate(factor.carries) if c is not None]
            split |= {*carried}
            read = [sides[i][d] for i, d in carried if i < operands and d in sides[i]]
            steps *= max(read) if read else self._one_of(factor.size)
            for i, d in carried if read else ():
                sides[i][d] = max(read)
        # What is kept along dimensions that no factor has is run once, by the longest of them.
        whole: list[float] = []
        for i, side in enumerate(sides):
            whole += [part for d, part in side.items() if (i, d) not in split]
        # And dimensions over tokens of the result, of which no factor speaks, are run for the new token alone.
        result = op.outs[0] if op.outs else ()
        alone = [s for d, s in enumerate(result) if self._long(s) and (operands, d) not in split]
        return steps * max(whole, default=1.0) * math.prod(map(self._one_of, alone))

    def _one_of(self, size: Size) -> float:
        """Compute the part of a loop over all tokens that one token's is."""
        return self.one(size) / max(self.whole(size), 1)

    def _long(self, size: Size) -> bool:
        return bool(symbols_of(size) & self.symbols)

    def _entering(self, op: Op, operands: list[Value]) -> list[Value]:
        """Find keys and values of an attention: of a fused one, and second operands of products whose shapes have the
        length twice."""
        if packet_of(op.target) is aten.scaled_dot_product_attention:
            return operands[1:3]
        often = [sum(map(self._long, shape)) for shape in (*op.ins, *op.outs)]
        product = len(operands) > 1 and 2 in often and often[1] == 1 and node_flops(op.node) > 0
        return operands[1:2] if product else []

    def _repeats(self, op: Op, sides: Sequence[Parts]) -> None:
        """Note a view that holds every number of its operand several times."""
        if len(op.slots) != 1 or len(op.outs) != 1 or not is_free(op) or not sides[0]:
            return
        before, after = (math.prod(map(self.whole, shape)) for shape in (op.ins[0], op.outs[0]))
        times = self.past.copies.get(resolve(op.slots[0]), 1.0) * after / max(before, 1)
        if times > 1:
            self.past.copies[op.node, 0] = times
