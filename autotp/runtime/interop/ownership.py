"""Ownership of DTensors by sharded modules, steps of optimizers that are under way, and refusals.

Each use of a sharded module that cannot work is refused with a sentence of its own when it is tried.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autotp import compat
from autotp.comm.ranks import Ranks
from autotp.errors import StateError
from autotp.inputs import Leaves

INSTEAD = (
    "Save it with sharded.save_checkpoint(folder, optimizer=optimizer), or with torch.distributed.checkpoint, and load "
    "it likewise; both are for any number of ranks."
)
_groups: dict[str, str] = {}  # groups of sharded modules' tp ranks -> those of all axes, by name
_wide: dict[frozenset[int], str] = {}  # the latter by their ranks: modules of other axes may share one of the former
_steps: list[int] = []  # of each step of an optimizer that is under way, one within another, the thread
_between: dict[Any, Any] = {}  # handlers that operators have between steps, which would slow down every update


def know(ranks: Ranks) -> None:
    """Take DTensors over the group of these tp ranks, or a mesh with it, for a sharded module's."""
    every = ranks.place or ranks.planners
    _groups[ranks.group_name] = _wide[frozenset(dist.get_process_group_ranks(every.group))] = every.group_name


def wide_group(mesh: DeviceMesh, which: Sequence[int]) -> str:
    """Return the group whose ranks communicate over these dimensions of a mesh; "" where none is ours."""
    groups = [mesh.get_group(i).group_name for i in range(mesh.ndim)]
    tp = next((g for g in reversed(groups) if g in _groups), "")  # the last dimension is tp, where it is ours
    if not tp or all(groups[i] == tp for i in which):
        return tp
    return _wide.get(frozenset(mesh.mesh.flatten().tolist()), _groups[tp])


def ours(value: Any) -> bool:
    """Return whether a value is a DTensor over the ranks of a sharded module."""
    if not isinstance(value, DTensor):
        return False
    mesh = value.device_mesh
    return any(mesh.get_group(i).group_name in _groups for i in range(mesh.ndim))


def in_parts(value: DTensor) -> bool:
    """Return whether a rank holds less than the value: a slice of it, or a summand."""
    return any(
        n > 1 and not isinstance(p, Replicate) for n, p in zip(value.device_mesh.shape, value.placements, strict=True)
    )


