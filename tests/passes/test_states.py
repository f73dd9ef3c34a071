"""What is carried from call to call has one layout, going in and out, in every program of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.capture.request import CaptureRequest
from autotp.driver.compile import applied, apply_plan, capture_model, decided_for, plan_stages
from autotp.driver.options import Options
from autotp.driver.verify import compare
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs
from autotp.ir.graph import STATE
from autotp.ir.layouts import Layout, Partition, R, Shard
from autotp.proof.run import Values
from tests.helpers.modules.carried import CARRIED, KV, SIZE, Attention, Nested, past, tokens

HALVES = Shard(1, Partition.plain(KV, 2))


def captured(model: nn.Module, inputs: Inputs, carried: Any = CARRIED) -> Any:
    request = CaptureRequest.read(carried=carried)
    return capture_model(model, inputs, torch.device("cpu"), request=request)


@pytest.fixture(scope="module")
def decoding():
    """The program with a past, planned for two ranks."""
    torch.manual_seed(0)
    model, inputs = Attention(), Inputs(tokens(3), *past(5))
    found, notes = captured(model, inputs)
    return model, inputs, plan_stages(found, notes, Options.read(2), "Attention")


def test_a_cache_is_split_by_heads_and_enters_and_leaves_without_a_conversion(decoding):
    _, _, staged = decoding
    program = staged.planned.program
    assert [x.name for x in program.leaves if x.kind is STATE] == ["past_k", "past_v"]
    assert program.carried == {1: "past_k", 2: "past_v"}
    assert staged.plan.states == staged.sharded.states == {"past_k": HALVES, "past_v": HALVES}
    graph = staged.sharded.graph
    layouts = staged.sharded.layouts
    given = [n for n in graph.nodes if n.op == "placeholder" and "past" in n.name]
    assert [layouts[n] for n in given] == [HALVES, HALVES]
    left = graph.output_node().args[0][1:]
    assert [layouts[n] for n in left] == [HALVES, HALVES] and not any("conversion" in n.meta for n in left)


def test_states_are_compared_as_what_they_are_joined_to(decoding):
    model, inputs, staged = decoding
    values = Values.of(staged.planned.program, model, inputs)
    report = compare(staged.planned, staged.sharded, values)
    assert report and not report.forward_only, report
    output = staged.sharded.graph.output_node()
    held = output.args
    output.args = ((held[0][0], held[0][2], held[0][1]),)
    try:
        wrong = compare(staged.planned, staged.sharded, values)
    finally:
        output.args = held
    assert not wrong and "the state past_k is off by" in str(wrong)


def test_programs_share_the_layouts_of_their_states_by_name(decoding):
    model, _, staged = decoding
    inputs = Inputs(tokens(4))
    begun, notes = captured(model, inputs)
    options = Options.of_plan(staged.plan)
    planned, sharded = apply_plan(begun, staged.plan, options)
    assert sharded.states == {"past_k": HALVES, "past_v": HALVES}
    values = Values.of(planned.program, model, inputs)
    assert compare(planned, sharded, values)
    apart = replace(staged.plan, states={})
    planned, sharded = apply_plan(begun, apart, options, states={"past_k": R, "past_v": R})
    assert sharded.states == {"past_k": R, "past_v": R} and compare(planned, sharded, values)
    first = plan_stages(begun, notes, Options.read(2), "Attention").plan  # nothing is passed yet: split all the same
    assert first.states == {"past_k": HALVES, "past_v": HALVES}


def test_a_plan_says_what_it_carries_and_keeps_it_in_its_file(decoding):
    _, _, staged = decoding
    plan = staged.plan
    row = SIZE * 4  # bytes of one head's key of one token
    assert "cache   2 tensors, Shard(1): 1 of 2, 32 B per token and rank" in str(plan)
    assert f"2 tensors, Shard(1): 1 of 2, {2 * row} B per token and rank" in plan.report()
    assert plan.memory.cache == 2 * 2 * 8 * row and plan.memory.cache_token == 2 * row  # tensors, batch, tokens
    again = autotp.Plan.from_json(plan.to_json())
    assert again == plan and again.states == plan.states
    planned, sharded = apply_plan(staged.planned.program, again, Options.of_plan(again))
    assert planned.states == sharded.states == plan.states


def test_decoding_is_priced_on_its_own_program():
    """What is read of a longer past takes longer, and the memory is that of the states, not a guess."""
    model = Attention()
    plans = [
        autotp.plan(model, 2, example_inputs=(tokens(1), *past(n)), carried=CARRIED, objective="decode",
                    check_capture=False) for n in (2**10, 2**16)
    ]  # fmt: skip
    assert [p.memory.cache for p in plans] == [2 * 2 * (n + 1) * SIZE * 4 for n in (2**10, 2**16)]
    assert plans[1].totals.seconds > plans[0].totals.seconds


class Running(nn.Module):
    """Sums over calls: of numbers, one each for a token, which only the batch and the length could split, of a row for
    each sequence, and of one that an operator without a rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, flat: Tensor, row: Tensor, odd: Tensor) -> tuple[Tensor, ...]:
        y = self.up(x)
        flat, row, odd = flat + y.mean(-1), row + y.sum(1), odd + y.amax(1)
        return y, flat, row, odd, torch.linalg.pinv(odd)


