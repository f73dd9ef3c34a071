"""Operators that call a `torch.autograd.Function`: forward and backward are the user's own, wherever a graph calls one.

The operator has no kernel of its own. It calls the Function, so that autograd, fake tensors and compilers see what they
would see in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.ir.op import dtype_name

Loop = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # which dimension of each operand and result is one loop


@dataclass(frozen=True)
class Slot:
    """Placeholder of a tensor, or of a number that is a size, among the arguments of a call."""

    tensor: bool


TENSOR, SIZE = Slot(True), Slot(False)


@dataclass
class FunctionCall:
    """A Function with its arguments other than tensors and sizes.

    Attributes:
        function: a subclass of `torch.autograd.Function`.
        leaves, spec: the arguments, with `Slot`s. outs, out_spec: likewise the results, once it ran.
        copied: which of the tensors that it returns share memory with an operand, and are copied.
        dtypes: of the tensors. where: the user's line, for errors.
        loops: the loops that may be split, by the number of dimensions of each operand.
        linear: whether the backward is linear in the incoming gradients.
        writes: whether it writes to its arguments, and gets copies of them: the operator's schema says that it only
            reads.
    """

    function: type[torch.autograd.Function]
    leaves: tuple[Any, ...]
    spec: compat.TreeSpec
    dtypes: tuple[torch.dtype, ...] = ()
    where: str = ""
    outs: list[Any] = field(default_factory=list)
    out_spec: compat.TreeSpec | None = None
    copied: list[bool] = field(default_factory=list)
    loops: dict[tuple[int, ...], tuple[Loop, ...]] = field(default_factory=dict)
    linear: bool = True
    writes: bool = False

    def same(self, other: FunctionCall) -> bool:
        """Say whether the other one computes the same."""
        alike = (self.leaves, self.spec, self.dtypes) == (other.leaves, other.spec, other.dtypes)
        return alike and _meaning(self.function) == _meaning(other.function)


CALLS: dict[str, FunctionCall] = {}  # by the key that a graph's operator holds


def enter(function_call: FunctionCall) -> str:
    """Enter a call into `CALLS` and return its key: the Function's name, its arguments, and a number if needed.

    Args:
        function_call: the Function with its other arguments.
    """
    kinds = map(dtype_name, function_call.dtypes)
    arguments = []
    for x in function_call.leaves:
        if not isinstance(x, Slot):
            arguments.append(repr(x))
        else:
            arguments.append(next(kinds) if x.tensor else "size")
    name = f"{function_call.function.__module__}.{function_call.function.__qualname__}({', '.join(arguments)})"
    number, key = 1, name
    while key in CALLS and not CALLS[key].same(function_call):
        number += 1
        key = f"{name} #{number}"
    CALLS.setdefault(key, function_call)
    return key


def _meaning(function: Any) -> list[Any]:
    """List the code of a class: equal for two that compute the same, such as one that a forward makes anew."""
    parts: list[Any] = []
    for kind in function.__mro__[: function.__mro__.index(torch.autograd.Function)]:
        for name, value in sorted(vars(kind).items()):
            plain = getattr(value, "__func__", value)
            code = getattr(plain, "__code__", None)
            if isinstance(code, CodeType):
                captured = [*(cell.cell_contents for cell in plain.__closure__ or ()), *(plain.__defaults__ or ())]
                parts.append((name, code, [_plain(x) for x in captured], id(plain.__globals__)))
            elif not name.startswith("_"):
                parts.append((name, _plain(value)))
    return parts


def _plain(value: Any) -> Any:
    """Return a key that two values share where a program cannot distinguish them."""
    return (type(value), value) if isinstance(value, bool | int | float | complex | str | None) else id(value)


def call(xs: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """Call a Function with these tensors and sizes; the key says which, and gives its other arguments.

    Args:
        xs: the tensors among its arguments, in order; any shapes.
        sizes: the sizes among them, in order.
        key: of the call, as `enter` returned it.

    Returns:
        The tensors among its results.
    """
    function_call = CALLS[key]
    # The operator says that it only reads, and where its backward is traced the operands are leaves, to which autograd
    # allows no write.
    if function_call.writes:
        xs = [x.clone() for x in xs]
    # A size is another in each call, so it is an operand; what else a Function takes, such as eps, is in the key.
    tensors, numbers = iter(xs), iter(sizes)
    leaves: list[Any] = []
    for x in function_call.leaves:
        if isinstance(x, Slot):
            of_kind = tensors if x.tensor else numbers
            leaves.append(next(of_kind))
        else:
            leaves.append(x)
    args, kwargs = compat.tree_unflatten(leaves, function_call.spec)
    outs, spec = compat.tree_flatten(apply(function_call.function, *args, **kwargs))
    results = [x for x in outs if isinstance(x, Tensor)]
    # What a Function returns is known only once it ran: a tensor, a tuple, a tuple with None in it.
    if function_call.out_spec is None:
        function_call.outs = compat.tree_map_only(Tensor, lambda x: TENSOR, outs)
        function_call.out_spec = spec
        memories = {x.untyped_storage()._cdata for x in xs}
        function_call.copied = [x.untyped_storage()._cdata in memories for x in results]
    # An operator of torch.library may not return its operand, as a Function that returns `x.view_as(x)` does.
    for i, aliases in enumerate(function_call.copied):
        if aliases:
            results[i] = results[i].clone()
    # In a proof operands are float64, and a Function that says `.half()` would give back the precision of the capture.
    if any(x.dtype != d for x, d in zip(xs, function_call.dtypes, strict=True)):
        for i, x in enumerate(results):
            if x.is_floating_point() and x.itemsize > 1:
                results[i] = x.to(torch.float64)
    return results


_writable_apply: Any = torch.autograd.Function.apply.__func__
# `Function.apply` as torch has it, also while its code is another.
apply = FunctionType(
    _writable_apply.__code__,
    _writable_apply.__globals__,
    "apply",
    _writable_apply.__defaults__,
    _writable_apply.__closure__,
)


@contextmanager
def functions_as(call: Callable[..., Any]) -> Iterator[None]:
    """Make `SomeFunction.apply(...)` mean `call(SomeFunction, ...)` within this context.

    The code is exchanged, not the method: many keep `reverse = Reverse.apply` from when their module was imported.

    Args:
        call: takes the Function's class, then its arguments.
    """

    def with_cell(__class__: Any) -> Callable[..., Any]:  # code with as many free variables as the original's
        return lambda cls, *args, **kwargs: (__class__, _autotp_call)[1](cls, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    original, names = _writable_apply.__code__, _writable_apply.__globals__
    names["_autotp_call"], _writable_apply.__code__ = call, with_cell(None).__code__
    try:
        yield
    finally:
        _writable_apply.__code__ = original
        del names["_autotp_call"]


_LIBRARY = torch.library.Library("autotp_functions", "DEF")
_SCHEMA = "(Tensor[] xs, SymInt[] sizes, str key) -> Tensor[]"
_LIBRARY.define(f"call{_SCHEMA}")
_LIBRARY.define(f"draw{_SCHEMA}", tags=(torch.Tag.nondeterministic_seeded,))  # one that draws random numbers
_LIBRARY.impl("call", call, "CompositeImplicitAutograd")
_LIBRARY.impl("draw", call, "CompositeImplicitAutograd")
CALL: Any = torch.ops.autotp_functions.call.default
DRAW: Any = torch.ops.autotp_functions.draw.default
