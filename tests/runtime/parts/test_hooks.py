"""Hooks on the modules of a sharded one see whole values and gradients, and what they return is split again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import autotp
from autotp.errors import RankError, StateError
from autotp.runtime.module_hooks import Boundary
from tests.helpers.compare import gradients_differ, mesh_of
from tests.helpers.errors import message_of

X = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0)).double()
EXACT = 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def pair(group: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    return model, autotp.compile(model, example_inputs=X, mesh=mesh_of(group), **options)


def normed(x: Tensor) -> Tensor:
    """Not element by element, and not linear."""
    return x / x.norm() + torch.arange(x.shape[-2]).unsqueeze(-1)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "after": lambda m: m.register_forward_hook(lambda _, args, out: normed(out)),
    "before": lambda m: m.register_forward_pre_hook(lambda _, args: normed(args[0])),
    "with kwargs": lambda m: m.register_forward_hook(lambda _, args, kwargs, out: out + len(kwargs), with_kwargs=True),
    "in place": lambda m: m.register_forward_hook(lambda _, args, out: out.add_(1.0) is None or None),
    "gradient": lambda m: m.register_full_backward_hook(lambda _, to, of: (to[0] / to[0].norm(),)),
    "gradient before": lambda m: m.register_full_backward_pre_hook(lambda _, of: (of[0] / of[0].norm(),)),
}


def apart(model: Any, sharded: Any, hook: Callable[[Any], Any], path: str) -> float:
    """The largest difference of outputs of two lengths and of gradients, with a hook on this module of both."""
    handles, found = [hook(m.get_submodule(path)) for m in (model, sharded)], []
    for x in (X, X[:, :5]):
        outputs = [m(x) for m in (model, sharded)]
        for m, y in zip((model, sharded), outputs, strict=True):
            m.zero_grad()
            y.square().mean().backward()
        found += [float((outputs[0] - outputs[1]).detach().abs().max()), gradients_differ(sharded, model)]
    for handle in handles:
        handle.remove()
    return max(found)


def kept(model: Any, sharded: Any, path: str) -> float:
    """The difference of gradients of a loss that has what a hook kept in it."""
    for m in (model, sharded):
        m.zero_grad()
        held: list[Tensor] = []
        handle = m.get_submodule(path).register_forward_hook(lambda _, args, out, held=held: held.append(out))
        (m(X).square().mean() + held[0].norm()).backward()
        handle.remove()
    return gradients_differ(sharded, model)


def hooked(rank: int, world: int, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sequence in (False, True):
        model, sharded = pair(group, sequence_parallel=sequence)
        for path in ("1.up", "1.down", "1"):
            for name, hook in HOOKS.items():
                found[f"{name} {path} {sequence}"] = apart(model, sharded, hook, path)
            found[f"kept {path} {sequence}"] = kept(model, sharded, path)
    with patch.object(Boundary, "split", False):
        found["control"] = apart(model, sharded, HOOKS["after"], "1.down"), kept(model, sharded, "1.up")
    return found | {"refused": refused(pair(group)[1], rank)}


def refused(sharded: Any, rank: int) -> list[str]:
    """Hooks on one rank alone (where values are split; that change; that look), and one that returns two values."""
    told = []
    handle = sharded[1].up.register_forward_hook(lambda _, args, out: None) if rank else None
    try:
        sharded(X)
    except RankError as error:
        told.append(str(error))
    if handle is not None:
        handle.remove()
    for hook in (lambda _, args, out: out * 2, lambda _, args, out: out.mul_(2), lambda _, args, out: None):
        handle = sharded[1].register_forward_hook(hook) if rank else None
        told.append(message_of(lambda: sharded(X)))
        if handle is not None:
            handle.remove()
    handle = sharded[1].up.register_forward_hook(lambda *_: None) if rank else None
    with torch.no_grad():  # a kind of call that is new
        told.append(message_of(lambda: sharded(X[:, :1])))
    if handle is not None:
        handle.remove()
    handle = sharded[1].up.register_forward_pre_hook(lambda _, args: (args[0], args[0]))
    try:
        sharded(X)
    except StateError as error:
        told.append(str(error))
    handle.remove()
    return told


def test_hooks_see_what_they_see_on_the_original(pool):
    for found in pool.run(hooked, world=2):
        control, told = found.pop("control"), found.pop("refused")
        assert min(control) > 1e-3, control
        assert max(found.values()) < EXACT, {n: x for n, x in found.items() if not x < EXACT}
        wanted = "hooks that see whole values: rank 0: none, rank 1: 1.up"
        assert wanted in told[0] and wanted in told[4]
        assert all("hooks that did so: rank 0: 0, rank 1: 1" in text for text in told[1:3]) and told[3] == ""
        assert "returned 2 values in the place of 1" in told[5]
