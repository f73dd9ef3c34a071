"""LoRA adapters on a model that is split over the ranks: trained, saved as PEFT does, read by PEFT, and merged.

    torchrun --nproc-per-node 2 examples/finetune_lora.py [FOLDER]

On the CPU. The exit status is 0 where a process without autotp computes the same with the folder that was saved.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
ADAPTERS = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def base_model() -> Any:
    """The model to adapt; where it is pretrained, `from_pretrained`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def train(sharded: Any, steps: int = 5) -> list[float]:
    """Train what requires gradients: the adapters."""
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = TEXT[step * 128 : (step + 1) * 128].view(4, 32)  # the same on every rank
        loss = sharded(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train, save, and compare what a plain PEFT model computes."""
    folder = f"{sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()}/autotp_lora"
    tokens = TEXT[:128].view(4, 32)
    adapted = get_peft_model(base_model(), ADAPTERS)  # before compile: the plan splits adapters with their layers
    sharded: Any = autotp.compile(adapted, example_inputs={"input_ids": tokens, "labels": tokens})
    losses = train(sharded)
    sharded.save_checkpoint(folder, format="huggingface")
    with torch.no_grad():
        logits = {"adapted": sharded(input_ids=tokens).logits}
        with sharded.disable_adapter():
            base = sharded(input_ids=tokens).logits
        sharded.merge_adapter()
        logits["merged"] = sharded(input_ids=tokens).logits
        wanted = PeftModel.from_pretrained(base_model(), folder)(input_ids=tokens).logits
    differences = {name: float((found - wanted).abs().max()) for name, found in logits.items()}
    if dist.get_rank() == 0:
        sharded.print_trainable_parameters()
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
        print("largest difference from PEFT's:", *(f"{name} {d:.1e}" for name, d in differences.items()))
        print(f"without adapters {float((base - wanted).abs().max()):.1e}")
    dist.destroy_process_group()
    return int(max(differences.values()) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
