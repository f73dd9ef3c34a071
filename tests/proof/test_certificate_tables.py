"""The certificate's tables of operators: each is spelled as what it is, and is linear where the table says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autotp import compat
from autotp.ir.op import aten
from autotp.ir.program import Decision
from autotp.proof.case import Case, RuleProgram, choices, program
from autotp.proof.certificate import RefusedError, Typing, checking
from autotp.proof.rule import decided
from autotp.proof.spelling import (
    ADAPTED_FUNCTIONS,
    EQUAL_FUNCTIONS,
    LINEAR,
    QUOTIENTS,
    SUMS,
    TYPED_SUMS,
    blank,
    linear_slots,
    spelled,
)
from tests.rules.cases import CASES

spmd = pytest.importorskip("spmd_types")
rulecheck = pytest.importorskip("spmd_types.rulecheck")


def tensors(value: Any) -> list[Tensor]:
    return [x for x in compat.tree_leaves(value) if isinstance(x, Tensor)]


def with_tensors(case: Case, values: Iterator[Tensor]) -> Any:
    args, kwargs = compat.tree_map(lambda x: next(values) if isinstance(x, Tensor) else x, (case.args, case.kwargs))
    return case.target(*args, **kwargs)


def packet(case: Case) -> Any:
    return getattr(case.target, "overloadpacket", None)


def close(found: Any, wanted: Any) -> bool:
    pairs = zip(tensors(found), tensors(wanted), strict=True)
    return all(x.dtype == y.dtype and torch.allclose(x, y, equal_nan=True) for x, y in pairs)


def test_an_operator_is_spelled_as_what_it_is():
    known = {*EQUAL_FUNCTIONS, *ADAPTED_FUNCTIONS, *QUOTIENTS, *SUMS}
    seen, wrong = set(), []
    for case in CASES:
        function, sums = spelled(case.target, case.kwargs) if packet(case) in known else (None, False)
        if function is None:
            continue
        seen.add(packet(case))
        first = [lambda x: x] if sums else []
        found, wanted = function(*first, *case.args, **case.kwargs), case.target(*case.args, **case.kwargs)
        wrong += [] if not case.values or close(found, wanted) else [str(case)]
    assert not wrong and len(seen) > 40


def test_what_is_added_to_a_typed_product_is_added_once():
    seen = set()
    for case in (c for c in CASES if packet(c) in TYPED_SUMS):
        if linear_slots(case.target, case.args, case.kwargs):
            continue  # what does not accumulate
        with checking(2):
            for x in tensors((case.args, case.kwargs)):
                spmd.assert_type(x, {"tp": spmd.R})
            function: Any = spelled(case.target, case.kwargs)[0]
            found = function(lambda x: x, *case.args, **case.kwargs)
        assert torch.allclose(found, case.target(*case.args, **case.kwargs)), str(case)
        seen.add(packet(case))
    assert {aten.conv2d, aten.bilinear, aten.scatter_add, aten.index_add, aten.index_put} <= seen


def test_rows_are_not_added_on_every_rank_to_what_each_has_whole():
    function: Any = spelled(aten.index_add.default, {})[0]
    at, whole, rows = torch.arange(3), torch.zeros(4, 5), torch.ones(3, 5)
    with checking(2):
        for x, kind in ((at, spmd.R), (whole, spmd.R), (rows, spmd.V)):
            spmd.assert_type(x, {"tp": kind})
        with pytest.raises(spmd.SpmdTypeError, match="Partial"):
            function(lambda x: spmd.assert_type(x, {"tp": spmd.P}), whole, 0, at, rows)


def test_linear_operators_are():
    seen, wrong = set(), []
    for case in CASES:
        groups = linear_slots(case.target, case.args, case.kwargs)
        operands = tensors((case.args, case.kwargs))
        assert groups is None or groups, f"{case} has no operand of the name in the table"
        for group in groups or ():
            if case.values and all(operands[i].dtype == torch.float64 for i in group):
                seen.add(packet(case))
                wrong += [] if additive(case, operands, group) else [f"{case} in {group}"]
    assert not wrong and len(seen) > 15


def kernel(case: Case, linear: Any) -> type:
    """An operator as a function with the type that the certificate gives it, in the checker's own form."""
    ndim = case.target(*case.args, **case.kwargs).ndim

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Any = None, z: Any = None) -> Any:  # type: ignore[override]
            return with_tensors(case, iter([v for v in (x, y, z) if v is not None]))

        @staticmethod
        def spmd_typecheck(*, x: Any, y: Any = None, z: Any = None) -> Any:
            given = [v for v in (x, y, z) if v is not None]
            equation = f"{','.join(blank(v.ndim) for v in given)}->{'_' * ndim}"
            return spmd.rules.einsum(equation, *given, linear_in=linear)

    return Kernel


