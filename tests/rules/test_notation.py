"""What the notation of the table says of a call: which dimensions are loops, which alternative fits, what is linear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autotp.errors import RuleError
from autotp.ir.op import Carry, Op
from autotp.proof.case import Case, program
from autotp.rules import einsum, loops
from autotp.rules.notation import attempt, notation
from tests.rules.cases import aten, case, f, flags, ints


def op_of(call: Case) -> Op:
    return program(call, lambda op: None).op


def shown(call: Case, text: str, **fields: Any) -> str:
    """The loops that a notation finds in a call, as docs and errors show them."""
    op = op_of(call)
    return notation(op, einsum(op, text, **fields))


SOFTMAX = case(aten.softmax.int, f(4, 6, 5), 1)
SUM = case(aten.sum.dim_IntList, f(4, 6, 5), [0, -1])


@pytest.mark.parametrize(
    ("call", "text", "loops"),
    [
        (case(aten.relu, f(4, 6)), "...->...", "ab->ab"),
        (case(aten.relu, f(4, 6)), "*->*", "__->__"),
        (case(aten.add.Tensor, f(4, 1), f(6)), "...->...", "a_,b->ab"),  # one term for all; of size 1 is no loop
        (SOFTMAX, "...[_]->...[_]", "a_b->a_b"),
        (SUM, "...->...[]", "abc->b"),
        (replace(SUM, args=(f(4, 6, 5), [0, -1], True)), "...->...[]", "abc->_b_"),
        (case(aten.sum.default, f(4, 6)), "...[_]->...[]", "__->"),  # without `dim`, all dimensions
        (case(aten.stack, [f(4, 6), f(4, 6)], 1), "...[]->...[_]", "ab,ab->a_b"),
        (case(aten.glu, f(4, 12), 1), "...[(2a)]->...[a]", "b(2 a)->ba"),
        (case(aten.mm, f(4, 6), f(6, 5)), "k,k-> | mk,kn->mn", "mk,kn->mn"),  # the first alternative that fits
        (case(aten.addmm, f(5), f(4, 6), f(6, 5)), "m?n?,mk,kn->mn", "n,mk,kn->mn"),
        (case(aten.prelu, f(4, 6), f(1)), "...,1->... | bc...,c->bc...", "ab,_->ab"),
        (case(aten.prelu, f(4, 6), f(6)), "...,1->... | bc...,c->bc...", "bc,c->bc"),
        (case(aten.linear, f(4, 6), f(5, 6)), "...k,nk,n->...n", "ak,nk->an"),  # an absent bias takes its term along
        (case(aten.lstm_cell, f(6, 3), [f(6, 4)] * 2, f(16, 3), f(16, 4)), "b_,b_;bn,(4n)_,(4n)_,,->bn",
         "b_,b_,bn,(4 n)_,(4 n)_->bn,bn"),
    ],
)  # fmt: skip
def test_a_notation_says_the_loops_of_a_call(call, text, loops):
    assert shown(call, text) == loops


def test_a_dimension_of_several_loops_has_the_length_that_is_left():
    attention = case(
        aten.scaled_dot_product_attention, f(2, 6, 4, 8), f(2, 3, 5, 8), f(2, 3, 5, 8), enable_gqa=True
    )  # fmt: skip
    (heads,) = einsum(op_of(attention), "_(h_)__,_h__,_h__->_(h_)__").factors
    assert heads.size == 3 and heads.ins == (Carry(1, unit=2), Carry(1), Carry(1))
    conv = op_of(case(aten.conv1d, f(2, 6, 8), f(4, 3, 3), None, [1], [0], [1], 2))
    places = {x.label: x.ins for x in einsum(conv, "b(gi)_,(go)i_,(go)->b(go)_", sizes={"g": "groups"}).factors}
    assert places["g"] == (Carry(1, unit=3), Carry(0, unit=2)) and places["o"] == (None, Carry(0, repeat=2))
    # Six channels are no multiple of four: there is no such loop.
    assert not loops(conv, [[None, ("a", 4), None], [None] * 3], [[None] * 3]).factors


def test_lengths_that_differ_are_no_loop_where_a_rule_is_strict():
    shorter = case(aten.gather, f(4, 6), 1, ints(6, 1, 6))
    assert shown(shorter, "...[_],...->...", strict=True) == "__,_a->_a"
    written = case(aten.scatter.src, f(4, 6), 1, ints(6, 1, 3), f(1, 3))
    assert shown(written, "...[_]->...[_]", strict=True) == "__,__,__->__"
    assert shown(case(aten.gather, f(4, 6), 1, ints(6, 4, 6)), "...[_],...->...", strict=True) == "a_,ab->ab"


@pytest.mark.parametrize(
    ("call", "linear", "sets"),
    [
        (case(aten.add.Tensor, f(4), f(4)), "self + other", ({0, 1},)),
        (case(aten.add.Tensor, f(4), 2.0), "self + other", ()),  # a number would be added on every rank
        (case(aten.add.Tensor, f(4), 0), "self + other", ()),
        (case(aten.add.Tensor, f(4), 0), "self + other=0", ({0},)),
        (case(aten.add.Tensor, f(4), 2.0), "self + other=0", ()),
        (case(aten.mul.Tensor, f(4), f(4)), "self or other", ({0}, {1})),
        (case(aten.mul.Tensor, f(4), 2.0), "self or other", ({0},)),
        (case(aten.masked_fill.Scalar, f(4), flags(4), 0), "self + value=0", ({0},)),
        (case(aten.masked_fill.Scalar, f(4), flags(4), 1), "self + value=0", ()),
    ],
)
def test_a_number_is_a_summand_only_where_it_is_nothing(call, linear, sets):
    assert einsum(op_of(call), "...->...", linear=linear).linear == tuple(map(frozenset, sets))


def test_a_cast_that_loses_digits_is_not_linear():
    down = op_of(case(aten.to.dtype, f(4), torch.float32))
    up = op_of(case(aten.to.dtype, f(4).float(), torch.float64))
    assert not einsum(down, "...->...", linear="self", exact=True).linear
    assert einsum(up, "...->...", linear="self", exact=True).linear


def test_what_fits_no_call_is_refused_by_its_term():
    op = op_of(case(aten.mm, f(4, 6), f(6, 5)))
    assert attempt(op, "bmk,bkn->bmn") is None
    with pytest.raises(RuleError, match=r"the term 'bmk' for a tensor of 2 dimensions, \['4', '6'\]"):
        einsum(op, "bmk,bkn->bmn")
    # A result is no longer than what it is made of: its first dimension would be a loop of no operand.
    assert attempt(op_of(case(aten.sum.default, f(4))), "->...") is None
    assert attempt(op_of(case(aten.unsqueeze, f(4), 0)), "...->...") is None
