"""A user's own operators get rules through the public functions, and the rules are proved."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import autotp
from autotp.errors import InputError, RuleError
from autotp.rules import Op, Rule, loops
from autotp.rules.core import RULES, function_of
from tests.helpers.modules.custom_ops import (
    PROJECT,
    Projected,
    example,
    f,
    faceless,
    fill,
    halves,
    project,
    registered,
    size,
    turn,
)

aten: Any = torch.ops.aten

# registration


@pytest.mark.parametrize(
    "op",
    [
        project,
        torch.ops.autotp_tests.project,
        torch.ops.autotp_tests.project.default,
        "autotp_tests::project",
        "autotp_tests::project.default",
        "autotp_tests.project",
    ],
    ids=["custom_op", "packet", "overload", "name", "name with overload", "dotted"],
)
def test_an_operator_is_named_in_several_ways(op):
    with registered(op, **PROJECT) as rule:
        assert function_of(torch.ops.autotp_tests.project.default) is rule
        assert autotp.prove_rule(op, f(4, 6), f(6, 5), f(5)).rule == "ak,kn,n->an"
    assert function_of(torch.ops.autotp_tests.project.default) is None


def test_a_function_is_a_rule_too():
    with contextlib.ExitStack() as stack:
        stack.enter_context(registered())

        @autotp.register_rule(turn)
        def along_rows(op: Op) -> Rule:
            rows = [*range(len(op.ins[0]) - 1), None]
            return loops(op, [rows], [rows], linear=(frozenset({0}),))

        assert function_of(torch.ops.autotp_tests.turn.default) is along_rows
        proof = autotp.prove_rule(turn, f(4, 6))
        assert not proof.gradients and "no derivative" in str(proof)


def test_a_list_of_results_has_one_term():
    with registered(halves, rule="_m->_m", linear="x"):
        assert autotp.prove_rule(halves, f(6, 4)).rule == "_m->_m,_m"


def test_an_optional_tensor_that_is_left_out_takes_its_term_along():
    with registered():
        assert autotp.prove_rule(project, f(4, 6), f(6, 5)).rule == "ak,kn->an"


def test_a_second_rule_needs_replace():
    with registered():
        with pytest.raises(InputError, match=r"autotp_tests.project has a rule already. Pass replace=True"):
            autotp.register_rule(project, "...k,kn,n->...n")
        autotp.register_rule(project, "..._,_n,n->...n", replace=True)
        assert autotp.prove_rule(project, f(4, 6), f(6, 5), f(5)).rule == "a_,_n,n->an"


def test_the_rules_of_the_house_are_not_replaced_by_accident():
    with pytest.raises(InputError, match=r"aten\.mm.* has a rule already"):
        autotp.register_rule("aten::mm", "mk,kn->mn")
    with pytest.raises(InputError, match=r"aten.add.Tensor has a rule already"):  # by its tag
        autotp.register_rule("aten::add.Tensor", "...,...->...")


@pytest.mark.parametrize(
    ("op", "rule", "options", "told"),
    [
        ("autotp_tests::nothing", "a->a", {}, "no operator that torch knows"),
        ("nothing", "a->a", {}, "no operator that torch knows"),
        (torch.add, "a,a->a", {}, "no operator that torch knows"),
        (fill, "a->a", {}, "writes to its operands"),
        (size, "a->a", {}, "returns something other than tensors"),
        (project, 3, {}, "is int; give an einsum string or a function"),
        (project, "...k,kn,n", {}, "no single '->'"),
        (project, "...k,kn->...n", {}, "has 2 terms for its operands, should be 3: one for each of x, w, bias"),
        (project, "...k,kn,n->...n,n", {}, "has 2 terms for its results, should be 1"),
        (project, "...k,k1,n->...n", {}, "the term 'k1'"),
        (project, "...k,kk,k->...k", {}, "a letter twice in 'kk'"),
        (project, "...k,kn,n->...nm", {}, "has m in its results alone"),
        (project, "k,kn,n->...n", {}, "`...` in its results alone"),
        (project, "...k,kn,n->...n", {"linear": ["y"]}, "names 'y' in linear or addends; its tensors are x, w, bias"),
        (project, "...k,kn,n->...n", {"addends": "b"}, "names 'b'"),
        (project, lambda op: Rule(), {"linear": ["x"]}, "belong to an einsum string"),
    ],
)
def test_what_cannot_be_a_rule_is_refused(op, rule, options, told):
    before = dict(RULES)
    with pytest.raises(InputError, match=told):
        autotp.register_rule(op, rule, **options)
    assert before == RULES


def test_terms_that_do_not_fit_a_call_are_named():
    with registered(rule="sk,kn,n->sn"), pytest.raises(RuleError, match=r"the term 'sk' for a tensor of 3 dimensions"):
        autotp.verify(Projected(), 2, example())


def test_a_rule_that_gives_something_else_is_refused():
    with registered(rule=lambda op: "sk->s"), pytest.raises(RuleError, match="gave str"):
        autotp.verify(Projected(), 2, example())


# proof


def test_a_proof_says_what_was_proved():
    with registered():
        proof = autotp.prove_rule(project, f(8, 1, 6), f(6, 4), f(4), tp=3)
        assert proof.tp == 3 and proof.gradients and proof.choices > 10
        assert str(proof).startswith("autotp_tests.project abk,kn,n->abn: ") and "forward and backward" in str(proof)
        assert proof.missed == ("b",) and str(proof).endswith("not exercised: b")  # of length 1
        assert autotp.prove_rule(project, f(8, 6), f(6, 4), f(4), tp=3).missed == ()


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"rule": "...k,kn,n->...n"}, r"split along k, which is summed over, over 2 ranks, result 0 is wrong"),
        ({**PROJECT, "addends": []}, r"split along k, which is summed over.*result 0 is wrong"),
        ({**PROJECT, "linear": ["x"]}, r"given summands of x, over 2 ranks, result 0 is wrong(.|\n)*correct `linear`"),
        ({"rule": "...k,nk,n->...n"}, r"split along ."),
        ({"rule": "..._,__,n->...n"}, r"split along n, over 2 ranks, it fails"),
    ],
    ids=["no addend", "no addend, linear", "linear in one", "transposed", "a dimension left out"],
)
def test_a_wrong_rule_is_refused(rule, told):
    with registered(**rule), pytest.raises(RuleError, match=told) as caught:
        autotp.prove_rule(project, f(4, 6), f(6, 6), f(6))
    assert "autotp_tests.project(float64[4, 6], float64[6, 6], float64[6])" in str(caught.value)


def test_a_wrong_backward_is_refused(monkeypatch):
    def half(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, grad.sum(0) / x.shape[0]  # a mean over the rows that it sees

    with registered():
        autotp.prove_rule(project, f(4, 6), f(6, 5), f(5))
        monkeypatch.setattr(project, "_backward_fn", half)
        with pytest.raises(RuleError, match=r"split along a.*the gradient of bias is wrong"):
            autotp.prove_rule(project, f(4, 6), f(6, 5), f(5))


def test_an_operator_that_refuses_empty_parts_says_so(monkeypatch):
    own = project._backward_fn

    def fussy(ctx: Any, grad: torch.Tensor) -> Any:
        assert all(t.numel() for t in ctx.saved_tensors), "no elements"
        return own(ctx, grad)  # type: ignore[misc]

    monkeypatch.setattr(project, "_backward_fn", fussy)
    with registered(), pytest.raises(RuleError, match=r"it fails: no elements(.|\n)*say empty=False"):
        autotp.prove_rule(project, f(4, 6), f(6, 5), tp=3)
    with registered(project, **PROJECT, empty=False):
        autotp.prove_rule(project, f(4, 6), f(6, 5), tp=3)


def test_other_dtypes_are_compared_as_exactly_as_they_can_be():
    with registered():
        whole = [torch.randint(-2, 3, s).bfloat16() for s in ((4, 6), (6, 5), (5,))]
        assert autotp.prove_rule(project, *whole).gradients
        assert autotp.prove_rule(project, *(t.float() for t in whole)).gradients
        with registered(rule="...k,kn,n->...n", replace=True), pytest.raises(RuleError, match="result 0 is wrong"):
            autotp.prove_rule(project, *whole)


@pytest.mark.parametrize(
    ("op", "args", "told"),
    [
        (turn, (f(4),), "autotp_tests.turn has no rule to prove"),
        (project, (), "got no tensor"),
        (project, (f(4, 6), f(5, 5)), "does not run"),
        ("aten::eq", (f(4), f(4)), "has the overloads aten.eq.Tensor, aten.eq.Scalar: name one"),
        ("aten::nothing", (f(4),), "no operator that torch knows"),
    ],
)
def test_what_cannot_be_proved_is_refused(op, args, told):
    with registered(), pytest.raises(InputError, match=told):
        autotp.prove_rule(op, *args)


def test_a_missing_fake_kernel_is_named():
    with registered(faceless, rule="...->..."), pytest.raises(InputError, match="register_fake gives it their shapes"):
        autotp.prove_rule(faceless, f(4))


def test_one_rank_proves_nothing():
    with registered(), pytest.raises(InputError, match="tp=2 or more"):
        autotp.prove_rule(project, f(4, 6), f(6, 5), tp=1)


def test_an_operator_that_is_tagged_pointwise_has_a_rule():
    assert autotp.prove_rule("autotp_tests::halve", f(4, 6)).rule == "ab->ab"


def test_operators_of_torch_can_be_proved():
    assert autotp.prove_rule("aten::mm", f(4, 6), f(6, 5)).rule == "mk,kn->mn"
    assert autotp.prove_rule(aten.add.Tensor, f(4, 6), f(6)).rule == "ab,b->ab"
