"""The benchmark of bytes against other plans: what it counts, and what it writes."""

from __future__ import annotations

import pytest

import autotp
from autotp.cost.solver.problem import Choice, Item, Problem, Use
from autotp.ir.layouts import P, R
from autotp.passes.shard.decide import rivals
from benchmarks.plan_quality import SIDES, found, ratios, section, sent, written
from benchmarks.predicted.against_megatron import savings
from tests.helpers.models import inputs_of, transformer
from tests.helpers.plans import planned_for

ABOUT: dict[str, str] = dict.fromkeys(("autotp", "torch", "transformers", "python", "machine", "date"), "x")


def side(forward: int, backward: int) -> dict[str, dict[str, int]]:
    return {"forward": {"bytes": forward}, "backward": {"bytes": backward}}


def test_ratios_are_of_both_directions():
    counts = {"Megatron": 100, "autotp": side(60, 15), "DTensor": {"failed": "no"}}
    assert ratios(counts) == {"autotp": 0.75, "DTensor": None, "transformers": None}
    assert ratios({"failed": "no"}) == dict.fromkeys(SIDES)


def test_the_section_has_a_row_for_each_degree():
    counts = {"Megatron": 100, "autotp": side(60, 15), "DTensor": side(100, 67)}
    text = section({"one": {"2": counts, "4": {"failed": "no"}}}, ABOUT)
    assert "| one | 2 | 0.75 | 1.67 | - |" in text and "| one | 4 |" not in text


def test_what_wins_is_an_operator_or_a_conversion():
    """The first choice of the product takes a second more, and what it leaves needs no conversion, which takes five."""
    product = Item("linear", [Choice((), (R,), 3.0), Choice((), (P,), 2.0)], [], [0], 2)
    reader = Item("add", [Choice((R,), (R,), 1.0)], [frozenset([0])], [1], 2)
    problem = Problem([product, reader], [Use(0, ((1, 0),), 2)], lambda value, a, b: 5.0 if (a, b) == (P, R) else None)
    assert savings(problem, (0, 0), (1, 0)) == {"linear": -2.0, "add": 0.0, "conversion of linear": 10.0}


def test_megatron_copies_heads_that_are_fewer_than_the_ranks():
    """The choices that its plan leaves of what reads keys have them on groups of ranks; of a single head any."""
    for kv, left in ((4, {2}), (1, {1})):
        model = transformer("llama", num_key_value_heads=kv)
        builder = autotp.plan(model, 8, example_inputs=inputs_of(model), check_capture=False).builder
        assert builder is not None
        problem, nodes = builder.build()
        node, slot, _ = next(part.heads for part in builder.parts if part.heads is not None).kv_at
        (ruled_out,) = rivals(builder, problem, nodes)
        at = nodes.index(builder.same[node])
        choices = [c for k, c in enumerate(problem.items[at].choices) if (at, k) not in ruled_out]
        assert {c.ins[slot].copies for c in choices} == left


def test_a_plan_sends_both_ways():
    plan = planned_for("llama", 2)
    assert sent(plan) == plan.totals.forward_bytes + plan.totals.backward_bytes > 0


@pytest.mark.parametrize("roles", [written, lambda model: found(model, inputs_of(model), 2)], ids=["written", "found"])
def test_roles_of_layers(roles):
    got = roles(transformer("llama"))
    inside = {name.rpartition(".")[2]: role for name, role in got.items() if ".layers.0." in name}
    assert inside == dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column") | dict.fromkeys(
        ("o_proj", "down_proj"), "row"
    )
