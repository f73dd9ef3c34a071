"""Matrices as a whole: exponentials, factors, inverses and solutions of each, and triangles."""

from __future__ import annotations

from autotp.ir.op import Op, Rule, aten

from .core import einsum, loops, rule


@rule(aten.matrix_exp, aten.linalg_matrix_exp, aten.linalg_inv.default, aten.linalg_inv_ex.default)
@rule(aten.linalg_cholesky.default, aten.linalg_cholesky_ex.default, aten.linalg_qr.default)
@rule(aten.linalg_det.default, aten.linalg_slogdet.default, aten.linalg_householder_product.default)
def matrices(op: Op) -> Rule:
    """Rule of many matrices, each on its own."""
    batch = len(op.ins[0]) - 2
    terms = [f"...{'_' * (len(shape) - batch)}" for shape in (*op.ins, *op.outs)]
    return einsum(op, f"{','.join(terms[: len(op.ins)])}->{','.join(terms[len(op.ins) :])}", empty=False)


@rule(aten.linalg_solve.default)
def solved(op: Op) -> Rule:
    """Rule of many systems: each is on its own, and so is each right side of one; linear in these."""
    if len(op.ins[0]) != len(op.ins[1]):
        return Rule()
    sides = "...__,..._n->..._n" if op.args["left"] else "...__,...n_->...n_"
    return einsum(op, sides, linear=(frozenset({1}),), empty=False)


@rule(aten.tril, aten.triu)
def triangle(op: Op) -> Rule:
    """Rows and columns stay whole; linear."""
    n = len(op.ins[0])
    return loops(op, [list(range(n))], [list(range(n))], whole=frozenset({n - 1, n - 2}), linear=(frozenset({0}),))
