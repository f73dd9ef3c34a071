"""One attempt to export a skeleton: what is traced, for which arguments, and how."""

from __future__ import annotations

import inspect
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import TensorArgument

from autotp import compat
from autotp.errors import CaptureError
from autotp.ir.carried import Carried, states_of
from autotp.ir.scopes import MARK
from autotp.passes.canonicalise.functionalise import functionalise, memory, mutates, regions

from .carrying import carries, carrying, forwarding
from .conditions import Conditions
from .functions import functions_kept, read_functions
from .grad_mode import Asked
from .messages import line_of
from .plain_types import files_of, plain_types
from .refusals import refuse_higher_order, refuse_hooks, unvalidated
from .repeated_blocks import Repeats, expand, refuse_writes
from .retrace import traced_again


@dataclass
class Exported:
    """What an attempt gives.

    Attributes:
        conditions: what must hold of the values of the inputs. written: further outputs -> the buffer's name, or the
            place among the input tensors of the state, that takes them; the program's own signature lacks these.
    """

    program: ExportedProgram
    conditions: Conditions | None
    written: dict[int, str | int]


@dataclass
class Attempt:
    """What one export is of; the changes of `attempts` alter it.

    Attributes:
        bare: the skeleton. args, kwargs: real tensors and whatever else the model is called with.
        symbolic: the first two dimensions of token inputs and the batch of all others are dynamic where possible.
        draft: decide branches on values by the values of the inputs, and keep what was decided as conditions.
        repeats: blocks that are traced once for all that are alike.
        asked: the grad mode that the forward is to find, and whether it asks.
        states: names of the arguments that come back from the call before; any of their dimensions may grow.
        contexts: what to trace in.
    """

    bare: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    symbolic: bool = True
    draft: bool = False
    repeats: Repeats | None = None
    asked: Asked = field(default_factory=Asked)
    states: frozenset[str] = frozenset()
    contexts: list[AbstractContextManager[Any]] = field(default_factory=list)

    def run(self) -> Exported:
        """Export; in-place operators are functional afterwards."""
        with ExitStack() as stack:
            for context in (*self.contexts, _named(self.bare, self.kwargs), _records(self.bare)):
                stack.enter_context(context)
            if carries(self.args, self.kwargs):
                stack.enter_context(carrying(self.bare))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            recorded = compat.recorded_inference(), compat.recorded_regions(), regions_kept(), functions_kept()
            recorded = (
                *recorded,
                compat.recorded_guards(),
                self.asked.answered(files_of(self.bare)),
                plain_types(self.bare),
                refuse_hooks(),
                unvalidated(),
            )
            for context in (compat.quiet_export(), _silent(), _unmoved(), *recorded):
                stack.enter_context(context)
            stack.enter_context(torch.enable_grad())  # else the model's own no_grad regions would not be seen
            if self.repeats:
                stack.enter_context(self.repeats.tracing())
            export = compat.draft_export if self.draft else torch.export.export
            program = export(self.bare, self.args, self.kwargs, dynamic_shapes=self._shapes(), strict=False)
            if compat.vmapped(program.graph):
                program = traced_again(program)
            refuse_higher_order(program.graph)
            _refuse_writes_to_parameters(program)
            if self.repeats:
                refuse_writes(program.graph)
            conditions = Conditions.of(program, self.symbolic) if self.draft else None
            specs = program.graph_signature.input_specs
            takers: dict[str, str | int] = {s.arg.name: str(s.target) for s in specs if s.kind.name == "BUFFER"}
            takers |= _states(program)
            written = functionalise(program.graph, takers.keys())
            if written is None:
                program, written = traced_again(program), {}
            if self.repeats:
                expand(program.graph, self.repeats, *self._holders(program))
        for graph in (program.graph, *regions(program.graph)):
            read_functions(graph)
        return Exported(program, conditions, {i: takers[name] for i, name in written.items()})

    def _holders(self, program: ExportedProgram) -> tuple[dict[int, fx.Node], set[fx.Node]]:
        """Id of a parameter or buffer -> its placeholder; and the placeholders of constants."""
        nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        held = {n: id(t) for n, t in [*self.bare.named_parameters(), *self.bare.named_buffers()]}
        specs = [(getattr(s.arg, "name", ""), s.target, s.kind.name) for s in program.graph_signature.input_specs]
        holders = {held[target]: nodes[name] for name, target, _ in specs if target in held}
        return holders, {nodes[name] for name, _, kind in specs if kind == "CONSTANT_TENSOR"}

    def _shapes(self) -> dict[str, Any] | None:
        if not self.symbolic:
            return None
        args, kwargs = compat.tree_map(_dims, (self.args, self.kwargs), is_leaf=compat.is_user_node)
        signature = inspect.signature(self.bare.forward)
        passed = signature.bind(*self.args, **self.kwargs).arguments
        grown = {name: compat.tree_map(_any_dims, passed[name]) for name in self.states & set(passed)}
        return dict(signature.bind(*args, **kwargs).arguments) | grown


