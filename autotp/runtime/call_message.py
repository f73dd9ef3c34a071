"""The message that ranks exchange before a forward or a backward, and how messages are compared.

The ranks of one lane are called alike: the tp ranks of one dp rank, of all stages. Those of another lane have a slice
of the batch of their own: as many examples, of other lengths and values, and so another program, but of the same kind.
The ranks of one place have the same stage, and so the same weights.

With a message go a few values of the inputs, by which ranks notice that they were given different ones: of inputs on
the CPU, which a loader makes, for reading others would wait for the device. Whole numbers are compared exactly, in
64 KiB of each tensor; floating ones, which may have been computed with other rounding on each rank, nearly.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.comm.channel import by_value
from autotp.comm.lockstep import CAUSES, end_hooks
from autotp.comm.ranks import Facts, Ranks, from_all
from autotp.comm.turn import hold
from autotp.errors import RankError
from autotp.inputs import Leaves
from autotp.runtime.interop.ownership import refuse_transforms

SAMPLES = 16  # floating values of all inputs together
RELATIVE_TOLERANCE = 1e-2  # of the largest sample
SAMPLE_BYTES = 2**16
SHORT_ELEMENTS = 64  # elements that are cheaper to read one by one, as the token of a step is
Sample = tuple[int, Sequence[float]]
SAMPLED = "(a sum of whole numbers, and some others)"
UNCHECKED = "With check=False values are not looked at."
NOTHING: Sample = (0, [0.0] * SAMPLES)


def sampled(flat: Leaves, anywhere: bool = False) -> Sample:
    """Return a checksum of the inputs' integers and `SAMPLES` of their floats; of those on the CPU, or `anywhere`."""
    tensors = [
        v
        for v in flat
        if type(v) in (Tensor, nn.Parameter)
        and v.numel()
        and not v.is_complex()
        and (v.is_cpu or (anywhere and not v.is_meta))
    ]
    exact, floating, short, near = 0, [], [], []
    try:
        for v in tensors:
            if v.is_floating_point():
                floating.append(v)
            elif v.numel() <= SHORT_ELEMENTS:
                short.append(v.tolist())
            else:
                exact = _summed(v, exact)
        exact = zlib.crc32(repr(short).encode(), exact)
        for v in floating[:SAMPLES]:
            near += _spread(v.detach(), SAMPLES // min(len(floating), SAMPLES)).tolist()
    except RuntimeError:  # under a transform, such as vmap, values cannot be read
        return NOTHING
    return exact, near + [0.0] * (SAMPLES - len(near))


def short(value: Any) -> bytes:
    """Return a digest of a value's text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


def few(value: Tensor) -> str:
    """Return a checksum of a few values of a tensor; empty on the meta device, and of tensors that wrap others.

    It is cheap for all tensors of a model, and differs between two that were drawn, trained or read differently.
    """
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.is_meta or not value.numel():
        return ""
    return f"{_checksum(_spread(value.detach(), SAMPLES)):08x}"  # of bytes: not every type has numbers that torch reads


def _line(x: Tensor, most: int) -> Tensor:
    """Flatten a tensor: of a large non-contiguous one a contiguous part, of a sparse one all."""
    x = x if x.layout == torch.strided else x.to_dense()
    while x.ndim > 1 and x.numel() > most and not x.is_contiguous():
        x = x[x.shape[0] // 2]
    return x.reshape(-1)


def _checksum(x: Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bytes, continued from `start`."""
    return zlib.crc32(x.contiguous().view(torch.uint8).cpu().numpy().data, start)


def _summed(x: Tensor, start: int) -> int:
    most = SAMPLE_BYTES // x.element_size()
    line = _line(x, most)
    for part in (line,) if line.numel() <= most else (line[: most // 2], line[-(most // 2) :]):
        start = _checksum(part, start)
    return start


def _spread(x: Tensor, count: int) -> Tensor:
    """Return `count` elements of a tensor, evenly spread; all where it has fewer."""
    line = _line(x, SAMPLE_BYTES)
    return line[:: max(1, line.numel() // count)][:count]


def alike(samples: Sequence[Sample]) -> bool:
    """Return whether these may be samples of the same inputs."""
    return all(exact == samples[0][0] and _near(samples[0][1], near) for exact, near in samples)


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    scale = max((abs(x) for x in (*a, *b) if math.isfinite(x)), default=0.0)
    return all(
        x == y or (x != x and y != y) or abs(x - y) <= RELATIVE_TOLERANCE * scale for x, y in zip(a, b, strict=True)
    )


SEQUENCES = (
    "With cp every rank passes the same whole sequences, of which the module takes its part; or each passes what "
    "Inputs.part(its cp rank, cp) returns, as it is: a copy of that is taken for whole."
)


class CallMessage(NamedTuple):
    """Message of one rank about its forward.

    Attributes:
        call: a digest of its kind; sizes: of its shapes; kind: of both, but no sizes save the number of examples.
        trained: which parameters are, as a number.
        new: whether it knows no program. hooked: whether hooks of the user may fail amid its collectives. whole:
            whether it was passed whole sequences, of which it takes its part.
        writes: to weights since the call before, all weights together.
        seed, state: what its random numbers come from, and that of its generator.
        sample: of the values of the inputs.
        tied: of what several pipeline stages hold (`autotp.runtime.stages.weights`).
    """

    call: bytes
    sizes: int
    kind: bytes
    trained: int
    new: bool
    hooked: bool
    whole: bool
    writes: int
    seed: int
    state: bytes
    sample: Sample
    tied: bytes = b""


def mode_of(mode: tuple[Any, ...], flat: Leaves) -> Facts:
    """Return the mode of a call in words.

    Args:
        mode: which modules train, the default dtypes, autocast. flat: the inputs.
    """
    training, facts = mode[0], {"dtypes": mode[1], "autocast": mode[-1] or "off"}
    facts["gradients"] = "on" if torch.is_grad_enabled() else "off"
    facts["training"] = training if isinstance(training, bool) else f"{sum(training)} of {len(training)} modules"
    for i, v in enumerate(flat):
        if isinstance(v, Tensor) and v.requires_grad:
            facts[f"gradient of input {i}"] = "wanted"
    return facts


def kind_of(flat: Leaves) -> Facts:
    """Describe in words what inputs of all slices of a batch have in common: not numbers, sizes and values."""
    tensors = [v for v in flat if isinstance(v, Tensor)]
    facts = {"examples": next((str(v.shape[0]) for v in tensors if v.ndim), "none")}
    for i, v in enumerate(flat):
        if isinstance(v, Tensor):
            facts[f"input {i}"] = f"{v.ndim}-d {v.dtype}" + (", with a gradient" if v.requires_grad else "")
        else:
            facts[f"input {i}"] = (
                type(v).__name__ if isinstance(v, int | float) and not isinstance(v, bool) else repr(v)
            )
    return facts


@dataclass(frozen=True)
class Groups:
    """Groups of a module's ranks that are compared with each other, as lists of places in its channel.

    Attributes:
        lanes: ranks that are called alike, but for their parts of sequences. slices: with the same values too.
        places: ranks with the same weights.
    """

    lanes: Sequence[Sequence[int]]
    slices: Sequence[Sequence[int]]
    places: Sequence[Sequence[int]]

    @classmethod
    def of(cls, size: int, tp: int, cp: int, dp: int) -> Groups:
        """Return the groups of ranks in the order of a mesh (pp, dp, cp, tp).

        Args:
            size: how many there are. tp, cp, dp: degrees; pp is what is left.
        """
        mesh = torch.arange(size).view(-1, dp, cp, tp)
        lanes, slices = mesh.transpose(0, 1).reshape(dp, -1), mesh.permute(1, 2, 0, 3).reshape(dp * cp, -1)
        return cls(lanes.tolist(), slices.tolist(), mesh.reshape(mesh.shape[0], -1).tolist())


def differ(values: Sequence[Any], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks of one group have other values.

    Args:
        values: by rank. groups: of ranks.
    """
    return any(len({*map(values.__getitem__, group)}) > 1 for group in groups)


def parted(everyone: Sequence[CallMessage], groups: Groups) -> str:
    """Return how calls of ranks differ: "call" within a lane, "kind" between lanes, "trained" where ranks of one place
    train other parameters; "" where they do not."""
    if differ([(m.call, m.sizes) for m in everyone], groups.lanes):
        return "call"
    if len({m.kind for m in everyone}) > 1:
        return "kind"
    trained = [m.trained for m in everyone]
    return "trained" if differ(trained, groups.places) else ""


def refuse_samples(samples: Sequence[Sample], head: str, advice: str = CAUSES) -> None:
    """Refuse samples of the same values that differ.

    Args:
        samples: by rank. head, advice: what stands before and after how they differ.

    Raises:
        RankError: with what differs.
    """
    if not alike(samples):
        texts = []
        for exact, near in samples:
            texts.append(", ".join([f"{exact:08x}", *(f"{x:g}" for x in near[:4])]))
        raise RankError(f"{head}: {by_value(texts)}.\n{advice}")


def refuse_generators(states: Sequence[bytes], what: str) -> None:
    """Refuse a forward with operators that draw as torch does, where the ranks' generators would give other numbers.

    Args:
        states: of the generators of the ranks of a slice, zeros where nothing draws so. what: the call in words.

    Raises:
        RankError: with the states that differ.
    """
    if len(set(states)) > 1:
        raise RankError(
            f"In {what} operators draw as torch does, and the ranks' generators are in different states: "
            f"{by_value([state.hex() for state in states])}. Call torch.manual_seed with one number on every rank."
        )


def compare(everyone: Sequence[CallMessage], groups: Groups, what: str) -> None:
    """Refuse weights that were written on some ranks only, or more often, and other values of the inputs.

    Args:
        everyone: the messages by rank. groups: of the ranks. what: the call in words.

    Raises:
        RankError: with what differs.
    """
    if len({message.whole for message in everyone}) > 1:
        kinds = {True: "whole sequences", False: "a part of them"}
        differences = by_value([kinds[message.whole] for message in everyone])
        raise RankError(f"The ranks do not agree on the inputs of {what}: {differences}. {SEQUENCES}")
    if differ([message.writes for message in everyone], groups.places):
        texts = [f"weights written {message.writes} times" for message in everyone]
        raise RankError(f"Since the call before {what} the ranks have parted: {by_value(texts)}.\n{CAUSES}")
    whole = everyone[0].whole
    for ranks in groups.lanes if whole else groups.slices:
        messages = [everyone[r] for r in ranks]
        refuse_generators([m.state for m in messages], what)
        axes, advice = ("cp and tp", SEQUENCES) if whole else ("tp", CAUSES)
        axes = axes if len(groups.places) == 1 else f"pp and {axes}"
        head = f"The {axes} ranks do not agree on the values of the inputs of {what} {SAMPLED}"
        refuse_samples([m.sample for m in messages], head, f"{advice} {UNCHECKED}")


@dataclass
class Ticket:
    """Record of one forward by which its backwards are compared; it holds nothing of the module.

    Attributes:
        ranks, what, hooked: see `Calls`. groups: of the ranks; None where values are not compared.
        task: of autograd, the latest backward.
    """

    ranks: Ranks
    what: str
    hooked: bool
    groups: Groups | None
    task: int = -1

    def backward(self, place: int, grads: Any) -> None:
        """Compare a backward, from the output at `place`, with those of other ranks before its first operator."""
        if (task := compat.graph_task()) != self.task:
            refuse_transforms(grads)
            self.task = task
            what = f"backward (from output {place}) of {self.what}" if place else f"backward of {self.what}"
            everyone = from_all(self.ranks, (self.hooked, sampled(grads) if self.groups else NOTHING), what)
            # Other gradients on the ranks of a slice of the batch are refused.
            for ranks in self.groups.slices if self.groups is not None else ():
                samples = [(0, everyone[r][1][1]) for r in ranks]
                if not alike(samples):
                    self.ranks.channel.leave()  # type: ignore[union-attr]
                    refuse_samples(samples, f"The tp ranks do not agree on the gradients for the {what} {SAMPLED}")
            if any(hooked for hooked, _ in everyone):
                hold()
                compat.after_backward(partial(end_hooks, self.ranks.channel, what, turn=False))
