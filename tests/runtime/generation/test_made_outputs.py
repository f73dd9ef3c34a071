"""Outputs are made as their class makes them, of which only the first are asked of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from autotp import compat
from autotp.runtime.generation.outputs import Outputs


class Numbered(OrderedDict[str, Any]):
    """Counts how many there are."""

    made = 0

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        Numbered.made += 1
        self.number = Numbered.made


def _children(x: Numbered) -> Any:
    return list(x.values()), list(x)


pytree.register_pytree_node(
    Numbered, _children, lambda values, keys: Numbered(zip(keys, values, strict=True)),
    serialized_type_name="tests.Numbered",
)  # fmt: skip


def test_the_outputs_of_transformers_are_what_their_class_makes(monkeypatch):
    logits, cache = torch.ones(2, 3), object()
    leaves, spec = compat.tree_flatten(CausalLMOutputWithPast(logits=logits, past_key_values=cache))  # type: ignore[arg-type]
    outputs = Outputs(spec)
    outputs.of(leaves)
    monkeypatch.delattr(CausalLMOutputWithPast, "__init__")  # not asked any more
    others = [torch.zeros(2, 3), object()]
    found = outputs.of(others)
    assert type(found) is CausalLMOutputWithPast and list(found) == ["logits", "past_key_values"]
    assert found[0] is found["logits"] is found.logits is others[0] and found.to_tuple()[1] is others[1]
    assert found.loss is None and found.attentions is None and "loss" not in found
    assert set(vars(found)) == {"loss", "logits", "past_key_values", "hidden_states", "attentions"}


@pytest.mark.parametrize("value", [
    {"a": torch.ones(1)}, (torch.ones(1), [torch.ones(2)]), CausalLMOutputWithPast(hidden_states=(torch.ones(1),)),
    OrderedDict(a=torch.ones(1)),
])  # fmt: skip
def test_others_are_made_by_their_class(value):
    leaves, spec = compat.tree_flatten(value)
    outputs = Outputs(spec)
    for _ in range(3):
        found = outputs.of(leaves)
        assert type(found) is type(value) and compat.tree_leaves(found) == leaves


def test_a_class_that_keeps_more_than_its_leaves_makes_each_itself():
    leaves, spec = compat.tree_flatten(Numbered({"a": torch.ones(1)}))
    outputs = Outputs(spec)
    numbers = [outputs.of(leaves).number for _ in range(3)]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
