"""The only place that imports private parts of torch, with what differs between the versions (2.11 - 2.13)."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
import torch.distributed._functional_collectives  # registers the meta kernels of the ops below
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._library.custom_ops import CustomOpDef
from torch._logging._internal import LazyTraceHandler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.tensor import DTensor
from torch.export import _trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

VARIANTS = 64

# Functional collectives as dispatcher ops: the compiler sees them, fake tensors pass through them.
c10d_ops: Any = torch.ops._c10d_functional

tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten
TreeSpec = pytree.TreeSpec
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what load_state_dict returns


def compile_whole(function: Callable[..., Any], backend: Any, options: dict[str, Any] | None) -> Callable[..., Any]:
    """`torch.compile` without graph breaks. Every size of 1, and every set of tensors that need gradients, is a
    variant: torch keeps 8 and then raises; from 2.13 on it keeps as many as are asked for."""
    more: dict[str, Any] = (
        {"recompile_limit": VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    )
    return torch.compile(function, fullgraph=True, backend=backend, options=options, **more)


def has_symmetric_memory() -> bool:
    """Whether torch has the operators that fuse collectives with matmuls through symmetric memory."""
    return hasattr(torch.ops.symm_mem, "fused_all_gather_matmul") and torch.distributed.is_nccl_available()


def use_symmetric_memory(group: str) -> None:
    """Let torch's micro-pipeline pass fuse the collectives of this group: until this is said it skips them silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that nobody need say so: that pass still asks (torch 2.13)
        symmetric_memory.enable_symm_mem_for_group(group)  # pyright: ignore[reportArgumentType]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of nested containers by their place, such as `logits` or `['more'][0]`.

    What a container that was registered without names holds is numbered.
    """
    try:
        pairs = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # some type within has no names
        pairs = _places(tree)
    return {place.removeprefix(".") or "0": leaf for place, leaf in pairs}


def _places(tree: Any) -> list[tuple[str, Any]]:
    if pytree.tree_structure(tree).is_leaf():
        return [("", tree)]
    return [(f"{place}{name}", leaf) for place, inner in _children(tree) for name, leaf in _places(inner)]


def _children(tree: Any) -> list[tuple[str, Any]]:
    """What a container holds, by its place in it."""

    def inner(value: Any) -> bool:
        return value is not tree

    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree, inner)[0]]
    except ValueError:
        return [(f"[{i}]", x) for i, x in enumerate(pytree.tree_leaves(tree, inner))]


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that `torch.export` accepts for a model's parameters."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, like: torch.Tensor, dtype: Any, device: torch.device | str) -> torch.Tensor:
    """A fake tensor as large as another one, and a parameter where that is one.

    Made directly: by way of the mode and of `nn.Parameter`, which detaches, it takes several times as long.
    """
    with without_torch_functions():
        empty = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
        made: Any = FakeTensor(mode, empty, torch.device(device))
    if isinstance(like, torch.nn.Parameter):
        made.requires_grad_(like.requires_grad)
        made._is_param = True
    return made


def without_torch_functions() -> contextlib.AbstractContextManager[Any]:
    """Reading tensors' attributes here is not shown to the tracer's modes, which takes most of the time."""
    return torch._C.DisableTorchFunction()


def told_by_data(val: Any) -> bool:
    """Whether a value, or one of its sizes, is a number that only the data tell."""
    symbolic = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool
    return any(isinstance(v, symbolic) and free_unbacked_symbols(v) for v in pytree.tree_leaves(val))


def vmapped(graph: fx.Graph) -> bool:
    """Whether a graph still holds `torch.vmap` as steps, around operators on values that hide a dimension."""
    return any(getattr(n.target, "__module__", "") == "torch._functorch.predispatch" for n in graph.nodes)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Without torch's own log lines about guards and missing fake kernels."""
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
    """The modules whose forward is being traced, as their operators will show them; None where nothing is traced."""
    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer.module_stack


