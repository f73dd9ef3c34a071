"""Deep copies of a model: with other tensors in place of its parameters and buffers, or with further buffers."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autotp import compat
from autotp.ir.graph import floating
from autotp.ir.precision import DELAYED, HISTORY, LATEST, Precision

Module = TypeVar("Module", bound=nn.Module)


def tensors_of(module: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers of a module by name, each tensor under its first one, or under every one."""
    how: dict[str, Any] = {"remove_duplicate": False} if every_name else {}
    return dict([*module.named_parameters(**how), *module.named_buffers(**how)])


class _Detached(TorchFunctionMode):
    """Mode that copies computed tensors, such as a weight that a hook makes anew at every call, without their history;
    torch refuses to copy them."""

    def __init__(self, other: Callable[[Tensor], Tensor | None] | None) -> None:
        super().__init__()
        self.other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        copy = self.other(tensor) if self.other is not None else None
        if copy is None and tensor.is_leaf:
            return func(tensor, memo)
        memo[id(tensor)] = copy = tensor.detach().clone() if copy is None else copy
        return copy


def copied(
    model: Module, replace: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor | None] | None = None
) -> Module:
    """Copy a model deeply; the user's own is left as it is.

    Args:
        replace: from a parameter or buffer to the tensor that the copy holds in its place.
        other: the same for any other tensor in an attribute; where it is left out or gives None, a copy of its values.
    """
    memo: dict[int, Any] = {id(tensor): replace(tensor) for tensor in tensors_of(model).values()}
    with _Detached(other), torch.inference_mode(False):
        return copy.deepcopy(model, memo)


def with_histories(model: Any, precision: Precision | None) -> Any:
    """Copy a model with histories in its large linear layers; return the model itself where it has or needs none.

    A history is [3, length]: of the input, the weight and the product's gradient, the newest last; zeros at first.
    Beside it is the gradient's value of the last backward, [], which the next call records. They are in a copy, and not
    in the skeleton alone, for the self-check, proofs and the tree of parts read a model's tensors by name.

    Args:
        model: it stays as it is, and the copy shares its tensors. precision: only delayed scaling wants any.
    """
    if precision is None or precision.recipe != DELAYED or not isinstance(model, nn.Module):
        return model
    layers = [name for name, module in model.named_modules() if _takes(precision, name, module)]
    if not layers or hasattr(model.get_submodule(layers[0]), HISTORY):
        return model
    model_copy = copied(model, lambda tensor: tensor)
    for name in layers:
        layer: Any = model_copy.get_submodule(name)
        weight = layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = torch.device("cpu") if weight.is_meta else weight.device
        layer.register_buffer(HISTORY, torch.zeros(3, precision.history, dtype=dtype, device=device))
        layer.register_buffer(LATEST, torch.zeros((), dtype=dtype, device=device))
    return model_copy


def _takes(precision: Precision, name: str, module: nn.Module) -> bool:
    """Say whether a module is a linear layer that the recipe may take."""
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        return False
    return precision.takes(f"{name}.weight".removeprefix("."), *module.weight.shape)


# ---- made-up values --------------------------------------------------------------------------------------------------

# Values for tensors that have none: weights, buffers and inputs on the meta device, so that a model can be run.
#
# They are small random numbers, the same in every process; what they are does not matter to a comparison, but they
# keep a deep network's numbers finite.

PATTERN = 65521  # a prime: larger tensors repeat so many numbers, and no two rows of one are alike


def made_real(tensor: Tensor, device: torch.device, name: str = "") -> Tensor:
    """Make a tensor of the same shape, strides and type that has values; a parameter where this is one.

    Weights are scaled to keep the size of activations; buffers and vectors are positive, whole numbers
    zero, truth values a lower triangle, which masks some positions and not all.

    Args:
        tensor: on the meta device.
        device: where the values are to be.
        name: of a parameter or buffer; those of other names get other numbers.
    """
    weight = isinstance(tensor, nn.Parameter)
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    with torch.no_grad():
        real.copy_(_values(tensor, name, weight))
    return nn.Parameter(real, tensor.requires_grad) if weight else real.requires_grad_(tensor.requires_grad)


