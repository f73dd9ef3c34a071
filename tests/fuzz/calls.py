"""A call of any operator that has a rule, from the table on which the rules are proved, amid other layers."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.proof.case import Case
from autotp.rules.core import function_of
from tests.rules.cases import CASES

from .pieces import Lines, Sizes, piece

LARGEST = 600  # elements of what is written out as numbers
FLOATS = (torch.float64, torch.float32)
# Without the one whose backward writes to an operand, which no model's own call does.
CALLED = [case for case in CASES if not str(case.target).startswith("autotp.float8_delayed")]


def _rule(case: Case) -> str:
    function: Any = function_of(case.target)
    return function.__name__


def _fits(case: Case) -> bool:
    """Whether a call can stand in a module: a tensor of floats goes in, and numbers come out."""
    tensors = [x for x in compat.tree_leaves((case.args, case.kwargs)) if isinstance(x, Tensor)]
    small = all(t.numel() <= LARGEST for t in tensors if t.dtype not in FLOATS)
    return case.values and small and any(t.dtype in FLOATS and t.ndim for t in tensors)


BY_RULE: dict[str, tuple[Case, ...]] = defaultdict(tuple)
for _case in CALLED:
    if _fits(_case):
        BY_RULE[_rule(_case)] += (_case,)
RULES = tuple(sorted(BY_RULE))
EVERY = tuple(sorted({_rule(c) for c in CALLED}))  # the others come by layers that need them


class Operands:
    """Writes the operands of a call: floats of the table's range, some of them made of `x`; numbers as they are."""

    def __init__(self, p: str, width: int, case: Case, every: bool) -> None:
        self.p, self.width, self.every = p, width, every
        self.init: list[str] = []
        self.count = 0
        tensors = [x for x in compat.tree_leaves((case.args, case.kwargs)) if isinstance(x, Tensor)]
        frozen = tensors[len(tensors) - case.frozen :]
        self.frozen = {id(t) for t in frozen}

    def text(self, value: Any) -> str:
        """An argument as an expression of `forward`."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            inner = ", ".join(self.text(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        return repr(value)

    def _tensor(self, t: Tensor) -> str:
        name, shape = f"self.{self.p}_{self.count}", list(t.shape)
        self.count += 1
        buffer = f"self.register_buffer('{self.p}_{self.count - 1}', {{}})"
        if t.dtype not in FLOATS:
            dtype = f", dtype={t.dtype}"
            self.init.append(buffer.format(f"torch.tensor({t.tolist()}{dtype}).view({shape})"))
            return name
        inside = bool(t.numel() and t.min() > 0 and t.max() < 1)
        drawn = f"torch.rand({shape}) * 0.8 + 0.1" if inside else f"torch.randn({shape})"
        if id(t) in self.frozen:
            self.init.append(buffer.format(drawn))
            return name
        self.init.append(f"{name} = nn.Parameter({drawn})")
        if not t.ndim or not (self.every or self.count == 1):
            return name
        self.init.append(f"{name}_of = nn.Linear({self.width}, {t.numel()})")
        return f"({name} + torch.tanh({name}_of(x.mean((0, 1)))).view({shape}) * 0.05)"


def _taken(case: Case) -> int:
    """How many numbers come out of a call."""
    with torch.no_grad():
        made = case.target(*case.args, **case.kwargs)
    return sum(t.numel() * (2 if t.is_complex() else 1) for t in compat.tree_leaves(made) if isinstance(t, Tensor))


@piece(rule=RULES, number=tuple(range(12)), every=(False, True))
def call(p: str, s: Sizes, rule: str, number: int, every: bool) -> Lines:
    """Its results, whatever they are, as one vector that a layer takes up again."""
    case = BY_RULE[rule][number % len(BY_RULE[rule])]
    operands = Operands(p, s.width, case, every)
    args = [operands.text(a) for a in case.args] + [f"{k}={operands.text(v)}" for k, v in case.kwargs.items()]
    init = [*operands.init, f"self.{p}_out = nn.Linear({_taken(case)}, {s.width})"]
    forward = (
        f"y = torch.ops.{case.target}({', '.join(args)})",
        f"x = x + torch.tanh(self.{p}_out(vector(y)))",
    )
    return Lines(tuple(init), forward)
