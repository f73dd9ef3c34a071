"""What a rank says of a forward before it begins, and in what the ranks may not differ.

The tp ranks of one dp rank are called alike. Those of another have a slice of the batch of their own: as many examples,
of other lengths and values, and so another program, but of the same kind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.comm.lockstep import CAUSES
from autotp.comm.wording import by_value
from autotp.errors import RankError

from .samples import SAMPLES, alike

BODY = struct.Struct(f"!8s8sIBIq8sI{SAMPLES}d")
NEW, HOOKED = 1, 2


class CallMessage(NamedTuple):
    """Of one rank's forward.

    Attributes:
        call: a digest of its kind, mode and shapes; `kind`: without sizes other than the number of examples.
        trained: which parameters are, as a number.
        flags: `NEW` where it knows no program, `HOOKED` where hooks of the user may fail amid its collectives.
        writes: to weights since the call before, all weights together.
        seed, state: what its random numbers come from, and that of its generator.
        exact, near: of the values of the inputs.
    """

    call: bytes
    kind: bytes
    trained: int
    flags: int
    writes: int
    seed: int
    state: bytes
    exact: int
    near: tuple[float, ...]

    def packed(self) -> bytes:
        """As a message."""
        return BODY.pack(*self[:-1], *self.near)

    @classmethod
    def read(cls, message: bytes) -> CallMessage:
        """Of a message."""
        fields = BODY.unpack(message)
        return cls._make((*fields[:8], fields[8:]))


def mode_of(mode: tuple[Any, ...], flat: Sequence[Any]) -> dict[str, str]:
    """The mode of a call in words.

    Args:
        mode: which modules train, the default dtypes, autocast. flat: the inputs.
    """
    training, facts = mode[0], {"dtypes": str(mode[1]), "autocast": str(mode[-1] or "off")}
    facts["gradients"] = "on" if torch.is_grad_enabled() else "off"
    facts["training"] = str(training if isinstance(training, bool) else f"{sum(training)} of {len(training)} modules")
    for i, v in enumerate(flat):
        if isinstance(v, Tensor) and v.requires_grad:
            facts[f"gradient of input {i}"] = "wanted"
    return facts


def kind_of(flat: Sequence[Any]) -> dict[str, str]:
    """What the inputs are on every slice of a batch, in words: numbers, sizes and values may be others on each."""
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


def parted(slices: Sequence[Sequence[CallMessage]]) -> str:
    """Whether the ranks are called differently: "call" where those of one slice are, "kind" where slices are."""
    for each in slices:
        if len({(message.call, message.trained) for message in each}) > 1:
            return "call"
    kinds = {(message.kind, message.trained) for each in slices for message in each}
    return "kind" if len(kinds) > 1 else ""


def written_apart(slices: Sequence[Sequence[CallMessage]]) -> str:
    """How often ranks have written weights, where not all have as often."""
    counts = [message.writes for each in slices for message in each]
    if len(set(counts)) == 1:
        return ""
    return by_value([f"weights written {n} times" for n in counts])


def valued_apart(slices: Sequence[Sequence[CallMessage]]) -> str:
    """In what the values of the inputs differ on the ranks of a slice, which have the same."""
    for each in slices:
        if not alike([(message.exact, message.near) for message in each]):
            texts = []
            for message in each:
                near = ", ".join(f"{x:g}" for x in message.near[:4])
                texts.append(f"{message.exact:08x} {near}")
            return by_value(texts)
    return ""


def compare(slices: Sequence[Sequence[CallMessage]], what: str) -> None:
    """Refuse weights that were written on some ranks only, or more often, and other values of the inputs.

    Args:
        slices: the messages of the ranks of each slice of the batch. what: the call in words.

    Raises:
        RankError: with what differs.
    """
    if differences := written_apart(slices):
        raise RankError(f"Since the call before {what} the ranks have parted: {differences}.\n{CAUSES}")
    if differences := valued_apart(slices):
        raise RankError(
            f"The tp ranks do not agree on the values of the inputs of {what} (a sum of whole numbers, and some "
            f"others): {differences}.\n{CAUSES} With check=False values of inputs are not looked at."
        )
