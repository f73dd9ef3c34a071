"""The benchmarks of speed: that what they compare is the same, that they notice what is not, and what they write."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autotp
from benchmarks import activations, overhead, step_time
from benchmarks.helpers import duty
from benchmarks.helpers.interleaved import Times, interleaved, ratio
from benchmarks.helpers.llama.megatron import Llama, Shape, by_hand, megatron_pins, split_dim, untouched
from benchmarks.helpers.llama.variants import difference, hand, local_gradients, ours, sent, training_step
from benchmarks.helpers.llama.ways import Plain, Sequence
from benchmarks.lists import unequal
from benchmarks.lists.hand_plans import FakeStore

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, wide=48, vocabulary=64)
IDS = torch.arange(8).view(1, 8) * 7 % 64
MADE = {
    "command": "python -m x",
    "machine": "a machine",
    "torch": "2",
    "transformers": "5",
    "python": "3",
    "date": "now",
}


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def trained(module: Any) -> dict[str, Tensor]:
    loss = training_step(module, IDS, IDS.flip(1))()
    return {"loss": loss.detach(), **local_gradients(module)}


def own_slices(whole: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    dims = {k: split_dim(k) if k != "loss" else None for k in whole}
    return {k: x if (d := dims[k]) is None else x.chunk(world, d)[rank] for k, x in whole.items()}


class Forgotten(Plain):
    """f that does not sum the gradients."""

    def enter(self, x: Tensor) -> Tensor:
        return x


def on_ranks(rank: int, world: int, group: Any, sequence: bool) -> dict[str, float]:
    """How far autotp's and the hand-written module are from the untouched one; and one without f."""
    model = untouched(SMALL)
    wanted = own_slices(trained(model), rank, world)
    place = rank, world, group.group_name
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    plan = autotp.plan(model, world, example_inputs=IDS, sequence_parallel=sequence, pins=megatron_pins(SMALL))
    made = {
        "autotp": autotp.parallelize(model, plan, mesh, example_inputs=IDS),
        "hand": by_hand(SMALL, (Sequence if sequence else Plain)(*place), model.state_dict()),
        "without f": by_hand(SMALL, Forgotten(*place), model.state_dict()),
    }
    return {name: difference(trained(module), wanted) for name, module in made.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_the_hand_written_module_computes_what_the_untouched_one_does(pool, sequence):
    for found in pool.run(functools.partial(on_ranks, sequence=sequence), world=2):
        assert found["hand"] < 1e-5 and found["autotp"] < 1e-5, found
        assert found["without f"] > 1e-2, found


@pytest.mark.parametrize("sequence", [False, True])
def test_both_communicate_by_one_plan(fake, sequence):
    model = untouched(SMALL)
    modules = hand(model, SMALL, sequence), ours(model, IDS, sequence, SMALL, optimise=False)
    found = []
    for module in modules:
        step = training_step(module, IDS, IDS)
        step()
        found.append(sent(step, 2))
    assert found[0] == found[1] and found[0][1] > 0
    other = training_step(hand(model, SMALL, not sequence), IDS, IDS)
    assert sent(other, 2) != found[0]


def test_interleaved_times_are_of_every_round_and_ratios_are_of_one_round():
    order: list[str] = []
    steps = {name: functools.partial(order.append, name) for name in "ab"}
    found = interleaved(steps, rounds=9, before=functools.partial(order.append, "-"))
    turns = "".join(order).replace("-", "")
    assert {turns[i : i + 2] for i in range(0, 20, 2)} == {"ab", "ba"} and order.count("-") == 20
    assert all(len(t.cpu) == len(t.wall) == 9 for t in found.values())
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def row(**changes: Any) -> dict[str, Any]:
    found = {"cpu_s": 1.0, "wall_s": 2.0, "cpu_ratio": 1.5, "wall_ratio": 1.25, "first_s": 3.0, "off": 1e-6}
    return found | {"collectives": 4, "bytes": 5_000_000} | changes


def test_step_times_of_other_numbers_or_plans_are_refused():
    good = {step_time.PLAIN: row(), "autotp": row()}
    step_time.check({"rows": good})
    for change, message in (({"off": 0.1}, "something else"), ({"bytes": 6}, "another plan")):
        with pytest.raises(RuntimeError, match=message):
            step_time.check({"rows": good | {"autotp": row(**change)}})


def test_rows_of_step_times_are_of_all_ranks():
    times = {step_time.PLAIN: Times([1.0, 1.0], [1.0, 2.0]), "autotp": Times([2.0, 2.0], [1.0, 1.0])}
    one = {"first": dict.fromkeys(times, 1.0), "off": dict.fromkeys(times, 0.0)}
    one |= {
        "sent": dict.fromkeys(times, ({"all_reduce 1": 3}, 8.0)),
        "times": {k: t._asdict() for k, t in times.items()},
    }
    late = {**one, "times": {**one["times"], "autotp": {"cpu": [4.0, 4.0], "wall": [3.0, 3.0]}}}
    found = step_time.rows([one, late], step_time.variants(SMALL))["autotp"]
    assert (found["cpu_s"], found["cpu_ratio"], found["wall_s"], found["wall_ratio"]) == (6.0, 3.0, 3.0, 2.25)
    assert found["collectives"] == 3


def test_overhead_is_measured_and_told(monkeypatch):
    monkeypatch.setattr(overhead, "SHAPE", SMALL)
    found = overhead.summary(overhead.measure(False, rounds=1, repeat=1))
    assert list(found) == ["hand-written", "autotp", "DTensor"] and found["hand-written"]["ratio"] == 1
    text = overhead.page({**MADE, "cores": 2, "rounds": 1, "load_before": 0.1, "results": {"plain": found}})
    assert "| autotp |" in text and "python -m x" in text


def test_saved_activations_by_hand(fake):
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 4))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.weight[ids]  # keeps the ids, 64 bytes
            return x.exp().sin()  # keeps its result and its operand, one storage of 128 bytes

    by_kind, with_loss = activations.kept(Twice(), IDS % 4)
    assert by_kind == {("int64", (1, 8)): 64, ("float32", (1, 8, 4)): 128}
    assert with_loss >= 192 + 128  # its logarithms of probabilities


