"""Give an operator of your own a rule, prove it, and shard a model that uses it.

    python examples/custom_operator.py

The operator is a gated activation in one kernel, which torch cannot look into. Without a rule it runs whole on every
rank; with one line its weights are split. Everything runs in one process; the exit status is 0 where all is right.
"""

import sys

import torch
from torch import Tensor, nn

import autotp


# 1. The operator: what it computes, the shape of its result, and its derivative.
@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gateᵀ) * (x upᵀ) for x (..., k), gate and up (n, k); the result is (..., n)."""
    return nn.functional.silu(x @ gate.mT) * (x @ up.mT)


@gated.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def save(ctx, inputs, output) -> None:
    """Keep the operands for the backward."""
    ctx.save_for_backward(*inputs)


def gradients(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    """By torch's own derivatives, for brevity; a kernel has its own backward here."""
    x, gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
    with torch.enable_grad():
        result = nn.functional.silu(x @ gate.mT) * (x @ up.mT)
    return torch.autograd.grad(result, (x, gate, up), grad)


gated.register_autograd(gradients, setup_context=save)


class Gated(nn.Module):
    """An MLP around the operator."""

    def __init__(self, width: int = 64, inner: int = 256) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(inner, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(inner, width) / width**0.5)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        return x + self.down(gated(x, self.gate, self.up))


def main() -> int:
    """Plan without a rule, try a wrong one, register the right one, prove it, and shard the model."""
    torch.manual_seed(0)
    model, batch = Gated(), torch.randn(2, 10, 64)

    print("Without a rule:", *autotp.plan(model, tp=4, example_inputs=batch).notes)

    arguments = [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 6, 8), (12, 8), (12, 8))]
    autotp.register_rule(gated, "bsk,nk,nk->bsn")  # says that k is summed over
    try:
        autotp.prove_rule(gated, *arguments)
    except autotp.AutoTPError as error:  # but a product of two sums is no sum of products
        print(f"\nRefused: {error}\n")

    autotp.register_rule(gated, "bs_,n_,n_->bsn", replace=True)  # `_` stays whole; b, s and n may be split
    print("Proved:", autotp.prove_rule(gated, *arguments), end="\n\n")

    report = autotp.verify(model, tp=4, example_inputs=batch)
    print(report.plan)
    print(report)
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
