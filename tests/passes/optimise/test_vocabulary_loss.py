"""A loss over a vocabulary without the scores: classes dealt out, a few numbers an example sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import InputError
from autotp.ir.graph import Capture
from autotp.passes.base import run_passes
from autotp.passes.decompose.loss_sums import DecomposeLosses
from autotp.rules import losses as rule
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, transformer
from tests.helpers.modules.heads import CLASSES, COLUMNS, EXAMPLES, WIDTH, Head, captured, values

IGNORED = -100
WEIGHT = torch.linspace(0.5, 2, CLASSES)
SMOOTHED = {"label_smoothing": 0.1, "ignore_index": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {}, "ignored": {"ignore_index": 3}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"},
    "weights": {"weight": WEIGHT.double()}, "smoothed": SMOOTHED,
}  # fmt: skip


def example(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(classes, (EXAMPLES,), generator=generator)
    target[:3] = 3
    return torch.randn(EXAMPLES, WIDTH, generator=generator).double().requires_grad_(), target


def columns(plan: autotp.Plan) -> bool:
    """Whether the head's classes are dealt out."""
    return plan.parameters[0].role == "column-parallel"


# In so small a case one gather of the scores is cheaper than a maximum and a sum, each with its latency.


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_classes_dealt_out_give_the_same_loss_and_gradients(name, tp):
    """4000 classes over three ranks are dealt unevenly."""
    model = Head(**OPTIONS[name]).double()
    report = autotp.verify(model, tp, example(), pins=COLUMNS)
    assert report, report
    assert report.plan is not None and columns(report.plan)
    assert [c.name for c in report.plan.collectives if c.op == "autotp.class_sums"] == ["f_star"]  # sums are added up


def test_a_target_of_the_wrong_rank_is_noticed():
    """The negative control: every rank looks its targets up as if its classes were the first ones."""
    with patch.object(rule, "local_index", lambda ids, segments, rank, tp: (ids, ids < CLASSES // 2)):
        report = autotp.verify(Head().double(), 2, example(), pins=COLUMNS)
    assert not report


def apart(program: Capture) -> Capture:
    """A record of its own, with the losses taken apart."""
    made = replace(program)
    run_passes(made, (DecomposeLosses(),))
    return made


class Loss(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, target, **self.options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*OPTIONS, "probabilities", "pictures", "both"])
def test_taken_apart_it_is_the_same(name, dtype):
    """What cannot be taken apart stays as it is, and right."""
    options = OPTIONS.get(name, {"weight": WEIGHT, "label_smoothing": 0.1} if name == "both" else {})
    options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    generator = torch.Generator().manual_seed(0)
    shape = (6, CLASSES, 2) if name == "pictures" else (6, CLASSES)
    scores = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    target: Tensor = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=generator)
    target[0] = 3
    target = torch.randn(shape, generator=generator).softmax(1).to(dtype) if name == "probabilities" else target
    model = Loss(**options)
    program = captured(model, scores.detach().requires_grad_(), target)
    made = apart(program)
    assert made.graph is not program.graph and apart(made).digest() == made.digest()
    found, wanted = values(made, [scores, target], model), model(scores, target)
    gradients = [torch.autograd.grad(x.sum(), scores)[0] for x in (found, wanted)]
    close = 1e-12 if dtype == torch.float64 else 1e-2
    assert difference(found, wanted) < close and difference(gradients[0], gradients[1]) < 3 * close


def test_a_program_without_a_loss_is_left_alone():
    program = captured(nn.Linear(4, 4), torch.randn(2, 4))
    assert apart(program).graph is program.graph and DecomposeLosses().idle(program) == "no cross entropy"


