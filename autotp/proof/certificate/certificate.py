"""R, I, V and P of every value of a rank's program, inferred by the checker on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm import conversions
from autotp.ir.graph import short_name, size_hint
from autotp.ir.layouts import Groups, Layout, R, Size
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path
from autotp.ir.specs import Spec
from autotp.plans.export.styles import AXIS, spmd_types

from .linear import linear_slots, tensors_in, type_by_rule
from .report import Certificate, Refusal
from .spelling import spelled
from .steps import transit

META = torch.device("meta")


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
    typing, refusal = Typing(planned, sharded), None
    try:
        typing.run()
    except RefusedError as error:
        refusal = _refusal(sharded, error)
    return Certificate(planned.tp, checker, **asdict(typing.count), refusal=refusal)


class RefusedError(Exception):
    """The checker refuses a node, or it cannot be run; `kind` and `detail` as in `Refusal`."""

    def __init__(self, kind: str, node: fx.Node, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.node, self.detail = kind, node, detail


def _refusal(sharded: Sharded, error: RefusedError) -> Refusal:
    node = error.node
    path = module_path(sharded.origin[node][0] if node in sharded.origin else node)
    op = short_name(node.target) if node.op == "call_function" else node.op
    return Refusal(error.kind, node.name, op, path[-1] if path else "", error.detail)


@contextmanager
def checking(tp: int) -> Iterator[None]:
    """Type every call of torch within this context over an axis of `tp` ranks; no processes are needed."""
    spmd, checker = spmd_types(), spmd_types("checker")
    mesh = {AXIS: spmd.MeshAxis.of(tp, 1)}
    with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="strict", local=True):
        yield


@dataclass
class Count:
    """Numbers of values that were asserted and inferred."""

    operators: int = 0
    conversions: int = 0
    leaves: int = 0
    partials: int = 0
    outputs: int = 0


@dataclass
class Typing:
    """The program of all ranks in lockstep, each value a typed meta tensor for every rank.

    Attributes:
        planned, sharded: the program, and what it was made from. Of the plan's layouts those of leaves, of pending
            sums and of states are read, and no others; of a decision the split loop, where no operand has it.
        count: of values; values: those of each node, by rank.
    """

    planned: Planned
    sharded: Sharded
    count: Count = field(default_factory=Count)
    values: dict[fx.Node, list[Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Type every value.

        Raises:
            RefusedError: at the first node that the checker refuses.
        """
        with checking(self.planned.tp), compat.all_nonzero():
            self.walk()

    def walk(self) -> None:
        """Run every node; see `run`."""
        wholes = iter(n for n in self.planned.program.graph.nodes if n.op == "placeholder")
        for node in self.sharded.graph.nodes:
            try:
                with torch.no_grad() if mark(node).no_grad else nullcontext():
                    self._step(node, next(wholes) if node.op == "placeholder" else node)
            except RefusedError:
                raise
            except Exception as error:
                kind = "types" if type(error).__name__ == "SpmdTypeError" else "shapes"
                raise RefusedError(kind, node, _words(error, self.planned.tp)) from error

    def _step(self, node: fx.Node, whole: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._leaf(node, whole)
        elif node.op == "output":
            self._outputs(node)
        elif mark(node).conversion is not None:
            self.values[node] = self._convert(node)
        else:
            self.values[node] = [self._call(node, rank) for rank in range(self.planned.tp)]
            self._of_split_loop(node)

    # Leaves.

    def _leaf(self, node: fx.Node, whole: fx.Node) -> list[Any]:
        value = whole.meta.get("val")
        if not isinstance(value, Tensor):
            return [self._number(value)] * self.planned.tp
        layout = self.sharded.layouts.get(node, R)
        with spmd_types().no_typecheck():
            shape = [size_hint(n, self.planned.program.hints) for n in sizes(value)]
            meta = torch.empty(shape, dtype=value.dtype, device=META)
            differentiable = whole in self.planned.grads and (meta.is_floating_point() or meta.is_complex())
            values = self._spec(layout).split(meta, self.planned.tp)
            parts = [x.detach().clone().requires_grad_(differentiable) for x in values]
        self.count.leaves += 1
        return [self._assert(x, layout.mark) for x in parts]

    def _number(self, value: Any) -> Any:
        return size_hint(value.node.expr, self.planned.program.hints) if isinstance(value, torch.SymInt) else value

    def _spec(self, layout: Layout) -> Spec:
        def number(size: Size | Groups) -> Any:
            return size if isinstance(size, Groups) else size_hint(size, self.planned.program.hints)

        return layout.to_runtime(number)

    def _assert(self, x: Tensor, letter: str) -> Tensor:
        """Assert the type of a leaf."""
        spmd = spmd_types()
        return spmd.assert_type(x, {AXIS: {"I": spmd.I, "R": spmd.R, "P": spmd.P}.get(letter, spmd.V)})

    # Conversions.

    def _convert(self, node: fx.Node) -> list[Tensor]:
        self.count.conversions += 1
        xs = self.values[node.args[0]]  # type: ignore[index]
        src, dst = (self._at(spec, 0) for spec in node.args[1:3])
        with spmd_types().no_typecheck():
            ys = conversions.simulate(xs, src, dst)
        for x, y in zip(xs, ys, strict=True):
            transit(x, src, dst, y)
        return ys

    # Operators.

    def _call(self, node: fx.Node, rank: int) -> Any:
        args, kwargs = self._at((node.args, node.kwargs), rank)
        if mark(node).axis == "tp":
            kwargs = {**kwargs, "rank": rank, "tp": self.planned.tp}
        operands = [x for a in (*args, *kwargs.values()) for x in tensors_in(a)]
        result = _new(self._typed_call(node, args, kwargs, operands), operands)
        if self._pending(node) and isinstance(result, Tensor):
            self._summand(result)
        if rank == 0:
            self.count.operators += bool(operands)
            self.count.leaves += not operands and isinstance(result, Tensor)
            self.count.partials += self._pending(node)
        return result

    def _of_split_loop(self, node: fx.Node) -> None:
        """Type a result whose type its operands do not say, by the loop that is split where it is computed."""
        origin, i = self.sharded.origin.get(node, (node, 0))
        decision, rule = self.planned.decisions.get(origin), self.planned.rules.get(origin)
        if rule is None or decision is None or decision.factor is None:
            return
        factor, xs = rule.factors[decision.factor], self.values[node]
        # The rule says that every rank has this result whole, whichever loop is split: it is a leaf.
        if factor.outs[i] is None and i in factor.alike:
            with spmd_types().no_typecheck():
                leaves = [torch.empty_like(x, requires_grad=x.requires_grad) for x in xs]
            self.values[node] = [self._assert(leaf, "I") for leaf in leaves]
        # No operand has the loop, as of `expand`: a rank makes its own part of the result.
        elif factor.outs[i] is not None and all(carry is None for carry in factor.ins):
            for x in xs:
                _varying(x)

    def _pending(self, node: fx.Node) -> bool:
        """Return whether the plan says that the value is summands of which nobody has the sum yet."""
        layout = self.sharded.layouts.get(node)
        return layout is not None and layout.partial

    def _typed_call(self, node: fx.Node, args: Any, kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        target: Any = node.target
        if mark(node).axis == "tp":
            return self._own(partial(target, *args, **kwargs), operands)
        if not operands:
            return self._factory(node, partial(target, *args, **kwargs))
        groups = linear_slots(target, args, kwargs)
        if groups is not None:
            with spmd_types().no_typecheck():
                result = _new(target(*args, **kwargs), operands)
            for y in tensors_in(result):
                type_by_rule(operands, groups, y)
            return result
        function, sums = spelled(target, kwargs)
        if function is None:
            return target(*args, **kwargs)
        pending = self._summand if self._pending(node) else _as_it_is
        return function(pending, *args, **kwargs) if sums else function(*args, **kwargs)

    def _own(self, function: Any, operands: list[Tensor]) -> Any:
        """A call that knows its rank: what it reads is no pending sum, and what it makes is the rank's own."""
        with spmd_types().no_typecheck():
            result = function()
        for y in tensors_in(result):
            type_by_rule(operands, (), y)
            _varying(y)
        return result

    def _factory(self, node: fx.Node, function: Any) -> Any:
        """A call without operands is a leaf."""
        with spmd_types().no_typecheck():
            result = function()
        layout = self.sharded.layouts.get(node, R)
        for y in tensors_in(result):
            self._assert(y, layout.mark if layout.split else "R")
        return result

    def _summand(self, x: Tensor) -> Tensor:
        return self._assert(x, "P")

    def _at(self, args: Any, rank: int) -> Any:
        def value(x: Any) -> Any:
            return META if isinstance(x, torch.device) else x

        return fx.map_arg(compat.tree_map(value, args), lambda n: self.values[n][rank])

    # Outputs.

    def _outputs(self, node: fx.Node) -> None:
        """Check that outputs are whole, and I where they have a gradient; a state is as the plan has it."""
        for i, out in enumerate(compat.tree_leaves(node.args[0])):
            if not isinstance(out, fx.Node) or not isinstance(self.values[out][0], Tensor):
                continue
            self.count.outputs += 1
            state = self.planned.program.becomes(i)
            layout = None if state is None else self.sharded.states.get(state)
            for x in self.values[out]:
                self._output(node, f"output {i}", x, layout)

    def _output(self, node: fx.Node, name: str, x: Tensor, state: Layout | None) -> None:
        spmd = spmd_types()
        kind, allowed = spmd.get_axis_local_type(x, AXIS), (spmd.I, spmd.R)
        if state is not None and state.split:
            allowed = (spmd.V,)
        elif x.requires_grad:
            allowed = (spmd.I,)
        if kind not in allowed:
            raise RefusedError("types", node, f"{name} is {kind}, should be {' or '.join(map(str, allowed))}")


def _varying(x: Tensor) -> None:
    """Have the checker type what every rank made for itself: V, of R, whose gradient is then a rank's summand."""
    spmd = spmd_types()
    if spmd.get_axis_local_type(x, AXIS) is not spmd.V:
        spmd_types("rules").reinterpret(x, AXIS, src=spmd.R, dst=spmd.V, out=x)


def _new(result: Any, operands: list[Tensor]) -> Any:
    """The result as a tensor of its own, that may have a type of its own: some operators return an operand."""
    again = isinstance(result, Tensor) and any(result is x for x in operands)
    return result.view_as(result) if again else result


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _words(error: Exception, tp: int) -> str:
    """Return the first paragraph of what is wrong: the others say where in the checker."""
    text = str(error).replace(f"MeshAxis({tp}:1)", AXIS).replace(f"'{AXIS}'", AXIS).strip()
    return text.split("\n\n")[0] or type(error).__name__
