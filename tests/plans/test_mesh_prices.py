"""A step on a mesh, from terms that are worked by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autotp.cost import Cluster
from autotp.cost.collective_costs import call_seconds
from autotp.cost.meshes import Mesh, boundary_sends, weight_sends
from autotp.cost.units import Call, Direction, Load, UnitCost
from autotp.driver.mesh_prices import Pricer, Terms

H100 = Cluster.preset("h100")


def unit(seconds: float = 1.0) -> UnitCost:
    """A block that computes so long forward and twice that backward, keeps 100 bytes of 10 that it reads."""
    block = Load(Direction(seconds), Direction(2 * seconds), seconds=3 * seconds, kept_bytes=100.0)
    return UnitCost(block, Load(), weights=2.0, gradients=2.0, states=12.0, optimizer=0.5, inputs=10.0, working=7.0)


def pricer(count: int = 8, tied: tuple[tuple[float, tuple[int, ...]], ...] = ()) -> Pricer:
    return Pricer(Terms(units=tuple(unit() for _ in range(count)), tied=tied, exposed_share=1.0, flops=1.0), H100, 1)


def test_a_pipeline_takes_its_micro_batches_and_those_that_fill_it():
    mesh = Mesh(pp=2, dp=1, cp=1, tp=1, microbatches=4)
    found, send = pricer().price(mesh), boundary_sends(mesh, 10.0, H100).seconds
    assert found.times["compute"] == pytest.approx(4 * 4 * 3.0)
    assert found.times["bubble"] == pytest.approx(1 / 4 * (4 * 4 * 3.0 + 4 * send))
    assert found.seconds == pytest.approx(5 * (4 * 3.0 + send) + 4 * 0.5)
    interleaved = pricer().price(replace(mesh, chunks=2))
    assert interleaved.times["bubble"] == pytest.approx(found.times["bubble"] / 2, rel=1e-4)


def test_the_bubble_falls_with_micro_batches_and_one_rank_has_none():
    shares = []
    for m in (2, 4, 8, 16):
        found = pricer().price(Mesh(2, 1, 1, 1, microbatches=m))
        shares.append(found.times["bubble"] / found.seconds)
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[-1]
    assert pricer().price(Mesh(1, 1, 1, 1, microbatches=8)).times["bubble"] == 0


def test_stages_that_are_not_equal_wait_for_the_slowest():
    found = pricer(count=3).price(Mesh(2, 1, 1, 1, microbatches=4))
    assert found.times["compute"] == pytest.approx(4 * 4.5) and found.times["uneven"] == pytest.approx(4 * 1.5)


def test_unlike_places_have_blocks_and_memory_of_their_own():
    """Of nine blocks the faster place has six; one more where the other has no memory; else the mesh does not fit."""
    mesh = Mesh(2, 1, 1, 1, microbatches=4)
    waits = []
    for limits, first in ((2000.0, 500.0), 6), ((2000.0, 300.0), 7), ((1000.0, 300.0), None):
        unlike = replace(pricer(9), machines=lambda pp, limits=limits: (limits, (2.0, 1.0)))
        found = unlike.price(mesh)
        assert found.fits is (first is not None) and (first is None or list(unlike.starts(2, 1)) == [0, first])
        waits.append(found.times["uneven"])
    assert waits[0] == pytest.approx(0) and waits[1] > 0


def test_memory_by_hand():
    one = pricer().price(Mesh(1, 1, 1, 1, microbatches=4)).memory
    assert one == 8 * 16 + 8 * 100 + 7
    two = pricer().price(Mesh(2, 1, 1, 1, microbatches=4)).memory
    assert two == 4 * 16 + 2 * 4 * 100 + 7, "the first stage holds two micro-batches"
    few = pricer().price(Mesh(2, 1, 1, 1, microbatches=1)).memory
    assert few == 4 * 16 + 4 * 100 + 7, "there is only one"
    split = Mesh(1, 4, 1, 1)
    assert pricer().price(replace(split, fully_shard=True)).memory == 8 * 16 / 4 + 800 + 7 + 2, "and one is gathered"
    again = pricer().price(Mesh(1, 1, 1, 1, keep="inputs")).memory
    assert again == 8 * 16 + 8 * 10 + 7 + 100, "one block at a time is whole again"


def test_computing_again_takes_a_forward():
    kept, again = (pricer().price(Mesh(1, 1, 1, 1, keep=keep)) for keep in ("all", "inputs"))
    assert again.times["again"] == pytest.approx(8 * 1.0) and again.seconds - kept.seconds == pytest.approx(8.0)


def test_a_weight_of_two_stages_is_held_by_both():
    tied = ((64.0, (0, 7)),)
    apart, alone = (own.price(Mesh(2, 1, 1, 1)).memory for own in (pricer(tied=tied), pricer()))
    whole = pricer(tied=tied).price(Mesh(1, 1, 1, 1)).memory
    # One micro-batch: both stages hold as much, but for the weight, which the first has among its own.
    assert apart == alone + 64.0 and whole == pricer().price(Mesh(1, 1, 1, 1)).memory


def test_dp_waits_for_what_the_backward_does_not_hide():
    slow = replace(H100, inter_bandwidth=1.0, intra_bandwidth=1.0, inter_latency=1e-9, intra_latency=1e-9,
                   collective_overhead=1e-9)  # fmt: skip
    own = Pricer(pricer().terms, slow, 1)
    mesh = Mesh(1, 16, 1, 1, fully_shard=True, microbatches=3)
    sends = 8 * weight_sends(mesh, 2.0, slow).seconds
    assert sends > 16 and own.price(mesh).times["dp"] == pytest.approx(3 * (sends - 16.0)), "every micro-batch"
    once = replace(mesh, fully_shard=False)
    sends = 8 * weight_sends(once, 2.0, slow).seconds
    assert own.price(once).times["dp"] == pytest.approx(max(sends - 16.0, 0)), "gradients are summed once"
    assert own.price(mesh).times["optimizer"] == pytest.approx(8 * 0.5 / 16)
    assert own.price(once).times["optimizer"] == pytest.approx(8 * 0.5)


def test_collectives_over_both_axes_are_sent_for_the_examples_of_a_micro_batch():
    calls, across = Counter({Call("all_reduce", 1e6): 2}), Counter({Call("all_to_all", 1e6): 3})
    block = Load(Direction(1.0, calls=calls, across=across), Direction(2.0), seconds=3.0, kept_bytes=100.0)
    units = tuple(replace(unit(), block=block) for _ in range(4))
    own, mesh = Pricer(Terms(units, (), 0.5, 1.0), H100, 1), Mesh(1, 1, 2, 2)
    one, double = own.price(mesh), own.price(replace(mesh, batch=2))
    assert one.times["tp"] == pytest.approx(0.5 * 4 * 2 * call_seconds("all_reduce", 1e6, 2, H100)), "half is hidden"
    assert one.times["cp"] == pytest.approx(4 * 3 * call_seconds("all_to_all", 1e6, 2, H100, 2)), "tp ranks lie between"
    assert double.times["compute"] == 2 * one.times["compute"] and double.sends["cp"] == 2 * one.sends["cp"]
    again = own.price(replace(mesh, keep="inputs"))
    assert again.times["cp"] == pytest.approx(2 * one.times["cp"]), "the forward is computed again with what it sends"
