"""One attempt to export a skeleton, with its arguments and options."""

from __future__ import annotations

import inspect
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from autotp import compat
from autotp.ir.carried import SHIFT, Carried, carried_in
from autotp.ir.scopes import MARK
from autotp.passes.base import run_passes
from autotp.passes.canonicalise.functionalise import regions

from .autograd_functions import functions_kept, read_functions
from .capture_errors import Stores, attributes_written, library_calls, refuse_gradients, unvalidated
from .copies import RECIPES
from .export_passes import EXPORTED, Exported, name_slices
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
        """Let a forward find that mode; torch and this library find the true one.

        Args:
            files: the globals of the model's files: `from torch import is_grad_enabled` is a name there.
        """

        def answering(name: str, answer: Callable[[bool], bool]) -> Iterator[Any]:
            original: Callable[[], bool] = getattr(torch, name)

            def ask() -> bool:
                if library_calls():
                    return original()
                self.asks = True
                return answer(original())

            yield mock.patch.object(torch, name, ask)
            for file in files:
                yield mock.patch.dict(file, {n: ask for n, value in file.items() if value is original})

        enabled = answering("is_grad_enabled", lambda now: now and self.mode == GRAD)
        inference = answering("is_inference_mode_enabled", lambda now: self.mode == INFERENCE)
        with ExitStack() as stack:
            stack.enter_context(compat.tables_of_dynamo())
            for patch in [*enabled, *inference, mock.patch.object(Tensor, "requires_grad", self._of_tensors())]:
                stack.enter_context(patch)
            yield

    def _of_tensors(self) -> property:
        """Make `Tensor.requires_grad` as the forward finds it: False of computed values where none are recorded."""
        original: Any = Tensor.requires_grad

        def read(tensor: Tensor) -> bool:
            flag = original.__get__(tensor)
            if library_calls():
                return flag
            self.asks = self.tensors = True
            return flag and (self.mode == GRAD or tensor.is_leaf)

        return property(read, original.__set__)


