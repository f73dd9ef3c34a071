"""A plan for other tools: the styles of torch's `parallelize_module`, and the `tp_plan` of transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from autotp.errors import InputError, PlanError
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.scopes import NUMBER, generic, module_path

from .boundaries import Boundaries, Boundary
from .fakerun import FakeRun
from .shared_inputs import once

if TYPE_CHECKING:
    from autotp.plans.plan import Plan


class Styles(dict[str, Any]):
    """Module path -> style, `*` for the number of a layer. A dict, to be given as it is.

    Attributes:
        cannot: what the plan does and these styles do not say, a line each. The model computes the same without it.
    """

    def __init__(self, styles: dict[str, Any], cannot: Iterable[str] = ()) -> None:
        super().__init__(styles)
        self.cannot = tuple(cannot)


def to_parallelize_plan(plan: Plan) -> Styles:
    """The plan for torch's `parallelize_module`; see `Plan.to_parallelize_plan`."""
    boundaries, cannot = _read(plan, "to_parallelize_plan", lambda name: name)
    styles = {b.module: _style(b) for b in boundaries}
    return Styles(_starred(styles, [p.name.split(".")[:-1] for p in plan.parameters]), cannot)


def to_tp_plan(plan: Plan) -> Styles:
    """The plan as a `tp_plan` of transformers; see `Plan.to_tp_plan`."""
    # Its rules are looked up with a * for every number, and it knows no module that leaves the sequence split. It
    # lays them over the model's own rules, so what is whole is said too.
    boundaries, cannot = _read(plan, "to_tp_plan", generic, data=False, slices=False)
    names = [name for p in plan.parameters for name in (p.name, *p.aliases)]
    owners = dict.fromkeys(generic(name.rpartition(".")[0]) for name in names)
    bare = dict.fromkeys(generic(name) for name in names if not name.endswith((".weight", ".bias")))
    whole = {name: "replicate" for name in (*owners, *bare) if name}
    return Styles(whole | {generic(b.module): _name(b) for b in boundaries}, cannot)


def _read(plan: Plan, method: str, alike: Callable[[str], str], **limits: Any) -> tuple[list[Boundary], list[str]]:
    """The boundaries that the model's code runs with, and what they do not say."""
    builder = plan.builder
    if builder is None:
        raise PlanError(
            f"{method} reads the graph that the plan was made from, and this plan was loaded, or made in another "
            "process. Make it again from itself, autotp.plan(model, tp=plan.tp, like=plan), and ask that one."
        )
    trial, untried = _trial(builder.program, plan.tp)
    refused: dict[str, str] = {}
    while True:
        of = Boundaries(builder, plan.decisions, alike=alike, refused=refused, **limits)
        boundaries = of.read()
        more = _differ(boundaries, plan) if alike is generic else {}
        if not more and trial is not None and (failed := trial.failing(boundaries)) is not None:
            more = _around(*failed, refused)
        if not more:
            break
        refused |= more
    boundaries = boundaries if alike is generic else once(of, boundaries, trial)
    lines = [*_differences(of), *untried]
    if plan.batch.size > 1:
        other = "fully_shard or DDP" if plan.batch.name == "dp" else "torch's context_parallel"
        lines.append(("", f"this is the tp axis alone; {plan.batch.name}={plan.batch.size} is for {other}"))
    return boundaries, list(dict.fromkeys(f"{generic(name) or plan.model}: {generic(text)}" for name, text in lines))


def _trial(program: Capture, tp: int) -> tuple[FakeRun | None, list[tuple[str, str]]]:
    """The model to try boundaries on, or why it is not tried."""
    assert program.origin is not None
    trial = FakeRun(*program.origin, tp)
    failed = trial.failing(())
    if failed is None:
        return trial, []
    return None, [("", f"not tried on the model, which does not run on fake tensors ({failed[1]})")]


def _around(path: str, error: str, refused: dict[str, str]) -> dict[str, str]:
    """The innermost module around a failure that may be split still, and why it must not."""
    parts = generic(path).split(".") if path else []
    paths = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
    reason = f"the code of {paths[0] or 'the model'} does not run on a part ({error})"
    return next(({p: reason} for p in paths if p not in refused), {})


def _differ(boundaries: list[Boundary], plan: Plan) -> dict[str, str]:
    """Weights and modules of which one rule cannot say what all layers do."""
    by = {b.module: _name(b) for b in boundaries}
    styles: dict[str, set[str | None]] = defaultdict(set)
    for p in plan.parameters:
        module = p.name.rpartition(".")[0]
        styles[generic(module)].add(by.get(module))
    odd = [name for name, kinds in styles.items() if len(kinds) > 1]
    return {name: "the layers differ, and a rule is for all of them" for m in odd for name in (m, f"{m}.weight")}


def _differences(of: Boundaries) -> Iterator[tuple[str, str]]:
    """Module, and what it does otherwise than the plan."""
    for name, why in of.without_style.items():
        yield name, f"whole, and split in the plan: {why}"
    yield from _converted(of)
    for modules in of.readers.values():
        # One reader gathers once, as the plan does.
        if len(modules) > 1:
            what = "gather their one input, or sum its gradient, each by itself; the plan does so once"
            yield modules[0].rpartition(".")[0], f"{_last(modules)} {what}"
    for node in of.sums.passing:
        path = module_path(node)
        parent = path[-1] if path else ""
        yield parent, "every module takes its own sum over ranks; the plan adds here and takes one"


