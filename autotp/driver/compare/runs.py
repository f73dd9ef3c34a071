"""What is compared: a call and what it starts from, runs of a graph, and values that are found again by their shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp import compat
from autotp.comm.ranks import Ranks, by_value
from autotp.errors import CompareError
from autotp.proof.numerics import relative

Random = tuple[Tensor, Tensor | None]


@dataclass
class Call:
    """What a call starts from: its flat inputs and the buffers; `part_values`: what each part gave, in order."""

    flat: list[Any]
    spec: Any
    buffers: dict[str, Tensor]
    device: torch.device
    part_values: list[tuple[str, list[Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flat = again(self.flat, clone=True)  # a call may write to its inputs
        self.random = self._now()

    def _now(self) -> Random:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def rewind(self, random: Random | None = None) -> None:
        """Draw again what the call drew."""
        cpu, device = random or self.random
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device, self.device)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Random numbers go on afterwards as they would have."""
        now = self._now()
        try:
            yield
        finally:
            self.rewind(now)


def again(values: Sequence[Any], clone: bool = False) -> list[Any]:
    """The values as leaves of another autograd graph."""
    out = []
    for x in values:
        if isinstance(x, Tensor):
            leaf = x.detach().clone() if clone else x.detach()
            out.append(leaf.requires_grad_(x.requires_grad))
        else:
            out.append(x)
    return out


@dataclass
class Run:
    """One run: the parameters by first name, what it computed by key, and its outputs."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Any, Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)

    def keep(self, key: Any, value: Any) -> None:
        """Note a value, whose gradient will be wanted."""
        if isinstance(value, Tensor):
            if value.requires_grad:
                value.retain_grad()
            self.values[key] = value

    def backward(self, grads: Mapping[int, Tensor]) -> None:
        """Fill the gradients, from those of the outputs at these positions."""
        pairs = [(self.outputs[i], g) for i, g in grads.items() if self.outputs[i].requires_grad]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, [g.to(o.dtype) for o, g in pairs])


@dataclass(frozen=True)
class Gap:
    """A difference on this rank: `order` compares between ranks, the smallest is the first."""

    order: int
    what: str
    error: float


def verdict(ranks: Ranks | None, mine: Gap | None, what: str, advice: str, rounding: Rounding) -> None:
    """The same CompareError on every rank, where one has found a difference: of the first one (collective).

    Args:
        ranks: that compared. mine: what this rank found, if anything. what: values or gradients, for the message.
        advice: what to do, for the message. rounding: what was allowed.

    Raises:
        CompareError: a rank has found a difference.
    """
    every: list[Gap | None] = [mine]
    if ranks is not None:
        every = [None] * ranks.tp
        dist.all_gather_object(every, mine, group=ranks.group)
    gaps = [gap for gap in every if gap is not None]
    if not gaps:
        return
    first = min(gaps, key=lambda gap: gap.order)
    here = []
    for gap in every:
        here.append(f"off by {gap.error:.1e}" if gap is not None and gap.order == first.order else "equal")
    raise CompareError(
        f"compare: {what} {first.what} are not the original's ({by_value(here)}, as a part of the largest; rounding in "
        f"{rounding.name} allows {rounding.allowed:.1e}), and all before them are. {advice}."
    )


@dataclass(frozen=True)
class Rounding:
    """What rounding may make of a difference, in the least exact dtype that is computed in."""

    dtype: torch.dtype

    @property
    def allowed(self) -> float:
        """As a part of the largest value."""
        return (1e3 if self.dtype.itemsize > 2 else 16) * torch.finfo(self.dtype).eps

    @property
    def name(self) -> str:
        """The dtype's."""
        return str(self.dtype).removeprefix("torch.")


def module_name(path: str) -> str:
    """The module at this path, in words."""
    return path or "the model"


def wide(x: Tensor) -> Tensor:
    """In a dtype in which differences are not rounded much."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors in a module's outputs."""
    return [t.detach() for t in compat.tree_leaves(outputs) if isinstance(t, Tensor)]


def by_shape(values: Any) -> dict[Any, list[tuple[set[str], Tensor]]]:
    """The values by their shapes, each with the modules that it was made in."""
    groups: dict[Any, list[tuple[set[str], Tensor]]] = defaultdict(list)
    for modules, value in values:
        groups[tuple(value.shape)].append((modules, value.detach()))
    return groups


def nearest(values: Sequence[Tensor], candidates: Mapping[Any, list[tuple[set[str], Tensor]]]) -> float:
    """How far the farthest of these is from what is most like it."""
    gaps = [0.0]
    for v in values:
        own = [relative(wide(k), wide(v)) for _, k in candidates.get(tuple(v.shape), [])]
        gaps += [min(own)] if own else []
    return max(gaps)
