"""Communication beside products in models: the same numbers, where the cost model wants it, and an off switch."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autotp
from autotp.comm import collectives, overlapped
from autotp.passes import optimise
from autotp.passes.optimise.overlap_products import Overlap
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import redrawn
from tests.helpers.modules.overlapped import Plain, called, calls_of, made
from tests.helpers.modules.stacked import kept_bytes

EXACT = 1e-12
ON: Any = {"optimise": {"overlap": True}}
FREE = dataclasses.replace(  # of machines without latencies: everything is worth it
    autotp.Cluster.preset("h100"), name="free", launch_overhead=1e-15, intra_latency=1e-15, collective_overhead=1e-15
)


def forced(chunks: int) -> Any:
    """The table with overlap in so many chunks wherever it can be."""
    rest = tuple(x for x in optimise.OPTIMISATIONS if x.name != "overlap")
    return patch.object(optimise, "OPTIMISATIONS", (*rest[:-1], Overlap(chunks=chunks, least=-1e30), rest[-1]))


def equal(rank: int, world: int, group: Any, names: list[str]) -> dict[Any, Any]:
    """Outputs and gradients beside the unsharded model's, with everything on, and how much is in the graph."""
    found: dict[Any, Any] = {}
    for name in names:
        model, inputs = made(name)
        wanted = called(model, inputs)
        wanted.square().mean().backward()
        for sequence in (False, True):
            with forced(2):
                sharded: Any = autotp.compile(
                    model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=sequence,
                    optimise={"overlap": True, "regather": sequence},
                )  # fmt: skip
            out = called(sharded, inputs)
            out.square().mean().backward()
            with torch.no_grad():
                quiet = called(sharded, inputs)
            counts = calls_of(sharded, "grouped"), calls_of(sharded, "scattered"), calls_of(sharded, "f_bucket")
            worst = max(difference(out, wanted), difference(quiet, wanted), gradients_differ(sharded, model))
            found[name, sequence] = worst, counts, sharded.plan.report()
    return found


@pytest.mark.parametrize("name, world", [("llama", 2), ("gpt2", 2), ("gpt2", 4), ("plain", 2), ("plain", 4)])
def test_models_compute_the_same(pool, name, world):
    for found in pool.run(equal, [name], world=world):
        for (_, sequence), (error, (products, dealt, buckets), text) in found.items():
            assert error < EXACT, found
            assert products >= 2 and (dealt >= 2) == sequence, found
            # Whole values leave none to bucket but the first norm's of plain: its two weights' gradients, summed
            # together, are less to send than its output's, and nobody wants its input's.
            assert buckets > 0 if sequence else buckets == (name == "plain"), found
            assert "with its products" in text and "overlap:" in text
            assert not sequence or "values are gathered again" in text


def wrong(rank: int, world: int, group: Any) -> float:
    """A group whose input's gradient is not summed."""
    model, inputs = made("plain")
    called(model, inputs).square().mean().backward()
    with forced(1):
        sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=False, **ON)
    out = called(sharded, inputs)
    with patch.object(overlapped, "begin", lambda x, *_: overlapped._Flight(x, x.dtype, None)):
        out.square().mean().backward()
    return gradients_differ(sharded, model)


def test_a_gradient_that_is_not_summed_shows(pool):
    assert min(pool.run(wrong, world=2)) > 1e-2


def switching(rank: int, world: int, group: Any) -> dict[str, Any]:
    model, inputs = made("plain")
    options = {"example_inputs": inputs, "mesh": mesh_of(group), "sequence_parallel": True, "cluster": FREE}
    on, off = autotp.compile(model, **options, **ON), autotp.compile(model, **options, optimise={"overlap": False})
    real = autotp.compile(model, **{**options, "cluster": "h100"}, **ON)
    left = autotp.compile(model, **options)
    none: Any = autotp.compile(model, **options, optimise=False)
    return {
        "on": (calls_of(on, "grouped"), on.plan.report()),
        "off": (calls_of(off, "grouped"), off.plan.report()),
        "small": (calls_of(real, "grouped") + calls_of(real, "scattered"), real.plan.report()),
        "left": (calls_of(left, "grouped"), left.plan.report()),
        "none": (calls_of(none, "grouped") + calls_of(none, "f_bucket"), none.plan.report()),
    }


