"""A plan for other tools: torch's `parallelize_module`, the `tp_plan` of transformers, and spmd_types' annotations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from autotp import compat
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, mapped
from autotp.ir.layouts import Layout
from autotp.ir.scopes import generic
from autotp.text import first_line

from .regions import Boundaries, Boundary

if TYPE_CHECKING:
    from autotp.plans.plan import Plan

AXIS = "tp"  # what annotations call the mesh axis


class Styles(dict[str, Any]):
    """Module path -> style. A dict, to be given as it is.

    Attributes:
        cannot: what the plan does and these styles do not say, a line each. The model computes the same without it.
    """

    def __init__(self, styles: dict[str, Any], cannot: Iterable[str] = ()) -> None:
        super().__init__(styles)
        self.cannot = tuple(cannot)


def to_parallelize_plan(plan: Plan) -> Styles:
    """Export the plan for torch's `parallelize_module`; see `Plan.to_parallelize_plan`."""
    boundaries, cannot = _read(plan, "to_parallelize_plan")
    return Styles({b.module: _style(b) for b in boundaries}, cannot)


def to_tp_plan(plan: Plan) -> Styles:
    """Export the plan as a `tp_plan` of transformers; see `Plan.to_tp_plan`."""
    # Its rules are looked up with a * for every number, and laid over the model's own: what is whole is said too.
    boundaries, cannot = _read(plan, "to_tp_plan")
    names = [name for p in plan.parameters for name in (p.name, *p.aliases)]
    owners = dict.fromkeys(generic(name.rpartition(".")[0]) for name in names)
    bare = dict.fromkeys(generic(name) for name in names if not name.endswith((".weight", ".bias")))
    whole = {name: "replicate" for name in (*owners, *bare) if name}
    return Styles(whole | {generic(b.module): _name(b) for b in boundaries}, cannot)


def _read(plan: Plan, method: str) -> tuple[list[Boundary], list[str]]:
    """Return the boundaries that the model's code runs with, and lines on what they do not say."""
    builder = plan.builder
    if builder is None:
        raise PlanError(
            f"{method} reads the graph that the plan was made from, and this plan was loaded, or made in another "
            "process. Make it again from itself, autotp.plan(model, tp=plan.tp, like=plan), and ask that one."
        )
    assert builder.program.origin is not None
    trial, lines = FakeRun(*builder.program.origin, plan.tp), []
    untried, refused = trial.failing(()), dict[str, str]()
    if untried is not None:
        lines.append(("", f"not tried on the model, which does not run on fake tensors ({untried[1]})"))
    while True:
        of = Boundaries(builder, plan.decisions, refused)
        boundaries = of.read()
        refusals = _differ(boundaries, plan)
        if not refusals and untried is None and (failed := trial.failing(boundaries)) is not None:
            refusals = _around(*failed, refused)
        if not refusals:
            break
        refused |= refusals
    lines = [*((name, f"whole, and split in the plan: {reason}") for name, reason in of.without_style.items()),
             *_between(of), *lines]  # fmt: skip
    if plan.batch.size > 1:
        other = "fully_shard or DDP" if plan.batch.cp == 1 else "torch's context_parallel"
        lines.append(("", f"this is the tp axis alone; {plan.batch.text} is for {other}"))
    return boundaries, list(dict.fromkeys(f"{generic(name) or plan.model}: {generic(text)}" for name, text in lines))


def _around(path: str, error: str, refused: dict[str, str]) -> dict[str, str]:
    """Return the innermost module around a failure that is not refused yet, and the reason to refuse it."""
    parts = generic(path).split(".") if path else []
    paths = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
    reason = f"the code of {paths[0] or 'the model'} does not run on a part ({error})"
    return next(({p: reason} for p in paths if p not in refused), {})


def _differ(boundaries: list[Boundary], plan: Plan) -> dict[str, str]:
    """Return weights and modules whose styles differ between layers, which one rule cannot say."""
    by = {b.module: _name(b) for b in boundaries}
    styles = defaultdict(set)
    for p in plan.parameters:
        module = p.name.rpartition(".")[0]
        styles[generic(module)].add(by.get(module))
    mixed = [name for name, kinds in styles.items() if len(kinds) > 1]
    return {name: "the layers differ, and a rule is for all of them" for m in mixed for name in (m, f"{m}.weight")}