@dataclass
class Attempt:
    """Arguments and options of one export; the changes of `attempts` alter it.

    Attributes:
        bare: the skeleton. args, kwargs: of the call, with real tensors.
        symbolic: the first two dimensions of token inputs and the batch of all others are dynamic where possible.
        draft: decide branches on values by the values of the inputs, and keep the decisions as conditions.
        repeats: blocks that are traced once for all that are alike.
        grad_mode: the one that the forward is to find, and whether it asks.
        states: names of the arguments that come back from the call before; any of their dimensions may grow.
        contexts: to trace in.
        short: states of length 1, of which programs take any length; all other sizes of 1 stay.
        assumes: true while an assumption of the attempt is proved on the model itself.
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
            by_name = _kwargs_in_signature(self.bare, self.kwargs)
            for context in (restored(self.bare), *self.contexts, subclass_calls(self.bare), by_name):
                stack.enter_context(context)
            # Plain dataclasses that it gives are to be known as containers before an export meets them.
            stack.enter_context(self.bare.register_forward_hook(lambda *call: compat.know_records(call[-1])))
            # The forward wants the cache that it is called with, and a graph takes tensors alone.
            if carries(self.args, self.kwargs):
                stack.enter_context(carrying(self.bare))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for context in (
                compat.quiet_export(),
                compat.quick_export(),
                _silent(),
                _unmoved(),
                compat.recorded_inference(),
                compat.recorded_regions(),
                regions_kept(),
                functions_kept(),
                self.grad_mode.answered(files_of(self.bare)),
                plain_values(self.bare),
                refuse_gradients(),
                unvalidated(),
                compat.flex_as_products(),
            ):
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
            name_slices(graph, self.bare)
        return exported

    def state_tensors(self) -> list[Tensor]:
        """List the states of the call before, of objects and of arguments that the user names."""
        arguments = inspect.signature(self.bare.forward).bind(*self.args, **self.kwargs).arguments
        states = [arguments.get(name) for name in self.states]
        tensors = [x for x in compat.tree_leaves(states) if isinstance(x, Tensor)]
        objects = carried_in(self.args, self.kwargs)
        return [*tensors, *(t for x in objects for t in x.tensors if isinstance(t, Tensor))]

    def _state_lengths(self) -> set[int]:
        """Collect the sizes of the states of objects beside batch and heads, but for those that stay; and their numbers
        that change from call to call, such as the length that a static cache is to have."""
        objects = carried_in(self.args, self.kwargs)
        pairs = [pair for x in objects for pair in zip(x.tensors, x.shape.names, strict=True)]
        # A state of one dimension is a list of places, such as those of the tokens that a paged cache reads.
        firsts = [2 * (t.ndim > 1) for t, _ in pairs]
        sizes = [(name, d, t.shape[d]) for (t, name), at in zip(pairs, firsts, strict=True) for d in range(at, t.ndim)]
        numbers = {x.tensors[i].shape[0] - SHIFT for x in objects for i in x.shape.counts}
        return numbers | {size for name, d, size in sizes if not is_number(name, d, size)}

    def _shapes(self) -> dict[str, Any] | None:
        if not self.symbolic:
            return None
        dims = FreeDims(self._state_lengths(), self.short)
        args, kwargs = compat.tree_map(dims.of_argument, (self.args, self.kwargs), is_leaf=compat.is_user_node)
        signature = inspect.signature(self.bare.forward)
        arguments = signature.bind(*self.args, **self.kwargs).arguments
        grown = {name: compat.tree_map(dims.of_state, arguments[name]) for name in self.states & set(arguments)}
        return dict(signature.bind(*args, **kwargs).arguments) | grown


@dataclass(frozen=True)
class FreeDims:
    """Choice of the free dimensions of a call's arguments.

    Attributes:
        lengths: sizes of states, which a mask over these has too.
        short: a state's length may be 1; all other sizes of 1, and of 0, stay.
    """

    lengths: Collection[int]
    short: bool = False

    def of_argument(self, value: Any) -> Any:
        """Return the free dimensions of an argument: of tokens the first two, of all else the batch."""
        if isinstance(value, Carried):  # which dimensions grow is not known, but for some
            return list(map(self.of_state, value.tensors, value.shape.names))
        if compat.is_user_node(value):  # torch wants the dimensions of its leaves in a list
            of_child = replace(self, short=False).of_argument
            return [compat.tree_map(of_child, x, is_leaf=compat.is_user_node) for x in compat.children(value)]
        if not isinstance(value, Tensor):
            return None
        dims = range(value.ndim)[:2]
        if value.ndim > 3:
            dims = [0, *(d for d in range(2, value.ndim) if value.shape[d] in self.lengths)]
        return {d: Dim.AUTO for d in dims if value.shape[d] > 1 or not self.short}

    def of_state(self, value: Any, name: str = "") -> Any:
        """Return the free dimensions of a state of an object, which has a name, or of one that the user names: all but
        numbers."""
        if not isinstance(value, Tensor):
            return None
        grown = lengths(value)
        dims = [d for d, n in enumerate(value.shape) if n > 1 or d in grown or not self.short]
        return {d: Dim.AUTO for d in dims if not is_number(name, d, value.shape[d])}


def lengths(state: Tensor) -> list[int]:
    """List the dimensions of a state which may be its length, beside its batch and heads, and are 1."""
    return [d for d in range(2, state.ndim) if state.shape[d] == 1]


@contextmanager
def _kwargs_in_signature(bare: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which forward's signature names the keywords of `**kwargs`: without, torch.export refuses symbolic
    sizes."""
    signature = inspect.signature(bare.forward)
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in kwargs if n not in signature.parameters]
    if not extra:
        yield
        return
    *parameters, rest = signature.parameters.values()
    with forwarding(bare, bare.forward, signature.replace(parameters=[*parameters, *extra, rest])):
        yield


