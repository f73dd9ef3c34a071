"""Operators by their names and kinds, and flex_attention as those that its score and mask functions are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives  # registers the meta kernels of the ops below
from torch._higher_order_ops.flex_attention import math_attention
from torch._library.custom_ops import CustomOpDef
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Functional collectives as dispatcher ops: the compiler sees them, fake tensors pass through them.
c10d_ops: Any = torch.ops._c10d_functional


def operators_named(*starts: str) -> list[Any]:
    """List torch's operators whose names start so, in all overloads of this version except those with `out`."""
    names = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    split = [n.partition(".") for n in sorted(names) if n.startswith(starts)]
    return [getattr(getattr(torch.ops.aten, n), over or "default") for n, _, over in split if "out" not in over]


sym_size: Any = torch.ops.aten.sym_size.int
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
wraps_tensors = is_traceable_wrapper_subclass
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# Torch 2.11's attention on a CPU divides by the number of heads, and of none the process dies (SIGFPE).
ATTENDS_WITHOUT_HEADS = VERSION > (2, 11)


def overload_of(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the overload that a function or method of torch calls with these; None where none has its name."""
    name = getattr(function, "__name__", "")
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(getattr(torch.ops.aten, name), overload)


def is_composite(op: Any) -> bool:
    """Return whether an operator of a library is composed of others, with no derivative or kernel of its own."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prims", "higher_order"):
        return False
    return op._can_decompose()


def operator(op: Any) -> Any:
    """Resolve an overload or packet, given as such, as a custom operator or by name; None where it is unknown."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        space, _, name = op.replace("::", ".").partition(".")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, space), packet, None) if packet else None
        op = getattr(op, overload, None) if overload else op
    return op if isinstance(op, OpOverloadPacket | torch._ops.OpOverload) else None


@contextmanager
def flex_as_products() -> Iterator[None]:
    """Let flex_attention compute all scores by torch's own reference: its functions for every score at once, between
    two products. The operator takes these as graphs, which do not say what may be split.
    """

    def reference(query: Any, key: Any, value: Any, score: Any, mask: Any, scale: float, options: Any) -> Any:
        return math_attention(query, key, value, score, mask, scale, options)

    others: dict[str, Any] = {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True, "setup_compilation_env": nullcontext}
    others["_validate_device"] = lambda *operands: None  # on the CPU it refuses gradients, which the reference has
    with mock.patch.multiple(flex, flex_attention_hop=reference, **others):
        yield


@contextmanager
def own_convolutions(operands: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let torch's own kernels compute where an operand may be a bfloat16 Conv3d's on a CPU: with AMX, oneDNN's gradient
    of its input writes past the end (torch 2.13), and the process dies of `free(): invalid pointer`."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and not any(x.ndim == 5 and x.dtype == torch.bfloat16 for x in operands))
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
