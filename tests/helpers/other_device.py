"""A device "other", registered in Python: its values lie on the CPU, and operands from elsewhere are errors.

Importing this registers it for the whole process, so tests import it in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
_setup_privateuseone_for_python_backend(NAME)
LIBRARY = torch.library.Library("aten", "IMPL")
BETWEEN = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}  # operators over two devices


class Other(Tensor):
    """A tensor of the device."""

    value: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, value: Tensor) -> Other:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; its results are on the device where its operands are, or it is told so.

    Raises:
        RuntimeError: an operand is elsewhere.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = {id(x.value): x for x in tensors if isinstance(x, Other)}
    away = [x for x in tensors if not isinstance(x, Other) and x.ndim]
    if here and away and func not in BETWEEN:
        raise RuntimeError(f"{func}: operands are on {NAME}, and one of shape {tuple(away[0].shape)} on the CPU")
    device = kwargs.get("device")
    to = bool(here) if device is None else torch.device(device).type == NAME
    if func is torch.ops.aten.copy_.default:
        to = isinstance(args[0], Other)
    found = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
    return tree_map(lambda x: here.get(id(x), Other(x) if to else x) if isinstance(x, Tensor) else x, found)


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Other):
        return x.value
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return Other(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Other(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _on_cpu(target).copy_(_on_cpu(source))
    return target


LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
