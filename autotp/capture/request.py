"""Request of a capture, and the mode of modules, gradients and autocast that it is made in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autotp.cost import Cluster
from autotp.errors import InputError
from autotp.ir.named_states import Names, read_carried
from autotp.ir.precision import Precision
from autotp.plans.estimates import ALONE, Axes

GRAD, NO_GRAD, INFERENCE = "grad", "no_grad", "inference"
TRAINING, PARAMETERS = attrgetter("training"), attrgetter("_parameters")
DTYPE, REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
Mode = tuple[Any, ...]  # (training flags, parameter dtypes, grad mode, trained parameters, autocast dtype)


@dataclass(frozen=True)
class CaptureRequest:
    """Request of a capture.

    Attributes:
        dp: number of slices of the batch, of which one is captured; `cp`: of every sequence.
        inner: with cp, number of tp ranks, which split heads before it does; `cluster`: that prices it.
        outputs: "full" and "sharded" keep all of them, "loss" the loss alone.
        random: the source of random numbers: "counter", or "torch".
        carried: which outputs come back as which inputs.
        precision: of large products; None for the model's own.
        ep: ranks of dp that experts are sharded over.
    """

    dp: int = 1
    outputs: str = "full"
    random: str = "counter"
    carried: Names = ()
    precision: Precision | None = None
    cp: int = 1
    inner: int = 1
    cluster: Cluster | None = None
    ep: int = 1

    @property
    def states(self) -> tuple[str, ...]:
        """The arguments that come back from the call before."""
        return tuple(name for _, name in self.carried)

    @classmethod
    def read(
        cls, axes: Axes = ALONE, outputs: str = "full", random: str = "counter", carried: Any = None,
        precision: Any = None,
    ) -> CaptureRequest:  # fmt: skip
        """Read the request from a public function's arguments, checked.

        Args:
            axes: beside tp. outputs, random, carried, precision: see `autotp.compile`.
        """
        _refuse_unknown("outputs", outputs, ("full", "sharded", "loss"))
        _refuse_unknown("random", random, ("counter", "torch"))
        names = read_carried(carried)
        cp = 1 if names else axes.cp  # a call that goes on with a state is computed by each rank of cp
        return cls(axes.dp, outputs, random, names, Precision.read(precision), cp, ep=axes.ep)

    def within(self, tp: int, cluster: Cluster) -> CaptureRequest:
        """Copy it for the tp ranks and the cluster of a plan, which matter with cp alone."""
        return self if self.cp == 1 else replace(self, inner=tp, cluster=cluster)


DEFAULT_CAPTURE = CaptureRequest()


def _refuse_unknown(what: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{what}={value!r} is not known; choose {' or '.join(map(repr, choices))}.")


def grad_mode() -> str:
    """Return the grad mode that is on: `GRAD`, `NO_GRAD` or `INFERENCE`."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    return GRAD if torch.is_grad_enabled() else NO_GRAD


def mode_of(modules: Iterable[nn.Module], device: torch.device) -> Mode:
    """Read the mode of modules: their training flags, the parameters' dtypes, the grad mode and, with gradients, which
    parameters are trained, and the autocast dtype."""
    modules = list(modules)
    return mode_with(shortened(list(map(TRAINING, modules))), modules, parameters_of(modules), device)


@torch.enable_grad()
def recording_mode(model: nn.Module, device: torch.device) -> Mode:
    """Read the mode of a model where gradients are recorded, as a trial runs it."""
    return mode_of(model.modules(), device)


def mode_with(
    training: Any, modules: Iterable[nn.Module], parameters: list[nn.Parameter], device: torch.device
) -> Mode:  # fmt: skip
    """Read the mode of modules whose training flags and parameters are known."""
    dtypes = set(map(DTYPE, parameters))  # mostly one, found fast
    kinds = shortened([*filter(None, map(_dtypes, modules))]) if len(dtypes) > 1 else tuple(dtypes)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    grad = grad_mode()
    trained = shortened(list(map(REQUIRES_GRAD, parameters))) if grad == GRAD else ()
    return training, kinds, grad, trained, autocast


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """List the parameters of modules: before every call, so by the interpreter's own loops."""
    tables = map(dict.values, map(PARAMETERS, modules))
    return [p for p in chain.from_iterable(tables) if p is not None]


def _dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    return tuple(dict.fromkeys(p.dtype for p in module._parameters.values() if p is not None))


def serves(state: Mode, mode: Mode) -> bool:
    """Say whether a capture in a state is for this mode: None, as of a grad mode that a forward never asks for, is
    any."""
    return (
        all(a is None or b is None or a == b for a, b in zip(state[:4], mode[:4], strict=True)) and state[4] == mode[4]
    )


def shortened(values: list[Any]) -> Any:
    """Shorten a list of equal values to the value."""
    return values[0] if values and values.count(values[0]) == len(values) else tuple(values)
