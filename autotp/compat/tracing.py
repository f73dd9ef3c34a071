"""Internals of torch that tracing and exporting a module needs."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._logging import structured
from torch._logging._internal import LazyTraceHandler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import _trace
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental import proxy_tensor, sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import checkpoint as checkpointing

from .fake import shape_env
from .trees import tree_leaves


@contextlib.contextmanager
def sizes_of_one() -> Iterator[list[Any]]:
    """Treat a size of 0 or 1 of an example as any other size in exports within this context, not as a constant.

    Torch may note no guard then where Python takes a size as a number (ProphetNet: `int(past_length + 1)`), and a
    program would have the example's for every size: that ends the export.

    Yields: the conditions on sizes that Python branches on, and none of those that kernels ask for strides.
    """
    guard_int, guard_bool, call = sym_node.SymNode.guard_int, sym_node.SymNode.guard_bool, proxy_tensor.proxy_call
    branches: list[Any] = []
    within: list[Any] = []  # operators that are called now

    def number(self: Any, file: str, line: int) -> int:
        if self.expr.free_symbols:
            raise ValueError(f"the forward takes the size {self.expr} as a number")
        return guard_int(self, file, line)

    def branch(self: Any, file: str, line: int) -> bool:
        if not within:
            branches.append(self.expr)
        return guard_bool(self, file, line)

    def run(mode: Any, operator: Any, *args: Any) -> Any:
        within.append(operator)
        try:
            return call(mode, operator, *args)
        finally:
            within.pop()

    with (
        mock.patch.object(symbolic_config, "backed_size_oblivious", True),
        mock.patch.object(sym_node.SymNode, "guard_int", number),
        mock.patch.object(sym_node.SymNode, "guard_bool", branch),
        mock.patch.object(proxy_tensor, "proxy_call", run),
    ):
        yield branches


def all_nonzero() -> contextlib.AbstractContextManager[Any]:
    """Let `nonzero`, and an index of flags, find every element of a tensor on the meta device within this context."""
    return mock.patch.object(symbolic_config, "meta_nonzero_assume_all_nonzero", True)


def vmapped(graph: fx.Graph) -> bool:
    """Return whether a graph still holds `torch.vmap` as steps, around operators on values that hide a dimension."""
    return any(getattr(n.target, "__module__", "") == "torch._functorch.predispatch" for n in graph.nodes)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Silence torch's own log lines about guards and missing fake kernels within this context."""
    loggers = [logging.getLogger(n) for n in ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")]
    levels = [x.level for x in loggers]
    for x in loggers:
        x.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for x, level in zip(loggers, levels, strict=True):
            x.setLevel(level)


def module_stack() -> dict[str, tuple[str, Any]] | None:
    """Return the modules whose forward is being traced, as their operators will show them; None without a trace."""
    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer.module_stack


@contextlib.contextmanager
def checkpoints_as(region: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Replace `torch.utils.checkpoint.checkpoint` within this context by a plain call within `region`."""

    def inside(*args: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    with (
        mock.patch.object(checkpointing, "_checkpoint_without_reentrant_generator", inside),
        mock.patch.object(checkpointing, "CheckpointFunction", Reentrant),
    ):
        yield


@contextlib.contextmanager
def recorded_inference() -> Iterator[None]:
    """Replace `torch.inference_mode` within this context by `torch.no_grad`, which a trace records."""
    with mock.patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode)):
        yield


@contextlib.contextmanager
def recorded_regions() -> Iterator[None]:
    """Make `torch.export` keep a region under no_grad also inside autocast, within this context: it drops those that
    begin with autocast's own mark."""
    enter = torch.amp.autocast_mode._enter_autocast

    def begins(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        nodes = getattr(node.graph.owning_module, str(node.target)).graph.nodes
        first = next((n for n in nodes if n.op != "placeholder" and n.target is not enter), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not (omit_if_same_with_ambient and first.args[0] == torch.is_grad_enabled())

    with mock.patch.object(replace_set_grad_with_hop_pass, "_is_set_grad_enabled_sub_mod", begins):
        yield


def draft_export(module: torch.nn.Module, args: Any, kwargs: Any, **options: Any) -> torch.export.ExportedProgram:
    """Run `torch.export.draft_export` with the values of the inputs, but not those of weights, which are fake.

    Without this torch would allocate every weight and compute with whatever is in that memory.

    Args:
        module: with fake weights. args, kwargs: real inputs. options: of `draft_export`.
    """
    fakify: Any = vars(_trace)["_fakify_params_buffers"]
    dispatch = _only_known(FakeTensorMode._dispatch_impl)
    note = ShapeEnv.set_real_tensor_prop_unbacked_vals

    def without_values(mode: FakeTensorMode, module: torch.nn.Module) -> Any:
        _keep_values(mode, False)
        try:
            return fakify(mode, module)
        finally:
            _keep_values(mode, True)

    # Torch 2.11 notes 1 for a condition that holds: the two are not equal in sympy, and no assertion was left of it.
    def truth(env: ShapeEnv, key: Any, value: Any) -> None:
        note(env, key, bool(value) if key.is_Relational else value)

    with (
        _unexplained(),
        mock.patch.object(ShapeEnv, "set_real_tensor_prop_unbacked_vals", truth),
        mock.patch.object(LazyTraceHandler, "emit", _to_nowhere),
        mock.patch.object(_trace, "_fakify_params_buffers", without_values),
        mock.patch.object(FakeTensorMode, "_dispatch_impl", dispatch),
    ):
        program = torch.export.draft_export(module, args, kwargs, **options)
    values = [v for n in program.graph.nodes for v in tree_leaves(n.meta.get("val")) if isinstance(v, FakeTensor)]
    for mode in {id(v.fake_mode): v.fake_mode for v in values}.values():  # or passes would compute with values too
        mode.propagate_real_tensors = False
        _keep_values(mode, False)
    return program


@contextlib.contextmanager
def _unexplained() -> Iterator[None]:
    """Omit from a draft export's report, within this context, how it came to each expression in sizes.

    For that torch reads the stack at every operation on a symbolic size, which takes most of the seconds of a draft.
    """
    frame: dict[str, Any] = {"line": 0, "name": "", "filename": -1, "loc": ""}
    with (
        mock.patch.object(sym_node, "dtrace_structured", lambda *_, **__: None),
        mock.patch.object(structured, "get_framework_stack", lambda *_, **__: [frame]),
    ):
        yield


def _to_nowhere(handler: Any, record: logging.LogRecord) -> None:
    """Discard torch's log of a draft, which goes into a file that is neither closed nor removed; only its name is
    read."""
    if handler.stream is None:
        handler.stream = io.StringIO()
        handler.stream.name = ""


def _keep_values(mode: FakeTensorMode, keep: bool) -> None:
    converter = mode.fake_tensor_converter.meta_converter
    converter.copy_data = converter.describer.copy_data = keep


def _only_known(dispatch: Any) -> Any:
    """Wrap the dispatch of fake tensors so that results of unknown values are unknown.

    Torch's own leaves them memory that nothing was written to: inside a cast, and where a known value is overwritten
    with an unknown one.
    """
    overwritten: dict[int, Any] = {}  # real storages with something unknown in them

    def has_value(value: FakeTensor) -> bool:
        real = value.real_tensor
        # A view that was made before the write has the same memory, and would be read as known.
        if real is not None and real.untyped_storage()._cdata in overwritten:
            value.real_tensor = None
        return value.real_tensor is not None

    def forget(value: Any) -> None:
        if isinstance(value, FakeTensor) and value.real_tensor is not None:
            # The storage is kept, not its address alone: freed memory is given to the next tensor, which may be known.
            storage = value.real_tensor.untyped_storage()
            overwritten[storage._cdata] = storage
            value.real_tensor = None

    def guarded(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Before the call, which changes what it writes to.
        knowing = [has_value(x) for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        result = dispatch(self, func, types, args, kwargs)
        # `x.copy_(y)` of an unknown y, and a cast of it, are unknown too.
        if not all(knowing):
            for schema, value in zip(func._schema.arguments, args, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write:
                    forget(value)
            for value in tree_leaves(result):
                forget(value)
        return result

    return guarded


def draft_failures(program: torch.export.ExportedProgram) -> list[Any]:
    """List the guesses and decisions that `draft_export` reports."""
    report: Any = getattr(program, "_report", None)
    return report.failures if report is not None else []


def decided_by_values(program: torch.export.ExportedProgram) -> set[str]:
    """Return the conditions that a draft export decided by values of its inputs, as torch writes them in assertions."""
    env = shape_env(program.graph)
    by_symbol = env.deferred_runtime_asserts if env else {}
    asserts = [a for group in by_symbol.values() for a in group]
    return {str(a.expr) for a in asserts if str(a.msg).startswith("propagate_real_tensors")}
