"""The certificate: right programs are accepted, wrong ones refused, by types that are inferred and not the plan's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn

import autotp
from autotp.comm import conversions
from autotp.errors import InputError
from autotp.ir.layouts import I, P, R
from autotp.ir.marks import mark
from autotp.ir.op import aten
from autotp.ir.program import Planned, Sharded
from autotp.plans.export import styles
from autotp.proof.certificate import RefusedError, Typing, certificate, checking
from autotp.proof.equality import compare
from autotp.proof.report import Difference
from autotp.proof.spelling import STEPS, transit
from benchmarks.helpers.lists.certified import PROGRAMS as CASES
from benchmarks.helpers.lists.certified import outputs, programs, tried
from benchmarks.helpers.lists.mutants import copied, mutants
from benchmarks.helpers.performance import PAGE
from benchmarks.lists.certificate import load, render
from tests.helpers.models import planned
from tests.helpers.modules.two_axes import model_of

spmd = pytest.importorskip("spmd_types")
PROGRAMS = [
    ("einsum", None), ("multihead-length-first", None), ("convolutions", None), ("llama", None), ("llama", True),
    ("llama-uneven", None), ("gpt2", None), ("bert", None),
]  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "sequence_parallel"), PROGRAMS)
def test_right_programs_are_accepted(name, sequence_parallel, tp):
    _, program, sharded = planned(name, tp, sequence_parallel)
    found = certificate(program, sharded)
    assert found, str(found)
    converted = sum(mark(n).conversion is not None for n in sharded.graph.nodes)
    assert found.conversions == converted > 0 and found.leaves and found.outputs
    assert found.partials == sum(x.partial and mark(n).conversion is None for n, x in sharded.layouts.items())


@pytest.mark.parametrize("axes", [{"dp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_the_program_of_a_rank_beside_tp_is_accepted_and_a_wrong_one_is_not(axes):
    """The certificate is of the plan's own program, in which no conversion over tp may be another one."""
    model, inputs = model_of("decoder")
    plan = autotp.plan(model, 2, example_inputs=inputs, check_capture=False, **axes)
    with patch("autotp.driver.verify.certificate", lambda *given: given):
        program, sharded, degrees = autotp.certify(model, plan, inputs)  # type: ignore[misc]
    found = certificate(program, sharded, degrees)
    assert program.program.digest() == plan.digest and degrees == axes
    assert found and found.conversions, str(found)
    refused = [m for m in mutants(program, sharded) if not certificate(program, m.program, degrees)]
    assert len({m.node for m in refused}) == found.conversions


@pytest.mark.parametrize("tp", [2, 4])
def test_uneven_heads_are_accepted(tp):
    attention, x = nn.MultiheadAttention(48, 6, batch_first=True), torch.randn(2, 5, 48)
    program, sharded, _ = programs(attention, {"query": x, "key": x, "value": x, "need_weights": False}, tp)
    found = certificate(program, sharded)
    assert found and found.conversions, str(found)


@pytest.mark.parametrize("tp", [2, 4])
def test_experts_are_accepted(tp):
    model, inputs = experts()
    found = certificate(*programs(model, inputs, tp)[:2])
    assert found and found.partials, str(found)


