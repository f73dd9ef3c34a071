"""One rank captures for all: what they get, what it costs, and when each captures for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.capture import rank0 as packing
from autotp.capture.capture import skeleton
from autotp.capture.rank0 import Untold, model_key
from autotp.driver import compile as pipeline
from autotp.inputs import Inputs
from tests.helpers.errors import error_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With dropout, so that training is another program."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(8, width), nn.Linear(width, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.5, self.training)) * self.scale


@dataclass
class Scores:
    """A plain dataclass, which torch's containers do not know of themselves."""

    scores: Tensor
    names: list[str]


class Scored(Net):
    def forward(self, x: Tensor, key: str = "all") -> Any:
        return {key: Scores(super().forward(x), ["up"])}


class Counted:
    """How often this process captures."""

    def __init__(self) -> None:
        self.times, self.prepare = 0, pipeline.prepare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.prepare(*args, **kwargs)


def on_ranks(rank: int, world: int, group: Any) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    counted = Counted()
    with patch.object(pipeline, "prepare", counted):
        model = Net().eval()
        sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=X)
        found["first"], found["error"] = counted.times, sharded._programs_made[0].capture.error
        torch.testing.assert_close(sharded(X[:3]), model(X[:3]))
        sharded.train()(X).sum().backward()
        found["later"] = counted.times - found["first"]
        gradients = [g.clone() for g in sharded.full_grad_dict().values()]
        found["trained"] = [g.abs().sum().item() for g in gradients]
        counted.times = 0
        for name, hook in {"hooked": lambda *_: found and None, "plainly hooked": lambda *_: None}.items():
            hooked = Net().eval()
            hooked.up.register_forward_hook(hook)
            torch.testing.assert_close(autotp.compile(hooked, mesh=mesh, example_inputs=X)(X), model(X))
            found[name], counted.times = counted.times, 0
        labelled = Net().eval()
        labelled.rank = rank  # type: ignore[assignment]  nothing reads it
        torch.testing.assert_close(autotp.compile(labelled, mesh=mesh, example_inputs=X)(X), model(X))
        found["labelled"], counted.times = counted.times, 0
        with patch.object(packing.compat, "unpacked_graph", side_effect=LookupError("unknown") if rank else None):
            autotp.compile(model, mesh=mesh, example_inputs=X)
        found["unread"] = counted.times
    said = {
        "x": X,
        "key": "all",
    }  # a word that is the default's own object here, and another one in what comes as bytes
    named = autotp.compile(Scored().eval(), mesh=mesh, example_inputs=said)(**said)["all"]
    found["named"] = type(named) is Scores and torch.allclose(named.scores, model(X)) and named.names
    other = Net().eval()
    other.scale = 2.0 + rank
    found["other"] = error_of(lambda: autotp.compile(other, mesh=mesh, example_inputs=X))
    return found


def test_one_rank_captures_and_all_run_its_program(pool):
    told = pool.run(on_ranks, world=2)
    assert [each["first"] for each in told] == [1, 0] == [each["later"] for each in told]
    assert all(each["error"] < 1e-5 for each in told) and told[0]["trained"] == told[1]["trained"]
    for each in ("hooked", "labelled"):
        assert [one[each] for one in told] == [1, 1], each
    assert [one["unread"] for one in told] == [1, 1] and [one["plainly hooked"] for one in told] == [1, 0]
    assert [one["named"] for one in told] == [["up"], ["up"]]  # where torch has not met the class in any capture
    for one in told:
        assert one["other"][0] == "RankError" and "do not agree on the model" in one["other"][1]


CHANGES: dict[str, Any] = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "training": lambda m: m.train(),
    "dtype": lambda m: m.double(),
    "frozen": lambda m: m.up.requires_grad_(False),
    "a forward": lambda m: setattr(m, "forward", nn.functional.relu),
    "tied": lambda m: setattr(m.down, "bias", m.up.bias),
}


def test_what_a_capture_depends_on_is_in_the_key():
    def key(model: nn.Module) -> str:
        return model_key(skeleton(model, "cpu"), Inputs(X).args)

    own = key(Net(8).eval())
    assert own == key(Net(8).eval())
    for name, change in CHANGES.items():
        model = Net(8).eval()
        change(model)
        assert key(model) != own, name
    assert model_key(skeleton(Net(8).eval(), "cpu"), Inputs(X[:2]).args) != own
    closed = Net(8)
    closed.forward = lambda x, n=own: own and x  # type: ignore[method-assign]
    with pytest.raises(Untold, match=r"forward is a function"):
        key(closed)


class Config:
    """As one of transformers: it has a hash of itself, which is another number in every process."""

    def __init__(self, size: int, salted: int) -> None:
        self.size, self._original_object_hash = size, salted

    def to_dict(self) -> dict[str, Any]:
        return {"size": self.size}


def test_a_key_is_the_same_in_processes_with_other_hashes():
    def key(size: int, salted: int) -> str:
        model = Net(8)
        model.config = Config(size, salted)  # type: ignore[assignment]
        return model_key(skeleton(model, "cpu"))

    assert key(1, 5) == key(1, 6) != key(2, 5)


def test_a_capture_comes_back_from_bytes(tmp_path):
    captured, _ = pipeline.capture_model(Net(), Inputs(X), torch.device("cpu"))
    again = packing.unpack(packing.pack(captured), torch.device("cpu"))
    assert again.digest() == captured.digest() and again.graph is not captured.graph
    assert {str(s): r for s, r in again.ranges.items()} == {str(s): r for s, r in captured.ranges.items()}
    assert again.accepts([X[:3]]) is None and again.accepts([X[:, :4]]) is not None
    captured.constants = {"weights": torch.ones(5000)}
    with pytest.raises(packing.Unpackable, match="weights holds 5000"):
        packing.pack(captured)
    with pytest.raises(packing.Unpackable):
        packing.unpack(b"no pickle", torch.device("cpu"))
