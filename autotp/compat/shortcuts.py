"""Shortcuts in an export: parts of torch's work whose results nothing here reads are left out."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import NamedTuple
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
    """Make an export within this context take fewer seconds and give the same graph.

    - Shape functions are not cached: with symbolic sizes an entry costs more than it saves in one trace.
    - A module that torch makes of a graph gets Python code when it is called: of some thirty that an export makes and
      throws away hardly any is.
    - Source lines of a node's stack are read when they are shown (`_Stack`).
    - `tensor_meta` is not written beside the value of a node: whether symbolic strides are those of one memory format
      or another takes more comparisons of sizes than the operator itself.
    """
    with (
        dynamo.patch(fake_tensor_cache_enabled=False),
        _lazy_graph_module._use_lazy_graph_module(True),
        mock.patch.object(proxy, "CapturedTraceback", _Stack),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda value: None),
    ):
        yield


class _Stack:
    """Stack of Python's own frames, in the place of torch's `CapturedTraceback`.

    A trace takes the stack of every node, and shows of its frames the few from the first forward on: so their source
    lines are read only then.
    """

    @classmethod
    def extract(cls) -> _Stack:
        return cls()

    def summary(self) -> list[Frame]:
        frames = []
        for frame, line in traceback.walk_stack(None):
            frames.append(Frame(frame.f_code.co_filename, line, frame.f_code.co_name, None))
        return frames[::-1]
