"""One layer of a plan as a line: its weights with their roles, and the collectives between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from .lines import wrapped
from .rows import last

if TYPE_CHECKING:
    from autotp.plans.estimates import Timed
    from autotp.plans.plan import Plan

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
ROLES = {
    "column-parallel": "cols", "row-parallel": "rows", "vocabulary-parallel": "vocabulary",
    "expert-parallel": "experts", "elementwise": "split", "whole": "whole",
}  # fmt: skip
ATTENTION = ("scaled_dot_product_attention", "dealt_attention")
SMALL = 0.01  # of the largest value that the layer converts: smaller ones are not drawn
LINES = 4


def short(primitive: str | None) -> str:
    """`AG` of `all_gather`, nothing where nothing is sent."""
    return SHORT.get(primitive, primitive.replace("_", "-")) if primitive else ""


def ways(forward: str | None, backward: str | None, trains: bool) -> str:
    """What is sent forward and, in training, backward: `AG/RS`."""
    return f"{short(forward)}/{short(backward)}" if trains else short(forward)


def flow(plan: Plan, width: int) -> Iterator[Text]:
    """One of the repeated blocks, or the model where none repeats, in the order of the forward."""
    if plan.layer is None or plan.tp == 1:
        return
    words = _words(plan, plan.layer.steps)
    if not any("-->" in word for word in words):
        return
    lines = list(wrapped(" ".join(words), width, "layer   ", " " * 8))
    yield from lines[:LINES]
    if len(lines) > LINES:
        yield Text(" " * 8 + "...")


def _words(plan: Plan, steps: tuple[Timed, ...]) -> list[str]:
    """Weights of the same role side by side, `--AG/RS-->` where something is sent between."""
    roles = _roles(plan)
    least = SMALL * max((s.bytes for s in steps if s.forward_sends or s.backward_sends), default=0.0)
    words: list[tuple[str, str]] = []  # a name and its role; a role that is empty stands alone
    for step in steps:
        if step.converts:
            if (step.forward_sends or step.backward_sends) and step.bytes >= least:
                arrow = ways(step.forward_sends, step.backward_sends, plan.objective == "training")
                words.append((f"--{arrow}-->", ""))
        elif any(name in step.name for name in ATTENTION):
            words.append(("attention", ""))
        elif step.module in roles and (last(step.module), roles[step.module]) not in words[-4:]:
            words.append((last(step.module), roles[step.module]))
    return [*_joined(words)]


def _joined(words: list[tuple[str, str]]) -> Iterator[str]:
    """The role after the last of those that share it."""
    for i, (name, role) in enumerate(words):
        following = words[i + 1][1] if i + 1 < len(words) else ""
        yield f"{name}[{role}]" if role and role != following else name


def _roles(plan: Plan) -> dict[str, str]:
    """Path of a module -> how its largest weight lies."""
    largest: dict[str, tuple[int, str]] = {}
    for p in plan.parameters:
        size = math.prod(p.shape)
        for name in (p.name, *p.aliases):
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, (0, "")), (size, ROLES.get(p.role, p.role)))
    return {module: role for module, (_, role) in largest.items()}
