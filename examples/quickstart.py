"""A plain module that nobody wrote for tensor parallelism, split over 2 ranks and compared with the original.

    torchrun --nproc-per-node 2 examples/quickstart.py

Forward, backward and one optimizer step, on the CPU in seconds. Prints the plan, what each rank holds, and the largest
differences; the exit status is 0 where they are rounding.
"""

import sys
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp

TOLERANCE = 1e-5


class Block(nn.Module):
    """Attention and an MLP, written out by hand."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.w_up = nn.Parameter(torch.randn(width, 4 * width) / width**0.5)
        self.w_down = nn.Parameter(torch.randn(4 * width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        x = x + self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2))
        return x + torch.einsum("bif,fw->biw", torch.einsum("biw,wf->bif", x, self.w_up).relu(), self.w_down)


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all tensors of two dicts with the same names."""
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def main() -> int:
    """Take one training step by both models."""
    torch.manual_seed(0)  # the same model and the same batch on every rank
    model, batch = Block(), torch.randn(2, 10, 64)

    sharded = autotp.compile(model, example_inputs=batch)  # over all ranks of torchrun

    outputs, gradients = [], []
    for m in (sharded, model):
        # Not Adam: it divides by the size of the gradient, and that of a key's bias is rounding and nothing else.
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        outputs.append(m(batch))
        outputs[-1].square().mean().backward()
        gradients.append(sharded.full_grad_dict() if m is sharded else {n: p.grad for n, p in m.named_parameters()})
        optimizer.step()

    differences = {
        "output": (outputs[0] - outputs[1]).abs().max().item(),
        "gradients": largest_difference(*gradients),
        "weights after a step": largest_difference(sharded.full_state_dict(), model.state_dict()),
    }
    held = sum(cast(DTensor, p).to_local().numel() for p in sharded.parameters())
    right = max(differences.values()) <= TOLERANCE
    if dist.get_rank() == 0:
        print(sharded.plan)
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
        for what, difference in differences.items():
            print(f"largest difference in the {what}: {difference:.1e}")
        print("Right" if right else "WRONG")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
