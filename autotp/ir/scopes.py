"""Scopes of nodes: the module calls that made them, and the regions that the model checkpoints itself.

A region of `torch.utils.checkpoint` in the model's forward is, while it is traced, one more level of the module stack
of its operators, named after the module that asks for it: `model#3`. The tree of the sharded module runs it under
torch's checkpoint again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from .marks import mark

MARK = "#"
SUFFIX = re.compile(r"[@#][@#\d]*$")  # of a later call of one module, or of a region in it
BLOCK = re.compile(r"\.\d+(\.|$)")  # the place in a list of modules


def scope_path(node: fx.Node) -> tuple[str, ...]:
    """List the modules and regions whose forward made this node, outermost first."""
    scope = mark(node).scope
    return module_path(node, regions=True) if scope is None else scope


def moved_to(node: fx.Node) -> tuple[str, ...]:
    """List the modules that a pass moved this node into, outermost first; none where it did not."""
    return tuple(p for p in mark(node).scope or () if not is_region(p))


def is_region(path: str) -> bool:
    """Say whether this level of a path is a region."""
    return MARK in path


def module_of(path: str) -> str:
    """Return the module that a level of a path is a call of, or a region in."""
    return SUFFIX.sub("", path)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its activations are recomputed in the backward."""

    def region(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)

    return region


def module_path(node: fx.Node, regions: bool = False) -> tuple[str, ...]:
    """List the modules whose forward made this node, outermost first; a later call of one module ends in `@k`.

    With `regions`, checkpointed regions are levels too (`autotp.ir.scopes`).
    """
    stack = node.meta.get("nn_module_stack") or {}
    paths = []
    for key, entry in stack.items():
        if key.startswith("L__self__") or key.startswith("L['self']"):
            call = re.search(r"@(\d+)$", key) if "@" in key else None
            paths.append(entry[0] + (call.group(0) if call and "@" not in entry[0] else ""))
    return tuple(p for p in paths if p and (regions or not is_region(p)))


def module_name(node: fx.Node) -> str:
    """Return the innermost module whose forward made this node; empty where none did."""
    return ("", *module_path(node))[-1]


def innermost(paths: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    """Return the path of the innermost module, or checkpointed region, that all these paths share."""
    levels = zip(*paths, strict=False)
    return tuple(level[0] for level in takewhile(lambda level: level.count(level[0]) == len(level), levels))


def block_of(name: str) -> str:
    """Return the path of the outermost repeated block that holds this parameter; empty where none does."""
    match = BLOCK.search(name)
    return name[: match.end() - (match.group(1) == ".")] if match else ""


NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number


def generic(name: str) -> str:
    """Replace the numbers in a path by `*`."""
    return NUMBER.sub("*", name)


# ---- blocks ----------------------------------------------------------------------------------------------------------

# The repeated blocks of a program, found once (`passes/analysis/fold`).


class Block(NamedTuple):
    """A call of a module that is in a list, or of a part of an item of a list whose items are not called.

    Attributes:
        path: of the call. container: of the list. nodes: its operators, in order.
        first: index of the first equal block among the blocks; its own where none before it is equal.
    """

    path: str
    container: str
    nodes: tuple[fx.Node, ...]
    first: int


class Blocks(NamedTuple):
    """The blocks of a program.

    Attributes:
        calls: all of them, those within others last.
        same: every node and leaf -> the node that decides for it: itself, or its equal in the first equal block.
    """

    calls: tuple[Block, ...] = ()
    same: dict[fx.Node, fx.Node] = {}

    @property
    def containers(self) -> dict[str, str]:
        """Path of each block -> path of the list that it is in."""
        return {block.path: block.container for block in self.calls}