def _between(of: Boundaries) -> Iterator[tuple[str, str]]:
    """Yield modules, and the reason why values between their modules are whole that the plan leaves split."""
    whole, regions = of.whole, defaultdict(list)
    for node in of.split:
        regions[of.sets[node]].append(of.sites.get(node, ("", ""))[0])
    for root, ends in regions.items():
        # A region of one module alone has no code between modules: the module does what the plan does.
        modules = list(filter(None, ends))
        if root in whole and modules and len(set(map(generic, ends))) > 1:
            names = ", ".join(dict.fromkeys(m.rpartition(".")[2] for m in modules))
            yield modules[0].rpartition(".")[0], f"whole at {names}, and split in the plan: {whole[root]}"
    for module, reason in of.gathered.items():
        yield module, f"gives a whole value, and a split one in the plan: {reason}"


def _style(b: Boundary) -> ParallelStyle:
    """Return the style of torch."""
    placement = Shard(-1) if b.split else Replicate()
    column = b.kind == "column"
    return ColwiseParallel(output_layouts=placement) if column else RowwiseParallel(input_layouts=placement)


def _name(b: Boundary) -> str:
    """Return the name of the style in transformers."""
    if b.lookup:
        return "embedding_rowwise" if b.kind == "row" else "embedding_colwise"
    if b.kind == "column":
        return "colwise" if b.split else "colwise_gather_output"
    return "rowwise" if b.split else "rowwise_split_input"


class FakeRun:
    """A trial of module boundaries on a model's skeleton, without numbers: does its code run on the parts of a rank?

    A view that names the number of heads, or a split by a width from the config, wants the whole. The graph cannot tell
    such a number from one that was read off a tensor, so the forward is run on fake tensors, and what a module would
    leave split is cut to a rank's width.
    """

    def __init__(self, bare: nn.Module, inputs: Inputs, tp: int) -> None:
        self.tp, self.model = tp, bare
        tensor = next(iter((*bare.parameters(), *bare.buffers())), None)
        self.mode = compat.fake_mode() if tensor is None else tensor.fake_mode  # type: ignore[union-attr]
        device = torch.device("cpu") if tensor is None else tensor.device

        def fake(x: Tensor) -> Tensor:
            return self.mode.from_tensor(x.detach().to(device), static_shapes=True)

        self.inputs = mapped(inputs, fake)

    def failing(self, boundaries: Iterable[Boundary]) -> tuple[str, str] | None:
        """Return the innermost module whose code does not run with these boundaries, and its error; None where all do.

        Args:
            boundaries: what each module does.
        """
        path = []
        hooks = []

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            path.pop()

        # The path is that of the module that runs: an error leaves it where it was raised.
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: path.append(name)))
            hooks.append(module.register_forward_hook(leave))
        # Between modules the code gets parts; within one it sees what it was written for.
        for b in boundaries:
            module: Any = self.model.get_submodule(b.module)
            if b.split and b.kind == "row":
                hooks.append(module.register_forward_pre_hook(self._whole))
            elif b.split:
                hooks.append(module.register_forward_hook(lambda m, args, out: out[..., : out.shape[-1] // self.tp]))
        try:
            with self.mode, torch.no_grad():
                self.model(*self.inputs.args, **self.inputs.kwargs)
        except Exception as e:  # of whatever kind: the model's own code raises it
            return ("", *path)[-1], first_line(e, type(e).__name__)
        finally:
            for hook in hooks:
                hook.remove()
        return None

    def _whole(self, module: nn.Linear, args: tuple[Tensor]) -> tuple[Tensor]:
        """Return the input of a row-parallel layer, as wide as its weight asks for."""
        part, width = args[0], module.in_features
        if part.shape[-1] * self.tp != width:
            raise ValueError(f"a part is {part.shape[-1]} wide here, and {width} over {self.tp} ranks are not")
        return (part.new_empty(*part.shape[:-1], width),)


# spmd_types


def spmd_types(part: str = "") -> Any:
    """Import the package spmd_types, or a module of it.

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


def to_spmd_types(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return layouts of parameters, split buffers and states, by name, as `spmd_types.assert_type` takes them."""
    return {name: {AXIS: annotation(layout)} for name, layout in {**plan.placements, **plan.states}.items()}


def annotation(layout: Layout) -> Any:
    """Return a layout as a type of the checker: R, I, P or S(dim).

    Rows by group are V: what they hold is no slice. So are candidates for a maximum, for P is a sum.
    """
    spmd = spmd_types()
    if layout.sharded_dim is not None and layout.groups is None:
        return spmd.S(layout.sharded_dim)
    summed = layout.partial and layout.to_runtime().reduction == "sum"
    return {"I": spmd.I, "R": spmd.R, "P": spmd.P if summed else spmd.V}.get(layout.mark, spmd.V)
