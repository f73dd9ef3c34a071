"""Objects that hold state: described, made again, and brought up to date in place."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from autotp import compat
from autotp.ir import carried as C
from autotp.ir import graph as leaves


class Layer:
    """A layer of a cache as anybody may write it."""

    def __init__(self) -> None:
        raise AssertionError("no constructor runs")


def layer(**held: Any) -> Any:
    made = object.__new__(Layer)
    made.__dict__.update(held)
    return made


def test_an_object_is_its_tensors_and_a_shape():
    keys, count = torch.ones(2, 3), torch.zeros(())
    cache = layer(layers=[layer(keys=keys, ready=True), layer(keys=None)], seen={0: count}, kind=Layer)
    told = C.describe(cache, "past")
    assert told.shape.names == ("past.layers.0.keys", "past.seen.0")
    assert told.tensors[0] is keys and told.tensors[1] is count
    again = C.rebuilt(told)
    assert again is not cache and again.layers[0] is not cache.layers[0] and again.layers[0].keys is keys
    assert again.layers[1].keys is None and again.layers[0].ready is True and again.kind is Layer


def test_equal_objects_are_of_one_shape_and_flags_are_a_part_of_it():
    def shape(**held: Any) -> C.Shape:
        return C.describe(layer(keys=torch.ones(2), **held), "past").shape

    assert shape(ready=True) == shape(ready=True) and hash(shape(ready=True)) == hash(shape(ready=True))
    assert shape(ready=True) != shape(ready=False) and shape(n=1) != shape(n=True)


def test_a_number_that_changes_travels_as_a_size():
    cache = layer(seen=7, width=3)
    told = C.describe(cache, "past", [(Layer, "seen")])
    assert told.tensors[0].shape == (7 + C.SHIFT, 0) and told.shape.counts == {0}
    assert C.describe(layer(seen=8, width=3), "past", [(Layer, "seen")]).shape == told.shape
    assert C.rebuilt(told).seen == 7
    assert C.states_of(compat.tree_flatten((told, torch.ones(1)))[1]) == {}  # a number is no state


def test_what_is_held_twice_is_held_twice_afterwards():
    keys: Tensor = torch.ones(1)
    cache = layer(a=layer(keys=keys), keys=keys)
    cache.b = cache.a
    told = C.describe(cache, "past")
    again = C.rebuilt(told)
    assert len(told.tensors) == 1 and again.b is again.a and again.keys is again.a.keys


def test_the_callers_object_is_brought_up_to_date():
    old, new = torch.zeros(1), torch.ones(1)
    cache = layer(layers=[layer(keys=old, seen=1)], cross=layer(keys=old.clone()))
    first, cross = cache.layers[0], cache.cross.keys
    before = C.describe(cache, "past")
    traced = C.rebuilt(before)
    traced.layers[0].keys, traced.layers[0].seen = new, 2
    traced.layers.append(layer(keys=new + 1))
    after = C.describe(traced, "past", (), before.tensors)
    assert len(after.tensors) == 2  # what was there before is not given again
    assert C.assign(cache, after, before.tensors) is cache
    assert cache.layers[0] is first and first.keys is new and first.seen == 2
    assert len(cache.layers) == 2 and cache.cross.keys is cross
    assert C.changed_numbers(before.shape.tree, after.shape.tree) == {(Layer, "seen", True)}


@pytest.mark.parametrize("cache", [DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())])
def test_caches_of_transformers_are_carriers(cache):
    assert C.is_carrier(cache)
    assert type(C.rebuilt(C.describe(cache, "past_key_values"))) is type(cache)


def test_other_arguments_are_none():
    for value in (torch.ones(1), 1, "x", None, {"a": 1}, [1], (1,), torch.nn.Linear(1, 1), Layer, len, torch.float32):
        assert not C.is_carrier(value), value


def test_a_cache_that_grew_is_another_shape_only_once():
    cache = DynamicCache()
    empty = C.describe(cache, "past").shape
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    one = C.describe(cache, "past").shape
    cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert empty != one == C.describe(cache, "past").shape
    assert StaticCache.__name__ not in repr(one)


def test_a_copy_of_a_kind_of_leaves_is_that_kind():
    for kind in (leaves.PARAMETER, leaves.BUFFER, leaves.TABLE, leaves.CONSTANT, leaves.STATE):
        assert copy.deepcopy(kind) is kind and pickle.loads(pickle.dumps(kind)) is kind
    assert copy.deepcopy(leaves.LeafKind("odd")) == leaves.LeafKind("odd")
