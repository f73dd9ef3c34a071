"""Self-check of a capture: it is compared with the model itself in outputs, gradients and buffers, on the example
inputs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import CaptureError, InputError
from autotp.inputs import Inputs, mapped
from autotp.ir.graph import BUFFER, CONSTANT, TABLE, Capture
from autotp.proof.differences import Rounding, differences, gradients, largest, loss, rounding_of
from autotp.proof.run import run
from autotp.text import failure

from .copies import copied, made_real, tensors_of

MAX_WEIGHT_BYTES = 10**9  # bytes of weights up to which a capture is compared without being asked to
CALLS = 3  # as long as the first that a comparison takes at least: it makes some five, and the first is the longest
ALL_THE_SAME = "check_capture=True compares all the same"
OUTPUT, STATE, GRADIENT = "output ", "", "the gradient of "
# By kind (outputs, buffers and inputs as they are afterwards, gradients of parameters and inputs), values by name.
Results = dict[str, Mapping[str, Any]]


class TooLong(Exception):
    """Error: a comparison takes longer than it may."""


class _AtMost(compat.TorchDispatchMode):
    """Mode that ends a run at the first operator after so many CPU seconds."""

    supports_higher_order_operators = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.deadline, self.over = time.process_time() + seconds, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.process_time() > self.deadline:
            self.over = True
            raise TooLong
        return func(*args, **(kwargs or {}))


class Clock:
    """The CPU seconds that a comparison may take in all.

    Attributes:
        seconds: in all. rest: seconds left. over: whether the last run took more than it might, and failed by that,
            whatever error the code between makes of it.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = self.rest = seconds
        self.over = False

    @contextmanager
    def running(self, share: float = 1.0) -> Iterator[None]:
        """Context that counts the seconds within; it ends by `TooLong` after this share of those that are left."""
        began, mode = time.process_time(), _AtMost(share * self.rest)
        try:
            with mode if self.seconds < math.inf else nullcontext():
                yield
        finally:
            self.rest -= time.process_time() - began
            self.over = mode.over


