"""transformers' `Trainer` for a sharded module."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer

from autotp.comm.lockstep import meet_everywhere
from autotp.errors import InputError
from autotp.runtime.checkpoint import load, save

from .accelerator import Parallelism, sizes_of

OPTIMIZER, SCHEDULER, ARGUMENTS = "sharded_optimizer", "scheduler.pt", "training_args.bin"
ADAPTERS = "adapter_model.safetensors"


class ShardedTrainer(Trainer):
    """transformers' `Trainer` whose model is a sharded module: used like that one, on every rank.

    The ranks of a tp group get the same batches; checkpoints are folders that transformers loads, with the optimizer's
    state as each rank holds it, for any number of ranks. Beside a trainer of another library it comes first:
    `class Mine(ShardedTrainer, SFTTrainer)`.
    """

    _tp, _dp, _ready = 1, 1, False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ready = True

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Say that transformers had sharded the model at load time: then it is neither wrapped nor moved.

        Not in the constructor, which refuses checkpoints of such models, since transformers saves no state of their
        optimizers: here it is saved.
        """
        return self._ready

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        """Set by the constructor, from what the model says of itself."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        model: Any = self.model
        self._tp, self._dp = sizes_of(model)
        if self._dp > 1 and not self.args.average_tokens_across_devices:
            raise InputError(
                "average_tokens_across_devices=False: with dp the loss of a sharded module is over the rows of all "
                "ranks and is divided by the tokens of all. Leave it at True."
            )
        return {**super()._build_accelerator_args(**kwargs), "parallelism_config": Parallelism(model)}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute as transformers does; with dp a sharded module's loss is that of all ranks' rows already.

        transformers takes it for a rank's share, and multiplies it by the number of shares.

        Args:
            model, inputs, return_outputs, num_items_in_batch: see `transformers.Trainer.compute_loss`.
        """
        result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outside = self.compute_loss_func is not None or self.label_smoother is not None
        if self._dp == 1 or outside or not self.model_accepts_loss_kwargs or num_items_in_batch is None:
            return result
        return (result[0] / self._dp, result[1]) if return_outputs else result / self._dp

    # ---- what is counted once, though every rank of a tp group has it ----------------------------------------------

    def floating_point_ops(self, inputs: Any) -> int:
        """Return a rank's share, for they are summed over all."""
        return super().floating_point_ops(inputs) // self._tp

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._tp

    # ---- what is saved ---------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that transformers loads. A collective call."""
        folder = str(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)  # type: ignore[union-attr, operator]
        if self.args.should_save:
            tokens = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokens is not None:
                tokens.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, ARGUMENTS))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model: Any = self.model
        save(model._shards, Path(output_dir) / OPTIMIZER, optimizer=self._bare_optimizer(), weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))  # type: ignore[union-attr]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER).is_dir():
            return
        model: Any = self.model
        place = Path(checkpoint)
        load(model._shards, place / OPTIMIZER, optimizer=self._bare_optimizer(), weights=False)
        self.lr_scheduler.load_state_dict(torch.load(place / SCHEDULER, weights_only=True))  # type: ignore[union-attr]

    def _bare_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        adapters = Path(resume_from_checkpoint) / ADAPTERS
        if adapters.is_file():
            load_adapters = importlib.import_module("peft").set_peft_model_state_dict
            load_adapters(self.model, load_file(adapters))  # type: ignore[arg-type]
        else:
            self.model.load_checkpoint(resume_from_checkpoint)  # type: ignore[union-attr, operator]

    def _load_best_model(self) -> None:
        if dist.is_initialized():
            meet_everywhere("loading the best model")
            dist.barrier()  # the folder may be another node's, on a file system that both see
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return self.model.no_sync()  # type: ignore[union-attr, operator]
