"""Type check of a rank's program by spmd_types, a checker of others: no value and no conversion of ours is trusted.

R, I, V and P of every value are inferred by the checker on meta tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm import conversions
from autotp.ir.graph import Leaf, short_name, size_hint
from autotp.ir.layouts import Layout, R
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_name
from autotp.passes.shard.batch_axis import scale_gradient
from autotp.plans.export.styles import AXIS, spmd_types

from .differences import own_leaf
from .report import Certificate, Difference
from .run import CallLayouts, Env, Simulated, StepError, Values, run
from .spelling import linear_slots, spelled, tensors_in, transit, type_by_rule, untyped

META = torch.device("meta")


def certificate(planned: Planned, sharded: Sharded, beside: Mapping[str, int] | None = None) -> Certificate:
    """Have spmd_types check the program of the ranks.

    Args:
        planned: the decided graph. sharded: its program for `planned.tp` ranks.
        beside: ranks of axes beside tp by name, where the program is that of one of them.

    Raises:
        InputError: spmd_types is not installed.
    """
    spmd_types()
    checker = f"spmd_types {version('spmd_types')}"
    if planned.tp == 1:
        return Certificate(1, checker)  # the checker says nothing of one rank, which has everything
    typing, refusal = Typing(planned, sharded, beside), None
    try:
        typing.run()
    except RefusedError as error:
        node = error.node
        module = module_name(sharded.origin.get(node, (node, 0))[0])
        op = short_name(node.target) if node.op == "call_function" else node.op
        refusal = Difference(error.kind, node.name, op, module, math.inf, error.detail)
    return Certificate(planned.tp, checker, **typing.count, refusal=refusal)


class RefusedError(Exception):
    """A refusal of a node by the checker, or of one that cannot be run; `kind`: "types" or "shapes"."""

    def __init__(self, kind: str, node: fx.Node, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.node, self.detail = kind, node, detail


@contextmanager
def checking(tp: int) -> Iterator[None]:
    """Type every call of torch within this context over an axis of `tp` ranks; no processes are needed."""
    spmd, checker = spmd_types(), spmd_types("checker")
    mesh = {AXIS: spmd.MeshAxis.of(tp, 1)}
    with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="strict", local=True):
        yield


class Typing(Simulated):
    """Simulated ranks in lockstep, on which each value is a typed meta tensor for every rank.

    Of the plan's layouts those of leaves, of pending sums and of states are read, and no others; of a decision the
    split loop, where no operand has it.

    Args:
        planned, sharded: the program, and what it was made from.
        degrees: ranks of axes beside tp, of which it is the first one's: what goes over them is typed as it comes.
    """

    def __init__(self, planned: Planned, sharded: Sharded, degrees: Mapping[str, int] | None = None) -> None:
        super().__init__(planned.tp)
        self.planned, self.sharded, self.degrees = planned, sharded, degrees or {}
        self.count = Counter[str]()  # values that were asserted and inferred, by the fields of a certificate

    def run(self) -> Values:
        """Type every value.

        Raises:
            RefusedError: at the first node that the checker refuses.
        """
        with checking(self.tp):
            return self.walk()

    def walk(self) -> Values:
        """Run every node; see `run`."""
        program, node = self.planned.program, self.sharded.graph.output_node()
        call = CallLayouts(program, self.sharded, {x.node: self._whole(x.node) for x in program.leaves}, self)
        with compat.all_nonzero():
            leaves = {new: self._leaf(leaf, new, call) for leaf, new in call.pairs()}
            try:
                values = run(self.sharded, leaves, self)
                self._outputs(node, values)
            except RefusedError:
                raise
            except Exception as failed:
                error = failed.__cause__ if isinstance(failed, StepError) else failed
                kind = "types" if type(error).__name__ == "SpmdTypeError" else "shapes"
                raise RefusedError(kind, getattr(failed, "node", node), _words(error, self.tp)) from error
        return values

    def step(self, node: fx.Node, env: Env) -> list[Any]:
        """Type one node on every rank."""
        with torch.no_grad() if mark(node).no_grad else nullcontext():
            if mark(node).conversion is not None:
                return self._convert(node, env)
            if mark(node).batch is not None or node.target is scale_gradient:
                return [self._across(node, x, env) for x in env[node.args[0]]]  # type: ignore[index]
            return self._of_split_loop(node, [self._call(node, env, rank) for rank in range(self.tp)])

    # Leaves.

    def _whole(self, leaf: fx.Node) -> Any:
        """Return a leaf's value on the meta device, with the sizes of the example inputs."""
        value, hints = leaf.meta.get("val"), self.planned.program.hints
        if isinstance(value, Tensor):
            shape = [size_hint(n, hints) for n in sizes(value)]
            return torch.empty(shape, dtype=value.dtype, device=META)
        return size_hint(value.node.expr, hints) if isinstance(value, torch.SymInt) else value

    def _leaf(self, leaf: Leaf, node: fx.Node, call: CallLayouts) -> list[Any]:
        with spmd_types().no_typecheck():
            parts = call.dealt(leaf, node)
            if not isinstance(parts[0], Tensor):
                return parts
            numbers = parts[0].is_floating_point() or parts[0].is_complex()
            parts = [own_leaf(x, leaf.node in self.planned.grads and numbers) for x in parts]
        self.count["leaves"] += 1
        return [self._assert(x, self.sharded.layouts.get(node, R).mark) for x in parts]

    def _assert(self, x: Tensor, letter: str) -> Tensor:
        """Assert the type of a leaf: V for all layouts that the checker has no letter for."""
        spmd = spmd_types()
        return spmd.assert_type(x, {AXIS: getattr(spmd, letter if letter in "IRP" else "V")})

    # Conversions.

    def _convert(self, node: fx.Node, env: Env) -> list[Tensor]:
        self.count["conversions"] += 1
        xs = env[node.args[0]]  # type: ignore[index]
        src, dst = self._at(node.args[1:3], env, 0)
        ys = untyped(conversions.simulate, xs, src, dst)
        for x, y in zip(xs, ys, strict=True):
            transit(x, src, dst, y)
        return ys

    def _across(self, node: fx.Node, x: Tensor, env: Env) -> Tensor:
        """Type a conversion over an axis beside tp: on every rank of that it is linear in its operand."""
        over, args = mark(node).batch, self._at(node.args[1:], env, 0)
        if over is None:
            y = untyped(scale_gradient, x, *args)
        else:
            y = untyped(conversions.simulate, [x] * self.degrees[over.axis], *args[:2])[0]
        type_by_rule([x], ((0,),), y)
        return y

    # Operators.

    def _call(self, node: fx.Node, env: Env, rank: int) -> Any:
        args, kwargs = self._at((node.args, node.kwargs), env, rank)
        if (axis := mark(node).axis) is not None:
            place = {"rank": rank, "tp": self.tp} if axis == "tp" else {"rank": 0, "tp": self.degrees[axis]}
            kwargs = {**kwargs, **place}
        operands = [x for a in (*args, *kwargs.values()) for x in tensors_in(a)]
        result = _new(self._typed_call(node, args, kwargs, operands), operands)
        if self._pending(node) and isinstance(result, Tensor):
            self._summand(result)
        if rank == 0:
            self.count["operators"] += bool(operands)
            self.count["leaves"] += not operands and isinstance(result, Tensor)
            self.count["partials"] += self._pending(node)
        return result

    def _of_split_loop(self, node: fx.Node, xs: list[Any]) -> list[Any]:
        """Type a result whose type its operands do not say, by the loop that is split where it is computed."""
        origin, i = self.sharded.origin.get(node, (node, 0))
        if (factor := self.planned.split(origin)) is None:
            return xs
        # The rule says that every rank has this result whole, whichever loop is split: it is a leaf.
        if factor.outs[i] is None and i in factor.alike:
            with spmd_types().no_typecheck():
                leaves = [torch.empty_like(x, requires_grad=x.requires_grad) for x in xs]
            return [self._assert(leaf, "I") for leaf in leaves]
        # No operand has the loop, as of `expand`: a rank makes its own part of the result.
        if factor.outs[i] is not None and all(carry is None for carry in factor.ins):
            for x in xs:
                _varying(x)
        return xs

    def _pending(self, node: fx.Node) -> bool:
        """Return whether the plan says that the value is partial."""
        layout = self.sharded.layouts.get(node)
        return layout is not None and layout.partial

    def _typed_call(self, node: fx.Node, args: Any, kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        target: Any = node.target
        # The checker types a call alike on all ranks, so that one which knows its rank has a type of its own.
        if mark(node).axis == "tp":
            return self._local(untyped(target, *args, **kwargs), operands)
        if not operands:
            return self._factory(node, untyped(target, *args, **kwargs))
        # Without a function in the checker's table a linear operator would take no pending sum.
        groups = linear_slots(target, args, kwargs)
        if groups is not None:
            result = untyped(lambda: _new(target(*args, **kwargs), operands))
            for y in tensors_in(result):
                type_by_rule(operands, groups, y)
            return result
        function, sums = spelled(target, kwargs)
        if function is None:
            return target(*args, **kwargs)
        # A bias is added to the sum once: the product is asserted to be a summand before.
        pending = self._summand if self._pending(node) else lambda x: x
        return function(pending, *args, **kwargs) if sums else function(*args, **kwargs)

    def _local(self, result: Any, operands: list[Tensor]) -> Any:
        """Type the result of a call that knows its rank: it reads no pending sum, and makes a local value."""
        for y in tensors_in(result):
            type_by_rule(operands, (), y)
            _varying(y)
        return result

    def _factory(self, node: fx.Node, result: Any) -> Any:
        """Type the result of a call without operands, which is a leaf."""
        layout = self.sharded.layouts.get(node, R)
        for y in tensors_in(result):
            self._assert(y, layout.mark if layout.split else "R")
        return result

    def _summand(self, x: Tensor) -> Tensor:
        return self._assert(x, "P")

    def _at(self, args: Any, env: Env, rank: int) -> Any:
        return fx.map_arg(compat.tree_map_only(torch.device, lambda _: META, args), lambda n: env[n][rank])

    # Outputs.

    def _outputs(self, node: fx.Node, values: Values) -> None:
        """Check that outputs are whole, and I where they have a gradient; a state is as the plan has it."""
        for i, out in enumerate(compat.tree_leaves(node.args[0])):
            if not isinstance(out, fx.Node) or not isinstance(values.nodes[out][0], Tensor):
                continue
            self.count["outputs"] += 1
            state = self.planned.program.becomes(i)
            layout = None if state is None else self.sharded.states.get(state)
            for x in values.nodes[out]:
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
    """Have the checker type a result that each rank makes alone: V, of R, whose gradient is then a rank's summand."""
    spmd = spmd_types()
    if spmd.get_axis_local_type(x, AXIS) is not spmd.V:
        spmd_types("rules").reinterpret(x, AXIS, src=spmd.R, dst=spmd.V, out=x)


def _new(result: Any, operands: list[Tensor]) -> Any:
    """Return a result that may have a type of its own: an alias where the operator returns an operand."""
    again = any(result is x for x in operands)
    return result.view_as(result) if again else result


def _words(error: BaseException | None, tp: int) -> str:
    """Return the first paragraph of an error: the others say where in the checker."""
    text = str(error).replace(f"MeshAxis({tp}:1)", AXIS).replace(f"'{AXIS}'", AXIS).strip()
    return text.split("\n\n")[0] or type(error).__name__