class Chosen(nn.Module):
    """Layers that read some rows: how many, the values of flags say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x[flags])))


def test_sizes_that_depend_on_values_are_accepted():
    inputs = {"x": torch.randn(4, 16), "flags": torch.tensor([True, False, True, True])}
    found = certificate(*programs(Chosen(), inputs)[:2])
    assert found and found.conversions, str(found)


@cache
def experts() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A mixture of four experts, two for each token, in one layer."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, vocab_size=32, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    return model, {"input_ids": torch.arange(16).reshape(2, 8)}


def hidden(program: Planned, sharded: Sharded) -> tuple[Planned, Sharded]:
    """Put nonsense for every layout but those of leaves, of pending sums and of the output."""
    copy, nodes = copied(sharded)
    leaves = {n for n in copy.graph.nodes if n.op == "placeholder" or not n.all_input_nodes}
    for node, layout in copy.layouts.items():
        if node not in leaves and not layout.partial:
            copy.layouts[node] = R if layout == I else I
    odd = {
        n: d if n.op == "output" else replace(d, ins=tuple(P for _ in d.ins), outs=tuple(P for _ in d.outs))
        for n, d in program.decisions.items()
    }
    return replace(program, decisions=odd), copy


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_types_are_inferred_and_not_the_plans(name):
    _, program, sharded = planned(name, 2)
    assert replace(certificate(*hidden(program, sharded)), tp=2) == certificate(program, sharded)


@pytest.mark.parametrize("name", ["einsum", "matmul-softmax", "convolutions"])
def test_wrong_programs_are_refused(name):
    _, program, sharded = planned(name, 2)
    whole, seen, passed = outputs(program, sharded), 0, []
    for mutant in mutants(program, sharded):
        try:
            fits = outputs(program, mutant.program) == whole
        except RefusedError:
            fits = False
        if fits:
            seen += 1
            passed += [str(mutant)] if certificate(program, mutant.program) else []
    assert seen > 10 and not passed


def test_mutants_of_a_whole_model():
    parts: list[dict[str, Any]] = []
    tried("Llama", parts.append)
    found = parts[0]["found"]
    assert not found.get("nobody") and found["types"] >= 20 * found["verify"] > 0


def test_rows_by_group_are_mutants_too_and_refused():
    model, inputs = CASES["Rows sorted by expert"].built()
    program, sharded, values = programs(model, inputs, **CASES["Rows sorted by expert"].steering)
    drawn = [m for m in mutants(program, sharded) if "group" in m.kind]
    assert len(drawn) > 50 and certificate(program, sharded)
    # A rank that has all rows has its own among them: these two compute the same, and are no faults.
    passed = [m for m in drawn if certificate(program, m.program)]
    assert {str(m) for m in passed} == {"g for group_s at group_s", "f for group_i at group_i"}
    assert not [str(m) for m in passed if not compare(program, m.program, values)]


def row_split(bias: bool) -> tuple[Planned, Sharded]:
    """A program with a row-split linear layer, whose bias is added once, or on every rank."""
    _, program, sharded = planned("encoder-layer-length-first", 2)
    copy, _ = copied(sharded)
    for node in list(copy.graph.nodes):
        if bias and mark(node).conversion == (I, P):
            with copy.graph.inserting_before(node):
                f = copy.graph.call_function(conversions.f, node.args)
            literals: Any = (node.args[0], I.to_runtime(), R.to_runtime())
            f.args, f.meta = literals, dict(node.meta)
            copy.layouts[f], copy.origin[f] = R, copy.origin[node]
            node.replace_all_uses_with(f)
            copy.graph.erase_node(node)
            del copy.layouts[node], copy.origin[node]
    return program, copy


def test_a_row_splits_bias_added_on_every_rank_is_refused():
    assert certificate(*row_split(False))
    refusal = certificate(*row_split(True)).refusal
    assert (
        refusal is not None and refusal.direction == "types" and "linear" in refusal.op and "Partial" in refusal.detail
    )


def test_an_all_reduce_wants_a_pending_sum():
    x = torch.empty(4, 4, device="meta")
    with checking(2):
        spmd.assert_type(x, {"tp": spmd.V})
        with pytest.raises(spmd.SpmdTypeError, match="to be P"):
            transit(x, P.to_runtime(), R.to_runtime(), torch.empty_like(x))


def test_a_pending_sum_goes_through_what_is_linear_and_nothing_else():
    _, program, sharded = planned("einsum", 2)
    for function, fits in ((aten.neg.default, True), (aten.gelu.default, False)):
        copy, nodes = copied(sharded)
        last = next(nodes[n] for n, x in sharded.layouts.items() if x.partial and mark(n).conversion is None)
        with copy.graph.inserting_after(last):
            new = copy.graph.call_function(function, (last,))
        last.replace_all_uses_with(new, lambda user, new=new: user is not new)
        new.meta = dict(last.meta)
        if fits:
            Typing(program, copy).run()
            continue
        with pytest.raises(RefusedError, match="Partial type") as refused:
            Typing(program, copy).run()
        assert refused.value.node is new


def test_every_conversion_of_the_table_has_a_step():
    """But for summands of copied slices (D), which gradients alone are, those along one dimension, and rows that
    travel (T) over dp."""
    kinds = {(a, b) for a, b in conversions.KINDS if "T" not in (a, b)}
    assert set(STEPS) == {(a, b) for a, b in kinds if "D" not in (a, b[0]) and "'" not in b}


@pytest.fixture
def linear() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    yield nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)


def test_the_public_functions(linear, monkeypatch):
    model, x = linear
    report = autotp.verify(model, 2, x, certify=True)
    assert report and report.certificate and "spmd_types" in str(report) and "accepts" in str(report)
    plan = report.plan
    assert plan is not None and autotp.certify(model, plan, x) == report.certificate
    assert plan.to_spmd_types() == {
        "0.weight": {"tp": spmd.S(0)}, "0.bias": {"tp": spmd.S(0)}, "2.weight": {"tp": spmd.S(1)},
        "2.bias": {"tp": spmd.I},
    }  # fmt: skip
    no = replace(report.certificate, refusal=Difference("types", "add", "aten.add", "0", float("inf"), "P and R"))
    refused = replace(report, certificate=no)
    assert not refused.ok and "refuses (types) at add" in str(refused)
    assert autotp.certify(model, autotp.plan(model, 1, example_inputs=x), x)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(styles, "import_module", missing)
    with pytest.raises(InputError, match=r"autotp\[certify\]"):
        autotp.certify(model, plan, x)


def test_the_page_is_what_the_results_render_to():
    assert PAGE.read_text() == render(PAGE.read_text(), load())
    found = load()["mutants"].values()
    rest = [{k: n for k, n in record["found"].items() if k != "shapes"} for record in found]
    caught = sum(r.get("types", 0) for r in rest)
    assert caught >= 0.95 * sum(sum(r.values()) for r in rest)
