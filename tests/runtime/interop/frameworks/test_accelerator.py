"""accelerate on two ranks: the same numbers as on one, before and after a state that was saved and loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autotp
from autotp.integrations.accelerator import ShardedAccelerator, ShardedParallelism
from tests.helpers.errors import error_of
from tests.helpers.processes import own_world

pytestmark = pytest.mark.ranks
ROWS, BATCH = 16, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.down(self.norm(self.up(x)).tanh()) - y) ** 2).mean()


def prepared(make: Any, model: Any, batch: int) -> tuple[Any, ...]:
    accelerator = make(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    draw = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(ROWS, 8, generator=draw), torch.randn(ROWS, 8, generator=draw))
    torch.manual_seed(1)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows, batch), schedule)


def epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> list[float]:
    """The losses of an epoch, on every rank the same."""
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def trained(rank: int, folder: str, tp: int, dp: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    sharded, stock, counted = tp * dp > 1, ("", ""), ("", "")
    if sharded:
        example = torch.zeros(BATCH // dp, 8), torch.zeros(BATCH // dp, 8)
        model = autotp.compile(model, tp=tp, dp=dp, example_inputs=example)
        stock = error_of(lambda: Accelerator(cpu=True).prepare(model))[:2]
        alone = {name: text for name, text in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        AcceleratorState._reset_state(reset_partial_state=True)
        with patch.dict(os.environ, alone, clear=True):  # then accelerate takes each rank for a world of its own
            counted = error_of(lambda: ShardedAccelerator(model))[:2]
        AcceleratorState._reset_state(reset_partial_state=True)

    def make(**options: Any) -> Any:
        if dp > 1:
            return ShardedAccelerator(model, **options)
        return Accelerator(cpu=True, parallelism_config=ShardedParallelism(model) if sharded else None, **options)

    all_of = prepared(make, model, BATCH // dp)
    found: dict[str, Any] = {"first": epoch(*all_of)}
    all_of[0].save_state(folder)
    found["second"] = epoch(*all_of)
    all_of[0].load_state(folder)
    found["again"] = epoch(*all_of)
    if sharded:
        found["stock"], found["counted"] = stock, counted
        found["refused"] = error_of(lambda: ShardedParallelism(model))[1]
        AcceleratorState._reset_state()
        found["gathered"] = ShardedAccelerator(model).gather(torch.ones(3)).tolist()
        found["rows"] = sum(len(all_of[0].gather_for_metrics(x)) for x, _ in all_of[3])
        found["rate"] = all_of[4].get_last_lr()
        found["files"] = sorted(p.name for p in Path(folder).iterdir())
        all_of[0].save_model(model, f"{folder}/whole")
        all_of[0].wait_for_everyone()
        whole = load_file(f"{folder}/whole/model.safetensors")
        found["whole"] = all(torch.equal(whole[n], t) for n, t in model.full_state_dict().items())
    return found


def test_all_of_accelerate_is_that_of_one_process(tmp_path):
    (one,) = own_world.run(trained, str(tmp_path / "one"), 1, 1, world=1)
    over_tp = own_world.run(trained, str(tmp_path / "tp"), 2, 1, world=2)
    over_dp = own_world.run(trained, str(tmp_path / "dp"), 1, 2, world=2)
    assert all("ShardedTrainer" in found["refused"] for found in over_dp) and over_tp[0]["refused"] == ""
    assert [len(found["gathered"]) for found in over_tp + over_dp] == [3, 3, 6, 6]
    for found in over_tp + over_dp:
        for name in ("first", "second", "again"):
            assert found[name] == pytest.approx(one[name], rel=1e-5), name
        assert found["again"] == found["second"] != found["first"]  # to the bit: the state is every rank's own
        assert found["rows"] == ROWS and found["rate"] == [0.1 * 0.5**4] and found["whole"]
        assert {"sharded_model_0", "sharded_optimizer_0", "scheduler.bin"} <= set(found["files"])
        kind, text = found["stock"]
        assert found["counted"][0] == "InputError" and "counts 1 processes" in found["counted"][1]
        assert kind == "StateError" and "ShardedAccelerator" in text
