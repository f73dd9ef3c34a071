"""Stacks of equal modules: which blocks of a model are alike, so that capture traces one of each kind.

Two blocks are alike where everything that their forward may read is the same: classes, flags, plain attributes, and the
shapes of what they hold. Their place in the stack, which many keep as a number (`layer_idx`), is replaced while tracing
by a number that must not be read; a forward that reads it all the same is traced in full.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FEWEST = 4  # blocks in a stack for which one trace is worth while
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
OWN = {"_parameters", "_buffers", "_modules", "training"}  # attributes of nn.Module that are looked at one by one
HOOKS = tuple(n for n in vars(nn.Module()) if "_hooks" in n)
AttributePlace = tuple[str, str]  # module within the block, attribute


class IndexRead(RuntimeError):
    """A block's forward reads which block of the stack it is."""


def _refuse(self: Any, *_: Any) -> Any:
    raise IndexRead("the forward of a block reads its place in the stack")


class Unread(int):
    """A number that may be passed on, but not be read."""


READING = """
    add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow neg pos abs invert
    lshift rlshift rshift rrshift and rand or ror xor rxor eq ne lt le gt ge bool index int float hash str repr format
    round trunc floor ceil
"""
for _name in READING.split():
    setattr(Unread, f"__{_name}__", _refuse)


def stacks(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """The outermost lists of at least `FEWEST` modules, by name; the model itself may be one, and hides no others."""
    lists: dict[str, nn.ModuleList | nn.Sequential] = {}
    for name, module in model.named_modules():
        inner = any(outer and name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= FEWEST and not inner and _full(module):
            lists[name] = module
    return lists


def _full(stack: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a list has a module at each place; some leave places empty."""
    return all(isinstance(block, nn.Module) for block in stack)


def path_of(stack: str, index: int) -> str:
    """The name of a block, by that of its stack, which is "" where that is the model."""
    return f"{stack}.{index}".removeprefix(".")


def place_in(stack: str, name: str) -> int | None:
    """Which block of a stack a module, or what lies in it, belongs to, by their names; None where it is in none."""
    inside = name.removeprefix(f"{stack}.") if stack else name
    place = re.split("[.@#]", inside)[0]
    return int(place) if place.isdigit() and name.startswith(stack) and (not stack or inside != name) else None


def kinds(stack: nn.ModuleList | nn.Sequential) -> list[Hashable | None]:
    """For every block what it has in common with those that are alike; None where it must be traced by itself."""
    places = _places(list(stack))
    return [_kind(block, places) for block in stack]


def _places(blocks: list[nn.Module]) -> set[AttributePlace]:
    """Attributes that hold the block's place in the stack, counted from any number."""
    offsets: dict[AttributePlace, list[int]] = {}
    for i, block in enumerate(blocks):
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    offsets.setdefault((path, name), []).append(value - i)
    return {place for place, numbers in offsets.items() if len(numbers) > 1 and len(set(numbers)) == 1}


def _kind(block: nn.Module, places: set[AttributePlace]) -> Hashable | None:
    parts: list[Hashable] = []
    for path, module in block.named_modules():
        state = vars(module)
        if any(state[name] for name in HOOKS):
            return None
        parts.append((path, type(module), module.training))
        parts += [(n, _shape(t), isinstance(t, nn.Parameter)) for n, t in module.named_parameters(recurse=False)]
        parts += [(n, _shape(t), n in state["_non_persistent_buffers_set"]) for n, t in _buffers(module)]
        rest = {n: v for n, v in state.items() if n not in OWN and n not in HOOKS and (path, n) not in places}
        parts += [(n, _value(v)) for n, v in rest.items()]
    return tuple(parts)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(recurse=False)


def _shape(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _value(value: Any) -> Hashable:
    """What is equal for two attributes only where a forward cannot tell them apart."""
    if type(value) in PLAIN:
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_value, value))
    if type(value) in (set, frozenset) and all(type(v) in PLAIN for v in value):
        return type(value), frozenset(map(_value, value))
    if isinstance(value, Mapping) and type(value).__name__ in ("dict", "OrderedDict"):
        return type(value), tuple((_value(k), _value(v)) for k, v in value.items())
    return id(value)


@contextmanager
def unread(stack: nn.ModuleList | nn.Sequential) -> Iterator[None]:
    """Within this context no block of the stack can tell its place."""
    blocks = list(stack)
    places = _places(blocks) if len(set(blocks)) == len(blocks) else set()
    places_of = [(vars(m), n) for b in blocks for path, m in b.named_modules() for n in vars(m) if (path, n) in places]
    values = [(state, name, state[name]) for state, name in places_of]
    for state, name, value in values:
        state[name] = Unread(value)
    try:
        yield
    finally:
        for state, name, value in values:
            state[name] = value
