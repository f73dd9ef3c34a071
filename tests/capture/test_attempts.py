"""Attempts at a capture: how often a model is traced before it is captured or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.capture.attempts import ATTEMPTS
from autotp.capture.export import Attempt
from autotp.driver.compile import capture_model
from autotp.errors import CaptureError
from autotp.inputs import normalise

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Detector(nn.Module):
    """Scores and boxes for places of a picture, of which non-maximum suppression keeps as many as there are."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(4)))
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        found = self.head(self.blocks(self.stem(images))).flatten(2).transpose(1, 2)
        return [self.kept(*one.split((1, 4), -1)) for one in found]

    def kept(self, scores: Tensor, boxes: Tensor) -> Tensor:
        best, places = scores.sigmoid()[:, 0].topk(min(12, len(scores)))
        likely = torch.where(best > 0.4)[0]
        boxes = boxes[places[likely]]
        if boxes.numel() == 0:
            return boxes
        order, chosen = best[likely].argsort(descending=True), []
        while order.numel() > 0:
            chosen.append(order[0])
            near = F.pairwise_distance(boxes[order[:1]], boxes[order[1:]]) < 0.5
            order = order[1:][~near]
        return boxes[torch.stack(chosen)]


class Padded(nn.Linear):
    """Asks whether there is padding."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * 2 if (x[:, 0] > 9).any() else super().forward(x)


class Counts(nn.Linear):
    """Makes a tensor of a size, and a number of that: without data, so with fixed sizes it is known."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = torch.tensor(x.shape[0]).item()
        return super().forward(x) * (2 if rows > 3 else 1)


class Dropped(nn.Linear):
    """Leaves the layer out at random."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x if torch.rand(()) < 0.5 else super().forward(x)


@pytest.fixture
def made(monkeypatch):
    """What was exported: with fixed sizes, as a draft, with equal blocks traced once."""
    found: list[tuple[bool, bool, bool]] = []
    own = Attempt.run

    def run(self: Attempt) -> Any:
        found.append((not self.symbolic, self.draft, self.repeats is not None))
        return own(self)

    monkeypatch.setattr(Attempt, "run", run)
    return found


def captured(model: nn.Module, x: Tensor) -> Any:
    return capture_model(model, normalise(x), torch.device("cpu"))[0]


ONCE, FIXED, DRAFT, FIXED_DRAFT = (False, False, True), (True, False, True), (False, True, False), (True, True, False)


def test_a_decision_on_values_is_not_traced_again_with_every_block(made):
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=r"if boxes.numel\(\) == 0") as caught:
        captured(Detector(), torch.randn(2, 3, 12, 12))
    assert made == [ONCE, FIXED, DRAFT, FIXED_DRAFT]
    assert "depends on the value of a tensor" in str(caught.value)


def test_a_branch_that_fixed_sizes_leave_open_is_drafted(made):
    program = captured(Padded(6, 6), X)
    assert program.conditions is not None
    assert made == [ONCE, FIXED, DRAFT]


def test_a_number_that_sizes_make_is_known_with_fixed_sizes(made):
    notes = " ".join(captured(Counts(6, 6), X).notes)
    assert "one batch size and length only" in notes
    assert made == [ONCE, FIXED]


def test_a_branch_on_random_numbers_is_refused(made):
    with pytest.raises(autotp.AutoTPError, match=r"torch.rand\(\(\)\) < 0.5"):
        captured(Dropped(6, 6), X)


def test_the_table_has_every_attempt_once():
    names = [tuple(change.name for change in changes) for changes in ATTEMPTS]
    assert len(set(names)) == len(names) and names[0] == ()
