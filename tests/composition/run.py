"""A composition on one rank: its model, batches, module or stages, and the same on one device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import autotp
from autotp.passes.decompose.counter_random import seeds
from autotp.runtime import programs
from tests.helpers.modules.trained import model_of
from tests.helpers.processes.cpu import cpu_seconds

from .features import BY_NAME, CARRIED
from .uses import SIMULATED, train

ROWS, LENGTH, MICROBATCHES, MOST = 8, 16, 2, 8
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 64, "num_hidden_layers": 2}  # fmt: skip
ONLY_SHARDED = {"fully_shard", "ep", "pins", "sequence_parallel", "compare", "backend"}
HEAD, IGNORED = 16, -100


def loss64(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' loss of a causal model, which casts to float32, in the type of the logits."""
    labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    how = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def degrees(names: Sequence[str]) -> dict[str, int]:
    """Of all axes, with tp=2 where that makes at most 8 ranks."""
    axes = {"pp": 1, "dp": 1, "cp": 1}
    for name in names:
        axes |= BY_NAME[name].axes
    size = axes["pp"] * axes["dp"] * axes["cp"]
    return {**axes, "tp": 2 if 2 * size <= MOST else 1}


def world_of(names: Sequence[str]) -> int:
    """Ranks of a composition."""
    axes, uses = degrees(names), [n for n in names if BY_NAME[n].use is not None]
    if axes["pp"] == 1 and uses and set(uses) <= {*SIMULATED}:
        return 1
    return axes["pp"] * axes["dp"] * axes["cp"] * axes["tp"]


