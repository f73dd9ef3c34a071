"""A rank's part of a cache: keys and values, recurrent states, whatever a program leaves for the next call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from autotp.ir.graph import Capture, placed_outputs, resolve, shape_of, tensor_at
from autotp.ir.op import Op, aten, packet_of, sizes, symbols_of
from autotp.ir.program import GraphPart, Planned

from .prices import Hints, lengths, nbytes, sizer


@dataclass(frozen=True)
class Cache:
    """Bytes on the fullest rank.

    Attributes:
        bytes: as they are after the call.
        token: by which they grow with each token of a sequence; `sequence`: of those that do not grow, for each
            sequence.
    """

    bytes: float = 0.0
    token: float = 0.0
    sequence: float = 0.0

    def __add__(self, other: Cache) -> Cache:
        return Cache(self.bytes + other.bytes, self.token + other.token, self.sequence + other.sequence)


def cache_of(
    planned: Planned, hints: Hints, times: Mapping[int, int] = MappingProxyType({}), plain: Collection[int] = ()
) -> Cache | None:
    """Return what a planned program leaves for the next call; None where it carries nothing.

    Args:
        planned: the program with its decisions. hints: sizes for symbols.
        times: position of an output -> for how many it stands; those that are left out for themselves.
        plain: positions of further outputs that come back in the next call, and are held whole.
    """
    if not planned.states and not plain:
        return None
    program, spoken, cache = planned.program, _spoken(planned.program, plain), Cache()
    before = {x.name: x.node for x in program.leaves if x.kind.carried}
    after = {program.becomes(i): (i, node) for i, node in placed_outputs(program)}
    for name, layout in planned.states.items():
        position, node = after.get(name, (-1, None))
        ends = [tensor_at(resolve(n)) for n in (before.get(name), node) if n is not None]
        share = layout.share(planned.tp, sizer(hints)) * times.get(position, 1)
        cache += _state(ends, share, spoken, hints)
    for position, node in placed_outputs(program):
        if position in plain:
            cache += _state([tensor_at(resolve(node))], times.get(position, 1), spoken, hints)
    return cache


def _state(ends: list[Tensor], share: float, spoken: set[Any], hints: Hints) -> Cache:
    """A part of a state, of which there are the values before the call and after it, or one of these."""
    hint = sizer(hints)
    part, shape, rows = nbytes(ends[-1], hint) * share, sizes(ends[-1]), _rows(ends, spoken, hints)
    if not shape:
        return Cache(part)
    sequence = part / max(hint(shape[0]), 1) if len(shape) > 1 else part
    return Cache(part, 0.0, sequence) if rows is None else Cache(part, sequence * rows)


def guessed(parts: Iterable[GraphPart], planned: Planned, hints: Hints) -> Cache:
    """Keys and values of every attention as they enter it, for a model that has no cache to look at.

    Args:
        parts: the named parts of the graph. planned: with its decisions. hints: sizes for symbols.
    """
    return Cache(sum(_entering(part, planned, hints) for part in parts))


def _entering(part: GraphPart, planned: Planned, hints: Hints) -> float:
    """Bytes of an attention's keys and values on a rank; an encoder's are not cached."""
    if part.heads is None or _sees_all(planned.ops[part.heads.at[0]]):
        return 0.0
    node, slot, _ = part.heads.kv_at
    hint, share = sizer(hints), planned.decisions[node].ins[slot].share(planned.tp, sizer(hints))
    values = hint(part.heads.value) / hint(part.heads.width)
    return (1 + values) * nbytes(tensor_at(resolve(planned.ops[node].slots[slot])), hint) * share


def _sees_all(op: Op) -> bool:
    """Return whether it is a fused attention in which every token sees every other: no mask of pairs of tokens."""
    if packet_of(op.target) is not aten.scaled_dot_product_attention or op.args["is_causal"]:
        return False
    mask = op.args["attn_mask"]
    sides = mask.meta["val"] if mask is not None else None
    flat = sides is None or 0 in sides.stride()[-2:] or 1 in sides.shape[-2:]  # the same for all queries, or all keys
    return flat and op.ins[0][-2] == op.ins[1][-2]


def _spoken(program: Capture, plain: Collection[int]) -> set[Any]:
    """The lengths of the sequences that further tokens go to: those of the first output that has any. A cache of what
    an encoder gave does not grow."""
    symbols = lengths(program)
    for position, node in placed_outputs(program):
        sides = set().union(*(symbols_of(s) for s in shape_of(node)[1:]))
        if program.becomes(position) is None and position not in plain and sides & symbols:
            return sides & symbols
    return symbols


def _rows(ends: list[Tensor], spoken: set[Any], hints: Hints) -> float | None:
    """The part of a state by which it grows with a token: along a dimension that a call makes longer, or where it
    begins one with the length of what is said; not the first, the batch's. None where it does not."""
    hint = sizer(hints)
    for before, after in list(zip(sizes(ends[0]), sizes(ends[-1]), strict=True))[1:]:
        symbols = symbols_of(after) if len(ends) > 1 else symbols_of(after) & spoken
        if symbols:
            growth = sizer({**hints, **{s: 2 * hints[s] for s in symbols}})(after) - hint(after)
            return growth / sum(hints[s] for s in symbols) / max(hint(after), 1)
        if before != after:
            return 1 / max(hint(after), 1)
    return None
