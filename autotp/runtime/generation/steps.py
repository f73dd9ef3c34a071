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

    def takes(self, flat: Sequence[Any]) -> bool:
        """Whether the program accepts these leaves; they are of its kind of call."""
        if self._code is None or self.capture.conditions is not None:
            return False
        places, code = self._code
        return code(*[flat[self.order[i]].shape[d] for i, d in places])


@dataclass
class StepKind:
    """Calls that are equal but for sizes. `digest` says which in any process."""

    digest: str
    programs: list[tuple[Program, list[int], Fit]] = field(default_factory=list)

    def program(self, flat: Sequence[Any]) -> tuple[Program, list[int]] | None:
        """What runs a call of these sizes, the latest first; None where it is not known yet."""
        self.programs = [each for each in self.programs if each[0].runs]
        for at, (program, order, fit) in enumerate(self.programs):
            if fit.takes(flat):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        return Steps()

    def kind(self, key: Hashable, flat: Sequence[Any], spec: Any) -> StepKind:
        """The kind of a call.

        Args:
            key: what else it is of. flat, spec: the leaves of its inputs and how they are nested.
        """
        grad = torch.is_grad_enabled()
        leaves = tuple(
            (x.dtype, x.ndim, grad and x.requires_grad) if isinstance(x, Tensor) else (type(x), x) for x in flat
        )
        whole = (grad, key, spec, leaves)
        kind = self.kinds.get(whole)
        if kind is None:
            if len(self.kinds) >= MOST:
                self.kinds.clear()
            kind = self.kinds[whole] = StepKind(hashlib.blake2b(repr(whole).encode(), digest_size=8).hexdigest())
        return kind
