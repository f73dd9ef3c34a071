"""The self-check: a capture is held against the model itself, outputs, gradients and buffers, on the example inputs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import compat
from .errors import CaptureError, InputError
from .graph import Capture
from .inputs import Inputs
from .numerics import largest, loss, relative
from .simulate import reference

LARGEST = 10**9  # bytes of weights up to which a capture is compared without being asked to
PLAIN = (bool, int, float, complex, str, type(None))


@dataclass
class Results:
    """What a run gave: outputs by name, buffers as they are afterwards, gradients by the name of the parameter."""

    outputs: dict[str, Any]
    buffers: Mapping[str, Any]
    gradients: Mapping[str, Tensor | None]


@dataclass
class Trial:
    """A model on its example inputs, to hold captures against. A copy of it is run, never the user's own.

    Attributes:
        skip: why nothing is compared; "" where it is.
    """

    model: nn.Module
    inputs: Inputs
    device: torch.device
    skip: str = ""

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, device: torch.device, wanted: bool | None = None) -> Trial:
        """A trial of this model; by default where its weights are real and under 1 GB.

        Args:
            wanted: `check_capture` of the public functions: False never compares, True also where weights are large.
        """
        if wanted is not None and not isinstance(wanted, bool):
            raise InputError(f"check_capture={wanted!r} is {type(wanted).__name__}: give None, True or False.")
        held = [*model.parameters(), *model.buffers()]
        tensors = [*held, *(v for v in compat.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(v, Tensor))]
        size = sum(t.numel() * t.element_size() for t in held)
        if wanted is False:
            return cls(model, inputs, device, "check_capture=False")
        if any(t.is_meta for t in tensors):
            if wanted:
                raise InputError("check_capture=True compares values, and there are tensors on the meta device.")
            return cls(model, inputs, device, "there are tensors on the meta device")
        if size >= LARGEST and not wanted:
            why = f"the weights take {size / 1e9:.1f} GB, 1 GB or more; check_capture=True compares all the same"
            return cls(model, inputs, device, why)
        return cls(model, inputs, device)

    @cached_property
    def copied(self) -> nn.Module:
        """The model with weights of its own, on the device of the capture."""
        memo: dict[int, Any] = {}
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            made = tensor.detach().to(self.device, copy=True)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return copy.deepcopy(self.model, memo)

    def mapped(self, change: Callable[[Tensor], Tensor] = lambda t: t) -> Inputs:
        """The example inputs on the device of the capture, each tensor changed."""

        def own(tensor: Tensor) -> Tensor:
            made = change(tensor.detach()).to(self.device, copy=True)
            return made.requires_grad_(tensor.requires_grad)

        args, kwargs = compat.tree_map_only(Tensor, own, (self.inputs.args, dict(self.inputs.kwargs)))
        return Inputs(*args, **kwargs)

    def outputs(self, inputs: Inputs, around: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
        """The model's outputs by name, without gradients; nothing of it is changed by that."""
        with self._undisturbed(), torch.no_grad(), around or nullcontext():
            return compat.named_leaves(self.copied(*inputs.args, **inputs.kwargs))

    def demand_equal(self, usual: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
        """Refuse a change with which the model computes something else."""
        wrong = _worst(_gaps("output", other, usual))
        if not wrong[0] <= self.tolerance():
            raise CaptureError(f"{what} the model computes something else: {wrong[1]} is off by {wrong[0]:.1e}")

    def compare(self, program: Capture) -> float:
        """The largest relative difference between a capture and the model. Where the model fails, `skip` says so.

        Raises:
            CaptureError: it is more than rounding allows.
        """
        try:
            self.outputs(self.mapped())  # a second call of the same model sees what the first left in attributes
            theirs = self._original()
        except Exception as error:  # whatever a user's forward may raise
            first = (str(error).splitlines() or [""])[0]
            self.skip = f"the model itself fails on the example inputs: {type(error).__name__}: {first}"
            return float("nan")
        error, name = _worst(_compared(self._captured(program), theirs))
        allowed = self.tolerance(program)
        if not error <= allowed:
            raise CaptureError(
                f"self-check: the captured graph is not the model: {name} is off by {error:.1e} of its largest value, "
                f"and rounding allows {allowed:.1e}"
            )
        return error

    def tolerance(self, program: Capture | None = None) -> float:
        """What rounding may make of a difference, in the least exact dtype that is computed in."""
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        kinds |= {d for d in program.state[-1:] if d is not None} if program is not None else set()
        each = (1e4 * torch.finfo(d).eps if d.itemsize > 2 else 16 * torch.finfo(d).eps for d in kinds)
        return max(each, default=1e-3)

    def _original(self) -> Results:
        inputs = self.mapped()
        with self._undisturbed(), torch.enable_grad():
            outputs = compat.named_leaves(self.copied(*inputs.args, **inputs.kwargs))
            buffers = {n: b.detach().clone() for n, b in self.copied.named_buffers()}
        return Results(outputs, buffers, _gradients(outputs, self._wanted(inputs)))

    def _captured(self, program: Capture) -> Results:
        inputs = self.mapped()
        held: dict[str, Any] = {**program.constants, **dict(self.copied.named_buffers(remove_duplicate=False))}
        held |= dict(self.copied.named_parameters(remove_duplicate=False))
        flat = iter(compat.tree_leaves((inputs.args, inputs.kwargs)))
        given: dict[fx.Node, Any] = {}
        for leaf in program.leaves:
            value = next(flat) if leaf.kind == "input" else held[leaf.name]
            given[leaf.node] = value.detach().clone() if leaf.kind in ("buffer", "constant") else value
        autocast = len(program.state) > 0 and program.state[-1] is not None  # its casts are in the graph
        without = torch.autocast(self.device.type, enabled=False) if autocast else nullcontext()
        with self._undisturbed(), torch.enable_grad(), without:
            found = compat.tree_leaves(reference(program.graph, given, lambda n, v: None))
        written = {program.aliases.get(n, n): found[i] for i, n in program.mutations.items()}
        left = {program.aliases.get(x.name, x.name): given[x.node] for x in program.leaves if x.kind == "buffer"}
        kept = [v for i, v in enumerate(found) if i not in program.mutations]
        outputs = compat.named_leaves(compat.tree_unflatten(kept, program.out_spec))
        return Results(outputs, left | written, _gradients(outputs, self._wanted(inputs)))

    def _wanted(self, inputs: Inputs) -> dict[str, Tensor]:
        """The leaves whose gradients are compared."""
        leaves = {**dict(self.copied.named_parameters()), **compat.named_leaves((inputs.args, inputs.kwargs))}
        return {n: v for n, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Random numbers start alike every time, and buffers and random numbers are afterwards as they were."""
        held = [(m, n, b, b.clone()) for m in self.copied.modules() for n, b in m._buffers.items() if b is not None]
        devices = [self.device] if self.device.type == "cuda" else []
        state = random.getstate()
        try:
            with torch.inference_mode(False), torch.random.fork_rng(devices):
                yield
        finally:
            random.setstate(state)
            for module, name, buffer, value in held:
                module._buffers[name] = buffer
                buffer.data = value


def _gradients(outputs: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a loss that gives every element of every output a gradient of its own; no `.grad` is touched."""
    total = loss(list(outputs.values()))
    if not total.requires_grad or not wanted:
        return dict.fromkeys(wanted)
    return dict(zip(wanted, torch.autograd.grad(total, list(wanted.values()), allow_unused=True), strict=True))


def _compared(found: Results, wanted: Results) -> list[tuple[float, str]]:
    buffers = {n: found.buffers.get(n, b) for n, b in wanted.buffers.items()}  # the graph lacks those it does not read
    return [
        *_gaps("output", found.outputs, wanted.outputs),
        *_gaps("buffer", buffers, wanted.buffers),
        *_gaps("the gradient of", found.gradients, wanted.gradients),
    ]


def _gaps(kind: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """How far each value is off, and its name."""
    scale = max((largest(v) for v in wanted.values() if isinstance(v, Tensor) and not v.is_complex()), default=0.0)
    for name in found.keys() | wanted.keys():
        a, b = found.get(name), wanted.get(name)
        if kind == "the gradient of":  # one that is absent is zero
            a = torch.zeros_like(b) if a is None and b is not None else a
            b = torch.zeros_like(a) if b is None and a is not None else b
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            yield relative(a.detach(), b.detach(), scale), f"{kind} {name}"
        elif isinstance(a, (*PLAIN, Tensor)) and isinstance(b, (*PLAIN, Tensor)):
            yield 0.0 if type(a) is type(b) and a == b else float("inf"), f"{kind} {name}"


def _worst(gaps: Any) -> tuple[float, str]:
    """The largest difference; what is not a number counts as one."""
    return max(gaps, key=lambda g: float("inf") if g[0] != g[0] else g[0], default=(0.0, ""))
