"""Conversions of a sharded module after its first forward, also where torch's data parallelism took note of types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Split in two; a loss that is a mean, as over the examples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    found = model.full_grad_dict() if hasattr(model, "full_grad_dict") else dict(model.named_parameters())
    return {name: (value if value.grad is None else value.grad).clone() for name, value in found.items()}


KINDS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "tp": 1}, "fully_shard": {"dp": 2, "tp": 1, "fully_shard": True}, "tp": {"tp": 2},
}  # fmt: skip
CONVERSIONS = {"double": torch.float64, "bfloat16": torch.bfloat16, "float": torch.float32}


def converting(rank: int, world: int, group: Any, options: dict[str, Any], grad: bool) -> dict[str, Any]:
    """Gradients after each conversion, on this rank's half of the batch where there is dp."""
    dp = options.get("dp", 1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")) if dp > 1 else mesh_of(group)
    half = X[2 * rank : 2 * rank + 2] if dp > 1 else X
    sharded: Any = autotp.compile(Net(), mesh=mesh, example_inputs=half, **options)
    if grad:
        gradients(sharded, half)
    else:
        with torch.no_grad():
            sharded(half)
    found = {}
    for name, dtype in CONVERSIONS.items():
        getattr(sharded, name)()
        found[name] = gradients(sharded, half.to(dtype)) | {"out": sharded(half.to(dtype)).detach()}
        assert {p.dtype for p in sharded.parameters()} == {dtype}
    return found


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_after_a_forward_holds(pool, kind, grad):
    everyone = pool.run(converting, KINDS[kind], grad, world=2)
    model = Net()
    for name, dtype in CONVERSIONS.items():
        wanted = gradients(model.to(dtype), X.to(dtype))
        for found in everyone:
            for weight, grad_of in wanted.items():
                assert found[name][weight].dtype == dtype == found[name]["out"].dtype
                close: dict[str, Any] = {} if name == "double" else {"rtol": 5e-2, "atol": 5e-3}
                torch.testing.assert_close(found[name][weight], grad_of, **close)


def one_alone(rank: int, world: int, group: Any) -> tuple[tuple[str, str, float], bool]:
    """The error of a conversion that ranks make differently, and whether the next call is right."""
    sharded: Any = autotp.compile(Net(), mesh=mesh_of(group), example_inputs=X)
    error = error_of(lambda: sharded.double() if rank else sharded.bfloat16())
    return error, torch.allclose(sharded(X), Net()(X), atol=1e-6)


def test_ranks_that_convert_to_other_types_all_hear_of_it(pool):
    for (error, text, _), right in pool.run(one_alone, world=2):
        assert error == "RankError" and "torch.float64" in text and right
