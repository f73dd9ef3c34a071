"""Every operator rule computes what the operator computes, however it is split, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotp.errors import RuleError
from autotp.ir.op import Carry, Factor, Op, Rule
from autotp.proof.case import Case, program, required
from autotp.proof.rule import prove, prove_program
from autotp.rules.core import RULES, function_of, loops, rule_of
from tests.rules.cases import CASES, REFUSED, aten, case, f, ints, program_of

RANKS = (2, 3)
BY_FUNCTION: dict[str, list[Case]] = defaultdict(list)
for _case in [*CASES, *REFUSED]:
    _function = function_of(_case.target)
    assert _function is not None, _case
    BY_FUNCTION[_function.__name__] += [_case] if _case in CASES else []


@pytest.mark.parametrize("name", sorted(BY_FUNCTION))
def test_every_choice_of_the_rule_is_right(name):
    for each in BY_FUNCTION[name]:
        call = program_of(each)
        exercised = set[Any]().union(*(prove_program(call, tp) for tp in RANKS))
        missed = required(call) - exercised
        assert not missed, f"{each}: never exercised: {missed}"


def test_every_rule_has_a_case_that_splits_something():
    entered = {function.__name__ for function in RULES.values()}
    split = {n for n, cases in BY_FUNCTION.items() if any((r := program_of(c).rule) and r.factors for c in cases)}
    refused = {n for n, cases in BY_FUNCTION.items() if not cases}
    assert entered - split - refused == {"->*", "*->*", "__,->_", "__,,,->__"}  # by nature


@pytest.mark.skipif(not REFUSED, reason="this torch computes every case")
def test_what_is_left_out_is_refused_by_torch_itself():
    for each in REFUSED:
        with pytest.raises((RuntimeError, NotImplementedError)):
            prove_program(program(each, lambda op: None), 2)


def test_every_operator_in_the_table_has_a_case():
    def packet(target: Any) -> str:
        return ".".join(str(target).split(".")[:2])

    assert not {packet(t) for t in RULES if t != "pointwise"} - {packet(c.target) for c in [*CASES, *REFUSED]}


def test_operators_that_write_into_their_operands_have_no_rule():
    assert [t for t in RULES if not isinstance(t, str) and t._schema.is_mutable] == [aten.detach_.default]


# What must fail. Each takes the operator and gives a rule that is nearly right.


def dims(op: Op) -> list[int]:
    return list(range(len(op.ins[0])))


def all_dims(op: Op) -> Rule:
    """Every dimension of the operand is a loop of its own; the other operands are whole."""
    return loops(op, [dims(op), *[[None] * len(s) for s in op.ins[1:]]], [dims(op)] * len(op.outs))


def linear_in(*slots: int) -> Callable[[Op], Rule]:
    return lambda op: Rule(linear=(frozenset(slots),))


def changed(**fields: Any) -> Callable[[Op], Rule]:
    """The rule of the table but for these fields."""
    return lambda op: replace(rule_of(op) or Rule(), **fields)


def normalised(op: Op) -> Rule:
    return loops(op, [dims(op), dims(op)[-1:], dims(op)[-1:]], [dims(op)])


def along_keys(op: Op) -> Rule:
    return loops(op, [["b", "h", "q", None], ["b", "h", "k", None], ["b", "h", "k", "v"]], [["b", "h", "q", "v"]])


def query_positions(op: Op) -> Rule:
    return loops(op, [[None, None, "q", None], [None] * 4, [None] * 4], [[None, None, "q", None]])


def unscaled(op: Op) -> Rule:
    """The units of the table's rule are forgotten."""
    found = rule_of(op)
    assert found is not None
    bare = [replace(x, ins=tuple(c and Carry(c.dim) for c in x.ins)) for x in found.factors]
    return replace(found, factors=tuple(bare))


def interleaved(op: Op) -> Rule:
    """A key head goes with every n-th query head, where it goes with n in a row."""
    q = Carry(1, repeat=2)
    return Rule((Factor(op.ins[1][1], (q, Carry(1), Carry(1)), (q,)),))


def unrepeated(op: Op) -> Rule:
    """Gate and value are split as one dimension."""
    return Rule((Factor(op.outs[0][-1], (Carry(len(op.ins[0]) - 1, unit=2),), (Carry(len(op.ins[0]) - 1),)),))


def cut_off(op: Op) -> Rule:
    """Right forward, and no gradient."""

    def localise(op: Op, local: Any) -> Any:
        return op.target, (local.emit(aten.detach.default, (local.operands[0],)),), {}

    return replace(rule_of(op) or Rule(), localise=localise)


def doubled(op: Op) -> Rule:
    """Right forward, and twice the gradient."""

    def localise(op: Op, local: Any) -> Any:
        x = local.operands[0]
        twice = local.emit(aten.mul.Tensor, (x, 2))
        return aten.sub.Tensor, (twice, local.emit(aten.detach.default, (x,))), {}

    return replace(rule_of(op) or Rule(), localise=localise)


