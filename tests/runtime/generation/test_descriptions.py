"""Objects that are described alike have one description, and what is assigned to one is described so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotp.ir.carried import Skim, assign, describe, write, writes_between
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carriers import Carriers


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


def test_what_is_described_alike_is_one_description():
    own, store = Carriers(("store",), moving=set(MOVING)), Store()
    before, _ = own.described(store, "store")
    store.layers[0].keys, store.count = torch.ones(5, 5), 7  # tensors, and a number that is known to change
    after, _ = own.described(store, "store")
    assert after.shape is before.shape and after.tensors[0] is store.layers[0].keys


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_described_otherwise_is_another_description(change):
    own, store = Carriers(("store",), moving=set(MOVING)), Store()
    before, _ = own.described(store, "store")
    CHANGES[change](store)
    after, _ = own.described(store, "store")
    again = own.described(store, "store")[0].shape
    assert after.shape != before.shape and again == after.shape
    assert again is after.shape or "twice" in change


def test_an_object_that_holds_itself_ends():
    store = Store()
    store.own = store  # type: ignore[attr-defined]
    assert describe(store, "store").shape == describe(store, "store").shape


def test_numbers_that_equality_cannot_tell_are_told():
    trees = [describe(SimpleNamespace(a=value), "x").shape.tree for value in (0.0, -0.0, 1, True, 1.0)]
    assert not any(a == b for i, a in enumerate(trees) for b in trees[:i])


def test_what_is_assigned_is_described_alike():
    store, one = Store(), Store()
    before = describe(store, "store", MOVING)
    one.layers[0].keys, one.layers[1].full, one.count = torch.full((4, 4), 2.0), True, 9
    one.layers[1].values = before.tensors[0]  # what it had in another place, and `values` of the first stay
    one.layers[0].values = before.tensors[1]
    one.layers.append(Layer())
    after, layer = describe(one, "store", MOVING, before.tensors), store.layers[0]
    assert assign(store, after, before.tensors) is store and store.layers[0] is layer
    assert describe(store, "store", MOVING).shape == describe(one, "store", MOVING).shape and len(store.layers) == 3
    assert store.layers[0].keys is after.tensors[0] and store.layers[1].values is before.tensors[0]
    assert layer.values is before.tensors[1] and store.count == 9 and store.layers[1].full is True


def test_what_is_skimmed_is_what_a_walk_finds():
    store = Store()
    before, walked = Skim(store, MOVING), describe(store, "store", MOVING)
    assert len(before.tensors) == len(walked.tensors) and not before.twice
    assert all(a is b for a, b in zip(before.tensors[:4], walked.tensors[:4], strict=True))
    for name, change in CHANGES.items():
        other, plain = Store(), Store()
        change(other)
        after = Skim(other, MOVING)
        assert after.key != Skim(plain, MOVING).key or after.twice, name
        assert after.twice == ("twice" in name)
    keys = [Skim(SimpleNamespace(a=value), ()).key for value in (0.0, -0.0, float("nan"), 1, True, 1.0)]
    assert len(set(keys)) == len(keys)


def test_writes_are_what_assign_does():
    store, one = Store(), Store()
    before = describe(store, "store", MOVING)
    one.layers[0].keys, one.layers[1].full, one.count = torch.full((4, 4), 2.0), True, 9
    one.layers[1].values = before.tensors[0]  # what it had in another place, and `values` of the first stay
    one.layers[0].values = before.tensors[1]
    after = describe(one, "store", MOVING, before.tensors)
    writes, skim = writes_between(before.shape, after.shape), Skim(store, MOVING)
    assert writes is not None
    assert "values" not in {key for at, key, _ in writes if at == 2}  # of the first layer
    write(writes, skim.holders, after, skim.tensors)
    assert describe(store, "store", MOVING).shape == describe(one, "store", MOVING).shape
    assert store.layers[0].keys is after.tensors[0] and store.layers[1].values is before.tensors[0]
    assert store.count == 9 and store.layers[1].full is True
    one.layers.append(Layer())
    assert writes_between(before.shape, describe(one, "store", MOVING).shape) is None


def test_a_call_that_is_like_the_last_one_is_nested_like_it():
    own, store = Carriers(("x", "store"), moving=set(MOVING)), Store()
    first = Arguments(own, (torch.ones(1),), {"store": store})
    second = Arguments(own, (torch.ones(2),), {"store": store})
    assert second.spec is first.spec and second.states == first.states
    assert [type(x) for x in second.flat] == [type(x) for x in first.flat]
    store.layers[0].full = True
    assert Arguments(own, (torch.ones(1),), {"store": store}).spec != first.spec
    own.moving.add((Layer, "seen"))
    assert Arguments(own, (torch.ones(1),), {"store": store}).spec != first.spec


def test_objects_of_two_classes_by_turns_are_read_as_the_ones_before():
    own, stores = Carriers(("store",), moving=set(MOVING)), (Store(), Other())
    first = [Arguments(own, (), {"store": store}) for store in stores]
    for before, store in zip(first, stores, strict=True):
        assert Arguments(own, (), {"store": store}).spec is before.spec
