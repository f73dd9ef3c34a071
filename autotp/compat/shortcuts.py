"""Shortcuts in an export: what nothing of ours reads is left out."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from torch._dynamo import config as dynamo
from torch.fx import _lazy_graph_module, proxy
from torch.fx.experimental import proxy_tensor


class Frame(NamedTuple):
    """A frame of a stack, as `traceback.StackSummary.from_list` takes it."""

    filename: str
    lineno: int
    name: str
    line: str | None


@contextlib.contextmanager
def quick_export() -> Iterator[None]:
    """Within this context an export takes fewer seconds and gives the same graph."""
    with contextlib.ExitStack() as stack:
        for context in (uncached_shapes, uncompiled_graphs, unread_lines, unlisted_strides):
            stack.enter_context(context())
        yield


def uncached_shapes() -> contextlib.AbstractContextManager[Any]:
    """Without torch's cache of shape functions: with symbolic sizes an entry costs more than it saves in one trace."""
    return dynamo.patch(fake_tensor_cache_enabled=False)


def uncompiled_graphs() -> contextlib.AbstractContextManager[Any]:
    """Within this context a module that torch makes of a graph gets Python code when it is called: of some thirty that
    an export makes and throws away hardly any is."""
    return _lazy_graph_module._use_lazy_graph_module(True)


def unread_lines() -> contextlib.AbstractContextManager[Any]:
    """Within this context a node's stack is of Python's own frames, whose source lines are read when they are shown: a
    trace takes the stack of every node, and shows of its frames the few from the first forward on."""

    def summary() -> list[Frame]:
        frames = []
        for frame, line in traceback.walk_stack(None):
            frames.append(Frame(frame.f_code.co_filename, line, frame.f_code.co_name, None))
        return frames[::-1]

    return mock.patch.object(
        proxy, "CapturedTraceback", SimpleNamespace(extract=lambda: SimpleNamespace(summary=summary))
    )


def unlisted_strides() -> contextlib.AbstractContextManager[Any]:
    """Without `tensor_meta` beside the value of a node: whether its symbolic strides are those of one memory format or
    another takes more comparisons of sizes than the operator itself."""
    return mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda value: None)