class Run:
    """A composition of features on a rank.

    Attributes:
        names, features: what is composed. axes: degrees. options: of `compile` or `stages`. lane: place over dp.
        folder: for files, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], rank: int, folder: str) -> None:
        self.names, self.features = names, [BY_NAME[n] for n in names]
        self.axes, self.folder = degrees(names), Path(folder)
        self.options: dict[str, Any] = {}
        for feature in self.features:
            self.options |= feature.options
        self.lane = rank // (self.axes["cp"] * self.axes["tp"]) % self.axes["dp"]
        self.draws = any(f.draws for f in self.features)
        self.slices = any(f.slices for f in self.features)
        self.cached = "caches by name" in names

    def model(self) -> Any:
        """The changed model, the same on every rank and each time."""
        family = next((f.family for f in self.features if f.family != "llama"), "llama")
        model: Any = model_of(family, torch.float64, **LLAMA)
        model.loss_function = loss64
        torch.manual_seed(1)
        for feature in self.features:
            model = feature.change(model) if feature.change is not None else model
        return model.eval() if self.cached else model.train()

    def batch(self, step: int = 0) -> dict[str, Tensor]:
        """The whole batch of a step; where one mean is over all of it, with rows that count otherwise."""
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(1, LLAMA["vocab_size"], (ROWS, LENGTH), generator=draw)
        labels = ids.clone()
        labels[:, :3] = IGNORED
        if self.axes["pp"] == 1 and not self.slices:
            labels[0, :9] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def mine(self, step: int = 0) -> dict[str, Tensor]:
        """This rank's slice of it."""
        return {k: v.chunk(self.axes["dp"])[self.lane] for k, v in self.batch(step).items()}

    def past(self, rows: int, heads: int = LLAMA["num_key_value_heads"], of: int = 0) -> dict[str, Tensor]:
        """A cache by name."""
        return {name: torch.zeros(rows, heads, of, HEAD, dtype=torch.float64) for name in CARRIED.values()}

    def example(self) -> dict[str, Tensor]:
        """Example inputs of a call on this rank."""
        rows = self.mine()
        if self.cached:
            return {"input_ids": rows["input_ids"], **self.past(len(rows["input_ids"]), of=4)}
        parts = MICROBATCHES if self.axes["pp"] > 1 else 1
        return {k: v[: len(v) // parts] for k, v in rows.items()}

    @cached_property
    def subject(self) -> Subject:
        """The module, or the stages."""
        return Subject(self, self.model(), self.axes, self.options)

    @cached_property
    def alone(self) -> Alone:
        """One device."""
        return Alone(self)

    def other(self) -> Subject:
        """A module of other weights on another mesh, without axes beside tp."""
        model = self.model()
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point() and type(p) is nn.Parameter and type(p.data) is Tensor:
                    p.mul_(0.5)
        world = dist.get_world_size()
        tp = min(world, 4)
        axes = {"pp": 1, "dp": 1, "cp": 1, "tp": tp if tp != self.axes["tp"] or tp < world else 1}
        return Subject(self, model, axes, {k: v for k, v in self.options.items() if k not in ONLY_SHARDED})


class Subject:
    """A sharded module, or stages, that is trained."""

    def __init__(self, run: Run, model: Any, axes: dict[str, int], options: dict[str, Any]) -> None:
        self.run, self.axes = run, axes
        own: dict[str, Any] = {k: v for k, v in axes.items() if k in ("dp", "cp") and v > 1}
        self.pipe, example = None, run.example() if axes is run.axes else run.batch()
        if run.cached and axes is not run.axes:
            example = {"input_ids": run.batch()["input_ids"], **run.past(ROWS, of=4)}
        if axes["pp"] > 1:
            own |= {"outputs": "full"} if run.cached else {}
            self.pipe = autotp.stages(model, axes["pp"], axes["tp"], **own, example_inputs=example, **options)
            self.module: Any = self.pipe.module
        else:
            self.module = autotp.compile(model, axes["tp"], **own, example_inputs=example, **options)
        self.saver: Any = self.pipe or self.module
        self.schedule: Any = None

    def loss(self, step: int) -> Tensor:
        """Of a batch, with its backward."""
        torch.manual_seed(step)
        rows = self.run.mine(step) if self.axes is self.run.axes else self.run.batch(step)
        if self.pipe is None:
            loss = self.module(**rows).loss
            loss.backward()
            return loss.detach()
        self.schedule = self.schedule or self.pipe.schedule(ScheduleGPipe, MICROBATCHES)
        return self.pipe.step(self.schedule, **rows)

    def clip(self, most: float) -> Tensor:
        """Clip gradients; their norm."""
        if self.pipe is not None:
            return self.pipe.clip_grad_norm_(most)
        norm: Any = nn.utils.clip_grad_norm_(self.parameters(), most)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def parameters(self) -> list[Any]:
        return list(self.saver.parameters())

    def gradients(self) -> dict[str, Tensor]:
        return self.module.full_grad_dict()

    def weights(self) -> dict[str, Tensor]:
        return self.module.full_state_dict()


class Alone:
    """The model on one device; where numbers are drawn or scaled by autotp, by its program of one rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.module = self.saver = run.model()
        if run.draws:
            options = {k: v for k, v in run.options.items() if k not in ONLY_SHARDED}
            rows = {"input_ids": run.batch()["input_ids"], **run.past(ROWS, of=4)} if run.cached else run.batch()
            self.module = self.saver = autotp.compile(self.module, 1, example_inputs=rows, **options)

    def pieces(self, step: int, whole: bool) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Micro-batch, place over dp, and the rows that are computed together."""
        axes, batch = self.run.axes, self.run.batch(step)
        parts = 1 if whole or axes["pp"] == 1 else MICROBATCHES
        rows = {k: v.unflatten(0, (axes["dp"], parts, -1)).transpose(0, 1) for k, v in batch.items()}
        lanes = axes["dp"] if self.run.slices and not whole else 1
        for micro in range(parts):
            slices = {k: v[micro].flatten(0, 1).chunk(lanes) for k, v in rows.items()}
            for lane in range(lanes):
                yield micro, lane, {k: v[lane] for k, v in slices.items()}

    def loss(self, step: int, whole: bool = False) -> Tensor:
        """The mean over the pieces, with its backward."""
        torch.manual_seed(step)
        losses, random, last = [], torch.get_rng_state(), 0
        for micro, place, rows in self.pieces(step, whole):
            if micro != last:
                random, last = torch.get_rng_state(), micro
            torch.set_rng_state(random)  # the same number on all dp ranks
            with patch.object(programs, "seeds", lambda count, _, base, place=place: seeds(count, place, base)):
                losses.append(self.module(**rows).loss)
        mean = torch.stack(losses).mean()
        mean.backward()
        return mean.detach()

    def clip(self, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), most)

    def parameters(self) -> list[Any]:
        return list(self.module.parameters())

    def gradients(self) -> dict[str, Tensor]:
        if self.run.draws:
            return self.module.full_grad_dict()
        return {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return self.module.full_state_dict() if self.run.draws else dict(self.module.state_dict())


def told(rank: int, world: int, group: Any, names: Sequence[str], folder: str) -> tuple[str, Any, float]:
    """What a composition gives on this rank, and its CPU seconds: "equal" with the figure, or "refused" or "failed"
    with what was raised."""
    begun = cpu_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            kind, said = "equal", used(names, rank, folder)
        except autotp.AutoTPError as error:
            kind, said = "refused", f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        except Exception as error:
            kind, said = "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return kind, said, cpu_seconds() - begun


def used(names: Sequence[str], rank: int, folder: str) -> float:
    """The largest difference of all that is done with the module, one after another."""
    run = Run(names, rank, folder)
    return max(use(run) for use in [f.use for f in run.features if f.use is not None] or [train])
