"""Capture of plain modules: containers as inputs, `torch.vmap`, random numbers, sizes told by the data alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError
from autotp.inputs import Inputs
from tests.helpers.cases.capture_cases import Net, Words, X, same

IDS = torch.tensor([[2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2]])


class Nested(Net):
    """Takes and gives containers, numbers, strings and None."""

    def forward(self, x: Tensor, more: Any = None, *rest: Any, kind: str = "add", **named: Any) -> dict[str, Any]:
        y = self.up(x)
        for z in [*(more or {}).get("list", []), *rest, *named.values()]:
            y = y + z if kind == "add" else y * z
        return {"y": y, "parts": (y[:1], [None, kind, 3, 1.5, True])}


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(X),
        Inputs(X, None, X, kind="mul"),
        Inputs(X, {"list": [X, 2.0], "other": None}),
        Inputs(X, {"list": (X,), "flag": True}, 3, X, last=X),
        Inputs(X.clone().requires_grad_()),
    ],
)
def test_inputs_and_outputs_of_every_kind(inputs, captured_once):
    model, sharded = Nested(), autotp.compile(Nested(), 1, example_inputs=inputs)
    found, wanted = sharded(*inputs.args, **inputs.kwargs), model(*inputs.args, **inputs.kwargs)
    assert torch.equal(found["y"], wanted["y"]) and torch.equal(found["parts"][0], wanted["parts"][0])
    assert found["parts"][1] == wanted["parts"][1]
    assert autotp.verify(model, 2, inputs)


@dataclass(frozen=True)
class Inner:
    y: Tensor
    absent: Tensor | None = None


@dataclass
class Answer:
    """A record that torch does not know, and that does not make itself from its fields."""

    x: Tensor
    more: list[Inner]
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.x.sum()
        self.shift = 3


class Records(Net):
    def forward(self, x: Tensor) -> Answer:
        return Answer(self.up(x), [Inner(x * 2)])


def test_plain_dataclasses_as_outputs(captured_once):
    model = Records()
    found, wanted = autotp.compile(model, 1, example_inputs=X)(X), model(X)
    assert type(found) is Answer and type(found.more[0]) is Inner and found.more[0].absent is None
    assert torch.equal(found.x, wanted.x) and torch.equal(found.more[0].y, wanted.more[0].y)
    assert torch.equal(found.total, wanted.total) and found.shift == 3
    report = autotp.verify(model, 2, X)
    assert report and report.capture_error == 0


class Recorded(Net):
    """Takes a record, of which a field is a number and another one more record."""

    def forward(self, given: Answer, scale: int = 2) -> Answer:
        return Answer(self.up(given.x) * scale, [Inner(given.more[0].y * given.x)])


def test_plain_dataclasses_as_inputs():
    model = Recorded()

    @dataclass
    class Mine(Answer):
        pass

    given = Mine(X, [Inner(X * 2)])
    sharded: Any = autotp.compile(model, 1, example_inputs=(given,))
    for call in (given, Mine(X[:2], [Inner(X[:2])])):
        found, wanted = sharded(call), model(call)
        assert torch.equal(found.x, wanted.x) and torch.equal(found.more[0].y, wanted.more[0].y)
    assert autotp.verify(
        model,
        2,
        {
            "given": Mine(
                X,
                [Inner(X)],
            )
        },
    )


class ComplexParts(Net):
    """Writes to parts of complex values: rows, a slice, a diagonal, with a conjugate and a real number."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.up(x).unflatten(-1, (-1, 2)).contiguous())
        w = z.clone()
        w[:, -1] = z[:, 0] * 1j
        w[1:, :1] = z[1:, 1:2].conj()
        w[0, 1:] += 2.0
        w.diagonal().mul_(1j)
        return torch.view_as_real(w)


def test_parts_of_complex_values_are_written():
    model = ComplexParts()
    same(model, X, X)
    report = autotp.verify(model, 2, X)
    assert report and report.capture_error == 0