def on_ranks(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Only the loss, from labels inside the model and from a function outside of it."""
    mesh, model = mesh_of(group), transformer("llama-uneven").double()
    inputs = inputs_of(model)
    labels = inputs["input_ids"].clone()
    labels[0, :4] = IGNORED
    found: dict[str, Any] = {}
    inside: Any = autotp.compile(model, mesh=mesh, outputs="loss", example_inputs={**inputs, "labels": labels})
    loss, wanted = inside(**inputs, labels=labels), model(**inputs, labels=labels).loss
    for x in (loss, wanted):
        x.backward()
    found["inside"] = difference(loss, wanted), gradients_differ(inside, model)
    model.zero_grad()

    def squared(out: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    given = {**inputs, "targets": labels}
    outside: Any = autotp.compile(model, mesh=mesh, loss=squared, outputs="loss", example_inputs=given)
    loss, wanted = outside(**given), squared(model(**inputs), labels)
    for x in (loss, wanted):
        x.backward()
    found["outside"] = difference(loss, wanted), gradients_differ(outside, model)
    found["names"] = set(outside.full_state_dict()) == set(model.state_dict())
    longer = inputs_of(model, 3, 9)
    found["longer"] = difference(
        inside(**longer, labels=longer["input_ids"]), model(**longer, labels=longer["input_ids"]).loss
    )
    try:
        autotp.compile(model, mesh=mesh, outputs="loss", example_inputs=inputs)
    except InputError as error:
        found["refused"] = str(error)
    return found


def test_only_the_loss_is_given(pool):
    for found in pool.run(on_ranks):
        assert max(*found["outside"], found["inside"][1], *found["inside"], found["longer"]) < 1e-5, found
        assert found["names"] and "labels=" in found["refused"]


class Scorer(nn.Module):
    """Tokens to scores and their loss, with nothing between that takes long to capture."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(classes, width), nn.Linear(width, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(torch.relu(self.embed(ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def test_with_the_loss_alone_scores_are_never_gathered():
    with torch.device("meta"):
        model = Scorer(32000, 64)
    ids = torch.zeros(4, 512, dtype=torch.long)
    inputs = {"ids": ids, "labels": ids}
    plans = {outputs: autotp.plan(model, 4, example_inputs=inputs, outputs=outputs) for outputs in ("full", "loss")}
    scores = ids.numel() * 32000 * 4
    gathered = {k: [c for c in plan.collectives if c.bytes >= scores / 2] for k, plan in plans.items()}
    assert gathered["full"] and not gathered["loss"]
    assert plans["loss"].memory.peak < 0.8 * plans["full"].memory.peak


def peak(rank: int, world: int, group: Any, classes: int, examples: int) -> float:
    """Bytes by which the process grows in a forward and backward of the loss."""
    torch.manual_seed(0)
    model = Head(classes, 8)
    x, target = torch.randn(examples, 8), torch.randint(classes, (examples,))
    pins = COLUMNS if world > 1 else None
    sharded: Any = autotp.compile(model, mesh=mesh_of(group), outputs="loss", example_inputs=(x, target), pins=pins)
    sharded(x[:2], target[:2]).backward()
    sharded.zero_grad()
    sharded(x[:8], target[:8]).backward()
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is now the size that it has
    before = _largest()
    sharded(x, target).backward()
    return _largest() - before


def _largest() -> float:
    """The largest resident size of this process, in bytes (Linux: proc(5))."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux tells it")
def test_memory_of_the_loss_falls_with_tp(pool):
    classes, examples = 16384, 1024
    grown = {tp: max(pool.run(peak, classes, examples, world=tp)) for tp in (1, 2, 4)}
    scores = 4 * classes * examples
    assert grown[1] > 1.5 * scores  # the scores, and at least a part of their gradient at the same time
    assert grown[2] < 1.25 * grown[1] / 2 and grown[4] < 1.25 * grown[1] / 4, grown


class Tokens(nn.Module):
    """A loss by labels, over a vocabulary that is dealt out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.options = nn.Linear(8, 24), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels, **self.options)


def out_of_bounds(rank: int, world: int, group: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    torch.manual_seed(0)
    x, good = torch.randn(6, 8), torch.arange(6)
    for name, options in (("mean", {}), ("smoothed", {"label_smoothing": 0.1}), ("none", {"reduction": "none"})):
        model = Tokens(**options)
        sharded: Any = autotp.compile(model, mesh=mesh_of(group), example_inputs=(x, good), pins=COLUMNS)
        for bad in (24, 1000, -1, -100):
            labels = good.clone()
            labels[-1] = bad
            texts = []
            for m in (model, sharded):
                try:
                    texts.append(f"{m(x, labels).sum().item():.5f}")
                except IndexError as error:
                    texts.append(str(error))
            found[name, bad] = texts
    return found


def test_a_class_out_of_bounds_is_refused_on_every_rank_as_by_the_model(pool):
    for found in pool.run(out_of_bounds, world=2):
        for (_, bad), (wanted, text) in found.items():
            assert text == wanted and ("out of bounds" in text) == (bad != IGNORED), found
