"""A sharded module is used like the original: modes, dtypes, hooks, wrappers, optimizers, buffers, copies."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autotp
from autotp.errors import StateError
from autotp.runtime import module, storage
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn, transformer
from tests.helpers.wrapped import Wrapper


class Counting(nn.Module):
    """Buffers that the forward changes: running statistics, a counter, one replaced; and dropout."""

    calls: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(16))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.calls)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0, rows: Tensor | None = None) -> dict[str, Any]:
        self.calls += 1
        y = self.norm(self.down(self.drop(torch.relu(self.up(x)))) * (self.total + scale))
        self.total = self.total + x.detach().sum(0)
        return {"y": y if rows is None else y + rows, "more": (y.sum(), None, [self.calls * 2], scale)}


def compiled(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return autotp.compile(model, 1, example_inputs=inputs, **options)


@pytest.fixture
def captures() -> Iterator[Mock]:
    """Counts the captures made by calls."""
    with patch.object(module, "prepare", wraps=module.prepare) as prepare:
        yield prepare


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
    model: Any = transformer("llama")
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
    model = transformer("llama-bias")
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
    with pytest.raises(StateError, match="part of a sharded module"):
        sharded[0](x)


def using(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Everything at tp=2 that needs no optimizer, on a Llama with dropout in its attention and a tied head."""
    with (
        patch.object(module, "prepare", wraps=module.prepare) as captures,
        patch.object(storage.Unwrap, "apply", wraps=storage.Unwrap.apply) as unwraps,
    ):
        return {"buffers": buffers(group), **modes(group, captures, unwraps)}


def modes(group: Any, captures: Mock, unwraps: Mock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = transformer("llama-tied", attention_dropout=0.2).train()
    inputs, other = inputs_of(model), inputs_of(model, 3, 7, seed=1)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), random="torch")
    captures.reset_mock()
    unwraps.reset_mock()

    def both(change: Any = lambda m: None, inputs: Any = inputs, context: Any = None) -> tuple[float, float]:
        change(model)
        change(sharded)
        outputs = []
        for m in (model, sharded):
            m.zero_grad()
            torch.manual_seed(3)
            with context or torch.enable_grad():
                outputs.append(m(**inputs).logits)
            outputs[-1].float().square().mean().backward()
        return difference(outputs[1], outputs[0]), gradients_differ(sharded, model)

    found["dropout"] = both(), both(inputs=other)
    found["unwraps"] = unwraps.call_count / 2
    found["eval"] = both(lambda m: m.eval())
    found["captures"] = captures.call_count
    found["again"] = both(lambda m: m.train()), both(lambda m: m.eval(), other), captures.call_count
    found["autocast"] = both(context=torch.autocast("cpu", torch.bfloat16))

    sharded(**inputs).logits.div_(2)  # what comes out is the user's
    layers = sharded.model.layers
    layers[0] = Wrapper(layers[0])
    found["checkpointed"] = both(lambda m: m.train()), layers[0].calls
    twin = copy.deepcopy(sharded)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    found["twin"] = float(twin(**inputs).logits.detach().abs().max()), both()
    found["tied"] = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    found["bfloat16"] = both(lambda m: m.to(torch.bfloat16).eval())
    found["tied after to"] = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    return found


def buffers(group: Any) -> float:
    """Largest difference of a buffer after two calls in training mode."""
    torch.manual_seed(0)
    model, x = redrawn(Counting()), torch.randn(4, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), random="torch")
    for m in (model, sharded):
        for step in range(2):
            torch.manual_seed(step)
            m(x)
    pairs = ((sharded.get_buffer(n), b) for n, b in model.named_buffers(remove_duplicate=False))
    return max(difference(found.float(), wanted.float()) for found, wanted in pairs)


def test_two_ranks_use_it_like_the_original(pool):
    for found in pool.run(using, world=2):
        close = [found["eval"], found["twin"][1], found["checkpointed"][0], *found["dropout"], *found["again"][:2]]
        assert max(max(x) for x in close) < 1e-5, found
        assert found["buffers"] < 1e-6, found["buffers"]
        assert found["unwraps"] == 3  # the root and two layers, once each
        assert found["captures"] == 1 and found["again"][2] == 1
        assert found["checkpointed"][1] == 1 and found["twin"][0] == 0
        assert found["tied"] and found["tied after to"]
        for low in ("autocast", "bfloat16"):  # eight bits: sums in another order differ by that
            assert max(found[low]) < 0.05, found


def training(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Two clipped AdamW steps of six heads and an odd vocabulary on four ranks."""
    six = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 257}
    model = transformer("llama-tied", **six).double()  # Adam's first steps blow rounding up
    sharded: Any = autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh_of(group))
    meshes = {p.device_mesh for p in sharded.parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, sharded)]
    found: dict[str, Any] = {"norms": [], "meshes": len(meshes)}
    for step in range(2):
        inputs = inputs_of(model, seed=step)
        for m in (model, sharded):
            scores = m(**inputs).logits.flatten(0, 1)  # not labels=: transformers takes the loss in float32
            nn.functional.cross_entropy(scores, inputs["input_ids"].flatten()).backward()
        found.setdefault("gradients", []).append(gradients_differ(sharded, model))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, sharded)]
        full = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        found["norms"].append(difference(full, norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = sharded.full_state_dict()
    found["state"] = max(float((state[n] - t).abs().max()) for n, t in model.state_dict().items())
    found["part"] = sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters())
    return found


def test_optimizers_and_clipping_work_on_the_shards(pool):
    for found in pool.run(training):
        assert found["meshes"] == 1 and found["part"] < 0.5, found
        assert max(found["norms"]) < 1e-10 and max(found["gradients"]) < 1e-10, found
        assert found["state"] < 1e-8, found


def sharding_data(rank: int, world: int, group: Any) -> dict[str, Any]:
    """FSDP per layer over dp on top of tp: a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = transformer("llama-tied")
    sharded: Any = autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    whole = inputs_of(model, 4)
    mine = {k: v.chunk(2)[mesh["dp"].get_local_rank()] for k, v in whole.items()}
    logits = sharded(**mine).logits
    logits.square().mean().backward()
    wanted = model(**whole).logits
    wanted.square().mean().backward()
    found: dict[str, Any] = {
        "outputs": difference(logits, wanted.chunk(2)[mesh["dp"].get_local_rank()].clone()),
        "gradients": gradients_differ(sharded, model),
        "part": sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters()),
    }
    state = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    found["state"] = max(difference(state[n], t) for n, t in model.state_dict().items())
    torch.optim.AdamW(sharded.parameters(), lr=0.1).step()
    found["moved"] = difference(sharded.full_state_dict()["lm_head.weight"], state["lm_head.weight"])
    sharded.load_state_dict(state)
    found["loaded"] = difference(sharded(**mine).logits, logits)
    dist.barrier()
    return found


def test_fully_shard_per_layer_on_top(pool):
    for found in pool.run(sharding_data):
        assert found["part"] < 0.3, found
        assert max(found["outputs"], found["gradients"], found["state"], found["loaded"]) < 1e-5, found
        assert found["moved"] > 1e-2
