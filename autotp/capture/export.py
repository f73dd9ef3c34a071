"""One attempt to export a skeleton: what is traced, for which arguments, and how."""

from __future__ import annotations

import inspect
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import Dim

from autotp import compat
from autotp.ir.carried import SHIFT, Carried
from autotp.ir.scopes import MARK
from autotp.passes.base import run_passes
from autotp.passes.canonicalise.functionalise import regions

from .autograd_functions import functions_kept, read_functions
from .capture_errors import Stores, attributes_written, library_calls, refuse_gradients, unvalidated
from .export_passes import EXPORTED, Exported
from .plain_values import files_of, plain_values, subclass_calls
from .repeated_blocks import Repeats
from .request import GRAD, INFERENCE
from .state_objects import carries, carrying, forwarding, is_number, restored


@dataclass
class GradModeAnswers:
    """Answers to a traced forward that asks for the grad mode; gradients are recorded anyway, to see its own regions.

    Attributes:
        mode: the grad mode around the forward. asks: whether it asked; `tensors`: whether it asked a tensor.
    """

    mode: str = GRAD
    asks: bool = False
    tensors: bool = False

    @contextmanager
    def answered(self, files: Sequence[dict[str, Any]] = ()) -> Iterator[None]:
        """Let a forward find that mode; torch and this library find what is.

        `files` are what the model's files name: `from torch import is_grad_enabled` is a name there.
        """

        def answering(name: str, answer: Callable[[bool], bool]) -> Iterator[Any]:
            own: Callable[[], bool] = getattr(torch, name)

            def ask() -> bool:
                if library_calls():
                    return own()
                self.asks = True
                return answer(own())

            yield mock.patch.object(torch, name, ask)
            for file in files:
                yield mock.patch.dict(file, {n: ask for n, value in file.items() if value is own})

        enabled = answering("is_grad_enabled", lambda now: now and self.mode == GRAD)
        inference = answering("is_inference_mode_enabled", lambda now: self.mode == INFERENCE)
        with ExitStack() as stack:
            stack.enter_context(compat.tables_of_dynamo())
            for each in [*enabled, *inference, mock.patch.object(Tensor, "requires_grad", self._of_tensors())]:
                stack.enter_context(each)
            yield

    def _of_tensors(self) -> property:
        """`Tensor.requires_grad` as the forward finds it: of what it computes, no where no gradients are recorded."""
        own: Any = Tensor.requires_grad

        def read(tensor: Tensor) -> bool:
            own_flag = own.__get__(tensor)
            if library_calls():
                return own_flag
            self.asks = self.tensors = True
            return own_flag and (self.mode == GRAD or tensor.is_leaf)

        return property(read, own.__set__)


@dataclass
class Attempt:
    """Arguments and options of one export; the changes of `attempts` alter it.

    Attributes:
        bare: the skeleton. args, kwargs: real tensors and whatever else the model is called with.
        symbolic: the first two dimensions of token inputs and the batch of all others are dynamic where possible.
        draft: decide branches on values by the values of the inputs, and keep what was decided as conditions.
        repeats: blocks that are traced once for all that are alike.
        grad_mode: the one that the forward is to find, and whether it asks.
        states: names of the arguments that come back from the call before; any of their dimensions may grow.
        contexts: what to trace in.
        short: states of length 1, of which programs take any length; all other sizes of 1 stay.
        assumes: while the model itself is asked about what the attempt assumes of it.
        stores: plain attributes of modules in which the forward left tensors.
        branches: the conditions on sizes that the forward branched on, where it is `short`.
    """

    bare: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    symbolic: bool = True
    draft: bool = False
    repeats: Repeats | None = None
    grad_mode: GradModeAnswers = field(default_factory=GradModeAnswers)
    states: frozenset[str] = frozenset()
    contexts: list[AbstractContextManager[Any]] = field(default_factory=list)
    assumes: bool = False
    short: bool = False
    stores: Stores = field(default_factory=list)
    branches: list[Any] = field(default_factory=list)

    def run(self) -> Exported:
        """Export; in-place operators are functional afterwards."""
        with ExitStack() as stack:
            around = subclass_calls(self.bare), _kwargs_in_signature(self.bare, self.kwargs), _records(self.bare)
            for context in (restored(self.bare), *self.contexts, *around):
                stack.enter_context(context)
            # The forward wants the cache that it is called with, and a graph takes tensors alone.
            if carries(self.args, self.kwargs):
                stack.enter_context(carrying(self.bare))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            recorded = (
                compat.recorded_inference(),
                compat.recorded_regions(),
                regions_kept(),
                functions_kept(),
                self.grad_mode.answered(files_of(self.bare)),
                plain_values(self.bare),
                refuse_gradients(),
                unvalidated(),
                compat.flex_as_products(),
            )
            for context in (compat.quiet_export(), compat.quick_export(), _silent(), _unmoved(), *recorded):
                stack.enter_context(context)
            stack.enter_context(torch.enable_grad())  # else the model's own no_grad regions would not be seen
            # Torch takes a size of 1 for a constant: a cache of one token would never grow.
            if self.short:
                self.branches = stack.enter_context(compat.sizes_of_one())
            if self.repeats:
                stack.enter_context(self.repeats.tracing())
            self.stores = stack.enter_context(attributes_written(self.bare))
            # A branch on values, which an export refuses, a draft decides by those of the inputs.
            export = compat.draft_export if self.draft else torch.export.export
            program = export(self.bare, self.args, self.kwargs, dynamic_shapes=self._shapes(), strict=False)
            exported = Exported(program, self.bare, self.repeats, (self.symbolic,) if self.draft else ())
            run_passes(exported, EXPORTED)
        # Once the graph is functional: a Function may stand in a checkpointed region as well as in the graph itself.
        for graph in (exported.graph, *regions(exported.graph)):
            read_functions(graph)
        return exported

    def state_tensors(self) -> list[Tensor]:
        """List what the call before left, of objects and of arguments that the user names."""
        arguments = inspect.signature(self.bare.forward).bind(*self.args, **self.kwargs).arguments
        states = [arguments.get(name) for name in self.states]
        tensors = [x for x in compat.tree_leaves(states) if isinstance(x, Tensor)]
        objects = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Carried)]
        return [*tensors, *(t for x in objects for t in x.tensors if isinstance(t, Tensor))]

    def _state_lengths(self) -> set[int]:
        """The sizes that the states of objects have beside their batch and heads, but for those that stay; and their
        numbers that change from call to call, such as the length that a static cache is to have."""
        objects = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Carried)]
        pairs = [pair for x in objects for pair in zip(x.tensors, x.shape.names, strict=True)]
        # A state of one dimension is a list of places, such as those of the tokens that a paged cache reads.
        firsts = [2 * (t.ndim > 1) for t, _ in pairs]
        sizes = [(name, d, t.shape[d]) for (t, name), at in zip(pairs, firsts, strict=True) for d in range(at, t.ndim)]
        numbers = {x.tensors[i].shape[0] - SHIFT for x in objects for i in x.shape.counts}
        return numbers | {size for name, d, size in sizes if not is_number(name, d, size)}

    def _shapes(self) -> dict[str, Any] | None:
        if not self.symbolic:
            return None
        dims = partial(_dims_of_short if self.short else _dims, self._state_lengths())
        args, kwargs = compat.tree_map(dims, (self.args, self.kwargs), is_leaf=compat.is_user_node)
        signature = inspect.signature(self.bare.forward)
        arguments = signature.bind(*self.args, **self.kwargs).arguments
        own = _lengths_of_short if self.short else _any_dims
        grown = {name: compat.tree_map(own, arguments[name]) for name in self.states & set(arguments)}
        return dict(signature.bind(*args, **kwargs).arguments) | grown


