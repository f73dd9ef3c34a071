"""A plan: which parameter lies how, how every operator runs, what it costs. Immutable data without tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from autotp.errors import PlanError
from autotp.ir.layouts import Dealt, Layout
from autotp.ir.serial import plain, read_layout, read_loop
from autotp.plans.show.overview import overview, screen
from autotp.plans.show.report import render

from .estimates import ALONE, Axis, Degree, Layer, Memory, Sublayer, Timed, Totals

if TYPE_CHECKING:
    from autotp.plans.export.styles import Styles

    from .explain import Comparison, Explanation

SCHEMA = 2


@dataclass(frozen=True)
class Decision:
    """How one operator runs: a layout per operand slot and per result, and the split factor with its loop."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    factor: int | None = None
    loop: Dealt | None = None


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: its first name in the model; `aliases` are further names of the same tensor.
        shape: whole shape; `local`: the shape that the fullest rank holds.
        layout: Invariant (whole) or Shard.
        role: "column-parallel", "row-parallel", "vocabulary-parallel", "expert-parallel", "elementwise", or "whole".
        reason: for a whole parameter, the operator and the cause that kept it whole.
        first: name of the equal parameter in the first of the repeated blocks; its own name where there is none.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str
    layout: Layout
    role: str = "whole"
    reason: str | None = None
    aliases: tuple[str, ...] = ()
    first: str = ""


@dataclass(frozen=True)
class Collective:
    """One inserted conversion that communicates, forward or backward.

    Attributes:
        name: f, f_star, g, g_star, ... (`autotp.comm.conversions.KINDS`); `change`: the layouts, such as "S(1) -> R".
        module: path of the module in which it runs; `block`: index of the plan's block, None outside all.
        value: name of the graph's value that is converted; `op`: the operator that made it, or "parameter";
            `source`: path of the module that made it, or the parameter's name.
        forward, backward: the primitive of each direction (`all_reduce`, ...), None where there is none.
        bytes: whole size of the value; `forward_bytes`, `backward_bytes`: what one rank sends.
        first: name of the equal value in the first of the repeated blocks.
    """

    name: str
    change: str
    module: str
    block: int | None
    value: str
    op: str
    source: str
    forward: str | None
    backward: str | None
    bytes: float
    forward_bytes: float
    backward_bytes: float
    first: str


@dataclass(frozen=True)
class Block:
    """A named part of the model, as the patterns found it.

    Attributes:
        kind: "attention", "mlp", "norm", "embedding", "head", "experts", "other".
        module: module path.
        detail: what it is, such as "8 heads, 4 kv heads, 64 wide"; `local`: what one rank has of that.
        parameters: names of its parameters; a tied one is in several blocks.
        first: index of the equal block in the first repeated layer; its own index where there is none.
        limit: what the number of heads forbids at this degree; empty where nothing.
    """

    kind: str
    module: str
    detail: str
    local: str
    parameters: tuple[str, ...]
    first: int
    limit: str = ""


