"""Whatever is set on a part, hooked to it or put in its place counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.runtime.revision import WRITERS, Revision, counted

CALLS: dict[str, Callable[[Any], object]] = {
    "__setitem__": lambda x: x.__setitem__(1, 2),
    "__delitem__": lambda x: x.__delitem__(1),
    "__ior__": lambda x: x.__ior__({2: 3}),
    "clear": lambda x: x.clear(),
    "move_to_end": lambda x: x.move_to_end(1),
    "pop": lambda x: x.pop(1),
    "popitem": lambda x: x.popitem(),
    "setdefault": lambda x: x.setdefault(3, 4),
    "update": lambda x: x.update({4: 5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", WRITERS)
def test_every_write_to_a_table_counts_and_reading_does_not(kind, name):
    if not hasattr(kind, name):
        return
    plain, table = kind({1: 1, 0: 0}), counted(kind({1: 1, 0: 0}))
    before = Revision.number
    assert list(table.items()) == list(plain.items()) and table.get(1) == 1 and counted(table) is table
    assert Revision.number == before
    CALLS[name](table)
    CALLS[name](plain)
    assert Revision.number > before and list(table.items()) == list(plain.items())


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda part: part.eval(),
    "attribute": lambda part: setattr(part, "eps", 2.0),
    "hook": lambda part: part.register_forward_hook(lambda *_: None),
    "hook of torch's": lambda part: nn.Module.register_forward_pre_hook(part, lambda *_: None),
    "hooks in place of hooks": lambda part: setattr(part, "_forward_hooks", OrderedDict()),
    "parameter": lambda part: part._parameters.update(weight=nn.Parameter(part.weight.detach())),
    "forward": lambda part: setattr(part, "forward", part.forward),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_part_count_and_calls_do_not(change):
    sharded: Any = autotp.compile(nn.Sequential(nn.LayerNorm(4)), 1, example_inputs=torch.ones(2, 4))
    part, x = sharded[0], torch.ones(2, 4)
    part.eps = 1.0
    sharded(x)
    before = Revision.number
    sharded(x)
    assert Revision.number == before
    CHANGES[change](part)
    assert Revision.number > before
    assert isinstance(part._forward_hooks, type(sharded._forward_hooks))