def test_the_checkers_own_check_of_rules_finds_the_table_right(monkeypatch):
    """Its summands are drawn by a generator that torch has for CUDA alone, or by a plain one where there is none."""
    monkeypatch.delattr("torch.func._random", raising=False)
    monkeypatch.setitem(sys.modules, "torch.func._random", None)
    seen, pending = set(), 0
    for case in CASES:
        groups = linear_slots(case.target, case.args, case.kwargs)
        operands = tensors((case.args, case.kwargs))
        double = all(x.dtype == torch.float64 for x in operands if x.is_floating_point())
        single = isinstance(case.target(*case.args, **case.kwargs), Tensor)
        if groups is not None and case.values and double and single and len(operands) <= 3:
            report = rulecheck.rulecheck(kernel(case, groups), operands)
            seen.add(packet(case))
            pending += sum(spmd.P in p.values() for each in report.checked for p in each.values())
    assert len(seen) > 40 and pending > 60
    gelu = Case(torch.ops.aten.gelu.default, (torch.randn(4, 3),))
    with pytest.raises(rulecheck.RuleCheckError, match="differs from the reference"):
        rulecheck.rulecheck(kernel(gelu, ((0,),)), tensors(gelu.args))


class AsProduced(Typing):
    """A program of one operator: what it gives may be summands, or slices."""

    def _outputs(self, node: Any, values: Any) -> None:
        pass


def accepted(p: RuleProgram, decision: Decision) -> str:
    """What the checker says against a choice for the one operator of a program; "" where it says nothing."""
    try:
        AsProduced(p.planned, decided(p, decision)).run()
    except RefusedError as error:
        return f"{p.case}: {', '.join(map(str, decision.ins))}: {error}"
    return ""


def with_summands(case: Case, tp: int = 2) -> Iterator[tuple[RuleProgram, Decision]]:
    """The choices of the rule table that take summands, by plain layouts."""
    p = program(case)
    p.planned.tp = tp
    for decision, _ in choices(p, tp):
        if any(x.partial for x in decision.ins):
            yield p, decision


def test_what_the_rules_give_summands_the_checker_does_too():
    """Not of `_scaled_mm`, whose second operand is a transposed one: a leaf of these programs has no strides."""
    chosen = [each for case in CASES if packet(case) is not aten._scaled_mm for each in with_summands(case)]
    assert len(chosen) > 400
    assert [*filter(None, (accepted(*each) for each in chosen))] == []


def test_an_operator_that_the_table_lacks_takes_no_summands(monkeypatch):
    case = next(c for c in CASES if packet(c) is aten.gather)
    monkeypatch.delitem(LINEAR, "aten.gather")
    said = [accepted(*each) for each in with_summands(case)]
    assert said and all("Partial type" in each for each in said)


def additive(case: Case, operands: list[Tensor], group: tuple[int, ...]) -> bool:
    """Return whether the result for a sum of operands is the sum of the results."""
    other = [torch.randn_like(x) if i in group else x for i, x in enumerate(operands)]
    both = [x + y if i in group else x for i, (x, y) in enumerate(zip(operands, other, strict=True))]
    found = [tensors(with_tensors(case, iter(x))) for x in (operands, other, both)]
    return all(torch.allclose(a + b, c) for a, b, c in zip(*found, strict=True))


def test_what_rounds_is_not_linear():
    assert spelled(aten.div.Tensor_mode, {"rounding_mode": "floor"}) == (None, False)
    assert spelled(aten.sum.default, {"dtype": torch.int64}) == (None, False)
    assert linear_slots(aten.to.dtype, (torch.zeros(2), torch.int64), {}) is None
    assert linear_slots(aten.masked_fill.Scalar, (torch.zeros(2), torch.ones(2) > 0, 1.0), {}) is None
    assert linear_slots(aten.pad.default, (torch.zeros(2), [1, 1], "constant", 2.0), {}) is None
    unknown = torch.empty((), device="meta")
    assert linear_slots(aten.masked_fill.Tensor, (torch.zeros(2), torch.ones(2) > 0, unknown), {}) == ((0, 2),)
    assert linear_slots(aten.copy.default, (torch.zeros(2, dtype=torch.int64), torch.zeros(2)), {}) is None
