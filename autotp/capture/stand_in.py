"""The self-check of a model that is too large for it: a small model of the same classes is captured and compared in its
place, and the captures of both must be the same graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from autotp.cost.machines import this_machine
from autotp.errors import AutoTPError, CaptureError
from autotp.inputs import Inputs, mapped
from autotp.ir.graph import Capture
from autotp.text import first_line

from .copies import copied, tensors_of
from .selfcheck import MAX_WEIGHT_BYTES, Clock, Trial, bytes_of, on_meta
from .small_model import cut, cuts, differs, narrowed

MAX_REAL_NUMBERS = 1 << 24  # numbers in all weights up to which a model on the meta device is made real as it is
MAX_STAND_IN_NUMBERS = 1 << 26  # numbers in all weights of a stand-in
EXAMPLES, LENGTH = 2, 16  # sizes that the first two dimensions of inputs are cut to
WEIGHT_COPIES = 4  # times the weights: a copy, the gradients of both sides, and intermediate values
MAX_LONE_BYTES = 8 * 10**9  # bytes of weights above which a model takes minutes on its own
MAX_DRAWN_BYTES = 2 * 10**9  # and above which it takes ten seconds to draw them for the meta device
MAX_SECONDS = 20.0  # of the CPU, for all calls of a comparison
Capturer = Callable[[Trial], Capture]  # captures the model of a trial, and compares the capture with it


@dataclass(frozen=True)
class Small:
    """A small model of the same classes.

    Attributes:
        stacks: number of its blocks of each stack that was cut. widths: width of the original -> its own.
        text: its description for the user.
    """

    model: nn.Module
    stacks: dict[str, int]
    widths: dict[int, int]
    text: str

    @property
    def ratio(self) -> int:
        """Ratio by which its layers are narrower."""
        return next((n // width for n, width in self.widths.items()), 1)


def trial_of(model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None, capturer: Capturer) -> Trial:
    """Make a trial of this model, or by default of a stand-in where its weights are large or many on the meta device.

    Where no stand-in can be made, a model of a few GB is compared itself on short inputs, if it fits in memory.

    Args:
        check: `check_capture` of the public functions: False never compares, True compares the model itself.
        capturer: captures a stand-in.
    """
    whole = Trial.of(model, inputs, device, check)
    if check is not None:
        return whole
    empty, size = on_meta(model), bytes_of(model)
    if not empty and size < MAX_WEIGHT_BYTES:
        return whole
    clock, late, most = Clock(MAX_SECONDS), "", MAX_DRAWN_BYTES if empty else MAX_LONE_BYTES
    # Of a few GB for the case that no stand-in runs: not compared at all would be worse than slowly.
    if MAX_WEIGHT_BYTES <= size <= most and WEIGHT_COPIES * size <= free_memory(device):
        whole = Trial.of(model, inputs, device, True)
    # The model itself is compared on short inputs first: its forward costs by their length.
    whole = replace(whole, short=tuple(shortened(inputs, {})), clock=clock)
    # A small model on the meta device needs no stand-in: random weights make it real as it is.
    if not empty or _count(model) > MAX_REAL_NUMBERS:
        for small in _smaller(model):
            # Each length in turn: a forward that cuts 512 positions into blocks of 64 does not run on 16.
            for short in shortened(inputs, small.widths):
                stand_in = StandIn(
                    small.model, short, device, ground=small.text, small=small, capturer=capturer, whole=whole,
                    clock=clock,
                )  # fmt: skip
                if stand_in.runs():
                    return stand_in
                if clock.over:
                    late = stand_in._trial.skip
                    break
            if clock.rest < MAX_SECONDS / 2:
                break  # one call of attention took most of it
    if whole.skip:
        late = (
            f"{whole.skip}; no small model of its classes could be made from it and compared in {MAX_SECONDS:.0f} CPU "
            f"seconds, and by itself one is compared up to {most / 1e9:.0f} GB, where {WEIGHT_COPIES} times its "
            "weights are free"
        )
    return replace(whole, skip=late)  # of a model whose stand-in takes too long, as it takes longer yet


def free_memory(device: torch.device) -> int:
    """Return the bytes that a process can take on this device; 0 where that cannot be told."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else this_machine.free_memory()


