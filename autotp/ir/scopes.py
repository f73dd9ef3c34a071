"""Activation checkpointing that the model does itself (`torch.utils.checkpoint` in its forward) is kept.

While a model is traced, such a region is one more level of the module stack of its operators, named after the module
that asks for it: `model#3`. The tree of the sharded module runs what is in it under torch's checkpoint again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autotp import compat

from .graph import module_path

MARK = "#"
SUFFIX = re.compile(r"[@#][@#\d]*$")  # of a later call of one module, or of a region in it
BLOCK = re.compile(r"\.\d+(\.|$)")  # the place in a list of modules


def regions_kept() -> AbstractContextManager[None]:
    """Within this context checkpointed regions are marked in the module stacks of a trace."""
    numbers = itertools.count()

    @contextmanager
    def region() -> Iterator[None]:
        stack = compat.module_stack()
        if stack is None:  # nothing is traced
            yield
            return
        parent = next(reversed(stack.values()))[0] if stack else ""
        mark = f"{MARK}{next(numbers)}"
        key = f"L['self']{mark}"  # as the keys of modules begin
        stack[key] = parent + mark, "checkpoint"
        try:
            yield
        finally:
            del stack[key]

    return compat.checkpoints_as(region)


def scope_path(node: fx.Node) -> tuple[str, ...]:
    """Names of the modules and regions whose forward made this node, outermost first."""
    return node.meta["scope"] if "scope" in node.meta else module_path(node, regions=True)


def is_region(path: str) -> bool:
    """Whether this level of a path is a region."""
    return MARK in path


def module_of(path: str) -> str:
    """The module that a level of a path is a call of, or a region in."""
    return SUFFIX.sub("", path)


def block_of(name: str) -> str:
    """The path of the outermost repeated block that holds this parameter; empty where none does."""
    found = BLOCK.search(name)
    return name[: found.end() - (found.group(1) == ".")] if found else ""


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose activations are computed again in the backward."""

    def region(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)

    return region
