"""A sharded module is used like the original: modes, dtypes, hooks, buffers, copies."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.driver import compile as pipeline
from autotp.errors import StateError
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.models import inputs_of, redrawn, transformer
from tests.helpers.modules.counting import Counting


def compiled(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return autotp.compile(model, 1, example_inputs=inputs, **options)


@pytest.fixture
def captures() -> Iterator[Mock]:
    """Counts the captures made by calls."""
    with patch.object(pipeline, "further", wraps=pipeline.further) as further:
        yield further


def test_one_rank_is_bitwise_the_original(captures):
    for name in ("llama-bias", "gpt2", "t5"):
        model: Any = transformer(name)
        inputs = inputs_of(model)
        sharded: Any = compiled(model, inputs)
        found, wanted = sharded(**inputs), model(**inputs)
        assert type(found) is type(wanted) and list(found) == list(wanted)
        assert torch.equal(found.logits, wanted.logits)
        found.logits.square().mean().backward()
        wanted.logits.square().mean().backward()
        grads = sharded.full_grad_dict()
        assert all(torch.equal(grads[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)
        assert repr(sharded) == repr(model)
        assert sharded.config.model_type == model.config.model_type
    assert captures.call_count == 0


def test_one_call_one_program_however_it_is_written(captures):
    model = transformer("llama")
    ids, mask = inputs_of(model)["input_ids"], torch.ones(2, 16, dtype=torch.long)
    sharded: Any = compiled(model, {"input_ids": ids, "attention_mask": mask})
    for call in (
        lambda m: m(ids, mask),
        lambda m: m(attention_mask=mask, input_ids=ids),
        lambda m: m(ids, attention_mask=mask, labels=None, use_cache=False),
        lambda m: m(**inputs_of(model, 3, 7), attention_mask=torch.ones(3, 7, dtype=torch.long)),
    ):
        assert difference(call(sharded).logits, call(model).logits) < 1e-6
    assert captures.call_count == 0
    assert difference(sharded(ids).logits, model(ids).logits) < 1e-6  # another structure
    assert captures.call_count == 1
    labelled = sharded(ids, mask, labels=ids)
    assert difference(labelled.loss, model(ids, mask, labels=ids).loss) < 1e-6 and captures.call_count == 2
    sharded(ids[:, :5], mask[:, :5], labels=ids[:, :5])
    assert captures.call_count == 2


class Ends(nn.Module):
    """Answers to numbers, flags and sizes that a capture writes into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, power: float = 1, flip: bool = False) -> Tensor:
        y = self.up(x) ** power
        y = -y if flip else y
        return y.sum(0) if x.shape[0] > 4 else y.mean(0)


def test_numbers_flags_and_sizes_never_give_another_calls_answer(captures):
    model = redrawn(Ends())
    sharded: Any = compiled(model, torch.randn(2, 8))
    for args in ((1,), (2,), (2.0,), (1, True), (True,), (1, 0), (1, False)):
        for rows in (3, 7, 1, 4, 5):
            x = torch.randn(rows, 8)
            assert difference(sharded(x, *args), model(x, *args)) < 1e-6, (args, rows)
    made = captures.call_count
    sharded(torch.randn(3, 8), 2)
    sharded(torch.randn(9, 8), flip=True)
    assert captures.call_count == made
    with pytest.raises(autotp.AutoTPError, match="forward accepts"):
        sharded(torch.randn(2, 8), pover=3)
    with pytest.raises(autotp.AutoTPError, match="ndarray"):
        sharded(torch.randn(2, 8).numpy())


def test_gradients_of_inputs(captures):
    model: Any = transformer("llama-short")
    sharded: Any = compiled(model, {"inputs_embeds": torch.randn(2, 8, 64)})
    x = torch.randn(2, 8, 64)
    assert not captures.called
    a: Any = x.clone().requires_grad_()
    b: Any = x.clone().requires_grad_()
    with torch.no_grad():
        sharded(inputs_embeds=a)
    assert not captures.called  # no gradient is wanted here
    sharded(inputs_embeds=a).logits.square().mean().backward()
    model(inputs_embeds=b).logits.square().mean().backward()
    assert captures.call_count == 1 and difference(a.grad, b.grad) < 1e-6