def _values(tensor: Tensor, name: str, weight: bool) -> Tensor:
    shape = tensor.shape
    if tensor.dtype == torch.bool:
        ones = torch.ones(shape, dtype=torch.bool)
        return ones.tril() if len(shape) > 1 else ones
    if not floating(tensor):
        return torch.zeros(shape, dtype=tensor.dtype)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {tuple(shape)}".encode()))
    count, draw_count = tensor.numel(), min(tensor.numel(), PATTERN)
    if weight and len(shape) > 1:
        numbers = torch.randn(draw_count, generator=draw) / math.sqrt(max(shape[1:]))
    else:
        numbers = 0.5 + torch.rand(draw_count, generator=draw)
    numbers = numbers.to(tensor.dtype)
    repeats = -(-count // PATTERN)
    return (numbers.repeat(repeats)[:count] if repeats > 1 else numbers).reshape(shape)


# ---- weights that are tensor subclasses ------------------------------------------------------------------------------

# Weights that are tensor subclasses, as quantised ones are: a copy of the model in which their parts are parameters.
#
# A subclass says by `__tensor_flatten__` which plain tensors it is made of. In the copy these stand in its place:
# that part of `layer.weight` which it calls `scale` is `layer._weight_scale`, as torchao's files have it. The forward
# still reads `layer.weight`, made anew of the parts, and so what is traced are the operators on the parts.

RECIPES = "_autotp_recipes"  # attribute: name of a weight -> its `Recipe`


@dataclass(frozen=True)
class Recipe:
    """Recipe that makes a tensor subclass of its parts.

    Attributes:
        kind: the subclass. described: its own description beside its parts. size, strides: of the tensor.
        parts: its attributes, each with the recipe of its value; None where that is a plain tensor.
    """

    kind: type[Any]
    described: object
    size: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[tuple[str, Recipe | None], ...]

    @classmethod
    def of(cls, tensor: Any) -> Recipe:
        """Read the recipe of a tensor."""
        names, described = tensor.__tensor_flatten__()
        tensors = [(name, getattr(tensor, name)) for name in names]
        inner = {name: cls.of(part) for name, part in tensors if compat.wraps_tensors(part)}
        parts = tuple((name, inner.get(name)) for name in names)
        return cls(type(tensor), described, tuple(tensor.shape), tuple(tensor.stride()), parts)

    def names(self, prefix: str) -> Iterator[str]:
        """Yield a name for each plain tensor that the subclass is made of, in order."""
        for name, recipe in self.parts:
            yield from recipe.names(f"{prefix}_{name}") if recipe else (f"{prefix}_{name}",)

    def plain_parts(self, tensor: Any) -> Iterator[Tensor]:
        """Yield these plain tensors."""
        for name, recipe in self.parts:
            yield from recipe.plain_parts(getattr(tensor, name)) if recipe else (getattr(tensor, name),)

    def tensor(self, parts: Iterator[Any]) -> Any:
        """Make the subclass of its plain tensors."""
        inner: dict[str, Any] = {}
        for name, recipe in self.parts:
            inner[name] = recipe.tensor(parts) if recipe else next(parts)
        return self.kind.__tensor_unflatten__(inner, self.described, torch.Size(self.size), self.strides)


def plain_weights(model: Any) -> Any:
    """Copy a model with every weight plain; return the model itself where that is so already.

    Weights that are trained stay: their parts have no gradient that would be theirs.

    Args:
        model: it stays as it is, and the copy shares its tensors.
    """
    if not isinstance(model, nn.Module) or not any(map(wrapped, tensors_of(model).values())):
        return model
    model_copy = copied(model, lambda tensor: tensor)
    parts_by_id: dict[int, list[nn.Parameter]] = {}  # a weight that stands in two places has one set of parts
    for module in list(model_copy.modules()):
        tensors = {**module._parameters, **module._buffers}
        wraps = {name: tensor for name, tensor in tensors.items() if tensor is not None and wrapped(tensor)}
        recipes = {name: Recipe.of(tensor) for name, tensor in wraps.items()}
        for name, recipe in recipes.items():
            frozen = [nn.Parameter(part.detach(), False) for part in recipe.plain_parts(wraps[name])]
            parts = parts_by_id.setdefault(id(wraps[name]), frozen)
            (module._parameters if name in module._parameters else module._buffers).pop(name)
            module._parameters.update(zip(part_names(name, recipe), parts, strict=True))
        if recipes:
            vars(module)[RECIPES] = recipes
            module.__class__ = _reading(type(module), tuple(recipes))
    return model_copy


def plain_state(state: Any) -> Any:
    """Rename a state dict of the model, such as a quantised one's own, to the names of the parts in the copy.

    Args:
        state: tensors by name; any other object, or a mapping without such a weight, is returned as it is.
    """
    if not isinstance(state, Mapping) or not any(isinstance(t, Tensor) and wrapped(t) for t in state.values()):
        return state
    plain: dict[str, Any] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or not wrapped(tensor):
            plain[name] = tensor
            continue
        owner, dot, leaf = name.rpartition(".")
        recipe = Recipe.of(tensor)
        names = [f"{owner}{dot}{part}" for part in part_names(leaf, recipe)]
        plain |= dict(zip(names, recipe.plain_parts(tensor), strict=True))
    return plain


def part_names(name: str, recipe: Recipe) -> list[str]:
    """List the names under which a module holds the parts of the weight of this name."""
    return list(recipe.names(f"_{name}"))


def parts_of(module: nn.Module, name: str) -> list[str]:
    """List the parts' names of a weight of this module; none of a weight that is not made of parts."""
    recipe = vars(module).get(RECIPES, {}).get(name)
    return part_names(name, recipe) if recipe is not None else []


def wrapped(tensor: Tensor) -> bool:
    """Say whether a weight wraps other tensors. DTensors do not count: they say the placement, not the storage."""
    return compat.wraps_tensors(tensor) and not isinstance(tensor, DTensor) and not tensor.requires_grad


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before `plain_weights`."""
    return vars(kind).get("of_parts", kind)


def _weight(module: nn.Module, name: str) -> Any:
    recipe: Recipe = vars(module)[RECIPES][name]
    return recipe.tensor(iter([module._parameters[n] for n in part_names(name, recipe)]))


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Make a class of modules that make the weights of these names anew whenever they are read."""
    body: dict[str, Any] = {name: property(lambda module, name=name: _weight(module, name)) for name in names}
    body |= {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    make: Any = type(kind)
    return make(kind.__name__, (kind,), {**body, "of_parts": kind})
