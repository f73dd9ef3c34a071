"""Models run in stages beside the model on one device: losses, gradients and steps of an optimizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import autotp
from autotp import compat
from tests.helpers.modules.trained import model_of

from .models import inputs_of

Outcomes = list[dict[str, Any]]  # by rank: of each thing that was tried
MICROBATCHES, ROWS, LENGTH = 4, 8, 8
CLOSE = 1e-9
APART = pytest.mark.skipif(compat.VERSION < (2, 13), reason="this torch counts some gradients several times there")
LAYERS = {"gpt2": "n_layer", "t5": "num_layers"}
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
    def order(self) -> str:
        return "v" if "ZBV" in self.kind else "loop"


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Numbers of 64 bits, so that what differs is no rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Tower(nn.Module):
    """Blocks between an embedding and a head, in few operators."""

    def __init__(
        self, layers: int = 2, width: int = 8, tied: bool = True, drop: float = 0.0, late: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(drop),
                          nn.Linear(2 * width, width)) for _ in range(layers)
        )  # fmt: skip
        self.late, self.head = nn.Dropout(late), nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.late(x))


def error(outputs: Any, targets: Tensor) -> Tensor:
    """A loss in 64 bits, where transformers' own are of 32."""
    scores = getattr(outputs, "logits", outputs)
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch_of(model: nn.Module, rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    """Rows of tokens with their targets."""
    if isinstance(model, Tower):
        ids = torch.randint(0, 16, (2, rows, LENGTH), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids[0], "targets": ids[1]}
    other = inputs_of(model, rows, LENGTH, seed + 100)
    return {**inputs_of(model, rows, LENGTH, seed), "targets": other.get("decoder_input_ids", other["input_ids"])}


def made(case: Case) -> Any:
    """The model, in training mode, of 64 bits throughout."""
    if case.model == "tower":
        return Tower(case.layers, **case.train).double().train()
    layers = {LAYERS.get(case.model, "num_hidden_layers"): case.layers}
    return model_of(case.model, torch.float64, **{**SMALL.get(case.model, {}), **layers, **case.train})


def staged(case: Case, model: nn.Module) -> tuple[Any, Any]:
    """The stages of this rank, and their schedule."""
    micro = {k: v[: ROWS // MICROBATCHES] for k, v in batch_of(model).items()}
    pipe = autotp.stages(
        model, case.pp, case.tp, dp=case.dp, chunks=case.chunks, order=case.order, example_inputs=micro,
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


def gradients_apart(pipe: Any, model: nn.Module) -> float:
    """How far the gradients of this rank's stages are from those of one device."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return apart(pipe.module.full_grad_dict(), gradients)


def off(pipe: Any, schedule: Any, model: nn.Module, batch: dict[str, Tensor]) -> float:
    """How far a step's loss and gradients are from those of one device."""
    loss, wanted = pipe.step(schedule, **batch), on_one_device(model, batch)
    return max(float((loss - wanted).abs()), gradients_apart(pipe, model))


def outcome(do: Callable[[], Any]) -> Any:
    """What it gives, or what it raises in words."""
    try:
        return do()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def assert_refused(outcomes: Outcomes, cell: str, words: str) -> None:
    """All these ranks have raised this."""
    for told in outcomes:
        assert re.match(words, str(told[cell]), re.DOTALL), told[cell]


def assert_right(outcomes: Outcomes, cell: str) -> None:
    """On all these ranks a difference from one device is rounding."""
    for told in outcomes:
        assert isinstance(told[cell], float) and told[cell] < CLOSE, told[cell]


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
                off[1] = gradients_apart(pipe, model)
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


def untied(rank: int, world: int, group: Any, case: Case) -> float:
    """How far gradients are apart where those of a tied weight are not summed over the stages."""
    with double():
        model = made(case)
        pipe, schedule = staged(case, model)
        pipe.module._calls.tied.holders = {}
        pipe.step(schedule, **batch_of(model))
        on_one_device(model, batch_of(model))
        far = gradients_apart(pipe, model)
        dist.barrier(group)
        return far


def drawn(rank: int, world: int, group: Any, seed: int, where: str) -> tuple[float, float, float]:
    """With dropout: how far a step of stages is from that of one sharded module, from one with another seed, and an
    evaluation from the model's."""
    with double():
        case = Case("tower", "Schedule1F1B", train={where: 0.3})
        model = made(case)
        pipe, schedule = staged(case, model)
        batch = batch_of(model)
        whole = autotp.compile(
            model, world, example_inputs=slices(batch)[0], loss=error, outputs="loss", check_capture=False
        )
        losses = []
        for start in (seed, seed + 1):
            torch.manual_seed(start + (rank if start == seed else 0))  # what the first rank draws counts
            losses.append(pipe.step(schedule, **batch))
            pipe.module.zero_grad()
        torch.manual_seed(seed)
        one = torch.stack([whole(**rows) for rows in slices(batch)]).mean().detach()
        few, called = slices(batch)[0], []
        for each, own in ((pipe.module, rank), (whole, 0)):
            torch.manual_seed(seed + own)  # likewise
            called += [each(**few).detach(), each(**few).detach()]
        assert abs(called[0] - called[2]) + abs(called[1] - called[3]) < CLOSE < abs(called[0] - called[1])
        for module in (pipe, model):
            module.eval()
        found = pipe.evaluate(pipe.schedule(schedules.ScheduleGPipe, MICROBATCHES), **batch)
        with torch.no_grad():
            wanted = torch.stack([error(model(r["input_ids"]), r["targets"]) for r in slices(batch)]).mean()
        pipe.train()
        again = pipe.step(schedule, **batch)  # the first mode's schedule goes on
        assert torch.isfinite(again)
        dist.barrier(group)
        return float((losses[0] - one).abs()), float((losses[1] - one).abs()), float((found - wanted).abs())


def _told(function: Any) -> str:
    try:
        function()
    except autotp.AutoTPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refused(rank: int, world: int, group: Any) -> dict[str, str]:
    """What this rank is told of uses that cannot be."""
    model = Tower()
    batch = batch_of(model)
    few, plain = slices(batch)[0], nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def make(of: nn.Module = model, pp: int = 2, tp: int = 2, **options: Any) -> Any:
        options = {"example_inputs": few, "loss": error, "check_capture": False, **options}
        return autotp.stages(of, pp, tp, **options)

    told = {
        "world": _told(lambda: make(pp=3)),
        "blocks": _told(lambda: make(pp=4, tp=1)),
        "chunks": _told(lambda: make(chunks=2)),
        "none": _told(lambda: make(plain, example_inputs=torch.randn(2, 8), loss=None, outputs="full")),
        "pp": _told(lambda: make(pp=0)),
        "memory": _told(lambda: make(memory=100)),
    }
    pipe = make()
    schedule = pipe.schedule(schedules.ScheduleGPipe, MICROBATCHES)
    uneven = {k: v[:6] for k, v in batch.items()}
    told |= {
        "dividing": _told(lambda: pipe.step(schedule, **uneven)),
        "sizes": _told(lambda: pipe.step(schedule, **{k: v[:4] for k, v in batch.items()})),
        "on one rank": _told(lambda: pipe.step(schedule, **(uneven if rank == 3 else batch))),
        "loss": _told(lambda: pipe.schedule(schedules.ScheduleGPipe, 4, loss=error)),
        "printed": str(pipe),
        "mode": _told(lambda: pipe.eval().step(schedule, **batch)),
        "other": _told(lambda: pipe.train().step(None, **batch)),
    }
    dist.barrier(group)
    return told
