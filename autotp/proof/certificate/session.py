"""The checker, switched on for the ranks of one axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotp.plans.export.annotations import AXIS, spmd_types


@contextmanager
def checking(tp: int, local: bool) -> Iterator[None]:
    """Within this context every call of torch is typed over an axis of `tp` ranks, for which no processes are needed.

    Args:
        tp: number of ranks. local: whether V is all that is known of a value that differs; otherwise its dimension is.
    """
    spmd, checker = spmd_types(), spmd_types("checker")
    mesh = {AXIS: spmd.MeshAxis.of(tp, 1)}
    with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="strict", local=local):
        yield


def words(error: Exception, tp: int) -> str:
    """The first paragraph of what is wrong: the others say where in the checker."""
    text = str(error).replace(f"MeshAxis({tp}:1)", AXIS).replace(f"'{AXIS}'", AXIS).strip()
    return text.split("\n\n")[0] or type(error).__name__
