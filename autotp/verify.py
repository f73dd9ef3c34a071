"""Prove on one machine that a plan computes what the original computes, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import api, compat
from .errors import InputError
from .graph import Capture, module_path, short_name
from .inputs import without_cache
from .layouts import I, R, Shard
from .plan import Plan
from .planner import Planned
from .rewrite import Sharded
from .simulate import StepError, reference, run
from .slices import recombine, split, to_runtime

TOLERANCE = 1e-9  # both sides run in float64


@dataclass(frozen=True)
class Difference:
    """Where the sharded program first differs.

    Attributes:
        direction: "forward" or "backward".
        value: name of the captured graph's value that arrives or comes out wrong; `op`: what made it; `module`: where.
        error: largest difference over the largest reference value; inf where an operator failed.
        detail: what was found, for a person.
    """

    direction: str
    value: str
    op: str
    module: str
    error: float
    detail: str


@dataclass(frozen=True)
class Report:
    """What `verify` found; `ok` says that outputs and every gradient agree.

    Attributes:
        tp: number of simulated ranks. plan: the plan that was proved.
        output_error, gradient_error: largest relative differences of outputs and parameter gradients, in float64.
        capture_error: largest relative difference between the captured graph and the model itself, in its own dtype.
        values: values compared forward and backward.
        difference: the first operator that differs, None where all agree.
    """

    tp: int
    plan: Plan | None
    output_error: float
    gradient_error: float
    capture_error: float
    values: int
    difference: Difference | None = None
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        return self.difference is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.difference is not None:
            d = self.difference
            return f"differs ({d.direction}) at {d.value} = {d.op} in {d.module or 'the model'}: {d.detail}"
        return (
            f"equal at tp={self.tp}: outputs within {self.output_error:.1e}, gradients within {self.gradient_error:.1e} "
            f"(float64, {self.values} values compared); the captured graph is within {self.capture_error:.1e} of the model"
        )


def verify(
    model: nn.Module, tp: int, example_inputs: Any = None, *, plan: Plan | None = None, **options: Any
) -> Report:
    """Run the plan on `tp` simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error. No launcher and no devices are needed.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate.
        example_inputs: as for `autotp.compile`.
        plan: prove this plan; otherwise one is made.
        options: pins, cluster, objective, sequence_parallel, as for `autotp.plan`.

    Returns:
        A `Report`, true where everything agrees; it names the first operator that differs.

    Raises:
        InputError, CaptureError, PlanError.
    """
    inputs = api.example(model, example_inputs)
    if inputs is None:
        raise InputError("autotp.verify needs example_inputs: only transformers models get theirs from the config.")
    captured, notes = api.capture_model(model, inputs, torch.device("cpu"))
    chosen = api.make_options(tp, options)
    if plan is None:
        plan = api.solve_plan(captured, notes, chosen, type(model).__name__)
    planned, sharded = api.apply_plan(captured, plan, chosen)
    values = Values.of(captured, model, without_cache(model, inputs)[0])
    report = compare(planned, sharded, values)
    return Report(**{**report.__dict__, "plan": plan, "capture_error": values.capture_error(model)})


@dataclass
class Values:
    """The leaves of a captured graph with real values, and how to run it."""

    program: Capture
    given: dict[fx.Node, Any]
    inputs: Any = None
    outputs: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, program: Capture, model: nn.Module, inputs: Any) -> Values:
        state = {
            **dict(model.named_buffers(remove_duplicate=False)),
            **dict(model.named_parameters(remove_duplicate=False)),
        }
        flat = iter(compat.tree_leaves((tuple(inputs.args), dict(inputs.kwargs))))
        given: dict[fx.Node, Any] = {}
        for leaf in program.leaves:
            if leaf.kind == "input":
                given[leaf.node] = next(flat)
            else:
                given[leaf.node] = _real(state[leaf.name] if leaf.name in state else program.constants[leaf.name])
        return cls(program, given, inputs)

    def doubled(self) -> dict[fx.Node, Any]:
        """The values in float64 (and complex128)."""
        return {n: _double(v) for n, v in self.given.items()}

    def capture_error(self, model: nn.Module) -> float:
        """Largest relative difference between the captured graph's outputs and the model's own."""
        if any(p.is_meta for p in model.parameters()):
            return float("nan")
        with torch.no_grad():
            found = reference(self.program.graph, {n: _copy(v) for n, v in self.given.items()}, lambda n, v: None)
            kept = [v for i, v in enumerate(compat.tree_leaves(found)) if i not in self.program.mutations]
            own = compat.tree_leaves(model(*self.inputs.args, **self.inputs.kwargs))
        pairs = [(a, b) for a, b in zip(kept, own, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)]
        return max((relative(a, b) for a, b in pairs), default=0.0)


def compare(planned: Planned, sharded: Sharded, values: Values) -> Report:
    """Run both programs in float64 and compare value by value, then gradient by gradient."""
    given = values.doubled()
    with promoted(planned.program.graph, sharded.graph):
        expected = _run_reference(planned, given)
        ranks = _Ranks(planned, sharded, given)
        difference = ranks.forward(expected)
        gradients = 0.0
        if difference is None:
            difference, gradients = ranks.backward(expected)
    return Report(planned.tp, None, ranks.output_error, gradients, 0.0, ranks.compared, difference)


@dataclass
class _Expected:
    values: dict[tuple[fx.Node, int], Any]
    leaves: dict[fx.Node, Tensor]


def _run_reference(planned: Planned, given: Mapping[fx.Node, Any]) -> _Expected:
    leaves = {n: v.clone().requires_grad_() if n in planned.grads else _copy(v) for n, v in given.items()}
    values: dict[tuple[fx.Node, int], Any] = {}

    def keep(node: fx.Node, value: Any) -> None:
        for i, v in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(v, Tensor):
                if v.requires_grad:
                    v.retain_grad()
                values[node, i] = v

    loss = _loss(reference(planned.program.graph, leaves, keep))
    if loss.requires_grad:
        loss.backward()
    return _Expected(values, {n: v for n, v in leaves.items() if isinstance(v, Tensor)})


class _Ranks:
    """The simulated ranks: what they made of every value, and how it compares."""

    def __init__(self, planned: Planned, sharded: Sharded, given: Mapping[fx.Node, Any]) -> None:
        self.planned, self.sharded = planned, sharded
        self.held: dict[fx.Node, list[Any]] = {}
        self.output_error, self.compared = 0.0, 0
        self.inputs: dict[fx.Node, list[Any]] = {}
        names = {n.name: n for n in given}
        for node in sharded.graph.nodes:
            if node.op == "placeholder":
                self.inputs[node] = self._place(node, given[names[node.name]])

    def _place(self, node: fx.Node, value: Any) -> list[Any]:
        layout, tp = self.sharded.layouts.get(node, R), self.planned.tp
        if isinstance(layout, Shard):
            parts = split(value, to_runtime(layout), tp)
        else:
            parts = [_copy(value) for _ in range(tp)]
        wanted = self.sharded.origin[node][0] in self.planned.grads if node in self.sharded.origin else False
        return [p.detach().clone().requires_grad_() for p in parts] if wanted else parts

    def forward(self, expected: _Expected) -> Difference | None:
        try:
            self.outputs = run(self.sharded, self.planned.tp, self.inputs, self._keep)
        except StepError as e:
            return self._blame(e.node, "forward", float("inf"), str(e).splitlines()[0])
        for node, ranks in self.held.items():
            if node not in self.sharded.origin:
                continue
            error = self._error(node, ranks, expected.values.get(self.sharded.origin[node]))
            if not error <= TOLERANCE:
                return self._blame(node, "forward", error, f"the recombined value is off by {error:.2e}")
            if any(node is x for x in _outputs(self.sharded.graph)):
                self.output_error = max(self.output_error, error)
        return None

    def _keep(self, node: fx.Node, ranks: list[Any]) -> None:
        self.held[node] = ranks
        for v in ranks:
            if isinstance(v, Tensor) and v.requires_grad:
                v.retain_grad()

    def _error(self, node: fx.Node, ranks: list[Any], whole: Any) -> float:
        if not isinstance(whole, Tensor) or not all(isinstance(v, Tensor) for v in ranks):
            return 0.0
        self.compared += 1
        return _layout_error([v.detach() for v in ranks], self._spec(node), whole.detach())

    def _spec(self, node: fx.Node, gradient: bool = False) -> Any:
        layout = self.sharded.layouts[node]
        sizes = {str(s): v for s, v in self._symbols().items()}
        return to_runtime(
            layout.dual if gradient else layout, lambda s: s if isinstance(s, int) else int(s.subs(sizes))
        )

    def _symbols(self) -> dict[Any, int]:
        if not hasattr(self, "_bound"):
            names = {n.name: n for n in self.inputs}
            self._bound = {
                s: self.inputs[names[node.name]][0].shape[d] for s, (node, d) in self.planned.program.symbols.items()
            }
        return self._bound

    def backward(self, expected: _Expected) -> tuple[Difference | None, float]:
        """Compare the gradient of every produced value, the last made first, then those of the parameters."""
        losses = [_loss(o) for o in self.outputs]
        total = sum(losses[1:], losses[0])
        if total.requires_grad:
            try:
                total.backward()
            except RuntimeError as e:
                return Difference("backward", "?", "?", "", float("inf"), str(e)), float("inf")
        scale = max(
            (v.grad.abs().max().item() for v in expected.leaves.values() if v.grad is not None and v.numel()),
            default=0.0,
        )
        worst = 0.0
        for node in reversed(list(self.held)):
            if "conversion" in node.meta or node not in self.sharded.origin:
                continue
            whole = expected.values.get(self.sharded.origin[node])
            error = self._gradient_error(node, whole, scale)
            if not error <= TOLERANCE:
                return self._blame(node, "backward", error, f"the recombined gradient is off by {error:.2e}"), error
            worst = max(worst, error)
        return None, worst

    def _gradient_error(self, node: fx.Node, whole: Any, scale: float) -> float:
        ranks = self.held[node]
        if not isinstance(whole, Tensor) or whole.grad is None or not all(isinstance(v, Tensor) for v in ranks):
            return 0.0
        if not whole.is_leaf and not any(v.requires_grad for v in ranks):
            return 0.0
        grads = [v.grad if v.grad is not None else torch.zeros_like(v) for v in ranks]
        self.compared += 1
        return _layout_error(grads, self._spec(node, gradient=True), whole.grad, scale)

    def _blame(self, node: fx.Node, direction: str, error: float, detail: str) -> Difference:
        """The value to name: an operand that arrives in another layout than decided, otherwise the value itself."""
        origin = self.sharded.origin.get(node, (None, 0))[0] or self._by_name(node)
        place = origin
        if direction == "forward" and "conversion" not in node.meta and origin in self.planned.ops:
            for old, wanted, new in zip(
                self.planned.ops[origin].slots, self.planned.decisions[origin].ins, _operands(node), strict=False
            ):
                has = self.sharded.layouts.get(new)
                if has is not None and has != wanted:
                    place, detail = (
                        self.sharded.origin[new][0],
                        f"{old.name} arrives as {has}, should be {wanted}; {detail}",
                    )
                    break
        moved = [
            convert.name
            for convert in self.held
            if "conversion" in convert.meta and self.sharded.origin[convert][0] is place
        ]
        detail += f" (conversions of this value: {', '.join(moved)})" if moved else ""
        name, op = (place.name, short_name(place.target)) if place is not None else (node.name, short_name(node.target))
        path = module_path(place) if place is not None else ()
        return Difference(direction, name, op, path[-1] if path else "", error, detail)

    def _by_name(self, node: fx.Node) -> fx.Node | None:
        if "conversion" in node.meta:
            return self.sharded.origin[node][0]
        return next((n for n in self.planned.ops if n.name == node.name), None)


def _operands(node: fx.Node) -> list[fx.Node]:
    return [a for a in compat.tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]


def _outputs(graph: fx.Graph) -> list[Any]:
    return compat.tree_leaves(next(n for n in graph.nodes if n.op == "output").args[0])


def _layout_error(ranks: list[Tensor], spec: Any, whole: Tensor, scale: float = 0.0) -> float:
    """Relative error of the recombined value; for whole layouts the worst rank counts."""
    try:
        found = ranks if spec[0] in (str(I), str(R)) else [recombine(ranks, spec)]
    except (RuntimeError, ValueError):
        return float("inf")
    return max(relative(f, whole, scale) for f in found)


def relative(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """max|a - b| over max|b| (plus a thousandth of `scale`); inf where shapes or non-finite values differ."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return float("inf")
    if not finite.any():
        return 0.0
    top = (a[finite] - b[finite]).abs().max().item()
    return top / (b[finite].abs().max().item() + 1e-3 * scale + 1e-30) if top else 0.0


