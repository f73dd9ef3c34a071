"""A `torch.autograd.Function` as an operator: forward and backward are the user's own, wherever a graph calls it.

The operator has no kernel of its own. It calls the Function, so that autograd, fake tensors and compilers see what they
would see in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from autotp import compat

Loop = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # which dimension of each operand and result is one loop


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor, or for a number that is a size, among the arguments of a call."""

    tensor: bool


TENSOR, SIZE = Slot(True), Slot(False)


@dataclass
class Called:
    """A Function and what it is called with besides tensors and sizes.

    Attributes:
        function: a subclass of `torch.autograd.Function`.
        leaves, spec: the arguments, with `Slot`s; `outs`, `out_spec`: the same of what it returned, once it ran.
        copied: which of the tensors that it returns share memory with an operand, and are copied.
        loops: what may be split, by the number of dimensions of each operand.
        where: the user's line, for errors.
    """

    function: Any
    leaves: tuple[Any, ...]
    spec: Any
    outs: list[Any] = field(default_factory=list)
    out_spec: Any = None
    copied: list[bool] = field(default_factory=list)
    loops: dict[tuple[int, ...], tuple[Loop, ...]] = field(default_factory=dict)
    where: str = ""

    def same(self, other: Called) -> bool:
        """Whether the other one computes the same."""
        alike = (self.leaves, self.spec) == (other.leaves, other.spec)
        return alike and _meaning(self.function) == _meaning(other.function)


CALLS: dict[str, Called] = {}  # by the key that a graph's operator holds


def enter(called: Called) -> str:
    """The key of a call: the Function's name and its arguments, and a number where those are not enough."""
    told = ", ".join("_" if isinstance(x, Slot) else repr(x) for x in called.leaves)
    name = f"{called.function.__module__}.{called.function.__qualname__}({told})"
    number, key = 1, name
    while key in CALLS and not CALLS[key].same(called):
        number += 1
        key = f"{name} #{number}"
    CALLS.setdefault(key, called)
    return key


def _meaning(function: Any) -> list[Any]:
    """What a class computes by: equal for two that cannot be told apart, such as one that a forward makes anew."""
    found: list[Any] = []
    for kind in function.__mro__[: function.__mro__.index(torch.autograd.Function)]:
        for name, value in sorted(vars(kind).items()):
            plain = getattr(value, "__func__", value)
            code = getattr(plain, "__code__", None)
            if isinstance(code, CodeType):
                cells = [cell.cell_contents for cell in plain.__closure__ or ()]
                found.append((name, code, plain.__defaults__, cells, id(plain.__globals__)))
            elif not name.startswith("_"):
                found.append((name, value))
    return found


def call(xs: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """What a Function makes of these tensors and sizes; its other arguments are known by the key."""
    called = CALLS[key]
    tensors, numbers = iter(xs), iter(sizes)
    leaves = [x if not isinstance(x, Slot) else next(tensors if x.tensor else numbers) for x in called.leaves]
    args, kwargs = compat.tree_unflatten(leaves, called.spec)
    outs, spec = compat.tree_flatten(compat.apply_function(called.function, *args, **kwargs))
    made = [x for x in outs if isinstance(x, Tensor)]
    if called.out_spec is None:
        held = {x.untyped_storage()._cdata for x in xs}
        called.outs, called.out_spec = [TENSOR if isinstance(x, Tensor) else x for x in outs], spec
        called.copied = [x.untyped_storage()._cdata in held for x in made]
    return [x.clone() if shared else x for x, shared in zip(made, called.copied, strict=True)]


_LIBRARY = torch.library.Library("autotp_functions", "DEF")
_SCHEMA = "(Tensor[] xs, SymInt[] sizes, str key) -> Tensor[]"
_LIBRARY.define(f"call{_SCHEMA}")
_LIBRARY.define(f"draw{_SCHEMA}", tags=(torch.Tag.nondeterministic_seeded,))  # one that draws random numbers
_LIBRARY.impl("call", call, "CompositeImplicitAutograd")
_LIBRARY.impl("draw", call, "CompositeImplicitAutograd")
CALL: Any = torch.ops.autotp_functions.call.default
DRAW: Any = torch.ops.autotp_functions.draw.default
