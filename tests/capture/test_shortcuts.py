"""What an export leaves out is nothing that its graph, its sizes, or the lines that it shows are made of."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autotp import compat
from autotp.driver.compile import capture_model
from autotp.inputs import Inputs


class Attention(nn.Module):
    """Views, broadcasts, comparisons of lengths and a matrix product with symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(*x.shape[:2], 3, 2, 4)
        query, key, value = heads.transpose(1, 3).unbind(2)
        places = torch.arange(x.shape[1])
        mask = (places[:, None] >= places).expand(x.shape[0], 2, -1, -1)
        mixed = scaled_dot_product_attention(query, key, value, mask)
        return self.out(mixed.transpose(1, 2).flatten(2)) + x[:, :1]


class Shorter(Attention):
    """Likewise, without its last operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 1:]


def program(module: nn.Module) -> list[Any]:
    """Every node of a capture, with its sizes, strides and the line that it comes from."""
    graph = capture_model(module, Inputs(torch.rand(3, 5, 8)), torch.device("cpu"))[0].graph
    values = ((n, n.meta.get("val")) for n in graph.nodes)
    sizes = ((n, (str(v.shape), str(v.stride())) if isinstance(v, torch.Tensor) else str(v)) for n, v in values)
    return [(n.name, str(n.target), str(n.args), size, n.stack_trace) for n, size in sizes]


@pytest.mark.parametrize("module", [Attention(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], ids=type)
def test_the_program_is_that_of_an_export_without_shortcuts(module):
    quick = program(module)
    with patch.object(compat, "quick_export", contextlib.nullcontext):
        assert program(module) == quick
    assert any("in forward" in (line or "") for *_, line in quick)


def test_another_program_would_be_noticed():
    assert program(Attention()) != program(Shorter())
