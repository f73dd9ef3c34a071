"""How units go to ranks of unlike shares: whole, all of them, and so that the last rank to be done is early."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.ir.layouts import Partition, Segment, Shard
from autotp.ir.sizes import apportion, dealt, largest
from autotp.plans.pieces import Pieces
from autotp.runtime.storage import Storage

thorough = settings(max_examples=150, deadline=None, derandomize=True)
falling = st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any).map(lambda x: tuple(sorted(x, reverse=True)))


@thorough
@given(st.integers(0, 12), st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple))
def test_no_other_units_are_done_earlier(count: int, shares: tuple[int, ...]):
    """Against all ways to deal a few units to two or three ranks."""
    ways = (w for w in itertools.product(range(count + 1), repeat=len(shares)) if sum(w) == count)

    def last(units: tuple[int, ...]) -> Fraction:
        return max(map(Fraction, units, shares))

    assert last(apportion(count, shares)) == min(map(last, ways))


@thorough
@given(st.integers(0, 300), falling)
def test_units_are_dealt_once_and_none_has_more_than_the_largest(count: int, shares: tuple[int, ...]):
    """Exactly where shares add up to the units, otherwise in proportion, as a symbol's; they fall as shares do."""
    tp, units = len(shares), apportion(count, shares)
    assert sum(units) == count and [*units] == sorted(units, reverse=True)
    assert all(n == 0 for n, share in zip(units, shares, strict=True) if share == 0)
    for deal in (shares, units):
        if any(deal):
            spans = [dealt(count, rank, tp, deal) for rank in range(tp)]
            assert [start for start, _ in spans] == [sum(n for _, n in spans[:rank]) for rank in range(tp)]
            assert sum(n for _, n in spans) == count
            assert max(n for _, n in spans) <= largest(count, tp, deal) < max(n for _, n in spans) + 2
    assert not any(units) or [dealt(count, r, tp, units)[1] for r in range(tp)] == [*units]


@thorough
@given(st.integers(2, 40), falling, st.integers(1, 3), st.integers(1, 3))
def test_pieces_hold_what_ranks_own(count: int, shares: tuple[int, ...], unit: int, repeat: int):
    """The blocks of all ranks are the parameter once, each rank's are its slice, and whole pieces are the whole."""
    tp = len(shares)
    partition = Partition.of([Segment(count, unit, apportion(count, shares)), Segment(tp, 1)], repeat, tp)
    for dim in (0, 1):
        length: Any = partition.length
        shape = (length, 2) if dim == 0 else (2, length)
        layout, whole = Shard(dim, partition), torch.arange(2 * length).reshape(shape)
        seen, spec = torch.zeros(shape, dtype=torch.int64), layout.to_runtime()
        pieces, storage = Pieces(shape, layout, tp), Storage(shape, layout, tp)
        for rank in range(tp):
            for block in pieces.blocks(rank):
                seen[block.slices((0, 0))] += 1
            locals_ = [torch.zeros(storage.share(piece, rank).size, dtype=torch.int64) for piece in storage.pieces]
            for piece, local in zip(storage.pieces, locals_, strict=True):
                blocks = [*storage.unfolded(piece, storage.share(piece, rank))] if local.numel() else []
                parts = local.unbind(dim) if len(blocks) > 1 else [local]
                for block, part in zip(blocks, parts, strict=False):
                    part.copy_(whole[block.slices((0, 0))].reshape(part.shape))
            assert torch.equal(storage.local(locals_), spec.take(whole, rank, tp))  # type: ignore[attr-defined]
        assert (seen == 1).all()
        assert torch.equal(
            storage.full(storage.write([torch.zeros(p.shape).long() for p in storage.pieces], whole)), whole
        )


def test_shares_that_rise_are_held_whole():
    """`torch.chunk` gives no rank more than the first: such a weight, which no public function makes, is not split."""
    partition = Partition.of([Segment(3, 2, (1, 2))], 1, 2)
    assert partition.segments[0].deal == (1, 2)
    assert Pieces((6, 4), Shard(0, partition), 2).held_whole


def test_one_deal_has_one_form():
    """Shares that are what `torch.chunk` gives are written as such, and equal ones as none."""
    assert Partition.of([Segment(6, 2, (4, 2))], 1, 2) == Partition.of([Segment(3, 4)], 1, 2)
    assert Partition.of([Segment(8, 1, (4, 4))], 1, 2) == Partition.plain(8, 2)
    odd = Partition.of([Segment(8, 1, (6, 2))], 1, 2)
    assert odd.segments == (Segment(4, 2, (3, 1)),) and Partition.from_json(odd.to_json()) == odd
    assert not odd.even(2) and odd.full(2) and odd.padding(2) == 1.5 and odd.share(2, int) == 0.75
    for shares in ([0, 0], [-1, 2], ["a"], 3):
        with pytest.raises((ValueError, TypeError)):
            Partition.from_json({"repeat": 1, "segments": [[4, 2, shares]]})
