"""`autotp explain`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import autotp
from autotp.errors import InputError
from autotp.text import near

from .command import FINE
from .options import DegreeOptions, ModelOptions, ModelOrPlan, SteeringOptions
from .plan import loaded, saved
from .screen import Screen

if TYPE_CHECKING:
    from autotp.plans.plan import Parameter


def explain(
    model: ModelOrPlan,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a parameter.", show_default=False)],
    sizes: ModelOptions,
    degree: DegreeOptions,
    steering: SteeringOptions,
    screen: Screen,
) -> int:
    """Say why a parameter lies as it does.

    The alternatives with their cost, what binds, and what would change the choice.
    """
    plan = saved(model, sizes, degree, steering)
    if plan is not None:
        record = recorded(plan, name)
        screen.result(_table(record), lambda: record)
        screen.say(f"A saved plan does not hold what else was possible: autotp explain MODEL {name} says that.")
        return FINE
    source = loaded(model, sizes, steering, screen)
    with screen.working(f"planning {type(source.model).__name__}"):
        result = autotp.plan(source.model, example_inputs=source.inputs, **degree.arguments(), **steering.arguments())
        explanation = result.explain(name)
    from autotp.plans.show.document import over  # noqa: PLC0415  it needs torch

    screen.say(f"{result.model} over {over(result)} ({result.cluster}, {result.objective}), priced for {source.sizes}")
    screen.result(explanation, lambda: {"tp": result.tp, result.batch.name: result.batch.size, **asdict(explanation)})
    return FINE


def recorded(plan: autotp.Plan, name: str) -> dict[str, Any]:
    """What a plan says of a parameter by itself, without the problem that it was solved from.

    Args:
        plan: a saved one. name: of a parameter.
    """
    parameter = next((p for p in plan.parameters if name in (p.name, *p.aliases)), None)
    if parameter is None:
        raise InputError(f"the plan has no parameter {name!r}. Names are like {near(name, plan.placements)}.")
    blocks = [b for b in plan.blocks if parameter.name in b.parameters]
    return {
        "parameter": parameter.name,
        "aliases": list(parameter.aliases),
        "tp": plan.tp,
        plan.batch.name: plan.batch.size,
        "layout": str(parameter.layout),
        "role": parameter.role,
        "shape": list(parameter.shape),
        "local": list(parameter.local),
        "equals": sum(p.first == parameter.first for p in plan.parameters),
        "reason": parameter.reason,
        "blocks": [f"{b.kind} {b.module}: {b.detail}" for b in blocks],
        "limits": [b.limit for b in blocks if b.limit],
        "collectives": _collectives(plan, parameter),
    }


def _collectives(plan: autotp.Plan, parameter: Parameter) -> list[dict[str, Any]]:
    """The collectives of the parameter itself, and of the module that holds it."""
    module = parameter.name.rpartition(".")[0]
    return [
        {"name": c.name, "change": c.change, "of": c.source, "forward": c.forward, "backward": c.backward}
        for c in plan.collectives
        if c.source in (parameter.name, module)
    ]


def _table(record: dict[str, Any]) -> RenderableType:
    """What is recorded, for people."""
    shape, local = (" x ".join(map(str, record[k])) or "scalar" for k in ("shape", "local"))
    equals = f" and its equals, {record['equals']} in all" if record["equals"] > 1 else ""
    rows = [("lies", f"{record['layout']}, {record['role']}"), ("shape", f"{shape}; on a rank {local}")]
    rows += [("tied to", name) for name in record["aliases"]]
    rows += [("in", block) for block in record["blocks"]]
    rows += [("limit", limit) for limit in record["limits"]]
    rows += [("reason", record["reason"])] if record["reason"] else []
    for c in record["collectives"]:
        ways = [f"{c[way].replace('_', '-')} {way}" for way in ("forward", "backward") if c[way]]
        rows.append(("sends", f"{', '.join(ways)} ({c['change']}, {c['of']})"))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for row in rows:
        table.add_row(Text(f"  {row[0]}"), Text(row[1]))
    beside = record.get("cp", record.get("dp"))
    ranks = str(record["tp"]) if beside == 1 else f"{beside} x {record['tp']}"
    return Group(Text(f"{record['parameter']}{equals}, over {ranks} ranks", style="bold"), table)
