"""Internals of torch that a rank runs: DTensors, compiled functions, backwards, groups."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.distributed import _composable_state
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

VARIANTS = 64
# Inductor's options for a function that is called at every token. Dynamo's guards have compared sizes and strides of
# what it is given; Inductor's code compares them again, tensor by tensor, and those of what its operators gave.
UNASSERTED = {"size_asserts": False, "alignment_asserts": False}
# What torch's data parallelism keeps of a parameter -> the gradient that was last seen of that parameter, its version,
# and whether it is one of NaN that stands for those that wait for their sum.
_marks: weakref.WeakKeyDictionary[Any, tuple[Any, int, bool]] = weakref.WeakKeyDictionary()
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what load_state_dict returns


def compile_whole(function: Callable[..., Any], backend: Any, options: dict[str, Any] | None) -> Callable[..., Any]:
    """Apply `torch.compile` without graph breaks. Every size of 1, and every set of tensors that need gradients, is a
    variant: torch keeps 8 and then raises; from 2.13 on it keeps as many as are asked for.

    No guards check what the function reads of torch and autotp; guards check what it reads of other modules, its
    inputs, and the modes of torch.

    Args:
        function: of tensors. backend, options: of `torch.compile`.
    """
    limit: dict[str, Any] = (
        {"recompile_limit": VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    )
    options = {"guard_filter_fn": _exchangeable, **(options or {})}  # its own each time: torch takes the filter out
    return torch.compile(function, fullgraph=True, backend=backend, options=options, **limit)


CannotCompile = TorchDynamoException  # the function, or for the backend: nothing has run


def compiled_once(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Wrap a function so that a compiled caller holds one copy of it; this is its name in graphs."""

    def block(*args: Any) -> Any:
        return function(*args)

    nested: Any = torch.compiler.nested_compile_region(block)
    nested.__module__, nested.__name__, nested.__qualname__ = module, name, name
    return nested


# Where a guard's expression starts, as Dynamo writes it: `G['torch'].ops`, `G['__import_autotp_dot_kernels'].attend`.
_SETTLED = re.compile(r"G\['(__import_)?(torch|autotp|device)(_\w+)?'\]")


def _exchangeable(guards: Sequence[Any]) -> list[bool]:
    """Return which guards are kept: not those of functions, operators and types of torch and autotp.

    Nobody exchanges those between two calls, and their guards are most of all and half of a lookup's time.
    """
    return [not (guard.is_global and _SETTLED.match(guard.name)) for guard in guards]


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Suspend hooks on tensors that are saved for a backward, such as those of checkpointing, within this context."""
    autograd: Any = vars(torch._C)["_autograd"]
    hooks: list[Any] = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Suspend the modes that fake tensors or count operators, within this context."""
    return _disable_current_modes()


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that work on a device draws from: the CPU's, and its own."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def draw_from(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Restore the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:] if device.type == "cuda" else ():
        torch.cuda.set_rng_state(state, device)


def transform(values: Sequence[Any]) -> str:
    """Name the transform of torch.func that is under way, or forward-mode differentiation; "" for none.

    Args:
        values: of the call; a backward of several gradients at once (`is_grads_batched`) shows in these alone.
    """
    functorch: Any = vars(torch._C)["_functorch"]
    if functorch.maybe_current_level() is not None:
        return str(functorch.peek_interpreter_stack().key()).rpartition(".")[2]
    if any(map(functorch.is_legacy_batchedtensor, [x for x in values if isinstance(x, torch.Tensor)])):
        return "is_grads_batched"
    return "forward-mode differentiation" if torch.autograd.forward_ad._current_level >= 0 else ""


def hooks_all_modules() -> bool:
    """Return whether somebody hooked every module's call, as torch's counters and trackers do."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def like_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's part as a DTensor with the placements of `like`; outside of autograd, where it costs a tenth of
    `DTensor.from_local`.

    The two share one spec, as a DTensor and its views do.
    """
    return DTensor(local, like._spec, requires_grad=False)


def local_of(tensor: Any) -> torch.Tensor:
    """Return a DTensor's local tensor itself, unseen by autograd: `to_local` under no_grad at less cost."""
    return tensor._local_tensor