def _count(model: nn.Module) -> int:
    return sum(t.numel() for t in tensors_of(model).values())


def _smaller(model: nn.Module) -> Iterator[Small]:
    """Yield small models of the same classes, those first that are most like the model."""
    return (small for small in _candidates(model) if _count(small.model) <= MAX_STAND_IN_NUMBERS)


def _candidates(model: nn.Module) -> Iterator[Small]:
    """Yield models with fewer blocks where the model has stacks, then narrower ones too."""
    stacks = cuts(model)
    lengths = {name: len(module) for name, module in model.named_modules() if name in stacks}  # type: ignore[arg-type]
    depth = ", ".join(f"{n} of the {lengths[name]} blocks of {name or 'the model'}" for name, n in stacks.items())
    random = "random weights" if on_meta(model) else "its own weights"
    if stacks:
        with cut(model, stacks):
            copy = copied(model, lambda t: t)
        yield Small(copy, stacks, {}, f"a stand-in with {depth}, and {random}")
    for thin, widths in narrowed(model):
        with cut(thin, stacks):
            small = Small(copied(thin, lambda t: t), stacks, widths, "")
        words = ", ".join(x for x in (depth, f"layers {small.ratio} times narrower") if x)
        yield replace(small, text=f"a stand-in of the same classes with {words}, and random weights")


def shortened(inputs: Inputs, widths: Mapping[int, int]) -> Iterator[Inputs]:
    """Yield the inputs with few examples and positions, with few examples, and in full length; floats as wide as layers
    are cut as these are."""

    def short(tensor: Tensor, dims: int) -> Tensor:
        part = tensor
        for d in range(min(tensor.ndim, dims if tensor.ndim <= 3 else min(dims, 1))):
            part = part.narrow(d, 0, min(LENGTH if d else EXAMPLES, part.shape[d]))
        if tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[-1] in widths:
            part = part.narrow(-1, 0, min(widths[tensor.shape[-1]], part.shape[-1]))
        return tensor if part.shape == tensor.shape else part.detach().clone().requires_grad_(tensor.requires_grad)

    for dims in (2, 1, 0):
        yield mapped(inputs, functools.partial(short, dims=dims))


@dataclass(kw_only=True)
class StandIn(Trial):
    """A trial of a small model, for captures of the large one.

    Attributes:
        whole: a trial of the large model itself, for where the small one is captured as another graph.
    """

    small: Small
    capturer: Capturer
    whole: Trial

    @cached_property
    def _trial(self) -> Trial:
        """Trial of the small model for captures of its own."""
        return Trial(self.model, self.inputs, self.device, ground=self.ground, clock=self.clock)

    def runs(self) -> bool:
        """Say whether the small model takes these inputs, and gives numbers."""
        return self._trial.original is not None

    @cached_property
    def _small_capture(self) -> tuple[Capture | None, str, str]:
        """Capture of the small model once it is proved, or None and the reason; and the fault of a refused one."""
        trial = self._trial
        try:
            program = self.capturer(trial)
        except AutoTPError as error:
            return None, f"{self.ground} cannot be captured: {first_line(error)}", trial.refused
        return (None, trial.skip, trial.refused) if trial.skip else (program, "", trial.refused)

    def compare(self, program: Capture) -> float:
        """Return the largest relative difference between the stand-in's capture and the stand-in; nan where this
        capture is another graph and the model itself is too large, see `skip`.

        Raises:
            CaptureError: it is more than rounding allows.
        """
        small, reason, refused = self._small_capture
        if small is not None:
            other = differs(program, small, self.small.stacks, self.small.ratio)
            if not other:
                return small.error
            reason = f"{self.ground} is captured as another graph: {other}"
        if refused:
            raise CaptureError(f"{refused} (on {self.ground})")
        if self.whole.skip:
            self.skip = reason
            return float("nan")
        error = self.whole.compare(program)
        self.ground, self.skip, self.remark = self.whole.ground, self.whole.skip, self.whole.remark
        return error

    def on(self, inputs: Inputs) -> Trial:
        """Make a trial for the assumption of an attempt: the stand-in's own capture is compared with it."""
        return replace(self, inputs=inputs)