def test_a_module_moved_to_where_it_is_already():
    class Mover(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.up = self.up.to(x.dtype)
            return self.up.to(torch.float32)(x)

    same(Mover(), X, X)


class Mapped(Words):
    """A mask from a function of two positions, as libraries of attention make it."""

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        ahead = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(at, at)
        return ahead.to(torch.float32) @ self.up(self.table(ids))


def test_vmap():
    more = torch.randint(2, 9, (3, 9), generator=torch.Generator().manual_seed(0))
    same(Mapped(), IDS, IDS, more)
    assert autotp.verify(Mapped(), 2, IDS)


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) + torch.randn_like(x)
        return hidden[torch.rand(len(x)).argsort()]


def test_random_numbers_are_the_same_on_all_ranks(monkeypatch):
    assert autotp.verify(Noisy(), 2, X)
    monkeypatch.setattr("autotp.proof.run.draws", lambda node: False)
    assert not autotp.verify(Noisy(), 2, X), "the negative control"


class Chosen(Net):
    """How many rows there are is known when they are chosen."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x[x[:, 0] > 0])
        filled = torch.zeros_like(rows)
        filled[:, :2] = rows[:, 2:4]
        filled.copy_(filled + rows)
        return filled


def test_sizes_that_only_the_data_tell():
    same(Chosen(), X, X, -X)
    assert autotp.verify(Chosen(), 2, X)


class Padded(Net):
    """Pads where lengths differ, which sizes of its inputs and the values of a mask say, as image models pad captions.

    With `looked_up` it looks lengths up in a set.
    """

    def __init__(self, looked_up: bool = False) -> None:
        super().__init__()
        self.looked_up = looked_up

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        lengths = [t.shape[1] for t in (x, y)]
        if mask is not None:
            lengths += [lengths[0] + n for n in mask.sum(1).tolist()]
        several = len(set(lengths)) > 1 if self.looked_up else max(lengths) > min(lengths)
        rows = [torch.cat([t, t.new_zeros(len(t), max(lengths) - t.shape[1], 8)], 1) if several else t for t in (x, y)]
        return self.up(torch.cat(rows))


def rows(*lengths: int) -> list[Tensor]:
    return [torch.randn(3, n, 8, generator=torch.Generator().manual_seed(n)) for n in lengths]


def test_lengths_that_are_compared_are_a_condition_of_every_call():
    model, (x, y) = Padded(), rows(4, 4)
    masks = [torch.tensor([[0, 0], ones, [0, 0]]) for ones in ([0, 0], [0, 1], [1, 1], [1, 0])]
    sharded: Any = autotp.compile(model, 1, example_inputs=(x, y, masks[0]))
    for mask in masks:
        assert torch.equal(sharded(x, y, mask), model(x, y, mask)), mask


def test_a_number_of_the_data_that_is_looked_up_is_refused_with_the_way_out():
    model, (x, y) = Padded(looked_up=True), rows(4, 5)
    assert torch.equal(autotp.compile(model, 1, example_inputs=(x, y))(x, y), model(x, y))
    with pytest.raises(CaptureError, match=r"(?s)several = .*values of a tensor.*max\(numbers\).*argument"):
        autotp.plan(model, 2, example_inputs=(x, y, torch.ones(3, 2, dtype=torch.int64)))


class Spare(Net):
    """Most of its weights are not used by this call."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.spare = nn.Linear(8, 8), nn.Linear(512, 512)

    def forward(self, x: Tensor, everything: bool = False) -> Tensor:
        return self.down(self.up(x).relu()) + (self.spare.weight.sum() if everything else 0)


def test_weights_that_are_not_used_are_held_in_parts_and_leave_no_room_for_whole_ones():
    totals = autotp.plan(Spare(), 2, example_inputs=X).totals
    assert totals.local_flops <= 0.5 * totals.flops
    assert totals.local_parameters <= 0.51 * totals.parameters