def lie_as(tensor: Any, other: Any) -> None:
    """Give a DTensor the local tensor and placements of another one of its shape; it stays the same object."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def forget_state(module: Any) -> Any:
    """Remove a module from the table of torch's data parallelism; return its state there."""
    return _composable_state._module_state_mapping.pop(module, None)


def remember_state(module: Any, state: Any) -> None:
    """Restore what `forget_state` returned."""
    if state is not None:
        _composable_state._module_state_mapping[module] = state


def of_sharding(hook: Any) -> bool:
    """Return whether a hook on a module is one of torch's data parallelism."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def part_of(value: Any) -> Any:
    """Return this rank's part: a DTensor's local tensor; anything else is its own."""
    return local_of(value) if isinstance(value, DTensor) else value


# Within it operators are called below autograd: where nothing is recorded, the functional collectives cost a third.
below_autograd = torch._C._AutoDispatchBelowAutograd


def after_backward(function: Callable[[], None]) -> None:
    """Queue a function, from within a backward, for its end; what it raises is raised by the backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def flat_mesh(mesh: Any) -> Any:
    """Flatten a mesh of several dimensions to one dimension."""
    return mesh._flatten()


def joined_mesh(outer: Any, inner: Any) -> Any:
    """Concatenate two meshes of one whole, as `fully_shard` does for weights that are split over both."""
    return DeviceMesh._concatenate([outer, inner])  # type: ignore[attr-defined]


def graph_task() -> int:
    """Return the number of the backward that is running in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def group_timeout(group: Any, device: torch.device) -> float:
    """Return the seconds after which a collective of this process group fails."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 1800.0


@contextlib.contextmanager
def tables_of_dynamo() -> Iterator[None]:
    """Clear, at the end of this context, tables that Dynamo made within it of functions that are replaced in it."""
    before = {id(table) for table in _tables() if table.cache_info().currsize}
    try:
        yield
    finally:
        for table in _tables():
            if id(table) not in before:
                table.cache_clear()


def _tables() -> list[Any]:
    """List Dynamo's tables by function of torch, of those of its modules that are loaded."""
    variables, rules = (sys.modules.get(f"torch._dynamo.{name}") for name in ("variables.torch", "trace_rules"))
    kind = getattr(variables, "TorchInGraphFunctionVariable", None)
    places = (kind, "_get_handlers"), (rules, "get_torch_obj_rule_map"), (rules, "get_tensor_method")
    tables = [getattr(place, name, None) for place, name in places]
    return [table for table in tables if hasattr(table, "cache_clear")]