def _refuse_writes_to_parameters(program: ExportedProgram) -> None:
    names = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    held = {place: names[n.name] for n, places in memory(program.graph).items() if n.name in names for place in places}
    for graph in (program.graph, *regions(program.graph)):
        for node, places in memory(graph).items():
            if mutates(node) and (found := places & held.keys()):
                raise CaptureError(f"the forward writes to the parameter {held[min(found)]} ({line_of(node)})")


def _states(program: ExportedProgram) -> dict[str, int]:
    """Placeholders of states -> their place among the input tensors."""
    inputs = [s.arg for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    states = {inputs[i].name for i in states_of(program.call_spec.in_spec)}  # type: ignore[arg-type]
    tensors = [x.name for x in inputs if isinstance(x, TensorArgument)]
    return {name: i for i, name in enumerate(tensors) if name in states}


def _dims(value: Any) -> Any:
    if isinstance(value, Carried):  # which dimensions grow is not known
        return [dict.fromkeys(range(t.ndim), Dim.AUTO) for t in value.tensors]
    if compat.is_user_node(value):  # torch wants the dimensions of its leaves in a list
        return [compat.tree_map(_dims, x, is_leaf=compat.is_user_node) for x in compat.children(value)]
    if not isinstance(value, Tensor):
        return None
    free = 2 if value.ndim <= 3 else 1
    return dict.fromkeys(range(min(value.ndim, free)), Dim.AUTO)


def _any_dims(value: Any) -> Any:
    return dict.fromkeys(range(value.ndim), Dim.AUTO) if isinstance(value, Tensor) else None


@contextmanager
def _named(bare: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Names what `**kwargs` takes in forward's signature: without, torch.export refuses symbolic sizes."""
    own, signature = bare.forward, inspect.signature(bare.forward)
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in kwargs if n not in signature.parameters]
    if not more:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    *named, rest = signature.parameters.values()
    with forwarding(bare, forward, signature.replace(parameters=[*named, *more, rest])):
        yield


@contextmanager
def _records(bare: nn.Module) -> Iterator[None]:
    """Within this context plain dataclasses that `bare` gives are known as containers before an export meets them."""

    def know(module: nn.Module, args: Any, output: Any) -> None:
        compat.know_records(output)

    handle = bare.register_forward_hook(know)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unmoved() -> Iterator[None]:
    """`module.to(dtype)` within a forward, to what the module is already, does nothing (on fake tensors it fails)."""
    apply = nn.Module._apply

    def same(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        made = [fn(t) for t in held]
        equal = all(a.dtype == b.dtype and a.device == b.device for a, b in zip(made, held, strict=True))
        return self if equal else apply(self, fn, recurse)

    with mock.patch.object(nn.Module, "_apply", same):
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Without the whole graph on stderr when an export fails; what else was written there appears on success."""
    written = io.StringIO()
    with redirect_stderr(written):
        yield
    sys.stderr.write(written.getvalue())


def regions_kept() -> AbstractContextManager[None]:
    """Within this context checkpointed regions are marked in the module stacks of a trace."""
    numbers = itertools.count()

    @contextmanager
    def region() -> Iterator[None]:
        stack = compat.module_stack()
        if stack is None:  # nothing is traced
            yield
            return
        parent = next(reversed(stack.values()))[0] if stack else ""
        mark = f"{MARK}{next(numbers)}"
        key = f"L['self']{mark}"  # as the keys of modules begin
        stack[key] = parent + mark, "checkpoint"
        try:
            yield
        finally:
            del stack[key]

    return compat.checkpoints_as(region)
