"""A digest of all that a capture of a model depends on, the same in every process; none where it cannot be told.

That is the tree of modules: their classes by name, flags, attributes and config, and of weights what they are like and
not their numbers. The code of classes is taken to be the same in every process of a run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum, slice)
OWN = {"_parameters", "_buffers", "_modules"}
MAX_DEPTH = 12  # containers within each other


class Untold(Exception):
    """Something whose equality cannot be told across processes; the message says what."""


def model_key(bare: nn.Module, *more: Any) -> str:
    """A digest of all that a capture of this model depends on.

    Args:
        bare: the skeleton. more: what else it depends on, such as the inputs: of tensors, what they are like.

    Raises:
        Untold: the model holds what cannot be compared, such as closures.
    """
    named_tensors = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    tensors = [(n, first.setdefault(id(t), n), type(t).__name__, _tensor(t)) for n, t in named_tensors]
    digests: dict[int, str] = {}
    modules = [(n, _class(type(m)), _attributes(n, m, digests)) for n, m in bare.named_modules()]
    return hashlib.sha256(repr((tensors, modules, [words(x) for x in more])).encode()).hexdigest()


def _attributes(name: str, module: nn.Module, digests: dict[int, str]) -> Any:
    tables = vars(module)
    plain = {k: v for k, v in tables.items() if k not in OWN and "_hooks" not in k}
    for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        kwargs = tables.get(f"{table}_with_kwargs", ())  # by numbers that are others in every process
        plain |= {table: [(hook, number in kwargs) for number, hook in tables[table].items()]}
    return [(k, _remembered(f"{name}.{k}", v, digests)) for k, v in sorted(plain.items())]


def _remembered(path: str, value: Any, digests: dict[int, str]) -> Any:
    """An attribute's words; of a config, which every module has, a digest made once."""
    try:
        if not hasattr(value, "to_dict"):
            return words(value)
        if id(value) not in digests:
            digests[id(value)] = hashlib.sha256(repr(words(value)).encode()).hexdigest()
        return digests[id(value)]
    except Untold as odd:
        raise Untold(f"{path.removeprefix('.')} is {odd}") from None


def words(x: Any, depth: int = 0) -> Any:
    """A value as what `repr` says alike in every process.

    Raises:
        Untold: it is known by its identity alone, or holds such a value.
    """
    if depth > MAX_DEPTH:
        raise Untold("nested too deep")
    # What it is like alone: weights of the same shapes are captured as the same graph.
    if isinstance(x, Tensor):
        return _tensor(x)
    # By its repr, which is the same in every process: the hash of a string is not.
    if isinstance(x, PLAIN):
        return type(x).__name__, repr(x)
    if isinstance(x, type):
        return _class(x)
    # A closure computes with what its cells hold, which may be anything: it is refused below. Not so a function that
    # its file has decorated, which is one for the process.
    if isinstance(x, FunctionType) and (x.__closure__ is None or _decorated(x)):
        return x.__module__, x.__qualname__, x.__code__.co_firstlineno, repr(x.__defaults__)
    # Of a module or a class, as `torch.tanh` is; `[].append` is known by its address, another in the next process.
    if isinstance(x, BuiltinFunctionType) and isinstance(x.__self__, type | ModuleType | None):
        return "built-in", getattr(x.__self__, "__name__", ""), x.__name__
    inner = _inner(x)
    if inner is None:
        raise Untold(f"a {type(x).__name__}, whose equality cannot be told")
    # A set of strings has another order in every process.
    items = [words(y, depth + 1) for y in inner]
    return type(x).__qualname__, sorted(map(repr, items)) if isinstance(x, set | frozenset) else items


def _decorated(function: FunctionType) -> bool:
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def _inner(x: Any) -> Iterable[Any] | None:
    """What a container holds; None of what is no container."""
    if isinstance(x, partial):
        return x.func, x.args, x.keywords
    if isinstance(x, Mapping):
        return list(x.items())
    if isinstance(x, list | tuple | set | frozenset):
        return x
    if hasattr(x, "to_dict"):  # a config of transformers; what hash() says of the rest is another in every process
        return [(k, v) for k, v in vars(x).items() if not k.endswith("_hash")]
    if is_dataclass(x) and type(x).__eq__ is not object.__eq__:
        return list(vars(x).items())
    return None


def _tensor(t: Tensor) -> Any:
    device = t.device.type  # its index is another on every rank
    return tuple(t.shape), t.stride(), str(t.dtype), device, t.requires_grad, t.is_inference()


@cache
def _class(kind: type) -> Any:
    return kind.__module__, kind.__qualname__, [_class(base) for base in kind.__bases__ if base is not object]
