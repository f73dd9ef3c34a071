"""Ways in by transformers' `Trainer` and accelerate's `Accelerator`, each as its documentation has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from autotp.integrations.accelerator import ShardedAccelerator, ShardedParallelism
from autotp.integrations.trainer import ShardedTrainer

from .context import Context, Numbers

BATCHES = 2  # each of ROWS rows over all ranks


class Amid(TrainerCallback):
    """Looks only."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """As a trainer has it."""
        self.context.used("callback")


def trainer(context: Context) -> Numbers:
    """Two steps of SGD, and what is saved then."""
    rows, size = _data(context)
    folder = context.place(context.option("path", "trained"))
    with _apart():
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=BATCHES, per_device_train_batch_size=size, learning_rate=context.rate,
            optim="sgd", max_grad_norm=context.option("max_grad_norm", 0.1), lr_scheduler_type="constant",
            seed=context.option("seed", 0), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        kind: Any = ShardedTrainer if context.sharded else Trainer
        own = kind(
            model=context.model, args=arguments, train_dataset=rows, data_collator=_collator(context),
            callbacks=[Amid(context)],
        )  # fmt: skip
        own.remove_callback(PrinterCallback)
        if context.left_out:
            return {}
        own.train()
        own.save_model(str(folder))
    return load_file(context.folder / "trained" / "model.safetensors")


def accelerator(context: Context) -> Numbers:
    """Two steps with accumulation and clipping, of which the losses are gathered, and the state that is saved then."""
    rows, size = _data(context)
    folder = context.place(context.option("path", "state"))
    with _apart():
        own = _accelerator(context, gradient_accumulation_steps=context.option("accumulate", 1))
        optimizer = AdamW(context.model.parameters(), lr=context.rate)
        loader: Any = DataLoader(rows, size, collate_fn=_collator(context))  # type: ignore[arg-type]
        model, optimizer, loader = own.prepare(context.model, optimizer, loader)
        losses = []
        for number, batch in enumerate(loader):
            if context.left_out and number:
                return {}
            with own.accumulate(model):
                loss = model(**batch).loss
                own.backward(loss)
                own.clip_grad_norm_(model.parameters(), context.option("max_norm", 0.1))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(own.gather(loss.detach()).double().mean())
        own.save_state(str(folder))
    return {"losses": torch.stack(losses), **context.weights()}


def _accelerator(context: Context, **options: Any) -> Any:
    if not context.sharded:
        return Accelerator(cpu=True, **options)
    if context.mesh.dp > 1:
        return ShardedAccelerator(context.model, **options)
    return Accelerator(cpu=True, parallelism_config=ShardedParallelism(context.model), **options)


def _data(context: Context) -> tuple[list[dict[str, Tensor]], int]:
    """Rows of all ranks, and how many of them are a batch of this rank."""
    whole = Context(context.mesh, context.rank, None, False, context.folder, context.source)
    whole.data, whole.length = context.data, context.length
    ids = torch.cat([whole.batch(number)[0] for number in range(BATCHES)])
    size = len(ids) // BATCHES
    return [{"input_ids": row, "labels": row} for row in ids], size // context.mesh.dp if context.sharded else size


def _collator(context: Context) -> Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]:
    """Makes a batch of rows."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        context.used("collator")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return collate


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Within it accelerate knows nothing of an earlier use."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
