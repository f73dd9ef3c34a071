"""Which partitions come first, and which of equal plans: a test for each thing that the docstrings say."""

import pytest

from autotp.ir.layouts import Grouped, Groups, I, P, Partition, R, Segment, Shard
from autotp.passes.shard.strategies import MAX_PARTITIONS, Candidates, penalty

TP = 2
PLAIN = Partition.plain(8, TP)
TWO = Partition((Segment(2, 2), Segment(2, 1)))  # as a fused k and v of different widths
REPEATED = Partition((Segment(2, 1),), 4)
UNEVEN = Partition.plain(9, TP)


@pytest.mark.parametrize(("partition", "points"), [(PLAIN, 0), (TWO, 1), (REPEATED, 1), (UNEVEN, 2)])
def test_the_penalty_counts_segments_repetition_and_unevenness(partition, points):
    assert penalty([Shard(0, partition)], TP) == points
    assert penalty([Shard(0, partition), Shard(0, TWO)], TP) == points + 1  # and adds up


def test_the_penalty_does_not_look_at_the_dimension():
    for partition in (PLAIN, TWO, REPEATED, UNEVEN):
        assert len({penalty([Shard(d, partition)], TP) for d in range(4)}) == 1
    assert penalty([I, R, P, Grouped(0, Groups(0, PLAIN))], TP) == 0


@pytest.mark.parametrize(("first", "then"), [(PLAIN, UNEVEN), (PLAIN, TWO), (PLAIN, REPEATED), (REPEATED, TWO)])
def test_simpler_partitions_come_first(first, then):
    assert first.simplicity(TP) < then.simplicity(TP)
    assert sorted([then, first], key=lambda p: p.simplicity(TP)) == [first, then]


def test_even_comes_before_few_segments_and_those_before_a_run():
    three = Partition((Segment(2, 4), Segment(2, 2), Segment(2, 1)))
    assert three.simplicity(TP) < UNEVEN.simplicity(TP)
    assert REPEATED.simplicity(TP) < TWO.simplicity(TP)


def test_the_simplest_stay_candidates():
    candidates = Candidates(TP)
    many = [Partition((Segment(2, i), Segment(2, 1))) for i in range(2, 2 + MAX_PARTITIONS)]
    for partition in [*many, PLAIN]:
        candidates.add(("x", 0), partition)
    assert candidates.of["x", 0][0] == PLAIN and len(candidates.of["x", 0]) == MAX_PARTITIONS
    before = list(candidates.of["x", 0])
    candidates.grew = False
    candidates.add(("x", 0), UNEVEN)  # the negative control: what is not among the simplest is no change
    assert candidates.of["x", 0] == before and not candidates.grew
