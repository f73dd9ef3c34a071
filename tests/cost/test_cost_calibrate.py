"""Calibration: the fit finds the numbers that made the times, and says how far it is off; measuring on gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.cost import Cluster
from autotp.cost.collectives import COLLECTIVES
from autotp.cost.machines.calibrate import _degrees
from autotp.cost.machines.clock import Clock
from autotp.cost.machines.fit import Kernel, Transfer, errors, fit
from autotp.cost.machines.operators import SIZES
from autotp.cost.machines.this_machine import described
from autotp.errors import InputError
from tests.helpers.clusters import ROUND

RATES = ("packing", "product_launches", "attention_rate")
FOUND = ("launch_overhead", "memory_bandwidth", "intra_latency", "intra_bandwidth", "inter_latency", "inter_bandwidth")


def kernels(truth: Cluster) -> list[Kernel]:
    """What a machine that is exactly `truth` would take: a launch, copies, matmuls."""
    blank = [Kernel("launch", "float32", 0, 1, 0)]
    blank += [Kernel("copy", "float32", 0, 2.0**k, 0) for k in (20, 22, 24)]
    blank += [Kernel("product launch", "float32", 1.0, 0, 0)]
    sizes = ((16, 64), (16, 512), (512, 512))
    blank += [
        Kernel(f"matmul {d}", d, 2.0 * m * n * n, 4.0 * (2 * m + n) * n, 0) for d in truth.peak_flops for m, n in sizes
    ]
    blank += [Kernel("attention", "float32", 4.0 * n * n * 64, 4.0 * n * 64, 0) for n in (64, 256)]
    return [k._replace(seconds=truth.launch_overhead if k.item == "launch" else k.predicted(truth)) for k in blank]


def transfers(truth: Cluster, degrees: tuple[int, ...] = (2, 4)) -> list[Transfer]:
    """Every collective on it, in a node; and between two nodes, over one rank of each."""
    places = [*((n, 1) for n in degrees), (2, truth.devices_per_node)]
    blank = [Transfer(p, 2.0**k, n, s, 0) for p in COLLECTIVES for n, s in places for k in (4, 10, 20)]
    return [t._replace(seconds=t.predicted(truth)) for t in blank]


@pytest.mark.parametrize(("switch", "packing"), [(True, 0.0), (False, 1.5)])
def test_the_fit_finds_the_numbers_that_made_the_times(switch, packing):
    truth = replace(
        ROUND, switch=switch, peak_flops={"float32": 3e9, "bfloat16": 7e9}, memory_bandwidth=5e9, packing=packing,
        product_launches=6.0, attention_rate=0.4,
    )  # fmt: skip
    other = replace(Cluster.preset("local"), devices_per_node=4)
    found = fit(kernels(truth), transfers(truth), other)
    for name in FOUND:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4), name
    assert found.peak_flops == pytest.approx(truth.peak_flops, rel=1e-3) and found.switch is switch
    for name in RATES:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3, abs=1e-9), name
    assert max(e.worst for e in errors([*kernels(truth), *transfers(truth)], found)) < 2e-3


def test_another_machine_shows_as_an_error():
    """The negative control: times that no alpha and beta make, and a cluster that is not the machine."""
    odd = [t._replace(seconds=t.seconds * (9 if t.nbytes == 2**10 else 1)) for t in transfers(ROUND)]
    found = errors(odd, fit(kernels(ROUND), odd, ROUND))
    assert max(e.worst for e in found) > 0.5
    slow = replace(ROUND, intra_latency=2e-6)
    off = {e.item: e.worst for e in errors(transfers(ROUND), slow)}
    assert off["all_reduce, 4 ranks"] > 0.9 and off["all_reduce, 2 ranks 4 apart"] == 0


def test_noise_moves_the_fit_by_no_more_than_itself():
    generator = torch.Generator().manual_seed(0)
    noisy = [
        t._replace(seconds=t.seconds * (1 + 0.1 * float(torch.rand(1, generator=generator)))) for t in transfers(ROUND)
    ]
    found = fit([], noisy, ROUND)
    assert ROUND.intra_latency <= found.intra_latency <= 1.1 * ROUND.intra_latency
    assert 0.9 <= found.intra_bandwidth / ROUND.intra_bandwidth <= 1


def test_what_is_not_measured_stays():
    assert fit([], [], ROUND) == ROUND
    alone = fit(kernels(ROUND), [], Cluster.preset("local"))
    assert alone.intra_latency == Cluster.preset("local").intra_latency


@pytest.mark.parametrize("seconds", [1e-30, 1.0])
def test_times_that_no_link_takes_still_give_a_cluster(seconds):
    same = [t._replace(seconds=seconds) for t in transfers(ROUND)]
    fit([k._replace(seconds=seconds) for k in kernels(ROUND)], same, ROUND)  # every number finite and positive


def test_groups_leave_no_rank_over():
    assert [_degrees(n) for n in (1, 2, 6, 7, 8)] == [[], [2], [2, 3, 6], [7], [2, 4, 8]]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], matmuls=((64, 64), (16, 128)), cold=2**20, budget=0.01))


def test_one_process(quick, capsys, tmp_path):
    found = autotp.calibrate(name="mine")
    said, local = capsys.readouterr().out, Cluster.preset("local")
    assert found.name == "mine" and found.intra_bandwidth == local.intra_bandwidth
    assert found.peak("float32") > 1e8 and found.memory_bandwidth > 1e8 and 1e-8 < found.launch_overhead < 1e-2
    assert "matmul bfloat16" in said and "mean error of the fit" in said and "not measured" in said
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
    clock, calls = Clock(None, torch.device("cpu"), 0.01), []
    assert (
        clock.time(lambda: calls.append(sum(range(20000)))) > 5 * clock.time(lambda: sum(range(200))) > 0 < len(calls)
    )


def on_a_rank(rank: int, world: int, group: Any, nodes: int) -> Cluster:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    SIZES["cpu"] = replace(SIZES["cpu"], matmuls=((64, 64),), transfers=(2**12, 2**21), cold=2**20, budget=0.005)
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