@dataclass(frozen=True)
class Plan:
    """Where every parameter lies and how every operator runs over `tp` ranks. `print` shows the most important,
    `report()` is all of it.

    Attributes:
        model: class name of the model; `digest`: of the captured graph that it was made for.
        tp: number of ranks.
        cluster: name of the cluster that it was priced on; `objective`: "training" and so on.
        parameters, collectives, blocks: what is split, what is sent, what the parts are.
        totals, memory: what it comes to, and what a rank holds.
        decisions: node name of the captured graph -> how it runs.
        notes: what the user should know of the capture.
        degrees: with tp="auto", what every degree that was tried comes to.
        layer: the times of one repeated block, operator by operator; None in a plan saved by an earlier version.
        batch: the data-parallel axis of the mesh beside tp, and what it costs.
        machines: the numbers of the cluster where it is no preset, by field.
        fired: of a running module, what became of each optimisation and of the backend; not saved.
    """

    model: str
    tp: int
    digest: str
    cluster: str
    objective: str
    parameters: tuple[Parameter, ...]
    collectives: tuple[Collective, ...]
    blocks: tuple[Block, ...]
    totals: Totals
    memory: Memory = field(default_factory=Memory)
    decisions: Mapping[str, Decision] = field(repr=False, default_factory=dict)
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    degrees: tuple[Degree, ...] = ()
    layer: Layer | None = None
    batch: Axis = ALONE
    machines: Mapping[str, Any] = field(repr=False, default_factory=dict)
    fired: tuple[str, ...] = field(compare=False, default=())

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Compute and communication of one layer's attention, feed-forward block, and rest, with the share of each."""
        return self.layer.sublayers if self.layer is not None else ()

    @property
    def placements(self) -> dict[str, Layout]:
        """Parameter name -> layout."""
        return {p.name: p.layout for p in self.parameters}

    def running(self, fired: tuple[str, ...]) -> Plan:
        """This plan, with what became of each optimisation when a module was made by it."""
        made = replace(self, fired=fired)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in self.__dataclass_fields__})
        return made

    def explain(self, name: str) -> Explanation:
        """Why a parameter lies as it does: the alternatives with their cost, what binds, and what would change it.

        The model is solved again with the parameter in each place that its operators know; its equals in repeated
        blocks move with it.

        Args:
            name: of the parameter, or another name of the same tensor.

        Raises:
            InputError: there is no such parameter. PlanError: the plan was not made in this process.
        """
        from .explain import explain  # noqa: PLC0415  it needs the planner, which makes plans

        return explain(self, name)

    def compare(self, other: Plan) -> Comparison:
        """How another plan differs: totals, collectives, and the parameters that lie differently.

        Args:
            other: a plan for the same model, or one that shares names with it; loaded ones too.
        """
        from .explain import compare  # noqa: PLC0415

        return compare(self, other)

    def to_parallelize_plan(self) -> Styles:
        """The plan as torch's styles, for `parallelize_module(model, mesh, ...)`: a dict whose `cannot` lists the rest.

        Raises:
            PlanError: the plan was not made in this process.
        """
        from autotp.plans.export.styles import to_parallelize_plan  # noqa: PLC0415  it reads the graph that plans are made from

        return to_parallelize_plan(self)

    def to_tp_plan(self) -> Styles:
        """The plan as a `tp_plan` of transformers, for its `DistributedConfig`: likewise."""
        from autotp.plans.export.styles import to_tp_plan  # noqa: PLC0415

        return to_tp_plan(self)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one self-contained page: blocks, totals, the predicted timeline of one layer."""
        from autotp.plans.show.page import write_html  # noqa: PLC0415  jinja2 is read only where it is wanted

        write_html(self, path)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k in self.__dataclass_fields__}

    def report(self) -> str:
        """All of the plan as text: every block, every collective, what was left whole and why. `print` shows less."""
        return render(self)

    def __str__(self) -> str:
        return overview(self)

    def __rich__(self) -> RenderableType:
        return screen(self)

    def to_json(self) -> str:
        """The plan as JSON text, with a schema version."""
        return json.dumps({"schema": SCHEMA, **plain(asdict_shallow(self))}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: the text is not a plan, or of another schema version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise PlanError(f"this is not a saved plan: {e}. Give the file that `Plan.save` wrote.") from e
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise PlanError(
                f"the plan has schema version {found!r}; this version of autotp reads {SCHEMA}. Plan again."
            )
        try:
            return _read_plan(data)
        except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as e:
            raise PlanError(f"the saved plan is damaged: {type(e).__name__}: {e}. Plan again.") from e

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        return cls.from_json(Path(path).read_text())


def asdict_shallow(plan: Plan) -> dict[str, Any]:
    """The plan's fields with its records as dicts and its layouts as they are."""
    out = {k: getattr(plan, k) for k in plan.__dataclass_fields__ if k != "fired"}
    for key in ("totals", "memory", "batch"):
        out[key] = asdict(out[key])
    for key in ("parameters", "collectives", "blocks", "degrees"):
        out[key] = [{k: getattr(r, k) for k in r.__dataclass_fields__} for r in out[key]]
    out["decisions"] = {n: [list(d.ins), list(d.outs), d.factor, d.loop] for n, d in plan.decisions.items()}
    out["layer"] = plan.layer and asdict(plan.layer)
    return out


def _read_plan(data: dict[str, Any]) -> Plan:
    decisions = {
        name: Decision(
            tuple(map(read_layout, ins)),
            tuple(map(read_layout, outs)),
            factor,
            read_loop(loop),
        )
        for name, (ins, outs, factor, loop) in data["decisions"].items()
    }
    parameters = [Parameter(**{**_tuples(p), "layout": read_layout(p["layout"])}) for p in data["parameters"]]
    return Plan(
        **{k: data[k] for k in ("model", "tp", "digest", "cluster", "objective")},
        parameters=tuple(parameters),
        collectives=tuple(Collective(**_tuples(r)) for r in data["collectives"]),
        blocks=tuple(Block(**_tuples(r)) for r in data["blocks"]),
        totals=Totals(**data["totals"]),
        memory=Memory(**data["memory"]),
        decisions=decisions,
        inputs=tuple(data["inputs"]),
        notes=tuple(data["notes"]),
        degrees=tuple(Degree(**r) for r in data["degrees"]),
        layer=_read_layer(data.get("layer")),
        batch=Axis(**data.get("batch", {})),
        machines=data.get("machines", {}),
    )


def _read_layer(data: dict[str, Any] | None) -> Layer | None:
    if data is None:
        return None
    steps = tuple(Timed(**step) for step in data["steps"])
    return Layer(**{**data, "steps": steps, "outside": Sublayer(**data["outside"])})


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