def test_the_cost_model_decides_and_the_switch_has_the_last_word(pool):
    for found in pool.run(switching, world=2):
        assert found["on"][0] == 3 and "of a step by the cost model" in found["on"][1]
        assert found["off"][0] == 0 and "overlap: switched off" in found["off"][1]
        assert found["small"][0] == 0 and "overlap: nowhere: 6 too small to gain" in found["small"][1]
        assert found["left"][0] == 0 and "between CPU processes takes the cores" in found["left"][1]
        assert found["none"][0] == 0 and "bucket: switched off" in found["none"][1]


def test_small_products_are_left_alone_and_large_ones_go_in_chunks():
    """As wide as Llama-3-8B on eight H100, g and g* are worth chunks by the cost model; at hidden 64 none is."""
    texts = {}
    for width in (64, 4096):
        with torch.device("meta"):
            model = Plain(width).bfloat16()
            x = torch.zeros(4, 4096, width, dtype=torch.bfloat16)
        sharded = autotp.compile(model, 8, example_inputs=x, sequence_parallel=True, check_capture=False)
        texts[width] = sharded.plan.report().partition("overlap:")[2]
    assert "chunks" in texts[4096] and "too small to gain" in texts[64], texts


def regathering(rank: int, world: int, group: Any) -> dict[str, Any]:
    """What autograd keeps without and with; whether a device that is too small switches it on."""
    model, inputs = made("plain")
    inputs = inputs.repeat(4, 8, 1)  # so that activations count
    options = {"example_inputs": inputs, "mesh": mesh_of(group), "sequence_parallel": True}
    plain, lean = autotp.compile(model, **options), autotp.compile(model, **options, optimise={"regather": True})
    tight = dataclasses.replace(autotp.Cluster.preset("h100"), name="tight", memory_size=1000.0)
    full: Any = autotp.compile(model, **options, cluster=tight)
    bytes_ = [kept_bytes(m, inputs) for m in (plain, lean)]
    return {
        "kept": bytes_, "value": inputs.nbytes, "same": difference(called(lean, inputs), called(plain, inputs)),
        "plain": plain.plan.report(), "full": calls_of(full, "grouped"),
    }  # fmt: skip


def test_regathering_keeps_the_slices_alone(pool):
    for found in pool.run(regathering, world=2):
        kept, lean = found["kept"]
        # Two layers and the head keep half of a value less: a gathered value was kept once for all of its products.
        assert kept - lean == 3 * found["value"] // 2, found
        assert found["same"] == 0.0
        assert "regather: nowhere: a rank holds" in found["plain"] and found["full"] == 3


def freezing(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Frozen layers send nothing, and keep nothing."""
    model, inputs = made("plain")
    with forced(1):
        sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=False, **ON)
    found = {}
    for name, frozen in {"all": "none", "lower": "layers.0", "most": "layers."}.items():
        for m in (model, sharded):
            m.zero_grad()
            for n, p in m.named_parameters():
                p.requires_grad_(not n.startswith(frozen) or n == "layers.2.up.weight")
            with patch.object(collectives, "_start", wraps=collectives._start) as start:
                called(m, inputs).square().mean().backward()
        found[name] = start.call_count, gradients_differ(sharded, model)
    return found


def test_frozen_parameters_send_nothing(pool):
    for found in pool.run(freezing, world=2):
        sent = {name: count for name, (count, _) in found.items()}
        assert max(error for _, error in found.values()) < 1e-10, found
        assert sent["lower"] < sent["all"] and sent["most"] < sent["lower"], sent


def regions(rank: int, world: int, group: Any) -> tuple[float, int]:
    """A layer that checkpoints itself keeps little with overlap too, and computes the same."""

    class Lean(Plain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
            return self.head(x)

    torch.manual_seed(0)
    model, inputs = redrawn(Lean()).double(), torch.randn(2, 16, 16, dtype=torch.double)
    with forced(2):
        sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), sequence_parallel=True, **ON)
    for m in (model, sharded):
        m(inputs).square().mean().backward()
    assert calls_of(sharded, "grouped") == 3
    return gradients_differ(sharded, model), kept_bytes(sharded, inputs)


def test_regions_that_the_model_checkpoints_are_not_crossed(pool):
    for error, kept in pool.run(regions, world=2):
        assert error < EXACT and kept < 6 * 2 * 16 * 16 * 8
