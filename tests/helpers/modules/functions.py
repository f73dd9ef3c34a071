"""Functions with a backward of their own, and a model that uses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

WIDTH = 8
TABLE = torch.ones(4 * WIDTH)


class Doubled(Function):
    """What the others share: twice the operand, and its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Reverse(Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.strength * grads[0], None


reverse = Reverse.apply  # as many keep it, from before anything is captured


class Round(Doubled):
    """Straight-through rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.round()


class Scale(Function):
    """A product with a weight; neither gradient is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight * 2, (grads[0] * x).sum((0, 1)) * 3


class Clipped(Doubled):
    """The whole gradient is brought to length 1: not linear, and not split."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


class Rows(Doubled):
    """Each row of the gradient is brought to length 1: rows may be dealt out, but are no sums."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm(dim=-1, keepdim=True)


class Counted(Doubled):
    """Reads how long its operand is."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].shape[-1]


class Fixed(Doubled):
    """Knows how long its operand is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.view(-1, 4, WIDTH).flip(-1).view(x.shape)


class Several(Doubled):
    """Two tensors and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, x.sum(-1, keepdim=True), 7

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Later(Function):
    """Defaults, and the context made afterwards."""

    @staticmethod
    def forward(x: Tensor, by: int = 3) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.by * 2, None


class Noisy(Doubled):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x + torch.rand_like(x)


class InPlace(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Shifts(Doubled):
    """Writes to its argument, and says so to nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        x -= x.amax(-1, keepdim=True)
        return x.exp()


def read_after(x: Tensor) -> Tensor:
    """What a Function has written to is read."""
    return Shifts.apply(x) + x  # type: ignore[return-value]


def weight_written(m: Any) -> Tensor:
    """A Function writes to a part of a weight."""
    x = m.scale[:2]
    return Shifts.apply(x).sum()  # type: ignore[union-attr]


class Written(nn.Module):
    """A block that writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(Shifts.apply(x))  # type: ignore[arg-type]


class Held(Function):
    """Is given a module, and reads its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        return x * module.bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Foreign(Doubled):
    """Reads a tensor that is no argument, in the backward alone."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * TABLE


class Decides(Doubled):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] if grads[0].norm() > 1 else grads[0] * 2


class Uses(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.between = nn.Parameter(torch.rand(4 * WIDTH) + 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x)))


def usual() -> nn.Module:
    """Gradient reversal, straight-through rounding, and a weight."""
    return Uses(lambda m, x: reverse(Scale.apply(Round.apply(x * 4), m.scale), 0.5))


def closes_over(m: Any, x: Tensor) -> Tensor:
    """A Function of its own for every call, that reads a weight which is no argument."""

    class Closes(Doubled):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * m.scale

    return Closes.apply(x)  # type: ignore[return-value]
