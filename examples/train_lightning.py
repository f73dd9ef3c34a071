"""Lightning trains a model that is split over the ranks; a second run goes on from the checkpoint of a first one.

    torchrun --nproc-per-node 2 examples/train_lightning.py [FOLDER]

Prints the losses of two epochs, at once and one by one; the exit status is 0 where they are the model's own.
"""

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

ROWS: Any = torch.randint(256, (12, 32), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
SAVED = f"{sys.argv[1] if len(sys.argv) > 1 else '.'}/autotp_lightning"


class Llama(LightningModule):
    """A model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.model: Any = LlamaForCausalLM(CONFIG)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Lightning calls this once its ranks are there, before it asks for the optimizer."""
        inputs = {"input_ids": ROWS[:4], "labels": ROWS[:4]}
        mesh: Any = self.device_mesh
        self.model = autotp.compile(self.model, mesh=mesh["tensor_parallel"], example_inputs=inputs)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, the same one on every rank of a tp group."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what `configure_model` made."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(epochs: int, start: str | None = None) -> list[float]:
    """Train until this epoch from a checkpoint or from nothing, and leave one; returns the losses."""
    module, ranks = Llama(), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks), accelerator="cpu",
        devices=ranks, max_epochs=epochs, gradient_clip_val=1.0, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=4), ckpt_path=start)
    trainer.save_checkpoint(SAVED)
    return module.losses


def alone(module: Llama) -> list[float]:
    """The losses of the model trained in a loop of its own."""
    optimizer = module.configure_optimizers()
    for batch in ROWS.split(4) * 2:
        module.training_step(batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module.losses


if __name__ == "__main__":
    runs = [fit(2), fit(1) + fit(2, start=SAVED), alone(Llama())]
    apart = (torch.tensor(runs[:2]) - torch.tensor(runs[2])).abs().max().item()
    print(*runs[:2], f"at most {apart:.1e} from the model alone", sep="\n")
    sys.exit(apart > 1e-4)
