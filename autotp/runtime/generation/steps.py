"""Which program runs a call that carries state, whose lengths are others at every call.

Equal calls but for sizes are one kind. A kind knows the programs that ran such calls, and asks each in plain numbers
whether it takes these sizes: no text is compared between the ranks, and nothing is looked up by size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autotp.ir.graph import Capture
from autotp.runtime.programs import Program

MOST = 256  # kinds of calls


@dataclass
class Fit:
    """The sizes that a program takes, as code.

    Attributes:
        capture: of the program. order: where its tensors lie among the leaves of a call.
    """

    capture: Capture
    order: Sequence[int]

    @cached_property
    def _code(self) -> tuple[list[tuple[int, int]], Callable[..., bool]] | None:
        return self.capture.size_bounds().code()

    def takes(self, shapes: Sequence[Any]) -> bool:
        """Whether the program accepts leaves of these shapes; they are of its kind of call."""
        if self._code is None or self.capture.conditions is not None:
            return False
        places, code = self._code
        return code(*[shapes[self.order[i]][d] for i, d in places])


@dataclass
class StepKind:
    """Calls that are equal but for sizes. `digest` says which in any process."""

    digest: str
    programs: list[tuple[Program, list[int], Fit]] = field(default_factory=list)

    def program(self, shapes: Sequence[Any]) -> tuple[Program, list[int]] | None:
        """What runs a call with leaves of these shapes, the latest first; None where it is not known yet."""
        self.programs = [each for each in self.programs if each[0].runs]
        for at, (program, order, fit) in enumerate(self.programs):
            if fit.takes(shapes):
                if at:
                    self.programs.insert(0, self.programs.pop(at))
                return program, order
        return None

    def learn(self, program: Program, order: list[int]) -> None:
        """Note a program that ran such a call."""
        if all(other is not program for other, _, _ in self.programs):
            self.programs.insert(0, (program, order, Fit(program.capture, order)))


class Steps:
    """The kinds of calls of one module."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, StepKind] = {}
        self._latest: dict[Hashable, tuple[Any, StepKind]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        return Steps()

    def kind(self, key: Hashable, flat: Sequence[Any], spec: Any) -> StepKind:
        """The kind of a call.

        Args:
            key: what else it is of. flat, spec: the leaves of its inputs and how they are nested.
        """
        grad = torch.is_grad_enabled()
        leaves = tuple([
            (x.dtype, x.ndim, grad and x.requires_grad) if isinstance(x, Tensor) else (type(x), x) for x in flat
        ])  # fmt: skip
        # One object in the next call's place, where its arguments were read as the last one's: not hashed again.
        short = grad, key, id(spec), leaves
        latest = self._latest.get(short)
        if latest is None or latest[0] is not spec:
            if len(self._latest) >= MOST:
                self._latest.clear()
            latest = self._latest[short] = spec, self._kind((grad, key, spec, leaves))
        return latest[1]

    def _kind(self, whole: Hashable) -> StepKind:
        kind = self.kinds.get(whole)
        if kind is None:
            if len(self.kinds) >= MOST:
                self.kinds.clear()
            kind = self.kinds[whole] = StepKind(hashlib.blake2b(repr(whole).encode(), digest_size=8).hexdigest())
        return kind
