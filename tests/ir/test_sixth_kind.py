"""A sixth kind of layout, known to this file alone: planned, written, simulated; saved, trained on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp import Plan
from autotp.comm import conversions as cv
from autotp.comm.conversions import ConversionKind
from autotp.errors import PlanError
from autotp.ir import layouts
from autotp.ir.layouts import Distribution, Layout, Partition, Shard, Size
from autotp.ir.specs import Runs, ShardSpec, Spec
from tests.helpers.compare import mesh_of
from tests.helpers.processes.pool import Pool


@dataclass(frozen=True)
class Backward(Distribution):
    """The last rank owns what the first one owns by `of`, and so on."""

    of: Partition
    field: ClassVar[str] = "backward"

    @property
    def length(self) -> Size:
        return self.of.length

    @property
    def static(self) -> bool:
        return self.of.static

    def even(self, tp: int) -> bool:
        return self.of.even(tp)

    def full(self, tp: int) -> bool:
        return self.of.full(tp)

    def local(self, rank: int, tp: int) -> int:
        return self.of.local(tp - 1 - rank, tp)

    def share(self, tp: int, hint: Callable[[Size], int]) -> float:
        return self.of.share(tp, hint)

    def to_runtime(self, size: Callable[[Any], Any]) -> Runs:
        return self.of.to_runtime(size)

    def to_json(self) -> dict[str, Any]:
        return {"backward": self.of.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Backward:
        return cls(Partition.from_json(data["backward"]))


class BackwardSpec(NamedTuple):
    """What `ShardSpec` says of the rank at the same place from the other end."""

    dim: int
    repeat: int
    segments: Any
    mark: str = "V"
    whole = False
    reduction = "sum"

    @property
    def sharded_dim(self) -> int | None:
        return self.dim

    @property
    def dual(self) -> Spec:
        return self  # type: ignore[return-value]  # a kind that the union does not name

    def forward(self) -> ShardSpec:
        return ShardSpec(self.dim, self.repeat, self.segments)

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.forward().take(x, tp - 1 - rank, tp)

    def owned(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return x

    def place(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.forward().place(x, tp - 1 - rank, tp)

    def pad(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.forward().pad(x, tp - 1 - rank, tp)

    def trim(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.forward().trim(x, tp - 1 - rank, tp)

    def deal(self, x: Tensor, tp: int) -> Tensor:
        return self.forward().deal(x, tp).flip(0)

    def collect(self, stack: Tensor, tp: int) -> Tensor:
        return self.forward().collect(stack.flip(0), tp)

    def split(self, x: Tensor, tp: int, seed: int = 0) -> list[Tensor]:
        return [self.take(x, rank, tp) for rank in range(tp)]

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        return self.forward().recombine(list(reversed(xs)))


@dataclass(frozen=True)
class Backwards(Layout):
    """One slice of dimension `dim`, from the other end."""

    dim: int
    partition: Backward
    mark: ClassVar[str] = "V"
    distribution_kind: ClassVar[type[Distribution] | None] = Backward
    split: ClassVar[bool] = True

    @property
    def sharded_dim(self) -> int | None:
        return self.dim

    @property
    def distribution(self) -> Distribution | None:
        return self.partition

    def share(self, tp: int, hint: Callable[[Size], int]) -> float:
        return self.partition.share(tp, hint)

    def local_shape(self, shape: Sequence[int], tp: int, rank: int = 0) -> tuple[int, ...]:
        return (*shape[: self.dim], self.partition.local(rank, tp), *shape[self.dim + 1 :])

    def plain(self, tp: int) -> bool:
        return False

    def to_runtime(self, size: Callable[[Any], Any] = lambda s: s) -> Spec:
        return BackwardSpec(self.dim, *self.partition.to_runtime(size))  # type: ignore[return-value]

    def to_json(self) -> Any:
        return {"dim": self.dim, **self.partition.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Layout | None:
        return cls(data["dim"], Backward.from_json(data)) if isinstance(data, dict) and "backward" in data else None

    @classmethod
    def seeds(cls, length: Size, tp: int) -> Iterable[Distribution]:
        return (Backward(Partition.plain(length, tp)),)


TABLE = {
    ("V", "R"): ConversionKind("g_v", cv.pad, "all_gather", cv.collect),
    ("V", "I"): ConversionKind("gather_v", cv.pad, "all_gather", cv.collect),
    ("P", "V"): ConversionKind("g_star_v", cv.deal, "reduce_scatter", cv.trim),
    ("I", "V"): ConversionKind("shard_v", cv.take),
    ("R", "V"): ConversionKind("shard_r_v", cv.take),
    ("V", "P"): ConversionKind("zero_pad_v", cv.place),
}


@contextlib.contextmanager
def sixth_kind() -> Iterator[None]:
    """Within this context there is the sixth kind, and no weight is planned as an ordinary shard."""
    with (
        patch.dict(layouts._KINDS), patch.dict(cv.KINDS), patch.dict(cv.FUNCTIONS),
        patch.object(Shard, "seeds", lambda length, tp: ()),
    ):  # fmt: skip
        layouts.register(Backwards)
        for (src, dst), kind in TABLE.items():
            cv.register(src, dst, kind)
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def test_planned_written_simulated_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows taken from the wrong end are noticed; and where nobody knows the kind, its plan is damaged."""
    with sixth_kind():
        report = autotp.verify(mlp(), 2, inputs())
        assert report, report
        assert report.plan is not None
        assert [x.layout.mark for x in report.plan.parameters] == ["V", "V", "V", "I"]
        text = report.plan.to_json()
        assert Plan.from_json(text) == report.plan
        monkeypatch.setattr(BackwardSpec, "trim", ShardSpec.trim)
        monkeypatch.setattr(BackwardSpec, "place", ShardSpec.place)
        monkeypatch.setattr(BackwardSpec, "recombine", lambda spec, xs: spec.forward().recombine(xs))
        assert not autotp.verify(mlp(), 2, inputs())
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_json(text)


def trained(rank: int, world: int, group: Any, text: str, folder: str) -> tuple[list[float], bool, float]:
    """Losses of two steps, whether the checkpoint gives back what was trained, and the first weight's own share."""
    with sixth_kind():
        model = autotp.compile(mlp(), world, plan=Plan.from_json(text), mesh=mesh_of(group), example_inputs=inputs())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(inputs()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        model.save_checkpoint(folder, format="huggingface")
        state = model.full_state_dict()
        again = autotp.compile(mlp(), world, plan=Plan.from_json(text), mesh=mesh_of(group), example_inputs=inputs())
        again.load_checkpoint(folder)
        found = again.full_state_dict()
        return losses, all(torch.equal(found[k], state[k]) for k in state), float(state["0.weight"].sum())


def test_trained_and_saved_on_ranks(pool: Pool, tmp_path: Path) -> None:
    with sixth_kind():
        text = autotp.plan(mlp(), 2, example_inputs=inputs()).to_json()
    model = mlp()
    losses = []
    for _ in range(2):
        loss = model(inputs()).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(float(loss.detach()))
    for found, same, total in pool.run(trained, text, str(tmp_path), world=2):
        assert found == pytest.approx(losses, rel=1e-4) and same
        assert total == pytest.approx(float(dict(model.named_parameters())["0.weight"].detach().sum()), rel=1e-3)