WRONG: list[tuple[Case, Callable[[Op], Rule], str]] = [
    (case(aten.softmax.int, f(4, 6), 1), all_dims, "result 0 is wrong"),
    (case(aten.cumsum, f(4, 6), 1), all_dims, "result 0 is wrong"),
    (case(aten.sort, f(4, 6)), all_dims, "result 0 is wrong"),
    (case(aten.layer_norm, f(2, 6), [6], f(6), f(6)), normalised, "normalized_shape"),
    (case(aten.rms_norm, f(2, 6), [6]), all_dims, "Given normalized_shape"),
    (case(aten.max_pool1d, f(6, 6), [3], [1], [1]), all_dims, "result 0 is wrong"),
    (case(aten.add.Scalar, f(4), 2), linear_in(0), "result 0 is wrong"),
    (case(aten.add.Tensor, f(4), f(4)), linear_in(0), "result 0 is wrong"),
    (case(aten.mul.Tensor, f(4), f(4)), linear_in(0, 1), "result 0 is wrong"),
    (case(aten.relu, f(4)), linear_in(0), "result 0 is wrong"),
    (case(aten.to.dtype, f(4), torch.int64), linear_in(0), "result 0 is wrong"),
    (case(aten.to.dtype, f(4), torch.float32), linear_in(0), "result 0 is wrong"),  # rounded before it is summed
    (case(aten.linear, f(3, 6), f(4, 6), f(4)), changed(addends=frozenset()), "result 0 is wrong"),
    (case(aten.index_add, f(4, 6), 1, ints(6, 8), f(4, 8)), changed(addends=frozenset()), "result 0 is wrong"),
    (case(aten.mean.dim, f(4, 6), [1]), changed(localise=None), "result 0 is wrong"),
    (case(aten.embedding, f(8, 6), torch.tensor([6, 1, 7, 3, 5])), changed(localise=None), "index out of range"),
    (case(aten.view, f(2, 12), [2, 3, 4]), changed(localise=None), "shape"),
    (case(aten.view, f(2, 12), [2, 4, 3]), unscaled, "expects|shape"),
    (case(aten.expand, f(1, 6), [4, 6]), changed(localise=None), "expanded size"),
    (case(aten.split_with_sizes, f(4, 6), [4, 2], 1), changed(localise=None), "split"),
    (case(aten.glu, f(4, 12)), unrepeated, "result 0 is wrong"),
    (case(aten.repeat_interleave.self_int, f(4, 3), 2, 0, output_size=8), changed(localise=None), "output_size"),
    (case(aten.conv1d, f(2, 6, 8), f(6, 1, 3), None, [1], [0], [1], 6), changed(localise=None), "groups"),
    (case(aten.scaled_dot_product_attention, f(2, 2, 4, 8), f(2, 2, 6, 8), f(2, 2, 6, 8)), along_keys, "wrong"),
    (
        case(aten.scaled_dot_product_attention, f(2, 2, 4, 8), f(2, 2, 4, 8), f(2, 2, 4, 8), is_causal=True),
        query_positions,
        "result 0 is wrong",
    ),
    (
        case(aten.scaled_dot_product_attention, f(2, 8, 4, 8), f(2, 4, 4, 8), f(2, 4, 4, 8), enable_gqa=True),
        interleaved,
        "result 0 is wrong",
    ),
    (case(aten.relu, f(4, 6)), cut_off, "cut off from the gradient"),
    (case(aten.clone, f(4, 6)), doubled, "gradient of self is wrong"),
]


@pytest.mark.parametrize(("wrong", "rule", "told"), WRONG, ids=[f"{c.target}-{i}" for i, (c, _, _) in enumerate(WRONG)])
def test_a_wrong_rule_is_noticed(wrong, rule, told):
    right, other = program(wrong), program(wrong, rule)
    for tp in RANKS:
        prove_program(right, tp)  # as the table has it
    with pytest.raises(RuleError, match=told):
        for tp in RANKS:
            prove_program(other, tp)


def test_only_casts_that_keep_every_digit_are_linear():
    casts = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float64}
    for small, large in casts.items():
        up, down = (program(case(aten.to.dtype, f(4).to(a), b)).rule for a, b in ((small, large), (large, small)))
        assert up and down and up.linear == (frozenset({0}),) and down.linear == ()


def test_a_factor_that_is_never_split_is_noticed():
    def never(op: Op) -> Rule:
        return replace(rule_of(op) or Rule(), factors=(Factor(6, (Carry(0), None), (None,), contracted=False),))

    mv = case(aten.mm, f(6, 4), f(4, 5))
    assert required(program(mv, never)) - prove(mv, 2, never) == {("factor", 0)}


def test_a_rule_for_another_number_of_operands_is_refused(monkeypatch):
    monkeypatch.setitem(RULES, aten.relu.default, lambda op: Rule((Factor(4, (None, None), (None,)),)))
    with pytest.raises(RuleError, match="2 operands and 1 results for a call with 1 and 1"):
        program(case(aten.relu, f(4)))
