"""What a template reads of an object is what a walk describes, and what it writes is what `assign` does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotp.ir.carried import assign, describe
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carrying import Carriers
from autotp.runtime.generation.template import Template


class Layer:
    """Keys and what is known of them."""

    def __init__(self) -> None:
        self.keys, self.values = torch.zeros(2, 3), torch.ones(2, 3)
        self.seen, self.full, self.scale = 0, False, 0.5
        self.sizes, self.more = {"a": 1}, (self.seen, None)  # a constant tuple would be one object in both


class Store:
    """Two layers."""

    def __init__(self) -> None:
        self.layers, self.count, self.kind = [Layer(), Layer()], 3, Layer


class Other(Store):
    """Likewise."""


MOVING = {(Store, "count")}


def shared(store: Any) -> None:
    store.layers[1].keys = store.layers[0].keys


def reordered(store: Any) -> None:
    count = vars(store).pop("count")
    layers = vars(store).pop("layers")
    store.count, store.layers = count, layers


CHANGES = {
    "flag": lambda s: setattr(s.layers[1], "full", True),
    "number for flag": lambda s: setattr(s.layers[1], "full", 0),
    "number": lambda s: setattr(s.layers[0], "seen", 1),
    "float": lambda s: setattr(s.layers[0], "scale", 0.25),
    "class": lambda s: setattr(s, "kind", Store),
    "no tensor": lambda s: setattr(s.layers[0], "keys", None),
    "one more": lambda s: setattr(s, "further", 1),
    "a layer less": lambda s: s.layers.pop(),
    "another key": lambda s: s.layers[0].sizes.update(b=s.layers[0].sizes.pop("a")),
    "in a tuple": lambda s: setattr(s.layers[0], "more", (2, None)),
    "a tensor twice": shared,
    "a layer twice": lambda s: s.layers.__setitem__(1, s.layers[0]),
    "another order": reordered,
}


def test_what_is_described_alike_is_read():
    store = Store()
    template = Template.of(describe(store, "store", MOVING).shape)
    assert template is not None
    store.layers[0].keys, store.count = torch.ones(5, 5), 7  # tensors, and a number that is known to change
    result, walked = template.read(store), describe(store, "store", MOVING)
    assert result is not None and template.shape == walked.shape
    assert [x.shape for x in result[0]] == [x.shape for x in walked.tensors]
    assert result[0][0] is store.layers[0].keys


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_described_otherwise_is_not_read(change):
    store = Store()
    template = Template.of(describe(store, "store", MOVING).shape)
    assert template is not None and template.read(store) is not None
    CHANGES[change](store)
    assert template.shape != describe(store, "store", MOVING).shape
    assert template.read(store) is None


def test_what_equality_cannot_tell_has_no_template():
    for value in (0.0, float("nan"), 1j):
        assert Template.of(describe(SimpleNamespace(a=value), "x").shape) is None
    twice = torch.ones(1)
    assert Template.of(describe(SimpleNamespace(a=twice, b=twice), "x").shape) is None
    assert Template.of(describe(SimpleNamespace(a=0.5), "x").shape) is not None


def test_writes_are_what_assign_does():
    store, one = Store(), Store()
    before = describe(store, "store", MOVING)
    one.layers[0].keys, one.layers[1].full, one.count = torch.full((4, 4), 2.0), True, 9
    one.layers[1].values = before.tensors[0]  # what it had in another place, and `values` of the first stay
    one.layers[0].values = before.tensors[1]
    after = describe(one, "store", MOVING, before.tensors)
    template = Template.of(before.shape)
    assert template is not None
    writes, result = template.writes(after.shape), template.read(store)
    assert writes is not None and result is not None
    assert "values" not in {write.key for write in writes if write.holder == 2}  # of the first layer
    expected = assign(copy.copy(Store()), after, before.tensors)
    Template.write(writes, result[1], after.tensors, result[0])
    assert describe(store, "store", MOVING).shape == describe(expected, "store", MOVING).shape
    assert store.layers[0].keys is after.tensors[0] and store.layers[1].values is before.tensors[0]
    assert store.count == 9 and store.layers[1].full is True
    one.layers.append(Layer())
    assert template.writes(describe(one, "store", MOVING).shape) is None


def test_a_call_that_is_like_the_last_one_is_not_walked(monkeypatch):
    carriers, store = Carriers(("x", "store"), moving=set(MOVING)), Store()
    first = Arguments(carriers, (torch.ones(1),), {"store": store})
    walks: list[str] = []
    walk = Carriers.as_tensors
    monkeypatch.setattr(Carriers, "as_tensors", lambda *args: walks.append("walk") or walk(*args))
    second = Arguments(carriers, (torch.ones(2),), {"store": store})
    assert not walks and second.spec is first.spec and second.states == first.states
    assert [type(x) for x in second.flat] == [type(x) for x in first.flat]
    store.layers[0].full = True
    assert Arguments(carriers, (torch.ones(1),), {"store": store}).spec != first.spec and len(walks) == 1
    carriers.moving.add((Layer, "seen"))
    assert Arguments(carriers, (torch.ones(1),), {"store": store}).spec != first.spec and len(walks) == 2


def test_objects_of_two_classes_by_turns_are_read_as_the_ones_before(monkeypatch):
    carriers, stores = Carriers(("store",), moving=set(MOVING)), (Store(), Other())
    first = [Arguments(carriers, (), {"store": store}) for store in stores]
    monkeypatch.setattr(Carriers, "as_tensors", lambda *_: pytest.fail("walked"))
    for before, store in zip(first, stores, strict=True):
        assert Arguments(carriers, (), {"store": store}).spec is before.spec
