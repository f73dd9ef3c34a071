"""Where a plan is cut: what may flow between stages, and how blocks are dealt out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

import autotp
from autotp.capture.request import CaptureRequest
from autotp.driver import staging as staging_module
from autotp.driver.compile import capture_model, plan_stages
from autotp.driver.options import Options, Steering, required_inputs
from autotp.driver.staging import staging
from autotp.errors import InputError, PlanError
from autotp.ir.layouts import I, Layout, P, R
from autotp.ir.program import Planned, Sharded
from autotp.passes.stages.balance import Weight, divide, in_flight, stage_starts, units_of
from autotp.passes.stages.cut import Piece, Wire, check_wires, cut, joined
from tests.helpers.pipelines import Tower


def wire(layout: Layout, graded: bool) -> Wire:
    return Wire("x", torch.empty(2), layout, graded)


@pytest.mark.parametrize(("layout", "graded"), [(P, True), (P, False), (R, True)])
def test_a_pending_sum_does_not_leave_its_stage(layout: Layout, graded: bool) -> None:
    check_wires([wire(I, True), wire(R, False)], 0)
    with pytest.raises(PlanError, match=r"between stages 0 and 1 the value x is .* summand"):
        check_wires([wire(I, True), wire(layout, graded)], 0)


def test_a_plan_is_cut_between_blocks() -> None:
    model, ids = Tower(4, tied=False), torch.zeros(2, 8, dtype=torch.int64)
    for sequence in (False, True):
        captured, notes = capture_model(
            model,
            required_inputs(model, ids, "test"),
            torch.device("cpu"),
            False,
            CaptureRequest(),
        )
        made = plan_stages(captured, notes, Options.read(2, Steering(sequence_parallel=sequence)), "Tower")
        units = units_of(made.planned, made.sharded)
        assert [u.name for u in units] == [f"blocks.{i}" for i in range(4)]
        found = staging(made.planned, made.sharded, made.builder, "Tower", 2, 1, None)
        assert sum(found.division.sizes) == 4
        total = sum(w.seconds for w in found.weights)
        assert total == pytest.approx(made.plan.totals.alone, rel=1e-6)
        pieces = cut(made.planned, made.sharded, stage_starts(units, (1, 2, 1)))
        assert [len(p.wires_out) for p in pieces] == [1, 1, 0] and pieces[1].wires_in == pieces[0].wires_out
        layout = pieces[0].wires_out[0].layout
        assert layout == I if not sequence else layout.mark == "S"
        names = [p.names for p in pieces]
        assert not any(a & b for a, b in itertools.combinations(names, 2))
        assert set().union(*names) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_are_divided_as_the_best_of_all_divisions(chunks: int, unlike: bool) -> None:
    """And on unlike places, of which the first is twice as fast and has half as much memory again."""
    times = torch.rand(9, generator=torch.Generator().manual_seed(chunks)).tolist()
    weights = [Weight(t, steady=1 + i, kept_bytes=2.0) for i, t in enumerate(times)]
    stages = 2 * chunks
    rates, parts = ([2.0, 1.0] * chunks, [1.5, 1.0] * chunks) if unlike else ([], [1.0, 1.0] * chunks)

    def cost(ends: tuple[int, ...]) -> tuple[float, float]:
        spans = list(itertools.pairwise((0, *ends, len(times))))
        slowest = max(sum(times[a:b]) / (rates[s] if rates else 1) for s, (a, b) in enumerate(spans))
        held = [sum(w.steady for w in weights[a:b]) for a, b in spans]
        kept = [2.0 * (b - a) * in_flight(s, 2, chunks) for s, (a, b) in enumerate(spans)]
        return slowest, max((x + y) / part for x, y, part in zip(held, kept, parts, strict=True))

    every = [cost(ends) for ends in itertools.combinations(range(1, 9), stages - 1)]
    best = divide(weights, 2, chunks, rates=rates)
    assert best is not None and max(best.seconds) == pytest.approx(min(every)[0])
    limit = sorted(memory for _, memory in every)[2]
    tight = divide(weights, 2, chunks, [limit * chunks * part for part in parts], rates)
    fitting = min(time for time, memory in every if memory <= limit)
    assert tight is not None and max(tight.seconds) == pytest.approx(fitting)
    assert all(x <= limit * part for x, part in zip(tight.memory, parts, strict=True))
    assert divide(weights, 2, chunks, [1.0] * stages) is None and divide(weights[: stages - 1], 2, chunks) is None


@pytest.mark.parametrize("sequence", [False, True])
def test_a_cut_is_proved_by_values(monkeypatch: pytest.MonkeyPatch, sequence: bool) -> None:
    model, ids = Tower(4), torch.zeros(2, 8, dtype=torch.int64)
    report = autotp.verify(model, 2, ids, pp=3, sequence_parallel=sequence)
    assert report and report.plan is not None and "equal at pp=3 x tp=2" in str(report), report
    alone = autotp.verify(model, 2, ids, plan=report.plan)
    assert alone and report.values >= alone.values

    def wrong(planned: Planned, sharded: Sharded, pieces: Sequence[Piece]) -> Sharded:
        """Sends twice the value from the first stage to the second."""
        graph = pieces[0].sharded.graph
        output = graph.output_node()
        with graph.inserting_before(output):
            twice = graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][-1], 2))  # type: ignore[index]
        output.args = ((*output.args[0][:-1], twice),)  # type: ignore[index]
        return joined(planned, sharded, pieces)

    monkeypatch.setattr(staging_module, "joined", wrong)
    assert not autotp.verify(model, 2, ids, plan=report.plan, pp=3)
    with pytest.raises(InputError, match=r"plan\(\) takes no pp: .* autotp\.stages"):
        autotp.plan(model, 2, example_inputs=ids, pp=2)  # type: ignore[call-overload]
