"""A sharded module beside plain ones in a larger module: loading, clipping and optimizers work over both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp
from tests.helpers.compare import mesh_of

OPTIM: Any = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW foreach": lambda p: OPTIM.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: OPTIM.AdamW(p, lr=0.1, fused=True),
    "SGD foreach": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


class Attention(nn.Module):
    """Four heads that share two keys and values; q, k and v come from one weight, which is held in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def apart(outer: Any, original: nn.Module) -> float:
    found, wanted = outer.state_dict(), original.state_dict()
    assert list(found) == list(wanted)
    return max(float((whole(found[n]) - t).abs().max()) for n, t in wanted.items())


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def train(modules: list[Any], x: Tensor, make: Callable[[Any], Any], foreach: bool | None) -> float:
    """Three clipped steps of each; the largest difference of a gradient's norm."""
    norms = []
    for m in modules:
        optimizer = make(m.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.05, foreach=foreach)).item())
            optimizer.step()
    return max(abs(a - b) for a, b in zip(norms[:3], norms[3:], strict=True))


def enclosed(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    inner = Attention()
    original, x = Outer(inner).double(), torch.randn(2, 3, 8).double()
    outer: Any = copy.deepcopy(original)
    sharded: Any = autotp.compile(inner, example_inputs=x, mesh=mesh_of(group))
    outer.inner = sharded
    start = copy.deepcopy(original.state_dict())
    found: dict[str, Any] = {"pieces": len(list(sharded.qkv.parameters()))}
    for i, (name, make) in enumerate(OPTIMIZERS.items()):
        both = [outer, original]
        norms = train(both, x, make, (None, True)[i % 2])
        found[name] = norms, apart(outer, original)
        kept = {n: t.clone() for n, t in outer.state_dict().items()}
        for m in both:
            m.load_state_dict(start)
        found[f"loaded after {name}"] = far(outer(x), original(x))
        outer.load_state_dict(kept)  # its own
        original.load_state_dict({n: whole(t) for n, t in kept.items()})
        found[f"own after {name}"] = far(outer(x), original(x))
    wrong = {**start, "inner.qkv.weight": start["inner.qkv.weight"][:4], "inner.more": x}
    del wrong["inner.qkv.bias"]
    with pytest.raises(RuntimeError) as error:
        outer.load_state_dict(wrong)
    found["error"] = str(error.value)
    sharded.qkv.load_state_dict({"weight": start["inner.qkv.weight"], "bias": start["inner.qkv.bias"]})
    found["part"] = float((sharded.full_state_dict()["qkv.weight"] - start["inner.qkv.weight"]).abs().max())
    return found


@pytest.fixture(scope="module")
def found(pool):
    return pool.run(enclosed, world=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_kinds_of_parameters_are_clipped_and_trained(found, name):
    for each in found:
        assert max(each[name]) < 1e-10, each[name]


def test_a_state_dict_of_the_original_and_its_own_are_loaded(found):
    for each in found:
        assert each["pieces"] > 2 and each["part"] == 0
        assert all(v < 1e-12 for k, v in each.items() if k.startswith(("loaded", "own"))), each


def test_what_does_not_fit_is_said_in_the_originals_names(found):
    for each in found:
        text = each["error"]
        assert "inner.qkv.bias" in text and "size mismatch for inner.qkv.weight" in text and "inner.more" in text
        assert "part0" not in text, text
