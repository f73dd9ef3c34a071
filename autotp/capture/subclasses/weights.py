"""Weights that are tensor subclasses, as quantised ones are: a copy of the model in which their parts are parameters.

A subclass says by `__tensor_flatten__` which plain tensors it is made of. In the copy these stand in its place: that
part of `layer.weight` which it calls `scale` is `layer._weight_scale`, as torchao's files have it. The forward still
reads `layer.weight`, made anew of the parts, and so what is traced are the operators on the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.capture.copies import copied

RECIPES = "_autotp_recipes"  # attribute: name of a weight -> its `Recipe`


@dataclass(frozen=True)
class Recipe:
    """What makes a tensor subclass of its parts.

    Attributes:
        kind: the subclass. described: what it said of itself beside its parts. size, strides: of the tensor.
        parts: its attributes, each with the recipe of what it holds; None where that is a plain tensor.
    """

    kind: Any
    described: Any
    size: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[tuple[str, Recipe | None], ...]

    @classmethod
    def of(cls, tensor: Any) -> Recipe:
        """How this tensor is made."""
        names, described = tensor.__tensor_flatten__()
        tensors = [(name, getattr(tensor, name)) for name in names]
        inner = {name: cls.of(part) for name, part in tensors if compat.wraps_tensors(part)}
        parts = tuple((name, inner.get(name)) for name in names)
        return cls(type(tensor), described, tuple(tensor.shape), tuple(tensor.stride()), parts)

    def names(self, prefix: str) -> Iterator[str]:
        """A name for each plain tensor that the subclass is made of, in order."""
        for name, recipe in self.parts:
            yield from recipe.names(f"{prefix}_{name}") if recipe else (f"{prefix}_{name}",)

    def plain_parts(self, tensor: Any) -> Iterator[Tensor]:
        """These plain tensors."""
        for name, recipe in self.parts:
            yield from recipe.plain_parts(getattr(tensor, name)) if recipe else (getattr(tensor, name),)

    def tensor(self, parts: Iterator[Any]) -> Any:
        """The subclass of its plain tensors."""
        inner: dict[str, Any] = {}
        for name, recipe in self.parts:
            inner[name] = recipe.tensor(parts) if recipe else next(parts)
        return self.kind.__tensor_unflatten__(inner, self.described, torch.Size(self.size), self.strides)


def plain_weights(model: Any) -> Any:
    """A copy of the model in which every weight is plain; the model itself where that is so already.

    Weights that are trained stay: their parts have no gradient that would be theirs.

    Args:
        model: it stays as it is, and the copy shares its tensors.
    """
    if not isinstance(model, nn.Module) or not any(map(wrapped, [*model.parameters(), *model.buffers()])):
        return model
    model_copy = copied(model, lambda tensor: tensor)
    parts_by_id: dict[int, list[nn.Parameter]] = {}  # a weight that stands in two places has one set of parts
    for module in list(model_copy.modules()):
        own = {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        recipes = {name: Recipe.of(tensor) for name, tensor in own.items() if wrapped(tensor)}
        for name, recipe in recipes.items():
            frozen = [nn.Parameter(part.detach(), False) for part in recipe.plain_parts(own[name])]
            parts = parts_by_id.setdefault(id(own[name]), frozen)
            (module._parameters if name in module._parameters else module._buffers).pop(name)
            module._parameters.update(zip(part_names(name, recipe), parts, strict=True))
        if recipes:
            vars(module)[RECIPES] = recipes
            module.__class__ = _reading(type(module), tuple(recipes))
    return model_copy


def plain_state(state: Any) -> Any:
    """A state dict of the model, such as a quantised one's own, by the names that its parts have in the copy.

    Args:
        state: tensors by name; what is no mapping, or holds no such weight, is given back as it is.
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
    """The names under which a module holds the parts of the weight of this name."""
    return list(recipe.names(f"_{name}"))


def parts_of(module: nn.Module, name: str) -> list[str]:
    """The same of a weight of this module that is made of parts; none of any other."""
    recipe = vars(module).get(RECIPES, {}).get(name)
    return part_names(name, recipe) if recipe is not None else []


def wrapped(tensor: Tensor) -> bool:
    """Whether a weight is made of others. DTensors are not: they say where numbers lie, not how they are stored."""
    return compat.wraps_tensors(tensor) and not isinstance(tensor, DTensor) and not tensor.requires_grad


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `plain_weights`."""
    plain: type[nn.Module] = vars(kind).get("of_parts", kind)
    return plain


def _weight(module: nn.Module, name: str) -> Any:
    recipe: Recipe = vars(module)[RECIPES][name]
    return recipe.tensor(iter([module._parameters[n] for n in part_names(name, recipe)]))


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class of modules that make the weights of these names anew whenever they are read."""
    body: dict[str, Any] = {name: property(lambda module, name=name: _weight(module, name)) for name in names}
    body |= {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    make: Any = type(kind)
    reading: type[nn.Module] = make(kind.__name__, (kind,), {**body, "of_parts": kind})
    return reading