def test_sequence_parallelism_and_regathering_keep_less():
    long = Shape(hidden=32, layers=1, heads=4, kv_heads=2, wide=48, vocabulary=64)
    measured = activations.measure(long, 64)
    names = activations.HAND, "autotp, sequence-parallel", "autotp, sequence-parallel, regathered"
    whole, sequence, regathered = (measured[n]["bytes"] for n in names)
    assert whole > sequence > regathered
    found = activations.summary(measured, long)
    assert all(0.5 <= r["parameters"] < 0.52 for r in found.values())
    text = activations.page({**MADE, "results": found})
    assert "| autotp, sequence-parallel, regathered |" in text


def test_weights_have_the_names_of_transformers():
    names = {
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert names < set(Llama(SMALL).state_dict())


# ---- ranks of unlike speed ----

LOOP = """
import sys, time
from benchmarks.helpers.duty import slow_down
slow_down(float(sys.argv[1]))
began, spent = time.perf_counter(), time.thread_time()
while time.thread_time() < spent + 0.2: pass
print((time.thread_time() - spent) / (time.perf_counter() - began))
"""


def test_cycles_leave_a_part_of_two_cores():
    """Of each ratio that is measured; the fastest rank has a core at most."""
    for speeds in unequal.RATIOS:
        parts = duty.cycles(speeds)
        assert sum(parts) <= duty.CORES + 1e-9 and max(parts) <= 1
        assert [x / parts[-1] for x in parts] == pytest.approx([x / speeds[-1] for x in speeds])


def test_a_process_runs_for_its_cycle_alone():
    """A quarter of the time, or less where others use the machine; without a cycle more than that."""
    found = []
    for cycle in ("0.25", "0.5"):
        done = subprocess.run([sys.executable, "-c", LOOP, cycle], capture_output=True, text=True, check=True)
        found.append(float(done.stdout))
    assert found[0] < 0.3 and found[1] < 0.6


def test_the_least_time_by_hand():
    """Of a rank that does half in two seconds of a whole core, and one that does half in three of half a core: one over
    a quarter and a twelfth, and the collectives once. With the CPU seconds of the ranks changed it is another."""
    times = [{"even": (6.0, 2.5), "uneven": (4.0, 3.0), "collectives": (0.5, 0.5)}]
    times.append({"even": (6.0, 3.0), "uneven": (3.0, 3.0), "collectives": (0.4, 0.0)})
    shares = {"even": [[], [0.5, 0.5]], "uneven": [[3, 1], [0.75, 0.25]]}
    ranks: list[Any] = []
    for cycle, own in zip((1.0, 0.5), times, strict=True):
        use = {"shares": shares, "times": own, "predicted_s": [5.0, 4.0]}
        ranks.append(
            {
                "cycle": cycle,
                "ratio": [3, 1],
                "speed": cycle,
                "products": 3 * cycle,
                "uses": dict.fromkeys(unequal.WITHIN, use),
            }
        )
    row = unequal.together((2, 1), ranks)
    assert row["uses"]["token"]["least_s"] == pytest.approx(3.0 + 0.5) and row["uses"]["token"]["gain"] == 1.5
    ranks[0]["speed"], ranks[1]["speed"] = 0.5, 1.0
    assert unequal.together((2, 1), ranks)["uses"]["token"]["least_s"] == pytest.approx(1 / (0.125 + 1 / 6) + 0.5)
    results = {"made": {"command": "x"}, "cores": 2, "load_before": 0.1, "ratios": {"2:1": row}}
    cells = "| 2:1 | 2:1 | 3:1 | token | 3:1 | 0.75 0.25 | 6.000 | 4.000 | 3.500 | 1.14 | 1.15 | 1.50 | 1.25 |"
    assert cells in unequal.page(results)


def test_the_order_of_gains():
    """Pairs of one use alone, and of what was predicted."""
    gains = [
        ("token", 1.5, 1.4),
        ("token", 1.2, 1.3),
        ("token", 1.1, 1.35),
        ("token", 1.0, float("nan")),
        ("x", 9.0, 0.1),
    ]
    assert unequal.agreement(gains) == "2 of 3"