def test_a_state_is_not_split_by_batch_or_length_and_never_gathered():
    model, x = Running(), torch.randn(4, 6, 8)
    inputs = Inputs(x, torch.randn(4, 6), torch.randn(4, 8), torch.randn(4, 8))
    found, notes = captured(model, inputs, {1: "flat", 2: "row", 3: "odd"})
    staged = plan_stages(found, notes, Options.read(2), "Running")
    assert staged.plan.states == {"flat": R, "row": Shard(1, Partition.plain(8, 2)), "odd": R}
    assert staged.plan.memory.cache_sequence == 4 * (8 / 2 + 8) and staged.plan.memory.cache_token == 4
    values = Values.of(staged.planned.program, model, inputs)
    assert compare(staged.planned, staged.sharded, values)
    # Where another program has split it, it is gathered rather than that nothing runs.
    split: dict[str, Layout] = dict.fromkeys(("row", "odd"), Shard(1, Partition.plain(8, 2)))
    planned, sharded = apply_plan(found, replace(staged.plan, digest=""), Options.read(2), states=split)
    assert planned.states == {"flat": R, **split} and compare(planned, sharded, values)
    # A rank that is told so has the same program: what it was not to move it moves by these decisions.
    of_plan: dict[str, Any] = {"plan": replace(staged.plan, digest=""), "options": Options.read(2)}
    decided = decided_for(found, split, **of_plan)
    planned, sharded, _ = applied(found, **of_plan, states=split, decided=decided)
    assert planned.solution is None and compare(planned, sharded, values)


def test_a_state_that_another_program_split_by_what_grows_here_is_refused(decoding):
    _, _, staged = decoding
    other = replace(staged.plan, digest="", states={"past_k": Shard(2, Partition.plain(8, 2))})
    with pytest.raises(PlanError, match="splits the state 'past_k' along dimension 2, which grows or is the batch"):
        apply_plan(staged.planned.program, other, Options.of_plan(staged.plan))


def test_containers_of_states_are_named_by_their_parts():
    model, inputs = Nested(), Inputs(tokens(3), list(past(5)))
    report = autotp.verify(model, 2, inputs, carried={"cache": "past"})
    assert report and report.plan is not None
    assert report.plan.states == {"past[0]": HALVES, "past[1]": HALVES}


@pytest.mark.parametrize(
    ("carried", "says"),
    [
        ([1], "carried is list; give a mapping such as"),
        ({1.5: "past_k"}, r"carried has 1.5: 'past_k'"),
        ({1: "past_k", 2: "past_k"}, "lets two outputs come back as 'past_k'"),
        ({1: "keys"}, "carried names 'keys', and forward has no such argument; it has x, past_k, past_v"),
        ({7: "past_k"}, "carried names the output 7, and the model gives none there"),
    ],
)
def test_what_cannot_be_carried_is_refused(carried, says):
    with pytest.raises(InputError, match=says):
        autotp.plan(Attention(), 2, example_inputs=(tokens(3), *past(5)), carried=carried, check_capture=False)


def test_one_head_for_all_ranks_keeps_its_keys_whole():
    """Scores need all of a key; of the values each rank may have some columns."""
    report = autotp.verify(Attention(1), 2, (tokens(3), *past(5, 1)), carried=CARRIED)
    assert report and report.plan is not None
    assert report.plan.states == {"past_k": R, "past_v": Shard(3, Partition.plain(SIZE, 2))}
    assert "1 tensor, whole, 1 tensor, Shard(3): 2 of 4, 24 B per token and rank" in str(report.plan)
