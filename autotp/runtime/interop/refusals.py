"""What others may not do with a sharded module, each with a sentence of its own at the moment that they try."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from autotp import compat
from autotp.errors import StateError

from .ours import ours
from .stepping import clipped

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
SET = {"qconfig": QUANTISE}  # an attribute that says what somebody is about to do -> why it is refused


class Refused:
    """An attribute that one part of torch asks for before all else: asked from there, it is this error.

    For everybody else it is not there, such as for a debugger that reads all.
    """

    def __init__(self, reader: str | tuple[str, ...], message: str) -> None:
        self.reader, self.message = reader, message

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> NoReturn:
        if instance is not None and str(sys._getframe(1).f_globals.get("__name__")).startswith(self.reader):
            raise StateError(self.message)
        raise AttributeError(self.name)


def refuse_transforms(values: Sequence[Any]) -> None:
    """Before a forward or a backward: raise where torch transforms it, or traces it with stand-ins for tensors.

    Args:
        values: inputs of the forward, or gradients that the backward begins with.

    Raises:
        StateError: with what to do instead.
    """
    if name := compat.transform(values):
        raise StateError(TRANSFORM.format(name))
    if any(isinstance(x, fx.Proxy) for x in values):
        raise StateError(TRACE)


_of_stages: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_clipping_of(module: nn.Module) -> None:
    """From now on torch's `clip_grad_norm_` is refused for the parameters of this module, a stage's of several."""
    _of_stages.add(module)


def refuse_clipping() -> None:
    """Where torch takes the norm of norms: raise if `clip_grad_norm_` does so, of parameters of one stage."""
    if _of_stages and (parameters := clipped()):
        own = {id(p) for module in _of_stages for p in module.parameters()}
        if not own.isdisjoint(map(id, parameters)):
            raise StateError(CLIPPING)


@functools.cache
def install() -> None:
    """From now on modules of torch that take others in mind what these are. Once per process."""
    register_module_module_registration_hook(_taken_in)


def _taken_in(taker: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse `DistributedDataParallel` over a module with sharded parameters in it, before it sends anything."""
    if isinstance(taker, DistributedDataParallel) and module is not None:
        sharded = next((n for n, p in module.named_parameters() if ours(p)), None)
        if sharded is not None:
            raise StateError(f"{sharded} of {type(module).__name__} is sharded. {DDP}")


class Refusals:
    """For a sharded module."""

    __jit_ignored_attributes__ = Refused(("torch.jit", "torch._jit_internal"), JIT)
    _initialize_hook = Refused("torch._dynamo", COMPILE)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see `autotp.compile`'s `backend`."""
        raise StateError(COMPILE)