def _converted(of: Boundaries) -> Iterator[tuple[str, str]]:
    """Module, and where values between its modules are whole that the plan leaves split."""
    whys = of.regions.why
    for root, ports in of.regions.members().items():
        # A region of one module's side alone has no code between modules: the module does what the plan does.
        alone = len(ports) == 1 and ports[0][0] != "op"
        if root not in whys or alone:
            continue
        ends = [(side, *of.sites[n]) for side, n in ports if side != "op"]
        after = [module for side, module, _ in ends if side == "out"]
        # A column-parallel module reads a whole input anyway.
        before = [module for side, module, kind in ends if side == "in" and kind == "row"]
        verbs = []
        if after:
            verbs.append(f"gathered after {_last(after)}")
        if before:
            verbs.append(f"cut before {_last(before)}")
        if verbs:
            parent = (after or before)[0].rpartition(".")[0]
            yield parent, f"{' and '.join(verbs)}, where the plan leaves values split: {whys[root]}"


def _last(modules: Iterable[str]) -> str:
    """The modules' own names, each once."""
    return ", ".join(dict.fromkeys(m.rpartition(".")[2] for m in modules))


def _starred(styles: dict[str, Any], modules: list[list[str]]) -> dict[str, Any]:
    """The styles with `*` for the number of a layer, where all that a key then fits have one style."""
    paths = list(dict.fromkeys(tuple(m[:i]) for m in modules for i in range(1, len(m) + 1)))
    out: dict[str, Any] = {}
    for name, style in styles.items():
        keys = [generic(name), NUMBER.sub("*", name, count=1)]
        out[next((k for k in keys if k in out or _one(k, styles, paths, repr(style))), name)] = style
    return out


def _one(key: str, styles: dict[str, Any], paths: list[tuple[str, ...]], style: str) -> bool:
    """Whether a key fits modules of one style only, and leads to one wherever it branches."""
    parts = key.split(".")
    fits = []
    for p in paths:
        if all(a in ("*", b) for a, b in zip(parts, p, strict=False)):
            fits.append(p)
    ends = [p for p in fits if len(p) == len(parts)]
    branches = [p for p in fits if len(p) < len(parts) and parts[len(p) - 1] == "*"]
    leads = {b for b in branches for e in ends if e[: len(b)] == b} == set(branches)
    return leads and all(repr(styles.get(".".join(e))) == style for e in ends)


def _style(b: Boundary) -> ParallelStyle:
    """torch's style. Values split along batch or sequence stay DTensors: code between modules reads sizes off them."""
    if b.kind == "input":
        return _input(b)
    if b.kind == "whole":
        assert b.in_dim is not None
        return SequenceParallel(sequence_dim=b.in_dim, use_local_output=not b.spread[1])
    kind = ColwiseParallel if b.kind == "column" else RowwiseParallel
    layout_in = _placement(b.in_dim, b.spread[0])
    layout_out = _placement(b.out_dim, b.spread[1])
    return kind(input_layouts=layout_in, output_layouts=layout_out, use_local_output=not b.spread[1])


def _placement(dim: int | None, along: bool) -> Replicate | Shard:
    """Whole, along batch or sequence, or by the last dimension, which the styles count from the end."""
    if dim is None:
        return Replicate()
    return Shard(dim) if along else Shard(-1)


def _input(b: Boundary) -> ParallelStyle:
    """One conversion for all that read an argument of a module; it is a DTensor within."""
    layout_in, whole = Replicate() if b.in_dim is None else Shard(b.in_dim), Replicate()
    if isinstance(b.place, str):
        name = b.place
        return PrepareModuleInput(input_kwarg_layouts={name: layout_in}, desired_input_kwarg_layouts={name: whole})
    number, count = b.place
    have: list[Any] = [None] * count
    want: list[Any] = [None] * count
    have[number], want[number] = layout_in, whole
    return PrepareModuleInput(input_layouts=tuple(have), desired_input_layouts=tuple(want))


def _name(b: Boundary) -> str:
    """The name of the style in transformers."""
    if b.kind == "whole":
        return "replicated_with_grad_allreduce"
    if b.lookup:
        return "embedding_rowwise" if b.kind == "row" else "embedding_colwise"
    if b.kind == "column":
        return "colwise" if b.out_dim is not None else "colwise_gather_output"
    return "rowwise" if b.in_dim is not None else "rowwise_split_input"


# spmd_types

AXIS = "tp"  # what annotations call the mesh axis


def spmd_types(part: str = "") -> Any:
    """The package spmd_types, or a module of it.

    Args:
        part: the module's name; empty for the package itself.

    Raises:
        InputError: it is not installed, or does not fit this torch.
    """
    try:
        return import_module(f"spmd_types.{part}" if part else "spmd_types")
    except ImportError as error:
        raise InputError(
            f"this needs the package spmd_types, which could not be imported ({error}). It comes with an extra of "
            "autotp: pip install 'autotp[certify]'."
        ) from error


def annotation(layout: Layout) -> Any:
    """A layout as a type of the checker: R, I, P or S(dim).

    Rows by group are V: what they hold is no slice. So are candidates for a maximum, for P is a sum.
    """
    spmd = spmd_types()
    if layout.sharded_dim is not None and layout.groups is None:
        return spmd.S(layout.sharded_dim)
    summed = layout.partial and layout.to_runtime().reduction == "sum"
    return {"I": spmd.I, "R": spmd.R, "P": spmd.P if summed else spmd.V}.get(layout.mark, spmd.V)


def of_layouts(layouts: Mapping[str, Layout]) -> dict[str, dict[str, Any]]:
    """Name -> what `spmd_types.assert_type` takes for that value: the mesh axis and its type there."""
    return {name: {AXIS: annotation(layout)} for name, layout in layouts.items()}


def to_spmd_types(plan: Plan) -> dict[str, dict[str, Any]]:
    """The layouts of a plan's parameters, split buffers and states, by name."""
    return of_layouts({**plan.placements, **plan.states})
