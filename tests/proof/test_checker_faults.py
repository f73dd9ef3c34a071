"""Faults of spmd_types 0.3.1 that the certificate works around: a version without is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

spmd = pytest.importorskip("spmd_types")
from spmd_types import rules  # noqa: E402
from spmd_types.checker import typecheck  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]
from spmd_types.types import I, P, R, V  # noqa: E402

aten = torch.ops.aten


def typed(kind: Any, *shape: int, grad: bool = True) -> Tensor:
    """A tensor on the meta device of this type over tp."""
    return spmd.assert_type(torch.empty(shape, device="meta", requires_grad=grad), {"tp": kind})


def kind(x: Any) -> Any:
    """The checker's type over tp."""
    return spmd.get_axis_local_type(x, "tp")


def refused(f: Callable[..., Any], *args: Any, error: type[Exception] = spmd.SpmdTypeError, **kwargs: Any) -> bool:
    """Call it, and return whether it raises this error."""
    try:
        f(*args, **kwargs)
    except error:
        return True
    return False


def test_the_checker_accepts_and_refuses_what_it_did() -> None:
    mesh = {"tp": spmd.MeshAxis.of(2, 1)}
    with spmd.set_current_mesh(mesh), typecheck(local=True):
        # Accepted, and wrong: three functions of its table of linear ones are not linear. For summands 1.5 and 1.5
        # the floor of the half is 0 + 0, and of the sum 1; nansum and nanmean leave out NaN of one summand, and not
        # of the sum.
        assert kind(torch.div(typed(P, 4), 2.0, rounding_mode="floor")) is P
        assert kind(torch.nansum(typed(P, 4))) is P
        assert kind(torch.nanmean(typed(P, 4))) is P

        # Accepted: V becomes P by assertion, whatever made it; and in a linear layer a bias that every rank adds.
        assert kind(spmd.assert_type(nn.functional.gelu(typed(V, 4)), {"tp": P})) is P
        assert kind(nn.functional.linear(typed(V, 4, 2), typed(V, 6, 2), typed(R, 6))) is V

        # An operator may return its operand. Asserting the type of the result then changes that of the operand.
        x = typed(V, 4)
        spmd.assert_type(x.contiguous(), {"tp": P})
        assert kind(x) is P

        # Refused, and right: the table's keys are torch's functions, so the operators below them are not linear in it.
        assert kind(torch.add(typed(P, 4), typed(P, 4))) is P
        assert refused(aten.add.Tensor, typed(P, 4), typed(P, 4))
        # Nor are an index, a cast, `where`, `linear`, a difference or zeros around a value.
        assert refused(lambda: typed(P, 4)[0])
        assert refused(typed(P, 4).to, torch.float64)
        assert refused(torch.where, typed(R, 4, grad=False) > 0, typed(P, 4), typed(P, 4))
        assert refused(nn.functional.linear, typed(P, 4, 2), typed(R, 6, 2))
        assert refused(torch.diff, typed(P, 4))
        assert refused(nn.functional.pad, typed(P, 4), (1, 1))
        # A factory is R, and the operator below it has no type, so that nothing may be done with what it makes.
        assert kind(torch.zeros(4, device="meta") + typed(R, 4)) is R
        assert refused(lambda: aten.zeros.default([4], device="meta") + typed(R, 4))
        # An operand without gradient may be I beside R in an operator of torch, and not in the einsum rule.
        assert kind(typed(I, 4, grad=False) + typed(R, 4)) is R
        assert refused(rules.einsum, "a,a->a", typed(I, 4, grad=False), typed(R, 4))
        # An einsum term without letters, a number, cannot be written; "..." stands for it.
        assert refused(rules.einsum, "a,->a", typed(R, 4), typed(R), error=TypeError)
        assert kind(rules.einsum("a,...->a", typed(R, 4), typed(R))) is R

        # A sum wants P in the rule, and takes V where it runs (next).
        assert refused(rules.all_reduce, typed(V, 4), "tp", dst=R)