@contextmanager
def _unmoved() -> Iterator[None]:
    """Context in which `module.to(dtype)` to the module's own dtype does nothing (on fake tensors it fails)."""
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
    """Context that drops the whole graph on stderr when an export fails; on success its stderr appears."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        yield
    sys.stderr.write(stderr.getvalue())


def regions_kept() -> AbstractContextManager[None]:
    """Return a context in which checkpointed regions are marked in the module stacks of a trace."""
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


# ---- plain Python ----------------------------------------------------------------------------------------------------

# Plain Python within a traced forward: `type(x) is torch.Tensor` of fake tensors, whose type is another; and flags that
# are computed from symbolic sizes (`is_causal=length > 1`), for which torch's attention wants a bool.


class _OfFakes(type):
    """Class of `PlainType`, which stands for `type` in every other use of the name."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Call `type`, but for fake tensors."""
        if len(args) == 1 and not kwargs and isinstance(args[0], compat.FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class PlainType(type, metaclass=_OfFakes):
    """Stand-in for `type` in the files of a traced model's classes."""


def files_of(model: nn.Module) -> list[dict[str, Any]]:
    """List the globals of the files of a model's classes, but for torch's own."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def _decided(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that conditions on sizes are decided as for the example, which becomes a guard."""

    def call(*args: Any, **kwargs: Any) -> Any:
        keywords = {name: _plain(x) for name, x in kwargs.items()}
        return function(*map(_plain, args), **keywords)

    return call


def _plain(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


@contextmanager
def plain_values(model: nn.Module) -> Iterator[None]:
    """Context in which the files of a model find plain types and bools where the model itself finds them.

    `type(x)` of a fake tensor is the real one's, and attention takes a condition on sizes as a flag.
    """
    attention = F.scaled_dot_product_attention
    flagged = _decided(attention)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flagged))
        for file in files_of(model):
            others = {name: flagged for name, value in file.items() if value is attention}
            others |= {"type": PlainType} if "type" not in file else {}
            stack.enter_context(mock.patch.dict(file, others))
        yield


# ---- calls of tensor subclasses --------------------------------------------------------------------------------------

# Calls of tensor subclasses within a forward are traced as if the forward made them.
#
# Torch's exporter records calls by a mode that is off while it handles one, and a subclass handles a call of a
# function inside of that: a `no_grad` there would be lost.

NO_HANDLER = "Unable to cast NotImplemented"  # torch, of a subclass that no mode of a trace takes


class _Handling(TorchFunctionMode):
    """Mode that calls a subclass's handler itself, so that other modes see the calls within it."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[Any] = []  # calls that are being handled: a subclass may leave one to torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wraps = [kind for kind in types if hasattr(kind, "__tensor_flatten__")]
        call = func, [id(x) for x in args]
        if not wraps or not inspect.ismethod(wraps[0].__torch_function__) or call in self.handled:
            return self._by_torch(func, types, args, kwargs)
        self.handled.append(call)
        try:
            with self:
                return wraps[0].__torch_function__(func, types, args, kwargs)
        finally:
            self.handled.pop()

    def _by_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Leave a call to torch; where a subclass handles it below autograd, which a trace does not get to, to that."""
        kinds: list[Any] = [type(x) for x in args if isinstance(x, Tensor) and compat.wraps_tensors(x)]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            overload = compat.overload_of(func, args, kwargs) if kinds and NO_HANDLER in str(error) else None
            if overload is None:
                raise
        with self:
            return kinds[0].__torch_dispatch__(overload, types, args, kwargs)


@contextmanager
def subclass_calls(bare: nn.Module) -> Iterator[None]:
    """Context in which a trace of the module sees the calls of tensor subclasses, where weights of it are such."""
    original = bare.forward
    if not any(RECIPES in vars(module) for module in bare.modules()):
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Handling():
            return original(*args, **kwargs)

    with forwarding(bare, forward, inspect.signature(original)):
        yield