def of_another_rank(value: Any) -> bool:
    """Return whether a DTensor holds a part that is not this rank's: another one pickled it.

    Its mesh comes with it, and in that the place of the rank that wrote it.
    """
    if not isinstance(value, DTensor) or not in_parts(value):
        return False
    mesh: Any = value.device_mesh
    return (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist() != list(mesh.get_coordinate() or ())


def handle_between_steps(handlers: Mapping[Any, Any]) -> None:
    """Compute these operators on DTensors by these functions, but within the steps of optimizers."""
    _between.update(handlers)
    _now([*_steps])


def _now(steps: list[int]) -> None:
    """Note the steps that are under way."""
    _steps[:] = steps
    table = compat.operator_handlers()
    for op, handler in _between.items():
        if steps:
            table.pop(op, None)
        else:
            table[op] = handler


def begin_step() -> None:
    """Note that all ranks are in a step of an optimizer from now on, in this thread."""
    _now([*_steps, threading.get_ident()])


def end_step() -> None:
    """Note that the innermost step is done."""
    _now(_steps[:-1])


def stepping() -> bool:
    """Return whether all ranks are in the step of an optimizer, in this thread."""
    return threading.get_ident() in _steps


def forget_steps() -> None:
    """Note that no step is under way in this thread: one that failed has no end."""
    if _steps and stepping():  # a list first, for Dynamo traces this
        _now([])


@contextlib.contextmanager
def outside_of_steps() -> Iterator[None]:
    """Run what a step calls that is not its own, such as a closure; where that fails the step has ended."""
    steps = [*_steps]
    _now([])
    yield
    _now(steps)


COMPILE = (
    "torch.compile around a sharded module finds nothing to compile: what runs are programs of autotp, one for each "
    "kind of call. autotp.compile(model, ..., backend='inductor') compiles those, and equal blocks once."
)
JIT = (
    "torch.jit.trace and torch.jit.script cannot write down a sharded module: they know neither its collectives nor "
    "that each rank has a program of its own. To run it compiled give autotp.compile backend='inductor'; to keep it, "
    "save_checkpoint and plan.save."
)
DDP = (
    "DistributedDataParallel averages gradients of plain tensors, and a sharded module's are split over tp. Give "
    "autotp.compile dp=..., which averages them over a second mesh axis, or wrap layers in fully_shard. In Lightning "
    "take ModelParallelStrategy instead of 'ddp', and compile in configure_model. accelerate and transformers' Trainer "
    "wrap modules that they were not told of: give them parallelism_config=ShardedParallelism(sharded), or take "
    "ShardedAccelerator and ShardedTrainer, all of autotp.integrations."
)
TRANSFORM = (
    "a sharded module takes no part in transforms of torch.func ({}): a rank's program has no rule for them. Gradients "
    "come from backward(), torch.autograd.grad (with create_graph=True for those of gradients) and "
    "torch.autograd.functional with vectorize=False; several examples go in as one batch. The original model takes "
    "all transforms."
)
TRACE = (
    "torch.fx.symbolic_trace cannot look into a sharded module: its programs look at the values that they are called "
    "with. sharded.program(example_inputs) is a rank's program as a graph."
)

QUANTISE = (
    "torch.ao.quantization changes layers of exactly torch's own classes, and would leave a sharded module as it is "
    "without a word. Quantise the model first, and give that to autotp.compile."
)
CLIPPING = (
    "torch.nn.utils.clip_grad_norm_ sees the gradients of one rank's stages, and would scale each stage by a norm of "
    "its own. pipe.clip_grad_norm_(max_norm) is over all stages."
)
NORMS = (
    "torch.nn.utils.clip_grad_norm_ adds up norms in an order that depends on the number of ranks, and tp_invariant "
    "asks for the same bits at any. module.clip_grad_norm_(max_norm) adds them up along the tree."
)
DRAWING = (
    "numbers are drawn into a weight of one rank's stages alone: each stage would draw the same ones for its own. "
    "pipe.module.apply(fn) draws as on the whole model, or initialise the model before autotp.stages."
)
TRAINER = (
    "transformers' Trainer would give each rank a batch of its own, and save on its first rank alone. Say which ranks "
    "share a batch: TrainingArguments(..., parallelism_config=ShardedParallelism(sharded), save_only_model=True). With "
    "optimizer states in checkpoints, or dp, take ShardedTrainer in its place. Both are of autotp.integrations."
)
# What transformers' Trainer asks a model, and nobody else. `autotp.integrations` sets it where it tells a trainer more.
LOADED = "is_distributed_loading_by_transformers"
SET = {"qconfig": QUANTISE}  # an attribute that says what somebody is about to do -> why it is refused


class Refused:
    """Attribute that one part of torch reads before all else, and nobody else knows: reading it raises this error.

    A part's `dir` leaves it out, so that a debugger that reads all reads the rest.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> NoReturn:
        if instance is None:
            raise AttributeError(self.name)
        raise StateError(self.message)


def refuse_transforms(values: Leaves) -> None:
    """Refuse a forward or a backward that torch transforms, or traces with stand-ins for tensors.

    Args:
        values: inputs of the forward, or gradients that the backward begins with.

    Raises:
        StateError: with what to do instead.
    """
    if name := compat.transform(values):
        raise StateError(TRANSFORM.format(name))
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise StateError(JIT)
    if any(isinstance(x, fx.Proxy) for x in values):
        raise StateError(TRACE)


_unclipped: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # module -> the reason
_drawing: list[bool] = []  # draws under way for all stages together


def know_virtual(module: nn.Module) -> None:
    """Refuse torch's `clip_grad_norm_` from now on for this module, whose ranks run several virtual ones."""
    _unclipped[module] = NORMS


def know_stages(module: nn.Module) -> None:
    """Refuse torch's `clip_grad_norm_`, and draws of single weights, from now on for this module, a stage's of
    several."""
    _unclipped[module] = CLIPPING


@contextlib.contextmanager
def drawing_all() -> Iterator[None]:
    """Let every rank draw for the weights of all stages in this context."""
    _drawing.append(True)
    try:
        yield
    finally:
        _drawing.pop()


def refuse_drawing(tensor: DTensor) -> None:
    """Refuse numbers that are drawn into a weight of one stage by itself.

    Raises:
        StateError: it says how to draw those of all stages.
    """
    of_stages = [module for module, reason in _unclipped.items() if reason == CLIPPING and not _drawing]
    for p in (p for module in of_stages for p in nn.Module.parameters(module)):
        if compat.part_of(p).untyped_storage()._cdata == compat.local_of(tensor).untyped_storage()._cdata:
            raise StateError(DRAWING)


def refuse_clipping(norms: Sequence[Any]) -> None:
    """Refuse a norm of norms of one stage's gradients, as `clip_grad_norm_` takes it, outside of a step.

    Args:
        norms: tensors that are about to be stacked.
    """
    if stepping() or not all(ours(norm) and not norm.ndim for norm in norms):
        return
    for module, reason in _unclipped.items():
        for p in nn.Module.parameters(module):
            if isinstance(p, DTensor) and p.device_mesh == norms[0].device_mesh:
                raise StateError(reason)