def test_modes_dtypes_and_autocast(captures):
    model = redrawn(Counting())
    x = torch.randn(4, 16)
    sharded: Any = compiled(model, x, random="torch")
    for step, change in enumerate(
        (lambda m: m, lambda m: m.eval(), lambda m: m.train(), lambda m: m.norm.eval(), lambda m: m.to(torch.bfloat16))
    ):
        change(model)
        change(sharded)
        value = x.to(next(model.parameters()).dtype)
        for _ in range(2):
            torch.manual_seed(step)
            wanted = model(value)
            torch.manual_seed(step)
            found = sharded(value)
            assert torch.equal(found["y"], wanted["y"]) and found["more"][1] is None
            assert torch.equal(found["more"][2][0], wanted["more"][2][0])
        for name, buffer in model.named_buffers(remove_duplicate=False):
            assert torch.equal(sharded.get_buffer(name), buffer), name
    assert captures.call_count == 3  # eval, the norm alone in eval, bfloat16; back in train() is the first again
    assert sharded.other.shared is sharded.calls


def test_autocast_means_what_it_means_on_the_original(captures):
    model = transformer("llama-bias-short")
    ids = inputs_of(model)["input_ids"]
    sharded: Any = compiled(model, ids)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = sharded(ids).logits, model(ids).logits
        assert found.dtype == wanted.dtype == torch.bfloat16 and torch.equal(found, wanted)
    assert captures.call_count == 1
    assert sharded(ids).logits.dtype == torch.float32 and captures.call_count == 1


class Fenced(nn.Module):
    """A part of the forward carries no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.a(x)
        return self.b(x) * scale


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_does_not_spoil_later_ones(context, captures):
    x = torch.randn(3, 8)
    model: Any = redrawn(Fenced())
    plan = autotp.plan(model, 1, example_inputs=x)
    sharded: Any = autotp.parallelize(model, plan)
    with context():
        assert not sharded(x + 0).requires_grad
    sharded(x).sum().backward()
    model(x).sum().backward()
    assert captures.call_count == 1
    assert sharded.a.weight.grad is None and difference(sharded.b.weight.grad, model.b.weight.grad) < 1e-6


def test_frozen_parameters_get_no_gradient():
    x = torch.randn(3, 8)
    model: Any = redrawn(Fenced())
    model.b.weight.requires_grad_(False)
    sharded: Any = compiled(model, x)
    sharded(x).sum().backward()
    assert not sharded.b.weight.requires_grad
    assert sharded.full_grad_dict().keys() == {"b.bias"}
    sharded.requires_grad_(False)
    assert not sharded(x).requires_grad


def test_the_original_is_untouched_and_not_kept():
    model = transformer("gpt2")
    before = {n: (id(p), p.clone()) for n, p in model.named_parameters()}
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    sharded: Any = compiled(model, inputs_of(model))
    sharded(**inputs_of(model)).logits.sum().backward()
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert attributes == {n: set(m.__dict__) for n, m in model.named_modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    held = [weakref.ref(p) for p in model.parameters()]
    del model, before
    gc.collect()
    assert not [r for r in held if r() is not None]


def test_a_copy_is_another_module():
    model = redrawn(Counting()).eval()
    x = torch.randn(4, 16)
    sharded: Any = compiled(model, x)
    twin = copy.deepcopy(sharded)
    assert torch.equal(twin(x)["y"], sharded(x)["y"]) and type(twin) is type(sharded)
    assert not {id(t) for t in twin.state_dict(keep_vars=True).values()} & {id(p) for p in sharded.parameters()}
    with torch.no_grad():
        twin.up.weight.add_(1.0)
    model(x)
    assert torch.equal(sharded(x)["y"], model(x)["y"]) and not torch.equal(twin(x)["y"], model(x)["y"])
    assert twin.other.shared is twin.calls is not sharded.calls
    twin.train()(x)
    assert int(twin.calls) == 3 and int(sharded.calls) == 2
    with pytest.raises(StateError, match="cannot be pickled"):
        copy.copy(sharded).__reduce_ex__(4)


def test_hooks_see_and_change_what_flows():
    model: Any = redrawn(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))))
    sharded: Any = compiled(model, torch.randn(2, 8))
    seen = []
    sharded[0].register_forward_hook(lambda m, args, out: seen.append((type(m).__name__, out.shape)))
    handle = sharded[1].register_forward_hook(lambda m, args, out: out * 2)
    x = torch.randn(2, 8)
    assert torch.equal(sharded(x), model(x) * 2) and len(seen) == 1
    handle.remove()
    assert torch.equal(sharded(x), model(x)) and len(seen) == 2
    assert len(sharded) == 2 and [repr(m) for m in sharded] == [repr(m) for m in model]
    assert torch.equal(sharded[0](x), model[0](x)) and len(seen) == 3


def test_a_call_of_a_new_kind_under_checkpointing():
    """The recomputation does not capture again, and saves what the forward saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(4, 8))
    for shape in ((3, 2, 8), (4, 8)):
        x = torch.randn(shape)
        for m in (model, sharded):
            m.zero_grad()
            checkpoint(m, x, use_reentrant=False).square().sum().backward()
        assert gradients_differ(sharded, model) < 1e-5