@dataclass
class Trial:
    """A model on its example inputs, to compare captures with. A copy of it is run, never the user's own.

    Attributes:
        skip: the reason why nothing is compared; "" where it is. remark: a further note for the user.
        ground: the model and inputs of the comparison where they are not the user's; "" where they are.
        refused: the fault of the last capture that was refused.
        short: smaller inputs, of which the first that a capture accepts is taken.
        clock: for all of it.
    """

    model: nn.Module
    inputs: Inputs
    device: torch.device
    skip: str = ""
    remark: str = ""
    ground: str = ""
    refused: str = ""
    short: tuple[Inputs, ...] = ()
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None = None) -> Trial:
        """Make a trial of this model as it is, whole; by default where its weights take under 1 GB.

        Args:
            check: `check_capture` of the public functions: False never compares, True also where weights are large.
        """
        if check is not None and not isinstance(check, bool):
            raise InputError(f"check_capture={check!r} is {type(check).__name__}: give None, True or False.")
        if check is False:
            return cls(model, inputs, device, "check_capture=False")
        size = bytes_of(model)
        if size >= MAX_WEIGHT_BYTES and not check:
            return cls(model, inputs, device, f"the weights take {size / 1e9:.1f} GB, 1 GB or more; {ALL_THE_SAME}")
        empty = ["weights"] * on_meta(model) + ["inputs"] * any(t.is_meta for t in inputs.tensors)
        ground = f"random {' and '.join(empty)}, for there are none on the meta device" if empty else ""
        return cls(model, inputs, device, ground=ground)

    @cached_property
    def copied(self) -> nn.Module:
        """Copy of the model with weights of its own, on the device of the capture."""
        names = {id(tensor): name for name, tensor in tensors_of(self.model).items()}

        def weight(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return made_real(tensor, self.device, names[id(tensor)])
            copy = tensor.detach().to(self.device, copy=True)
            return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy

        return copied(self.model, weight, lambda tensor: made_real(tensor, self.device) if tensor.is_meta else None)

    @cached_property
    def called_model(self) -> nn.Module:
        """The copy after one call: its changes of attributes and of buffers, such as a cache, belong together."""
        with self._undisturbed(buffers=False), torch.enable_grad():
            inputs = self.mapped()
            self.copied(*inputs.args, **inputs.kwargs)
        return self.copied

    def mapped(self, change: Callable[[Tensor], Tensor] = lambda t: t) -> Inputs:
        """Copy the example inputs to the device of the capture, each tensor changed."""

        def copy_of(tensor: Tensor) -> Tensor:
            real = made_real(tensor, self.device) if tensor.is_meta else tensor
            return change(real.detach()).to(self.device, copy=True).requires_grad_(tensor.requires_grad)

        return mapped(self.inputs, copy_of)

    def outputs(self, inputs: Inputs, around: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
        """Return the model's outputs by name. With gradients: values that a model keeps for later calls may need
        them."""
        model = self.called_model
        with self._undisturbed(), torch.enable_grad(), around or nullcontext():
            return _outputs(model, inputs)

    def demand_equal(self, usual: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
        """Refuse a change with which the model's outputs are others."""
        try:
            _compare({OUTPUT: other}, {OUTPUT: usual}, self.tolerance())
        except _Differs as fault:
            raise CaptureError(f"{what} the model computes something else: {fault}") from fault

    def on(self, inputs: Inputs) -> Trial:
        """Make a trial of other inputs."""
        return Trial(self.model, inputs, self.device, ground=self.ground, clock=self.clock)

    def compare(self, program: Capture) -> float:
        """Return the largest relative difference between a capture and the model; nan where the model fails, see
        `skip`.

        Raises:
            CaptureError: it is more than rounding allows.
        """
        fits = [x for x in self.short if program.accepts(x.leaves) is None]
        self.inputs, self.short = (fits[0] if fits else self.inputs), ()
        theirs = self.original
        if theirs is None:
            return float("nan")
        allowed = self.tolerance(program)
        try:
            with self.clock.running():
                ours = self._captured(program, GRADIENT in theirs)
            return _compare(ours, theirs, allowed)
        except _Differs as fault:
            text = f"{fault} of its largest value, and rounding allows {allowed:.1e}"
            self.refused = f"self-check: the captured graph is not the model: {text}"
            raise CaptureError(self.refused) from fault
        except Exception as error:  # whatever operators may raise
            if self.clock.over:
                self.skip = self._late
                return float("nan")
            self.refused = f"self-check: the captured graph fails where the model runs: {error}"
            raise CaptureError(self.refused) from error

    def tolerance(self, program: Capture | None = None) -> float:
        """Return the difference that rounding allows, in the least exact dtype that is computed in."""
        # Numbers of one byte are stored so, and computed with as others.
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point() and p.itemsize > 1}
        if program is not None:
            kinds |= {*filter(None, program.state[-1:])}
        return rounding_of(kinds)

    @cached_property
    def original(self) -> Results | None:
        """The model's results; None where it fails, and then `skip` says how."""
        inputs = self.mapped()
        try:
            self.copied  # noqa: B018  # before the calls, of which only those of a comparison are counted
            with self.clock.running(1 / CALLS):
                self.called_model  # noqa: B018  # the first call; the next one is compared
            with self._undisturbed(), torch.enable_grad(), self.clock.running():
                results = self._results(inputs)
        except Exception as error:  # whatever a user's forward may raise
            self.skip = self._late if self.clock.over else self._failed(error)
            return None
        if self.ground and not finite(results[OUTPUT].values()):
            self.skip = f"the model gives no finite numbers on {self.ground}"
            return None
        return results

    def failure(self) -> str:
        """Say how the model itself fails on its inputs; "" where it runs."""
        try:
            self.outputs(self.mapped())
        except Exception as error:  # whatever a user's forward may raise
            return self._failed(error)
        return ""

    def _failed(self, error: Exception) -> str:
        return f"the model itself fails on {self.ground or 'the example inputs'}: {failure(error)}"

    @property
    def _late(self) -> str:
        where = f"on {self.ground or 'the example inputs'}"
        return f"it would take over {self.clock.seconds:.0f} CPU seconds {where}; {ALL_THE_SAME}"

    def _results(self, inputs: Inputs) -> Results:
        outputs = _outputs(self.copied, inputs)
        state = {f"buffer {n}": b.detach().clone() for n, b in self.copied.named_buffers()} | _leaves_by_name(inputs)
        try:
            return {OUTPUT: outputs, STATE: state, GRADIENT: _gradients(outputs, self._gradient_leaves(inputs))}
        except (RuntimeError, NotImplementedError) as error:
            self.remark = (
                f"only the outputs of the capture were compared: the model's own backward fails: {failure(error)}"
            )
            return {OUTPUT: outputs, STATE: state}

    def _captured(self, program: Capture, backward: bool) -> Results:
        inputs = self.mapped()
        empty = {n: v for n, v in program.constants.items() if isinstance(v, Tensor) and v.is_meta}
        values = {n: made_real(v, self.device) for n, v in empty.items()}
        tensor_of = {**program.constants, **values, **tensors_of(self.copied, every_name=True)}
        flat = iter(inputs.leaves)
        leaf_values: dict[fx.Node, list[Any]] = {}
        for leaf in program.leaves:
            value = next(flat) if leaf.kind.passed else tensor_of[leaf.name]
            leaf_values[leaf.node] = [value.detach().clone() if leaf.kind in (BUFFER, TABLE, CONSTANT) else value]
        autocast = any(program.state[-1:])  # its casts are in the graph
        without = torch.autocast(self.device.type, enabled=False) if autocast else nullcontext()
        with self._undisturbed(), torch.enable_grad(), without:
            (results,) = run(program, leaf_values).outputs
            afterwards = {x.name: leaf_values[x.node][0] for x in program.leaves if x.kind in (BUFFER, TABLE)}
            afterwards |= {taker: results[i] for i, taker in program.mutations.items()}
            state: dict[str, Any] = _leaves_by_name(inputs)
            for taker, value in afterwards.items():
                name = f"input {taker}" if isinstance(taker, int) else f"buffer {program.aliases.get(taker, taker)}"
                state[name] = value
            user_outputs = [v for i, v in enumerate(results) if i not in program.mutations]
            outputs = compat.named_leaves(compat.tree_unflatten(user_outputs, program.out_spec))
            grads = {GRADIENT: _gradients(outputs, self._gradient_leaves(inputs))} if backward else {}
            return {OUTPUT: outputs, STATE: state, **grads}

    def _gradient_leaves(self, inputs: Inputs) -> dict[str, Tensor]:
        """Collect the leaves whose gradients are compared, by name."""
        leaves = {**dict(self.copied.named_parameters()), **compat.named_leaves((inputs.args, inputs.kwargs))}
        return {n: v for n, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}

    @contextmanager
    def _undisturbed(self, buffers: bool = True) -> Iterator[None]:
        """Context in which random numbers start alike every time, and after which they and buffers are as before."""
        modules = self.copied.modules() if buffers else ()
        buffers_before = [(m, n, b, b.clone()) for m in modules for n, b in m._buffers.items() if b is not None]
        devices = [self.device] if self.device.type == "cuda" else []
        state = random.getstate()
        # Its own numbers of Python's, for a trace that follows begins at `state`, and would draw those of this run.
        random.seed("self-check")
        try:
            # The CPU's own flex_attention has no backward.
            with torch.inference_mode(False), torch.random.fork_rng(devices), compat.flex_as_products():
                yield
        finally:
            random.setstate(state)
            for module, name, buffer, value in buffers_before:
                module._buffers[name] = buffer
                buffer.data = value


def _gradients(outputs: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Compute gradients of a loss in which every element of every output has its own weight; no `.grad` changes."""
    total = loss(list(outputs.values()))
    toward = torch.ones_like(total) if total.requires_grad else None
    return dict(zip(leaves, gradients([total], [toward], list(leaves.values())), strict=True))


class _Differs(Exception):
    """Error: a value is not the model's; the message says which, and by how much."""


def _compare(ours: Results, theirs: Results, allowed: float) -> float:
    """Return the largest relative difference.

    Raises:
        _Differs: one is more than is allowed.
    """
    worst = 0.0
    for kind, expected in theirs.items():
        values = dict(ours[kind])
        if kind == STATE:  # the graph lacks buffers that it does not read
            values = {n: values.get(n, b) for n, b in expected.items()}
        if kind == GRADIENT:  # one that is absent is zero
            expected = dict(expected)
            for n, b in expected.items():
                a = values.get(n)
                if (a is None) != (b is None):
                    values[n], expected[n] = (torch.zeros_like(b), b) if b is not None else (a, torch.zeros_like(a))  # type: ignore[arg-type]
        tensors = [v for v in expected.values() if isinstance(v, Tensor) and not v.is_complex()]
        rounding = Rounding(allowed, max(map(largest, tensors), default=0.0))
        gap = differences(values, expected, rounding)
        if gap is not None:
            raise _Differs(f"{kind}{gap.key} is off by {gap.error:.1e}")
        worst = max(worst, rounding.worst)
    return worst


def _outputs(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return the outputs of a call. One that is a buffer is copied: buffers are afterwards as they were."""
    outputs = compat.named_leaves(model(*inputs.args, **inputs.kwargs))
    buffers = set(map(id, model.buffers()))
    for name, value in outputs.items():
        if id(value) in buffers:
            outputs[name] = value.clone()
    return outputs


def _leaves_by_name(inputs: Inputs) -> dict[str, Tensor]:
    return {f"input {i}": v.detach() for i, v in enumerate(inputs.tensors)}


def finite(values: Iterable[Any]) -> bool:
    """Say whether some numbers of these are finite, where there are any."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
    return not tensors or any(bool(torch.isfinite(v).any()) for v in tensors)


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in tensors_of(model).values())


def on_meta(model: nn.Module) -> bool:
    """Say whether some parameter or buffer is on the meta device."""
    return any(t.is_meta for t in tensors_of(model).values())