def gathered(root: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as a forward of this module whose weights torch's data parallelism gathers, beside its hooks.

    Args:
        root: the module. function: of `args` and `kwargs`.
    """
    state = root._get_fsdp_state()
    if state._state_ctx.iter_forward_root is not None:  # within a forward, as of a hook
        return function(*args, **kwargs)
    args, kwargs = state._pre_forward(root, args, kwargs)
    return state._post_forward(root, args, function(*args, **kwargs))


@contextlib.contextmanager
def at_once(parts: Sequence[Any]) -> Iterator[None]:
    """Let torch's data parallelism gather weights once within this context, and sum gradients at its end.

    Torch's own pipeline stages do the same: backwards in parts read weights that must be present from the forward.

    Args:
        parts: modules that it was given, for each of which `outermost` was called.
    """
    states = [part._get_fsdp_state() for part in parts]
    groups = [group for state in states for group in _parameter_groups(state)]
    # Micro-batches are in flight together: one's backward must not free what another reads, or sum what is not all.
    before = [(g.reduce_grads, g.reshard_after_backward, g.post_forward_mesh_info) for g in groups]
    for group in groups:
        group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = False, False, None
    for state in states:
        state._state_ctx.is_last_backward = False
    try:
        yield
    except BaseException:
        # Those of a step that failed would be added to the next one's.
        for part in parts:
            for p in _own_parameters(part):
                _drop(p)
        raise
    finally:
        # Calls beside steps gather and sum as before.
        for group, settings in zip(groups, before, strict=True):
            group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = settings
        for state in states:
            state._state_ctx.is_last_backward = True
    # What torch's backward would do, had it been told that it is the last: sums, and the end of the iteration.
    for group in groups:
        group.post_backward()
    for state in states:
        if state._is_root:
            state._root_post_backward_final_callback()


def outermost(root: Any) -> None:
    """Make a module the root of torch's data parallelism for the modules in it."""
    root._get_fsdp_state()._lazy_init()


def reset_iteration(root: Any) -> None:
    """Reset torch's data parallelism after a forward or backward that failed: what it gathered is stale by the next."""
    if root._get_fsdp_state()._is_root is None:  # before its first forward: it has gathered nothing
        return
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    context = root._get_fsdp_state()._state_ctx
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
        for group in _parameter_groups(state):
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False


def differentiates(root: Any) -> bool:
    """Return whether a backward is under way of a module that torch's data parallelism was given."""
    return root._get_fsdp_state()._training_state.name == "PRE_BACKWARD"


def show_own(part: Any) -> None:
    """Give a module that torch's data parallelism was given its own parameters; what was gathered of them is kept."""
    for p in _own_parameters(part):
        p._setattr_on_modules(p.sharded_param)


def unsummed(part: Any) -> bool:
    """Return whether torch's data parallelism has gradients of a module that it has not summed yet."""
    return any(map(_waits, _own_parameters(part)))


def mark_unsummed(part: Any) -> None:
    """Give each parameter with gradients that wait for their sum one of NaN, or note which it has.

    Torch keeps what waits where no `zero_grad` finds it; that this one is gone tells that it was to be dropped.
    """
    for p in _own_parameters(part):
        if p in _marks or not _waits(p):
            continue
        own, stands = p.sharded_param, p.sharded_param.grad is None
        if stands:
            local = own.to_local()
            own.grad = p.to_sharded_dtensor(local.new_full((), torch.nan).expand_as(local))  # of one element in memory
        _marks[p] = own.grad, _version(own.grad), stands


def drop_unmarked(part: Any) -> bool:
    """Drop what waits where the gradient that was noted is gone or zero; return whether one has other values."""
    rewrites = False
    for p in filter(_marks.get, _own_parameters(part)):
        (marked, version, _), grad = _marks[p], p.sharded_param.grad
        if grad is marked and _version(grad) == version:
            continue
        if grad is marked and grad.to_local().any():
            rewrites = True
            continue
        _drop(p)
        _unmark(p)
    return rewrites


def unmark(part: Any) -> None:
    """Take away gradients of NaN that stand for others."""
    for p in _own_parameters(part):
        _unmark(p)


def _unmark(p: Any) -> None:
    marked, _, stands = _marks.pop(p, (None, 0, False))
    if stands and p.sharded_param.grad is marked:
        p.sharded_param.grad = None


def _version(tensor: Any) -> int:
    return tensor._version + tensor.to_local()._version  # writes to a DTensor are counted in the first alone


def _waits(p: Any) -> bool:
    whole = getattr(p, "_unsharded_param", None)
    return p.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _drop(p: Any) -> None:
    p.unsharded_accumulated_grad = None
    if hasattr(p, "_unsharded_param"):
        p._unsharded_param.grad = None


def _own_parameters(part: Any) -> Iterator[Any]:
    """Iterate over what torch's data parallelism keeps of each parameter of a module, those of its blocks left out."""
    for group in _parameter_groups(part._get_fsdp_state()):
        yield from group.fsdp_params


def _parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one, up to torch 2.11
    return [group for group in groups if group is not None]


def follow_types(part: Any) -> None:
    """Drop what torch's data parallelism gathered in a type that the parameters of this part no longer have.

    It notes types at the first forward; `Module.to` changes them without its knowledge.
    """
    for group in _parameter_groups(part._get_fsdp_state()):
        # Before the first forward no type is noted.
        stale = [p for p in group.fsdp_params if getattr(p, "orig_dtype", None) not in (None, p.sharded_param.dtype)]
        for p in stale:
            p.all_gather_outputs, p._unsharded_inner_tensors = [], []
            p.__dict__.pop("_unsharded_param", None)
        if stale:
            group._init_mp_dtypes()
