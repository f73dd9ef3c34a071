"""What loggers write of a sharded module: scalars, histograms, and walks over parameters with hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of


def watched(tensor: Tensor) -> list[float]:
    """What `wandb.watch` makes of each parameter after a forward, and of each gradient in a hook: counts of 64 bins."""
    flat = tensor.detach().clone().reshape(-1)
    if (~torch.isfinite(flat)).all().item():
        return []
    return flat.histc(bins=64, min=flat.min().item(), max=flat.max().item()).cpu().tolist()


def logged(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """A step, logged by rank 0; beside it the model's own values."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    seen: dict[str, Tensor] = {}  # as wandb.watch does: a hook on every parameter, which reads its gradient
    for name, p in sharded.named_parameters():
        p.register_hook(lambda grad, name=name: seen.update({name: grad.full_tensor()}))
    for m in (model, sharded):
        loss = m(x).square().mean()
        loss.backward()
    norms: list[Any] = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (model, sharded)]
    norm, weights, gradients = norms[1].full_tensor(), sharded.full_state_dict(), sharded.full_grad_dict()
    with SummaryWriter(folder) if rank == 0 else contextlib.nullcontext() as writer:
        if writer is not None:
            writer.add_scalar("loss", loss, 3)
            writer.add_scalar("norm", norm, 3)
            for name, p in weights.items():
                writer.add_histogram(name, p, 3)
            for name, g in gradients.items():
                writer.add_histogram(f"{name}.grad", g, 3)
    walks = [error_of(lambda p=p: watched(p.data.cpu())) for n, p in sharded.named_parameters() if n == "0.weight"]
    hook = sharded[0].weight.register_hook(lambda grad: watched(grad.data))
    walks.append(error_of(lambda: sharded(x).square().mean().backward()))
    hook.remove()
    for read in ("numpy", "tolist"):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):  # torch's own refusal
            getattr(sharded[0].weight.detach(), read)()
    return {
        "watched": [(kind, text) for kind, text, _ in walks],
        "way out": {n: watched(t) == watched(dict(model.named_parameters())[n]) for n, t in weights.items()},
        "hooks": all(torch.equal(seen[n], g) for n, g in gradients.items()) and len(seen) == 4,
        "wanted": (loss.item(), norms[0].item(), {n: p.detach() for n, p in model.named_parameters()},
                   {f"{n}.grad": p.grad for n, p in model.named_parameters()}),
    }  # fmt: skip


def test_tensorboard_reads_what_was_logged(pool, tmp_path):
    found = pool.run(logged, str(tmp_path), world=2)
    for each in found:
        assert each["hooks"]
        assert len(each["watched"]) == 2 and all(each["way out"].values())
        for kind, text in each["watched"]:  # never a rank's part for the whole
            assert kind == "StateError" and "full_tensor()" in text, text
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    loss, norm, weights, gradients = found[0]["wanted"]
    for name, wanted in (("loss", loss), ("norm", norm)):
        (event,) = read.Scalars(name)
        assert event.step == 3 and abs(event.value - wanted) < 1e-6
    for name, wanted in {**weights, **gradients}.items():
        (event,) = read.Histograms(name)
        assert event.step == 3 and event.histogram_value.num == wanted.numel()
        for have, want in ((event.histogram_value.min, wanted.min()), (event.histogram_value.max, wanted.max())):
            assert abs(have - float(want)) < 1e-5, name
