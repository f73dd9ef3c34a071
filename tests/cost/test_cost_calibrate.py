"""Calibration: times give the numbers that made them; medians of these; measuring on gloo ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autotp
import autotp.cost.machines.calibrate as measuring
from autotp.comm.ranks import PLAIN_PROCESS
from autotp.cost import Cluster
from autotp.cost.collective_costs import COLLECTIVES, collective_seconds
from autotp.cost.machines.calibrate import SIZES, Clock, link_of, own_seconds, together, with_medians
from autotp.cost.machines.this_machine import described
from autotp.errors import InputError
from tests.helpers.clusters import ROUND


def measured(truth: Cluster, primitive: str, n: int, sizes: tuple[int, int] = (2**10, 2**20)) -> Any:
    """Bytes and seconds of a short and a long message in a node that is exactly `truth`."""
    return [(float(size), collective_seconds(primitive, size, n, truth)) for size in sizes]


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("primitive", COLLECTIVES)
def test_two_messages_give_the_link_that_made_their_times(primitive, switch):
    truth = replace(ROUND, switch=switch)
    found = link_of(primitive, 4, measured(truth, primitive, 4), not switch, 1e-12)
    assert found == pytest.approx((truth.intra_latency, truth.intra_bandwidth), rel=1e-6)
    # the negative control: of a ring whose ranks forward for each other an all-to-all says something else
    other = link_of(primitive, 4, measured(truth, primitive, 4), switch, 1e-12)
    assert (other == pytest.approx(found)) is (primitive != "all_to_all")


def test_medians_take_the_place_of_what_was_measured_and_of_nothing_else():
    samples = {"launch_overhead": [1e-6, 9e-6, 2e-6], "memory_bandwidth": [5e9], "bfloat16": [1e9, 3e9, 7e12]}
    found = with_medians(samples, ROUND)
    assert (found.launch_overhead, found.memory_bandwidth) == (2e-6, 5e9)
    assert found.peak_flops == {"float32": ROUND.peak("float32"), "bfloat16": 3e9}
    assert with_medians({}, ROUND) == ROUND and found.collective_overhead == ROUND.collective_overhead
    linked = with_medians({**samples, "intra_latency": [3e-6]}, ROUND)
    assert (linked.intra_latency, linked.collective_overhead) == (3e-6, 2e-6)


@pytest.mark.parametrize("seconds", [1e-30, 1.0])
def test_times_that_no_link_takes_still_give_a_cluster(seconds):
    latency, bandwidth = link_of("all_reduce", 4, [(1e3, seconds), (1e6, seconds)], False, 1e-12)
    replace(ROUND, intra_latency=latency, intra_bandwidth=bandwidth)  # every number finite and positive
    assert own_seconds(seconds, 2 * seconds, queued=False) > 0
    assert own_seconds(10.0, 1.0, queued=False) == 9.0 and own_seconds(10.0, 1.0, queued=True) == 10.0
    assert own_seconds(1.5, 1.0, queued=True) == 0.5  # the queue is empty: every launch is waited for


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "COLD_BYTES", 2**20)
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], matmuls=((64, 64), (16, 128)), budget=0.01))


def test_one_process(quick, capsys, tmp_path):
    found = autotp.calibrate(name="mine")
    said, local = capsys.readouterr().out, Cluster.preset("local")
    assert found.name == "mine" and found.intra_bandwidth == local.intra_bandwidth
    assert found.peak("float32") > 1e8 and found.memory_bandwidth > 1e8 and 1e-8 < found.launch_overhead < 1e-2
    assert "bfloat16" in said and "median" in said and re.search(r"inter_latency +none", said)
    found.save(tmp_path / "mine.toml")
    assert Cluster.resolve(str(tmp_path / "mine.toml")) == found
    again = autotp.calibrate(base=found, show=False, dtypes=[torch.bfloat16])
    assert not capsys.readouterr().out and set(again.peak_flops) == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base": "tpu"}, "not a preset"),
        ({"name": 3}, "Cluster.name"),
        ({"devices_per_node": 0}, "devices_per_node"),
        ({"mesh": 2}, "mesh is int"),
        ({"dtypes": ["float32"]}, "torch.float32"),
    ],
)
def test_bad_arguments_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        autotp.calibrate(**given)


def test_nodes_are_those_of_torchrun_or_given(monkeypatch):
    def held(world: int, given: int | None = None) -> Any:
        ranks: Any = SimpleNamespace(tp=world)
        return described("x", Cluster.preset("local"), ranks, torch.device("cpu"), given)["devices_per_node"]

    assert (held(4), held(4, 2)) == (64, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (held(4), held(2), held(4, 4)) == (2, 64, 4)
    with pytest.raises(InputError, match="devices_per_node=3 does not divide the 4 ranks"):
        held(4, 3)


def test_calls_are_timed():
    clock, calls = Clock(PLAIN_PROCESS, torch.device("cpu"), 0.01), []
    assert (
        clock.time(lambda: calls.append(sum(range(20000)))) > 5 * clock.time(lambda: sum(range(200))) > 0 < len(calls)
    )


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.03])
def test_a_throttled_device_is_as_slow_as_its_work_over_time(monkeypatch, pause):
    """A device that pauses after every ten calls takes its pauses too; the control: the median of batches misses them,
    as it is a batch with none of a throttle's few long pauses."""
    now, calls = [0.0], [0]

    def call() -> None:
        calls[0] += 1
        now[0] += 0.001 + pause * (calls[0] % 10 == 0)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    clock = Clock(PLAIN_PROCESS, torch.device("cpu"), 0.2)
    assert clock.alone(call) == pytest.approx(0.001 + pause / 10, rel=0.01)
    short = replace(clock, budget=0.03)
    assert (short.time(call) < 0.9 * short.alone(call)) == bool(pause)


