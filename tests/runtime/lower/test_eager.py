"""Eager programs: functions in the place of overloads give the same numbers, and parts stand where users put them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autotp.comm import conversions
from autotp.ir.specs import INVARIANT, PartialSpec
from autotp.runtime.lower import eager
from tests.rules.cases import CASES

CALLS = [case for case in CASES if case.target in eager.FUNCTIONS and case.values]


def test_every_function_has_a_case():
    assert {case.target for case in CALLS} == set(eager.FUNCTIONS)


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_a_function_gives_what_its_overload_gives(case):
    function = eager.FUNCTIONS[case.target]
    found, wanted = function(*case.args, **case.kwargs), case.target(*case.args, **case.kwargs)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, list | tuple) else [(found, wanted)]
    for a, b in pairs:
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def call(target: Any, first: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = first
    return graph.call_function(target, (x, 2))


def test_only_what_is_known_to_do_the_same_is_called():
    mul = torch.ops.aten.mul.Tensor
    assert eager.quick(call(mul, torch.ones(2))) is torch.mul
    assert eager.quick(call(mul, 3)) is mul  # a number in a tensor's place
    assert eager.quick(call(torch.ops.aten.hardshrink.default, torch.ones(2))) is torch.ops.aten.hardshrink.default


def converted(target: Any, x: torch.Tensor, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = x
    arguments: Any = (value, PartialSpec("sum"), INVARIANT)
    return graph.call_function(target, arguments, {"rank": 0, "tp": 2, "group": "0", **kwargs})


def test_only_a_plain_sum_of_floating_numbers_is_called_at_once():
    x = torch.ones(2)
    assert eager.summed(converted(conversions.f_star, x)) is not None
    assert eager.summed(converted(conversions.all_reduce, x.bfloat16())) is not None
    assert eager.summed(converted(conversions.f_star, x > 0)) is None  # sent as other numbers
    assert eager.summed(converted(conversions.f_star, x, wire=torch.float8_e4m3fn)) is None
    assert eager.summed(converted(conversions.f_star, x, tp=1)) is None
    for other in (conversions.group_p, conversions.ungroup_i, conversions.gather, torch.ops.aten.mul.Tensor):
        assert eager.summed(converted(other, x)) is None


class Wrapper(nn.Module):
    """As libraries wrap layers: the names of what is wrapped are found through it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_parts_are_found_through_what_users_put_there():
    tree = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    other = nn.Linear(2, 2)
    assert eager.submodule(tree, ["0", "0"], other) is tree[0][0]  # type: ignore[index]
    inner: Any = tree[0][0]  # type: ignore[index]
    tree[0] = Wrapper(tree[0])
    assert eager.submodule(tree, ["0", "0"], other) is inner
    assert eager.submodule(tree, ["0", "missing"], other) is other
