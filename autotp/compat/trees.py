"""Nested containers (pytrees) and their leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten
TreeSpec = pytree.TreeSpec


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Map the leaves of nested containers by their place, such as `logits` or `['more'][0]`.

    Items of containers that were registered without names are numbered.
    """
    know_records(tree)
    try:
        pairs = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf)[0]]
    except ValueError:  # some type within has no names
        pairs = _places(tree)
    return {place.removeprefix(".") or "0": leaf for place, leaf in pairs}


def know_records(tree: Any) -> Any:
    """Register the plain dataclasses among the leaves, and within those, as containers; return the tree.

    Torch registers a class for good. One that somebody registered before stays as it is.
    """
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(type(leaf)):
            _know(type(leaf))
            know_records(leaf)
    return tree


def know_structure(spec: pytree.TreeSpec) -> None:
    """Register the plain dataclasses in a structure that another process made."""
    kind: type = spec.type  # none of a leaf
    if dataclasses.is_dataclass(kind) and not registered(kind):
        _know(kind)
    for inner in spec.children():
        know_structure(inner)


def _know(kind: type) -> None:
    pytree.register_pytree_node(
        kind,
        _fields,
        _record(kind),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=_named_fields,
    )


def _fields(record: Any) -> tuple[list[Any], list[str]]:
    """Return the values that a dataclass holds, also of attributes that are no fields, and their names."""
    names = [f.name for f in dataclasses.fields(record) if hasattr(record, f.name)]
    names += [name for name in getattr(record, "__dict__", ()) if name not in names]
    return [getattr(record, name) for name in names], names


def _named_fields(record: Any) -> tuple[list[Any], list[str]]:
    values, names = _fields(record)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(names, values, strict=True)], names


def _record(kind: type) -> Any:
    def rebuild(values: Any, names: list[str]) -> Any:
        record = object.__new__(kind)  # its __init__ has run in the forward
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record

    return rebuild


def _places(tree: Any) -> list[tuple[str, Any]]:
    if pytree.tree_structure(tree).is_leaf():
        return [("", tree)]
    return [(f"{place}{name}", leaf) for place, inner in _children(tree) for name, leaf in _places(inner)]


def _children(tree: Any) -> list[tuple[str, Any]]:
    """List the items of a container, by their place in it."""

    def inner(value: Any) -> bool:
        return value is not tree

    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree, inner)[0]]
    except ValueError:
        return [(f"[{i}]", x) for i, x in enumerate(pytree.tree_leaves(tree, inner))]


def register_node(kind: type, flatten: Any, unflatten: Any) -> None:
    """Make a class a node of nested containers.

    Args:
        kind: the class. flatten: gives a list of children and a context. unflatten: takes both.
    """

    def with_keys(value: Any) -> Any:
        children, context = flatten(value)
        return [(pytree.SequenceKey(i), child) for i, child in enumerate(children)], context

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def is_node(value: Any) -> bool:
    """Return whether nested containers open such a value."""
    return pytree._get_node_type(value) in pytree.SUPPORTED_NODES


def registered(kind: type) -> bool:
    """Return whether nested containers open values of a class that is no named tuple."""
    return kind in pytree.SUPPORTED_NODES


def is_user_node(value: Any) -> bool:
    """Return whether nested containers open such a value because somebody registered its class."""
    return is_node(value) and pytree._get_node_type(value) not in pytree.BUILTIN_TYPES


def children(value: Any) -> list[Any]:
    """Return the children of a node, in order."""
    return list(pytree.SUPPORTED_NODES[pytree._get_node_type(value)].flatten_fn(value)[0])