def test_it_measures_a_backward_where_no_gradients_are_recorded():
    with torch.inference_mode():
        assert autotp.calibrate(dtypes=[], show=False).launch_overhead > 0


def test_a_rate_is_all_work_over_its_time():
    """The median of what is shown; the control: that of the rates of three sizes is another, by the small ones."""
    found = measuring.rates([(1.0, 1.0), (2.0, 1.0), (97.0, 10.0)])
    assert found == [1.0, 100.0 / 12.0, 9.7] and with_medians({"float32": found}, ROUND).peak("float32") == found[1]
    assert found[1] != 2.0 and len(measuring.rates([(1.0, 2.0)])) == 3


def on_a_rank(rank: int, world: int, group: Any, nodes: int) -> Cluster:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    measuring.COLD_BYTES = 2**20
    SIZES["cpu"] = replace(SIZES["cpu"], matmuls=((64, 64), (64, 64)), budget=0.005)
    return autotp.calibrate(mesh, devices_per_node=world // nodes, show=False)


def test_two_ranks_measure_their_links(pool):
    found = pool.run(on_a_rank, 1, world=2)
    assert found[0] == found[1] and found[0].devices_per_node == 2
    local = Cluster.preset("local")
    assert found[0].intra_latency != local.intra_latency and found[0].inter_latency == local.inter_latency
    assert 1e-7 < found[0].intra_latency < 0.1 and 1e6 < found[0].intra_bandwidth < 1e12


def test_four_ranks_as_two_nodes_measure_both(pool):
    found = pool.run(on_a_rank, 2)
    assert len(set(map(hash, found))) == 1
    local = Cluster.preset("local")
    assert found[0].intra_latency != local.intra_latency and found[0].inter_latency != local.inter_latency


def test_unlike_ranks_are_said_rank_by_rank():
    """By a quarter in one figure, or by their names; otherwise one device stands for all, with the worst of each."""
    fast: Any = {"launch_overhead": [1e-6], "memory_bandwidth": [2e9], "float32": [4e9, 5e9, 6e9]}
    slow: Any = fast | {"launch_overhead": [2e-6], "float32": [2e9, 2.5e9, 3.1e9]}
    found, shown = together([(ROUND, fast), (ROUND, slow)], {"intra_latency": [3e-6]})
    assert [found.rank(r).peak("float32") for r in (0, 1)] == [5e9, 2.5e9] and found.ratio() == (2, 1)
    assert found.rank(1).intra_latency == 3e-6 and found.name == "round" and len(shown) == 2
    four, shown = together([(ROUND, slow), (ROUND, fast), (ROUND, fast), (ROUND, slow)], {})
    assert four.ratio() == (1, 2, 2, 1) and four.rank(0) == four.rank(3) and len(shown) == 2
    close = slow | {"float32": [4e9, 5.5e9, 4.5e9]}
    alike, shown = together([(ROUND, fast), (ROUND, close)], {})
    assert not alike.ranks and alike.peak("float32") == 4.5e9 and alike.launch_overhead == 2e-6 and len(shown) == 1
    assert together([(ROUND, fast), (replace(ROUND, device="another"), fast)], {})[0].ranks
    assert together([(ROUND, fast), (replace(ROUND, memory_size=5e8), fast)], {})[0].rank(1).memory_size == 5e8


def delayed(rank: int, world: int, group: Any) -> Cluster:
    """The second rank sleeps after each of its calls as long as it took."""
    measuring.COLD_BYTES = 2**20
    SIZES["cpu"] = replace(SIZES["cpu"], matmuls=((256, 256), (256, 256)), budget=0.05)
    if rank:
        batch = Clock._batch
        Clock._batch = lambda self, call, calls: 3 * batch(self, call, calls)  # type: ignore[method-assign]
    return autotp.calibrate(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), show=False)


def test_each_rank_measures_itself(pool):
    found = pool.run(delayed, world=2)
    assert found[0] == found[1] and found[0].rank(0).peak("float32") > 1.5 * found[0].rank(1).peak("float32")
