"""Both tiers of the checker over one program."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

from autotp.ir.graph import short_name
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path
from autotp.plans.export.annotations import spmd_types

from .dimensions import Dimensions
from .local import RefusedError, Typing
from .report import Certificate, Refusal


def certificate(planned: Planned, sharded: Sharded) -> Certificate:
    """Have spmd_types check the program of the ranks.

    Args:
        planned: the decided graph. sharded: its program for `planned.tp` ranks.

    Raises:
        InputError: spmd_types is not installed.
    """
    spmd_types()
    checker = f"spmd_types {version('spmd_types')}"
    if planned.tp == 1:
        return Certificate(1, checker)  # the checker says nothing of one rank, which has everything
    typing = Typing(planned, sharded)
    dimensions = Dimensions(planned, sharded, typing.values)
    refusal = None
    try:
        typing.run()
        dimensions.run()
    except RefusedError as error:
        refusal = _refusal(sharded, error)
    unsaid = tuple(sorted(dimensions.unsaid))
    return Certificate(
        planned.tp, checker, **asdict(typing.count), dimensions=dimensions.checked, unsaid=unsaid, refusal=refusal
    )


def _refusal(sharded: Sharded, error: RefusedError) -> Refusal:
    node = error.node
    origin = sharded.origin[node][0] if node in sharded.origin else node
    path = module_path(origin)
    op = short_name(node.target) if node.op == "call_function" else node.op
    return Refusal(error.tier, node.name, op, path[-1] if path else "", error.detail)