def _loss(outputs: Any) -> Tensor:
    """A fixed linear functional of all outputs: every element has a gradient of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for v in compat.tree_leaves(outputs):
        if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) and v.numel():
            flat = torch.view_as_real(v).reshape(-1) if v.is_complex() else v.reshape(-1)
            weight = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) + 0.5)
            total = total + (torch.where(torch.isfinite(flat), flat, 0) * weight).sum()
    return total


class promoted:
    """Within this context the graphs compute in float64: every floating dtype among their literals is float64."""

    WIDE = {
        torch.float32: torch.float64,
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.complex64: torch.complex128,
    }

    def __init__(self, *graphs: fx.Graph) -> None:
        self.saved = [(n, n.args, n.kwargs) for g in graphs for n in g.nodes]

    def __enter__(self) -> None:
        wide: Callable[[Any], Any] = lambda x: self.WIDE.get(x, x) if isinstance(x, torch.dtype) else x  # noqa: E731
        for node, args, kwargs in self.saved:
            node.args, node.kwargs = compat.tree_map(wide, args), compat.tree_map(wide, kwargs)

    def __exit__(self, *_: Any) -> None:
        for node, args, kwargs in self.saved:
            node.args, node.kwargs = args, kwargs


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(
        torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else value.dtype
    )


def _real(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_meta:
        return (
            torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(value.numel())).to(
                value.dtype
            )
            * 0.1
        )
    return value.detach() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
