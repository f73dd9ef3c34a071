"""What a rank says of a forward before it begins, and in what the ranks may not differ.

The tp ranks of one dp rank are called alike. Those of another have a slice of the batch of their own: as many examples,
of other lengths and values, and so another program, but of the same kind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from autotp.comm.wording import by_value

from .samples import SAMPLES, alike

BODY = struct.Struct(f"!8s8sIBq8sI{SAMPLES}d")
NEW, WRITTEN = 1, 2


class Said(NamedTuple):
    """Of one rank's forward.

    Attributes:
        call: a digest of its kind, mode and shapes; `kind`: without sizes other than the number of examples.
        trained: which parameters are, as a number.
        flags: `NEW` where it knows no program, `WRITTEN` where weights were written since the call before.
        seed, state: what its random numbers come from, and that of its generator.
        exact, near: of the values of the inputs.
    """

    call: bytes
    kind: bytes
    trained: int
    flags: int
    seed: int
    state: bytes
    exact: int
    near: tuple[float, ...]

    def packed(self) -> bytes:
        """As a message."""
        return BODY.pack(*self[:-1], *self.near)

    @classmethod
    def read(cls, message: bytes) -> Said:
        """Of a message."""
        fields = BODY.unpack(message)
        return cls._make((*fields[:7], fields[7:]))


def kind_of(flat: Sequence[Any]) -> dict[str, str]:
    """What the inputs are on every slice of a batch, in words: numbers, sizes and values may be others on each."""
    tensors = [v for v in flat if isinstance(v, Tensor)]
    told = {"examples": next((str(v.shape[0]) for v in tensors if v.ndim), "none")}
    for i, v in enumerate(flat):
        if isinstance(v, Tensor):
            told[f"input {i}"] = f"{v.ndim}-d {v.dtype}" + (", with a gradient" if v.requires_grad else "")
        else:
            told[f"input {i}"] = type(v).__name__ if isinstance(v, int | float) and not isinstance(v, bool) else repr(v)
    return told


def parted(slices: Sequence[Sequence[Said]]) -> str:
    """Whether the ranks are called differently: "call" where those of one slice are, "kind" where slices are."""
    if any(len({(said.call, said.trained) for said in each}) > 1 for each in slices):
        return "call"
    return "kind" if len({(said.kind, said.trained) for each in slices for said in each}) > 1 else ""


def written_apart(slices: Sequence[Sequence[Said]]) -> str:
    """Which ranks have written weights, where not all or none have."""
    written = [bool(said.flags & WRITTEN) for each in slices for said in each]
    if len(set(written)) == 1:
        return ""
    return by_value(["weights written" if w else "weights as they were" for w in written])


def valued_apart(slices: Sequence[Sequence[Said]]) -> str:
    """In what the values of the inputs differ on the ranks of a slice, which have the same."""
    for each in slices:
        if not alike([(said.exact, said.near) for said in each]):
            return by_value([f"{said.exact:08x} {', '.join(f'{x:g}' for x in said.near[:4])}" for said in each])
    return ""