def _dims(lengths: Collection[int], value: Any) -> Any:
    """The dimensions that are free; `lengths`: sizes of states, which a mask over what these hold has too."""
    if isinstance(value, Carried):  # which dimensions grow is not known, but for some
        return _varying(value, [dict.fromkeys(range(t.ndim), Dim.AUTO) for t in value.tensors])
    if compat.is_user_node(value):  # torch wants the dimensions of its leaves in a list
        return [
            compat.tree_map(partial(_dims, lengths), x, is_leaf=compat.is_user_node) for x in compat.children(value)
        ]
    if not isinstance(value, Tensor):
        return None
    if value.ndim <= 3:
        return dict.fromkeys(range(min(value.ndim, 2)), Dim.AUTO)
    return dict.fromkeys((0, *(d for d in range(2, value.ndim) if value.shape[d] in lengths)), Dim.AUTO)


def _dims_of_short(lengths: Collection[int], value: Any) -> Any:
    """Free the dimensions where a state's length is 1, but for all other sizes of 1, and of 0."""
    if isinstance(value, Carried):
        return _varying(value, [_lengths_of_short(t) for t in value.tensors])
    dims = _dims(lengths, value)
    if not isinstance(value, Tensor):
        return dims
    return {d: dim for d, dim in dims.items() if value.shape[d] > 1}


def _varying(value: Carried, dims: list[dict[int, Any]]) -> list[dict[int, Any]]:
    """Select of the dimensions of an object's tensors those that are not numbers for ever."""
    varying = []
    for tensor, name, own in zip(value.tensors, value.shape.names, dims, strict=True):
        varying.append({d: x for d, x in own.items() if not is_number(name, d, tensor.shape[d])})
    return varying


def _lengths_of_short(value: Any) -> Any:
    dims = _any_dims(value)
    return dims and {d: dim for d, dim in dims.items() if value.shape[d] > 1 or d in lengths(value)}


def lengths(state: Tensor) -> list[int]:
    """The dimensions of a state which may be its length, beside its batch and heads, and are 1."""
    return [d for d in range(2, state.ndim) if state.shape[d] == 1]


def _any_dims(value: Any) -> Any:
    return dict.fromkeys(range(value.ndim), Dim.AUTO) if isinstance(value, Tensor) else None


@contextmanager
def _kwargs_in_signature(bare: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Names what `**kwargs` takes in forward's signature: without, torch.export refuses symbolic sizes."""
    own, signature = bare.forward, inspect.signature(bare.forward)
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in kwargs if n not in signature.parameters]
    if not more:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    *parameters, rest = signature.parameters.values()
    with forwarding(bare, forward, signature.replace(parameters=[*parameters, *more, rest])):
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
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        images = [fn(t) for t in tensors]
        equal = all(a.dtype == b.dtype and a.device == b.device for a, b in zip(images, tensors, strict=True))
        return self if equal else apply(self, fn, recurse)

    with mock.patch.object(nn.Module, "_apply", same):
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Without the whole graph on stderr when an export fails; what else was written there appears on success."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        yield
    sys.stderr.write(stderr.getvalue())


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
