"""Partitions: what every rank owns, and the algebra that views, splits and concatenations do with them."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.ir.layouts import I, P, Partition, R, Segment, Shard, dealt, divide

thorough = settings(max_examples=150, deadline=None, derandomize=True)

segments = st.lists(st.builds(Segment, st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4)
ranks = st.integers(1, 5)
factors = st.integers(1, 4)


@st.composite
def partitions(draw: st.DrawFn, tp: int) -> Partition:
    return Partition.of(draw(segments), draw(st.integers(1, 3)), tp)


def owned(p: Partition, tp: int) -> list[list[int]]:
    """The elements of every rank."""
    return [[i for start, n in p.spans(rank, tp) for i in range(start, start + n)] for rank in range(tp)]


def pieces(p: Partition, tp: int) -> list[list[tuple[int, int]]]:
    return [p.spans(rank, tp) for rank in range(tp)]


@thorough
@given(st.data(), ranks)
def test_the_ranks_tile_the_dimension_once(data, tp):
    p = data.draw(partitions(tp))
    held = owned(p, tp)
    assert sorted(i for each in held for i in each) == list(range(p.length))
    assert [len(each) for each in held] == [p.local(rank, tp) for rank in range(tp)]
    assert all(each == sorted(each) for each in held)


@thorough
@given(st.data(), ranks)
def test_even_means_equal_local_sizes_in_every_segment(data, tp):
    p = data.draw(partitions(tp))
    shares = {tuple(n for _, n in p.spans(rank, tp)) for rank in range(tp)}
    assert p.even(tp) == (len(shares) == 1)
    assert p.full(tp) == all(p.local(rank, tp) > 0 for rank in range(tp))


@thorough
@given(segments, segments, st.integers(1, 3), st.integers(1, 3), ranks)
def test_equal_partitions_are_those_with_equal_spans(a, b, times, more, tp):
    p, q = Partition.of(a, times, tp), Partition.of(b, more, tp)
    assert (p == q) == (pieces(p, tp) == pieces(q, tp))


@thorough
@given(segments, st.integers(1, 3), ranks, st.integers(1, 3))
def test_one_distribution_has_one_form(run, times, tp, finer):
    p = Partition.of(run, times, tp)
    assert Partition.of(list(p.segments), p.repeat, tp) == p
    assert Partition.of(run * times, 1, tp) == p
    even = [Segment(tp * finer, s.length) for s in run]
    assert Partition.of(even, times, tp) == Partition.of([Segment(tp, s.length * finer) for s in run], times, tp)


@thorough
@given(st.data(), factors, factors, ranks)
def test_lower_undoes_lift(data, repeat, unit, tp):
    p = data.draw(partitions(tp))
    lifted = p.lift(repeat, unit, tp)
    assert lifted.lower(repeat, unit, tp) == p
    step = p.length
    expected = [
        [(r * step + i) * unit + u for r in range(repeat) for i in each for u in range(unit)] for each in owned(p, tp)
    ]
    assert owned(lifted, tp) == expected


@thorough
@given(st.data(), factors, factors, ranks)
def test_lift_undoes_lower_where_there_is_one(data, repeat, unit, tp):
    p = data.draw(partitions(tp))
    low = p.lower(repeat, unit, tp)
    assert low is None or low.lift(repeat, unit, tp) == p


@thorough
@given(st.data(), st.integers(1, 3), ranks)
def test_cut_undoes_join(data, count, tp):
    parts = [data.draw(partitions(tp)) for _ in range(count)]
    joined = Partition.join(parts, tp)
    assert joined is not None
    assert joined.length == sum(p.length for p in parts)
    starts = [sum(p.length for p in parts[:k]) for k in range(count)]
    expected = [
        [start + i for start, p in zip(starts, parts, strict=True) for i in owned(p, tp)[rank]] for rank in range(tp)
    ]
    assert owned(joined, tp) == expected
    assert joined.cut([p.length for p in parts], tp) == tuple(parts)


@thorough
@given(st.data(), st.integers(0, 40), ranks)
def test_a_cut_is_at_a_boundary_and_gives_what_each_rank_has_there(data, at, tp):
    p = data.draw(partitions(tp))
    lengths = [min(at, p.length), p.length - min(at, p.length)]
    cut = p.cut(lengths, tp)
    boundaries = {start for start, _ in p.spans(0, tp)} | {p.length}
    assert (cut is not None) == (lengths[0] in boundaries)
    if cut is not None:
        assert Partition.join(cut, tp) == p
        halves = [owned(x, tp) for x in cut]
        assert owned(p, tp) == [a + [lengths[0] + i for i in b] for a, b in zip(*halves, strict=True)]


@thorough
@given(st.integers(0, 40), ranks)
def test_chunk_is_the_rule_of_torch_chunk(count, tp):
    chunks = [dealt(count, rank, tp) for rank in range(tp)]
    assert sum(n for _, n in chunks) == count
    step = -(-count // tp)
    assert all(n == max(0, min(step, count - rank * step)) for rank, (_, n) in enumerate(chunks))


def test_a_cut_inside_a_segment_has_no_partition():
    assert Partition.plain(12, 2).cut([5, 7], 2) is None
    assert Partition.plain(12, 2).lower(1, 5, 2) is None
    assert Partition.of([Segment(2, 3)], 1, 2).lower(1, 2, 2) is None


def test_an_empty_dimension_has_one_partition():
    empty = Partition.of([], 1, 2)
    assert empty.length == 0 and empty == Partition.plain(0, 2) == Partition.of([Segment(3, 2)], 0, 2)
    assert empty.cut([0], 2) == (empty,)
    assert owned(empty, 2) == [[], []]


def test_symbolic_sizes_are_dealt_and_cut_where_that_is_certain():
    n = sympy.Symbol("n", integer=True, positive=True)
    p = Partition.plain(n, 2)
    assert not p.static and not p.even(2) and not p.full(2)
    assert p.lift(3, 4, 2).lower(3, 4, 2) == p
    assert p.lift(1, 4, 2).length == 4 * n
    assert Partition.plain(8, 2).lift(n, 1, 2).even(2)
    assert Partition.join([p, Partition.plain(4, 2)], 2).cut([n, 4], 2) == (p, Partition.plain(4, 2))  # type: ignore[union-attr]
    assert Partition.plain(8, 2).lift(n, 1, 2).cut([4 * n, 4 * n], 2) is None


@pytest.mark.parametrize(("a", "b", "quotient"), [(12, 4, 3), (12, 5, None), (0, 4, 0), (4, 0, None)])
def test_divide(a, b, quotient):
    assert divide(a, b) == quotient


def test_divide_symbols():
    n = sympy.Symbol("n", integer=True, positive=True)
    assert divide(6 * n, 3) == 2 * n and divide(6 * n, n) == 6 and isinstance(divide(6 * n, n), int)
    assert divide(n, 2) is None and divide(n + 2, 2) is None and divide(2 * n + 2, 2) == n + 1


def test_duals():
    shard = Shard(0, Partition.plain(4, 2))
    assert (I.dual, R.dual, P.dual, shard.dual) == (I, P, R, shard)
