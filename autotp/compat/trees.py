"""Nested containers and their leaves."""

from __future__ import annotations

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
    """The leaves of nested containers by their place, such as `logits` or `['more'][0]`.

    What a container that was registered without names holds is numbered.
    """
    try:
        pairs = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf)[0]]
    except ValueError:  # some type within has no names
        pairs = _places(tree)
    return {place.removeprefix(".") or "0": leaf for place, leaf in pairs}


def _places(tree: Any) -> list[tuple[str, Any]]:
    if pytree.tree_structure(tree).is_leaf():
        return [("", tree)]
    return [(f"{place}{name}", leaf) for place, inner in _children(tree) for name, leaf in _places(inner)]


def _children(tree: Any) -> list[tuple[str, Any]]:
    """What a container holds, by its place in it."""

    def inner(value: Any) -> bool:
        return value is not tree

    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree, inner)[0]]
    except ValueError:
        return [(f"[{i}]", x) for i, x in enumerate(pytree.tree_leaves(tree, inner))]


def register_node(kind: type, flatten: Any, unflatten: Any) -> None:
    """Make a class a node of nested containers.

    Args:
        flatten: gives a list of children and a context; `unflatten` takes both.
    """

    def with_keys(value: Any) -> Any:
        children, context = flatten(value)
        return [(pytree.SequenceKey(i), child) for i, child in enumerate(children)], context

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def is_node(value: Any) -> bool:
    """Whether nested containers open such a value."""
    return pytree._get_node_type(value) in pytree.SUPPORTED_NODES


def is_user_node(value: Any) -> bool:
    """Whether nested containers open such a value because somebody registered its class."""
    return is_node(value) and pytree._get_node_type(value) not in pytree.BUILTIN_TYPES


def children(value: Any) -> list[Any]:
    """What a node holds, in order."""
    return list(pytree.SUPPORTED_NODES[pytree._get_node_type(value)].flatten_fn(value)[0])
