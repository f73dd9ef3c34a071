"""A model made small: with a few blocks of each stack, and with narrower layers where its constructor can be asked.

What is made is a model of the same classes, on the meta device or with the original's own tensors; nothing of the
original changes.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .copies import copied
from .stacks import FEWEST, kinds, place_in

FEWEST_KEPT = 2  # blocks of a stack: one that follows what is before the stack, and one that follows a block
RATIOS = (128, 64, 32, 16, 8, 4, 2)  # by which layers are made narrower: the first that leaves `NARROW`
NARROW = 128  # what the widest of the common widths comes to, or more
LEAST = 32  # and where such a model is too large or does not run
Stack = nn.ModuleList | nn.Sequential


def cuts(model: nn.Module) -> dict[str, int]:
    """Stacks of blocks -> how many from the first on hold every kind of block after every kind that it follows.

    The last that is kept is of the kind of the stack's last. Stacks within blocks that are kept are cut too.
    """
    lengths: dict[str, int] = {}
    for name, module in model.named_modules():
        inside_cut = any((place_in(stack, name) or 0) >= length for stack, length in lengths.items())
        if not inside_cut and isinstance(module, Stack) and len(module) >= FEWEST and len(set(module)) == len(module):
            least = _shortest(kinds(module))
            if least < len(module):
                lengths[name] = least
    return lengths


def _shortest(kinds: list[Hashable | None]) -> int:
    """The length of the shortest beginning with all pairs of neighbours, and the last kind at its end."""
    if None in kinds:
        return len(kinds)
    pairs = set(zip(kinds, kinds[1:], strict=False))
    for n in range(FEWEST_KEPT, len(kinds)):
        if kinds[n - 1] == kinds[-1] and set(zip(kinds[:n], kinds[1:n], strict=False)) == pairs:
            return n
    return len(kinds)


@contextmanager
def cut(model: nn.Module, lengths: Mapping[str, int]) -> Iterator[None]:
    """Within this context the stacks of the model have these lengths."""
    modules = model.named_modules()
    stacks = [(module, dict(module._modules), lengths[name]) for name, module in modules if name in lengths]
    try:
        for module, blocks, length in stacks:
            module._modules = dict(list(blocks.items())[:length])
        yield
    finally:
        for module, blocks, _ in stacks:
            module._modules = blocks


# ---- narrower --------------------------------------------------------------------------------------------------------


def narrowed(model: nn.Module) -> Iterator[tuple[nn.Module, dict[int, int]]]:
    """Models of the same classes on the meta device, made by the same constructor with smaller widths; and which: all
    are smaller by one ratio. The ratio that suits most comes first, then greater ones, then smaller ones.

    A width is a number among the constructor's arguments that is a dimension of a layer, but for how many rows the
    embeddings have and how many modules or experts there are. There are none where the constructor's arguments are not
    kept, or it does not take others.
    """
    arguments, common = _constructor_arguments(model), _widths(model)
    if arguments is None or not common:
        return
    widest = max(n for n, count in common.items() if 4 * count >= max(common.values()))
    at = next((i for i, r in enumerate(RATIOS) if widest % r == 0 and widest // r >= NARROW), len(RATIOS))
    for ratio in (*RATIOS[at : at + 1], *reversed(RATIOS[:at]), *RATIOS[at + 1 :]):
        widths = {n: n // ratio for n in common if n % ratio == 0 and n > ratio}
        thin = _with_widths(model, arguments, widths) if widths.get(widest, 0) >= LEAST else None
        if thin is not None:
            yield thin, widths


def _widths(model: nn.Module) -> Counter[int]:
    """The dimensions of layers, with how often they are met."""
    counts: Counter[int] = Counter()
    rows, numbers = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}, _numbers(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            shape = list(parameter.shape)
            if isinstance(module, nn.Embedding):
                shape = shape[1:]
            elif "Conv" in type(module).__name__:
                shape = shape[:2]
            elif _experts(module, parameter):
                shape = shape[1:]
            counts.update(shape)
    return Counter({n: count for n, count in counts.items() if n not in numbers and (n not in rows or count > 2)})


def _numbers(model: nn.Module) -> set[int]:
    """How many modules its lists have, and how many experts."""
    lists = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList)}
    return lists | {len(p) for m in model.modules() for p in m.parameters(recurse=False) if _experts(m, p)}


def _experts(module: nn.Module, parameter: Tensor) -> bool:
    return parameter.ndim > 2 and "Conv" not in type(module).__name__


def _with_widths(model: nn.Module, arguments: Mapping[str, Any], widths: Mapping[int, int]) -> nn.Module | None:
    """The model with these widths, where it is then made of the same modules."""
    dtypes = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), _default(dtypes.most_common(1)[0][0]):
            narrow = type(model)(**{name: _narrow(value, widths, {}) for name, value in arguments.items()})
    except Exception:  # whatever a constructor thinks of these sizes
        return None
    want, have = dict(model.named_modules()), dict(narrow.named_modules())
    tensors, names = _tensors(model), {id(t): n for n, t in _tensors(narrow).items()}
    if want.keys() != have.keys() or any(type(m) is not type(have[n]) for n, m in want.items()):
        return None
    if tensors.keys() != set(names.values()):
        return None
    for name, module in want.items():
        have[name].training = module.training

    def like(tensor: Tensor) -> Tensor:
        other = tensors[names[id(tensor)]]
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=other.dtype, device="meta")
        return nn.Parameter(empty, other.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    return copied(narrow, like)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _constructor_arguments(model: nn.Module) -> dict[str, Any] | None:
    """The arguments that the model's constructor takes, as far as the model keeps them under the same names, itself or
    in its `config`; None where one that it needs is not kept."""
    config = getattr(model, "config", None)
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(type(model).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if isinstance(config, Mapping) and name in config:
            arguments[name] = config[name]
        elif name in vars(model):
            arguments[name] = vars(model)[name]
        elif hasattr(config, name):
            arguments[name] = getattr(config, name)
        elif parameter.default is parameter.empty:
            return None
    return arguments


def _narrow(value: Any, widths: Mapping[int, int], copies: dict[int, Any]) -> Any:
    """A copy of arguments with other widths."""
    # No flag: True is an int, and equal to 1.
    if type(value) is int:
        return widths.get(value, value)
    # No named tuple, whose constructor takes its fields one by one.
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_narrow(v, widths, copies) for v in value)
    if isinstance(value, dict):
        narrow = copy.copy(value)
        for key, v in value.items():
            # The copy of a frozen configuration is frozen as well, so not by its own `__setitem__`.
            dict.__setitem__(narrow, key, _narrow(v, widths, copies))
        return narrow
    if not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
        return value
    # A configuration that is reached twice is copied once, so that two parts still share it, and one that holds itself
    # ends.
    if id(value) not in copies:
        copies[id(value)] = narrow = copy.copy(value)
        for key, v in list(vars(value).items()):
            vars(narrow)[key] = _narrow(v, widths, copies)
    return copies[id(value)]
