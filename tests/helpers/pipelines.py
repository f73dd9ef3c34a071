"""Models run in stages beside the model on one device: losses, gradients and steps of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import autotp

from .models import inputs_of, transformer

MICROBATCHES, ROWS, LENGTH = 4, 8, 8
LAYERS = {"gpt2": "n_layer"}
SMALL = {"llama": {"hidden_size": 32, "intermediate_size": 48}, "bert": {"hidden_size": 32, "intermediate_size": 48}}


@dataclass(frozen=True)
class Case:
    """How a model is run in stages."""

    model: str = "llama"
    kind: str = "ScheduleGPipe"
    pp: int = 2
    tp: int = 2
    dp: int = 1
    chunks: int = 1
    layers: int = 2
    steps: int = 1
    train: dict[str, Any] = field(default_factory=dict)  # of the model's config
    options: dict[str, Any] = field(default_factory=dict)  # of autotp.stages

    @property
    def placement(self) -> str:
        return "v" if "ZBV" in self.kind else "loop"


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Numbers of 64 bits, so that what differs is no rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def error(outputs: Any, targets: Tensor) -> Tensor:
    """A loss in 64 bits, where transformers' own are of 32."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def batch_of(model: nn.Module, rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    """Rows of tokens with their targets."""
    return {**inputs_of(model, rows, LENGTH, seed), "targets": inputs_of(model, rows, LENGTH, seed + 100)["input_ids"]}


def made(case: Case) -> Any:
    """The model, in training mode."""
    layers = {LAYERS.get(case.model, "num_hidden_layers"): case.layers}
    return transformer(case.model, **{**SMALL.get(case.model, {}), **layers, **case.train}).double().train()


def staged(case: Case, model: nn.Module) -> tuple[Any, Any]:
    """The stages of this rank, and their schedule."""
    micro = {k: v[: ROWS // MICROBATCHES] for k, v in batch_of(model).items()}
    pipe = autotp.stages(
        model, case.pp, case.tp, dp=case.dp, chunks=case.chunks, placement=case.placement, example_inputs=micro,
        loss=error, check_capture=False, **case.options,
    )  # fmt: skip
    kind = getattr(schedules, case.kind, None) or getattr(pipelining, case.kind)
    return pipe, pipe.schedule(kind, MICROBATCHES)


def on_one_device(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the micro-batches' losses, with its backward."""
    size = len(batch["input_ids"]) // MICROBATCHES
    total = torch.zeros(())
    for i in range(MICROBATCHES):
        rows = {k: v[size * i : size * (i + 1)] for k, v in batch.items()}
        targets = rows.pop("targets")
        loss = error(model(**rows), targets) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return total


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, as a part of the largest value."""
    return max(float((found[n] - wanted[n]).abs().max()) for n in found) / max(
        float(x.abs().max()) for x in wanted.values()
    )


def compared(rank: int, world: int, group: Any, case: Case) -> tuple[float, float, float, list[str]]:
    """How far loss, gradients and, after steps of AdamW with clipping, weights are apart; and the names held here."""
    with double():
        model = made(case)
        pipe, schedule = staged(case, model)
        mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pipe, model))
        off = [0.0, 0.0]
        for step in range(case.steps):
            batch = batch_of(model, seed=step)
            loss, wanted = pipe.step(schedule, **batch), on_one_device(model, batch)
            off[0] = max(off[0], float((loss - wanted).abs()))
            if step == 0:
                gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                off[1] = apart(pipe.module.full_grad_dict(), gradients)
            norms = [pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
            off[0] = max(off[0], float((norms[0] - norms[1]).abs()))
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        weights = apart(pipe.module.full_state_dict(), model.state_dict())
        names = [n for n, _ in pipe.module.storages()]
        dist.barrier(group)
        return off[0], off[1], weights, names


def carried_over(rank: int, world: int, group: Any, folder: str) -> list[float]:
    """A checkpoint of stages in tensor parallelism, in other stages and in one process: how far weights are apart
    after a further step there, and that step's loss from the one that the stages take."""
    with double():
        case = Case("gpt2", "Schedule1F1B", steps=1, layers=4)
        model = made(case)
        pipe, schedule = staged(case, model)
        first = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        pipe.step(schedule, **batch_of(model))
        first.step()
        first.zero_grad()
        pipe.save_checkpoint(folder, optimizer=first, extra={"step": 1})
        wanted = pipe.step(schedule, **batch_of(model, seed=1))
        first.step()
        full = pipe.module.full_state_dict()
        off = []
        for target in (Case("gpt2", "ScheduleInterleaved1F1B", chunks=2, layers=4), None):
            fresh = made(case)
            with torch.no_grad():
                for p in fresh.parameters():
                    p.zero_()
            if target is not None:
                other, plan = staged(target, fresh)
                second = torch.optim.AdamW(other.parameters(), lr=1e-2)
                extra = other.load_checkpoint(folder, optimizer=second).extra
                loss = other.step(plan, **batch_of(model, seed=1))
                second.step()
                own = other.module.full_state_dict()
            else:
                micro = {k: v[:2] for k, v in batch_of(model).items()}
                with_loss = autotp.compile(
                    fresh, 4, example_inputs=micro, loss=error, outputs="loss", check_capture=False
                )
                second = torch.optim.AdamW(with_loss.parameters(), lr=1e-2)
                extra = with_loss.load_checkpoint(folder, optimizer=second).extra
                loss = (
                    sum((with_loss(**rows) for rows in slices(batch_of(model, seed=1))), torch.zeros(())) / MICROBATCHES
                )
                loss.backward()
                second.step()
                own = with_loss.full_state_dict()
            assert extra == {"step": 1}
            off += [
                float((loss.detach() - wanted).abs()),
                max(float((own[n] - full[n]).abs().max()) for n in own if n in full),
            ]
        dist.barrier(group)
        return off


def slices(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The micro-batches of a batch."""
    size = ROWS // MICROBATCHES
    return [{k: v[size * i : size * (i + 1)] for k, v in batch.items()} for i in range(MICROBATCHES)]