@contextlib.contextmanager
def checkpoints_as(region: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Within this context what `torch.utils.checkpoint.checkpoint` calls is called within `region`, and that is all."""

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


def mode_of(val: Any) -> contextlib.AbstractContextManager[Any]:
    """The mode that fake tensors belong to."""
    return next((v.fake_mode for v in pytree.tree_leaves(val) if isinstance(v, FakeTensor)), contextlib.nullcontext())


@contextlib.contextmanager
def recorded_inference() -> Iterator[None]:
    """Within this context `torch.inference_mode` is `torch.no_grad`, which a trace records."""
    with mock.patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode)):
        yield


@contextlib.contextmanager
def recorded_regions() -> Iterator[None]:
    """Within this context `torch.export` keeps a region under no_grad also where it lies within autocast: it forgets
    those that begin with autocast's own mark."""
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
    """`torch.export.draft_export` that follows the values of the inputs, but not those of weights, which are fake.

    Without this torch would allocate every weight and compute with whatever is in that memory.
    """
    fakify: Any = vars(_trace)["_fakify_params_buffers"]
    dispatch = _only_known(FakeTensorMode._dispatch_impl)

    def without_values(mode: FakeTensorMode, module: torch.nn.Module) -> Any:
        _keep_values(mode, False)
        try:
            return fakify(mode, module)
        finally:
            _keep_values(mode, True)

    with (
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


def _to_nowhere(handler: Any, record: logging.LogRecord) -> None:
    """Torch logs every draft into a file that it neither closes nor removes; it wants to know the file's name."""
    if handler.stream is None:
        handler.stream = io.StringIO()
        handler.stream.name = ""


def _keep_values(mode: FakeTensorMode, keep: bool) -> None:
    converter = mode.fake_tensor_converter.meta_converter
    converter.copy_data = converter.describer.copy_data = keep


def _only_known(dispatch: Any) -> Any:
    """A dispatch of fake tensors under which what is made of an unknown value is unknown.

    Torch's own leaves memory there that nothing was written to: inside a cast, and where a known value is overwritten
    with an unknown one.
    """
    overwritten: dict[int, Any] = {}  # real storages with something unknown in them

    def known(value: FakeTensor) -> bool:
        real = value.real_tensor
        if real is not None and real.untyped_storage()._cdata in overwritten:
            value.real_tensor = None
        return value.real_tensor is not None

    def forget(value: Any) -> None:
        if isinstance(value, FakeTensor) and value.real_tensor is not None:
            storage = value.real_tensor.untyped_storage()
            overwritten[storage._cdata] = storage
            value.real_tensor = None

    def guarded(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        knowing = [known(x) for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        found = dispatch(self, func, types, args, kwargs)
        if not all(knowing):
            for schema, value in zip(func._schema.arguments, args, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write:
                    forget(value)
            for value in tree_leaves(found):
                forget(value)
        return found

    return guarded


def draft_failures(program: torch.export.ExportedProgram) -> list[Any]:
    """What `draft_export` reports that it guessed or decided."""
    report: Any = getattr(program, "_report", None)
    return report.failures if report is not None else []


def decided_by_values(program: torch.export.ExportedProgram) -> set[str]:
    """The conditions that a draft export decided by the values of its inputs, as torch writes them in assertions."""
    env = shape_env(program.graph)
    asserts = [a for found in (env.deferred_runtime_asserts if env else {}).values() for a in found]
    return {str(a.expr) for a in asserts if str(a.msg).startswith("propagate_real_tensors")}


def shape_env(graph: fx.Graph) -> ShapeEnv | None:
    """The shape environment that the symbolic sizes of this graph belong to."""
    for node in graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            sizes = val.shape if isinstance(val, torch.Tensor) else [val]
            for size in sizes:
                if isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat):
                    return size.node.shape_env
    return None


def read_shape_env(env: ShapeEnv | None) -> tuple[dict, dict, list[sympy.Basic]]:
    """Hints (symbol -> example size), ranges (symbol -> (low, high)) and guards of a shape environment."""
    if env is None:
        return {}, {}, []
    values = getattr(env, "backed_var_to_val", None)
    values = env.var_to_val if values is None else values
    hints = {k: int(v) for k, v in values.items()}
    ranges = {k: (_bound(r.lower, 0), _bound(r.upper, 2**62)) for k, r in env.var_to_range.items()}
    return hints, ranges, [g.expr for g in env.guards]


def _bound(x: Any, otherwise: int) -> int:
    return int(x) if getattr(x, "is_Integer", False) else otherwise


def like_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part as a DTensor that lies as `like` does; outside of autograd, where it costs a tenth of
    `DTensor.from_local`.

    The two share what says how they lie, as a DTensor and its views do.
    """
    return DTensor(local, like._spec, requires_grad=False)


def local_of(tensor: Any) -> torch.Tensor:
    """A DTensor's local tensor, the very one, which autograd does not see: `to_local` under no_grad at less cost."""
    return tensor._local_tensor


def operators_named(*starts: str) -> list[Any]:
    """Torch's operators whose names start so, in all overloads that this version has, but for those with `out`."""
    names = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    split = [n.partition(".") for n in sorted(names) if n.startswith(starts)]
    return [getattr(getattr(torch.ops.aten, n), over or "default") for n, _, over in split if "out" not in over]


def operator_handlers() -> dict[Any, Callable[..., Any]]:
    """Operator -> what computes it on DTensors, called with (operator, args, kwargs), where its shards do not say."""
    return DTensor._op_dispatcher._custom_op_handlers


def by_default(op: Any, args: Any, kwargs: Any) -> Any:
    """An operator on DTensors as torch computes it, from within its handler."""
    handlers = operator_handlers()
    own = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if own is not None:
            handlers[op] = own


# Within it operators are called below autograd: where nothing is recorded, the functional collectives cost a third.
below_autograd = torch._C._AutoDispatchBelowAutograd


def after_backward(function: Callable[[], None]) -> None:
    """Called in a backward: run the function when all of it is done; what it raises is raised by the backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def flat_mesh(mesh: Any) -> Any:
    """A mesh of several dimensions as one of one dimension."""
    return mesh._flatten()


sym_size: Any = torch.ops.aten.sym_size.int

OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
wraps_tensors = is_traceable_wrapper_subclass


def operator(op: Any) -> Any:
    """The overload or packet that an operator is: by itself, as a custom operator, or by name; None where unknown."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        space, _, name = op.replace("::", ".").partition(".")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, space), packet, None) if packet else None
        op = getattr(op, overload, None) if overload else op
    return op if isinstance(op, OpOverloadPacket | torch._ops.OpOverload) else None


def graph_task() -> int:
    """A number for the backward that is running in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def group_timeout(group: Any, device: torch.device) -> float:
    """Seconds after which a collective of this process group fails."""
    options = getattr(group._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found.total_seconds() if found is not None else 1800.0
