"""Gradients that are zero by mathematics, and in floating point whatever rounding leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.proof import differences


def ids(seed: int) -> Tensor:
    """Two sequences of four tokens."""
    return torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(seed))


class Constant(nn.Module):
    """The mean of what was centred, and of a softmax, over the same dimension: it does not depend on the weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.embed = nn.Embedding(16, 8)
        self.embed.weight.data *= 3

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return (x - x.mean(1, keepdim=True) + x.softmax(1)).mean(1)


@pytest.mark.parametrize("cp", [1, 2])
def test_what_rounding_leaves_of_a_zero_gradient_is_no_difference(cp, monkeypatch):
    assert all(autotp.verify(Constant(), 2, ids(seed), cp=cp) for seed in range(3))
    monkeypatch.setattr(differences, "FLOOR", 0.0)  # the negative control: beside itself alone it is noise
    assert not all(autotp.verify(Constant(), 2, ids(seed), cp=cp) for seed in range(8))


def test_zeros_of_what_no_gradient_reached_take_no_memory():
    leaf = torch.ones(100, 100, requires_grad=True)
    inside = leaf * 2
    inside.retain_grad()
    zeros = differences.grad_or_zeros(inside)
    assert zeros.shape == inside.shape and not zeros.any() and zeros.untyped_storage().nbytes() == 4
    assert differences.grad_or_zeros(leaf).contiguous().untyped_storage().nbytes() == 40000  # for who adds to it
    inside.sum().backward()
    assert bool((differences.grad_or_zeros(inside) == 1).all())


@pytest.mark.parametrize(("dtype", "own"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_bfloat16_volume_is_graded_by_torchs_own_kernels(dtype, own):
    """Those of oneDNN write past the end of a result on some CPUs, and the process dies."""
    x, weight = torch.randn(1, 2, 4, 4, 4, dtype=dtype), torch.randn(3, 2, 3, 3, 3, dtype=dtype, requires_grad=True)
    result, seen = nn.functional.conv3d(x, weight), []
    result.register_hook(lambda gradient: seen.append(torch.backends.mkldnn.enabled))
    differences.gradients([result], [torch.ones_like(result)], [weight])
    assert seen == [not own and torch.backends.mkldnn.enabled]
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()
