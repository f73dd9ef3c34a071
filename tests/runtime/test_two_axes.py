"""Batch over dp and weights over tp, on one mesh: outputs, losses and gradients are those of one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autotp
from autotp import compat
from autotp.capture.rank0 import pack, unpack
from autotp.capture.request import CaptureRequest
from autotp.comm import conversions
from autotp.driver.compile import capture_model
from autotp.errors import InputError, PlanError, StateError
from autotp.passes.shard import batch_axis
from autotp.passes.shard.batch_axis import BatchRules
from autotp.passes.shard.deal import DealAxis
from autotp.runtime import data_parallel
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.errors import message_of
from tests.helpers.modules.two_axes import DP, ESM, TP, Contrastive, model_of, slice_of


def two_axes(rank: int, world: int, group: Any, name: str, split: bool) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mine, (model, whole) = mesh["dp"].get_local_rank(), model_of(name)
    inputs = slice_of(whole, mine)
    sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=inputs)
    found, wanted = sharded(**inputs), model(**whole)
    scores, all_scores = (found[1], wanted[1]) if name == "contrastive" else (found["logits"], wanted["logits"])
    losses = [out[0] if out[0].ndim == 0 else out[0].square().mean() for out in (found, wanted)]
    inside = found[0].ndim == 0  # else each rank has the mean of its own slice
    for loss in losses:
        loss.backward()
    return {
        "loss": difference(losses[0], losses[1]) if inside else 0.0,
        "scores": difference(scores, all_scores.chunk(DP)[mine].clone()),
        "gradients": gradients_differ(sharded, model),
        "part": sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters()),
        "state": max(difference(t, model.state_dict()[n]) for n, t in sharded.full_state_dict().items()),
    }


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
@pytest.mark.parametrize("name", ["llama", "bert", "esm", "contrastive", "mpt"])
def test_outputs_losses_and_gradients_are_those_of_one_device(pool, name, split):
    close = 1e-5 if name in ("llama", "mpt") else 1e-10  # transformers takes the loss of a decoder in float32
    for found in pool.run(two_axes, name, split):
        assert max(found["loss"], found["scores"], found["gradients"]) < close, found
        assert found["state"] == 0.0 and found["part"] < (0.3 if split else 0.56), found


def filled(rank: int, world: int, group: Any) -> dict[str, float]:
    """A model without weights, which come after its first capture; its scalar is averaged over dp by a hook."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mine, (model, whole) = mesh["dp"].get_local_rank(), model_of("contrastive")
    inputs = slice_of(whole, mine)
    sharded: Any = autotp.compile(copy.deepcopy(model).to("meta"), dp=DP, mesh=mesh, example_inputs=inputs)
    sharded.load_state_dict(model.state_dict())
    for loss in (sharded(**inputs)[0], model(**whole)[0]):
        loss.backward()
    return {"gradients": gradients_differ(sharded, model)}


def test_weights_that_come_after_the_capture_are_averaged_too(pool):
    for found in pool.run(filled):
        assert found["gradients"] < 1e-10, found


def unscaled(rank: int, world: int, group: Any) -> dict[str, float]:
    with patch.object(batch_axis, "scale_gradient", lambda x, factor: x):
        return two_axes(rank, world, group, "bert", False)


def test_a_loss_over_all_ranks_has_the_sum_of_their_gradients(pool):
    """The negative control: without `scale_gradient` the gradients are half of what they should be."""
    for found in pool.run(unscaled):
        assert found["loss"] < 1e-10 and found["gradients"] > 0.4, found


def accumulating(rank: int, world: int, group: Any, split: bool) -> dict[str, Any]:
    """Two micro-batches, the first without a sum over dp; then the plan from a file, and no second wrapping."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mine, (model, whole) = mesh["dp"].get_local_rank(), model_of("esm")
    other = {"input_ids": whole["input_ids"].flip(1)}
    sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=slice_of(whole, mine))
    sent: list[Any] = []
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced, sharded.no_sync():
        sharded(**slice_of(whole, mine)).logits.square().mean().backward()
        sent.append(reduced.call_count)
    sharded(**slice_of(other, mine)).logits.square().mean().backward()
    for inputs in (whole, other):
        model(**inputs).logits.square().mean().backward()
    found: dict[str, Any] = {"gradients": gradients_differ(sharded, model), "sent": sent[0]}
    inputs = slice_of(whole, mine)
    graded = [n for n, p in sharded.named_parameters() if p.grad is not None]
    with torch.no_grad():
        sharded(**inputs)
    found["hidden"] = set(graded) - {n for n, p in sharded.named_parameters() if p.grad is not None}
    sharded(**inputs)  # no backward yet
    found["later"] = gradients_differ(sharded, model) if graded else 1.0
    again: Any = autotp.compile(copy.deepcopy(model), plan=sharded.plan, mesh=mesh, example_inputs=inputs)
    found["again"] = difference(again(**inputs).logits, sharded(**inputs).logits)
    longer = torch.randint(4, 30, (2, 20), generator=torch.Generator().manual_seed(mine))
    try:
        fully_shard(again.esm.encoder.layer[0].attention, mesh=mesh["dp"])
        again(longer)
    except (StateError, RuntimeError) as error:
        found["refused"] = str(error)
    return found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_gradients_accumulate_without_a_sum_over_dp(pool, split):
    for found in pool.run(accumulating, split):
        assert found["gradients"] < 1e-10 and found["again"] < 1e-12 and found["sent"] == 0, found
        assert not found["hidden"] and found["later"] < 1e-10, "an evaluation before the step hides gradients"
        assert "Leave out dp, or the wrapping; fully_shard=True splits" in found["refused"], found


def between(rank: int, world: int, group: Any, split: bool, anew: bool) -> dict[str, float]:
    """What is read and written after a forward that has no backward yet, or gets none; on one device likewise."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mine, (model, whole) = mesh["dp"].get_local_rank(), model_of("esm")
    inputs, found = slice_of(whole, mine), {}
    with nullcontext() if anew else patch.object(data_parallel, "own_after", lambda shards: nullcontext()):
        sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=inputs)
        steps = []
        for module, given in ((sharded, inputs), (model, whole)):
            module(**given)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):  # the gradients of the first are dropped between the forward and backward of the second
                loss = module(**given).logits.square().mean()
                module.zero_grad()
                loss.backward()
            steps.append(optimizer.step)
        found["gradients"] = gradients_differ(sharded, model)
        sharded(**inputs)
        norms = sharded.clip_grad_norm_(1e9), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        found["norm"] = abs(float(norms[0]) - float(norms[1])) / float(norms[1])
        for step in steps:
            step()
        scores = model(**whole).logits
        found["scores"] = difference(sharded(**inputs).logits, scores.chunk(DP)[mine].clone())
        return found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_after_a_forward_a_module_has_its_own_parameters(pool, split):
    for found in pool.run(between, split, True):
        assert max(found.values()) < 1e-10, found
    for found in pool.run(between, split, False):
        assert min(found["gradients"], found["norm"], found["scores"]) > 1e-3, found  # the control


ORDERS: dict[str, Callable[[Any, list[Tensor]], Any]] = {  # of the backwards of two forwards
    "at once": lambda module, losses: torch.stack(losses).sum().backward(),
    "one by one": lambda module, losses: [x.backward() for x in losses],
    "last first": lambda module, losses: [x.backward() for x in losses[::-1]],
    "the first alone": lambda module, losses: losses[0].backward(),
    "after a reading": lambda module, losses: [module.state_dict(), losses[1].backward()],
}


def two_linears() -> tuple[DeviceMesh, nn.Module, Tensor, Tensor]:
    """The mesh, a model, two inputs of it, and this rank's part of both."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    whole = torch.randn(2, 4, 8).double()
    return mesh, model, whole, whole.chunk(DP, dim=1)[mesh["dp"].get_local_rank()]


def in_order(rank: int, world: int, group: Any, split: bool) -> dict[str, float]:
    """How far gradients are from one device's, by order."""
    (mesh, model, whole, mine), found = two_linears(), {}
    for order, backwards in ORDERS.items():
        copied = copy.deepcopy(model)
        sharded: Any = autotp.compile(copied, dp=DP, mesh=mesh, fully_shard=split, example_inputs=mine[0])
        for module, (first, second) in ((sharded, mine), (copied, whole)):
            backwards(module, [module(first).square().mean(), module(second).pow(3).mean()])
        found[order] = gradients_differ(sharded, copied)
    return found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_forwards_and_backwards_come_in_any_order(pool, split):
    for found in pool.run(in_order, split):
        assert max(found.values()) < 1e-10, found


DROPS: dict[str, Callable[[Any, Any], Any]] = {  # amid an accumulation, by the module or its optimizer
    "an optimizer's": lambda module, optimizer: optimizer.zero_grad(),
    "to zeros": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    "a module's": lambda module, optimizer: module.zero_grad(),
    "before a step": lambda module, optimizer: (optimizer.zero_grad(), optimizer.step()),
    "of one": lambda module, optimizer: setattr(next(iter(module.parameters())), "grad", None),
    "none": lambda module, optimizer: None,
}


def dropping(rank: int, world: int, group: Any, split: bool, heeded: bool) -> dict[str, float]:
    """How far gradients are from one device's where those that wait for their sum were dropped, by how and when."""
    (mesh, model, whole, mine), found = two_linears(), {}
    with nullcontext() if heeded else patch.object(compat, "drop_unmarked", lambda part: False):
        sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=mine[0])
        both: list[tuple[Any, Any]] = [(sharded, mine), (model, whole)]
        rows = [(module, torch.optim.SGD(module.parameters(), lr=0.1), given) for module, given in both]
        for name, before, early in itertools.product(DROPS, (False, True), (False, True)):
            if not heeded and name == "before a step":  # which is refused then
                continue
            for module, optimizer, (first, second) in rows:
                module.zero_grad()
                if before:  # a gradient that is summed stands beside what waits
                    module(second).pow(3).mean().backward()
                with module.no_sync() if module is sharded else nullcontext():
                    module(first).square().mean().backward()
                if early:
                    DROPS[name](module, optimizer)
                loss = module(second).pow(4).mean()
                if not early:
                    DROPS[name](module, optimizer)
                loss.backward()
            found[f"{name}, {before=}, {early=}"] = gradients_differ(sharded, model)
    return found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_gradients_dropped_amid_an_accumulation_are_gone(pool, split):
    for found in pool.run(dropping, split, True):
        assert max(found.values()) < 1e-10, found
    for found in pool.run(dropping, split, False):  # the control
        assert min(x for name, x in found.items() if "none" not in name) > 1e-3, found


EARLY: dict[str, tuple[Callable[[Any, Any], Any], str]] = {  # amid an accumulation -> what is said of it
    "step": (lambda module, optimizer: optimizer.step(), "a step of an optimizer after backwards in no_sync() alone"),
    "clip": (lambda module, optimizer: module.clip_grad_norm_(1.0), "clip_grad_norm_() after backwards in no_sync()"),
    "read": (lambda module, optimizer: module.full_grad_dict(), "full_grad_dict() after backwards in no_sync() alone"),
    "replan": (lambda module, optimizer: module.replan(tp=TP, dp=DP), "replan() after backwards in no_sync() alone"),
}


def early(rank: int, world: int, group: Any, split: bool) -> tuple[dict[str, str], str, float]:
    """What is said amid an accumulation, and of a backward after gradients were scaled there; gradients thereafter."""
    mesh, model, (_, whole), (_, mine) = two_linears()
    sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=mine)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(mine).square().mean().backward()
    with sharded.no_sync():
        sharded(mine).square().mean().backward()
    said = {name: message_of(lambda do=do: do(sharded, optimizer)) for name, (do, _) in EARLY.items()}
    torch.ops.aten._foreach_mul_([p.grad for p in sharded.parameters()], 0.5)
    scaled = message_of(sharded(mine).square().mean().backward)
    optimizer.zero_grad()
    for module, given in ((sharded, mine), (model, whole)):
        module(given).square().mean().backward()
    found = gradients_differ(sharded, model)
    optimizer.step()
    return said, scaled, found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_what_needs_whole_gradients_is_refused_amid_an_accumulation(pool, split):
    for said, scaled, gradients in pool.run(early, split):
        assert all(wanted in said[name] for name, (_, wanted) in EARLY.items()), said
        assert "gradients were changed in place while others" in scaled and gradients < 1e-10, scaled


def recomputed(rank: int, world: int, group: Any, split: bool) -> float | str:
    """How far gradients are from one device's where the whole module is recomputed, or why it is refused."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    mine, (model, whole) = mesh["dp"].get_local_rank(), model_of("esm")
    inputs = slice_of(whole, mine)
    sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, fully_shard=split, example_inputs=inputs)

    def train() -> None:
        for module, given in ((sharded, inputs), (model, whole)):
            checkpoint(module, given["input_ids"], use_reentrant=False).logits.square().mean().backward()

    return message_of(train) or gradients_differ(sharded, model)


def test_recomputation_of_a_module_over_dp_is_right_or_refused(pool):
    assert max(pool.run(recomputed, False)) < 1e-10
    assert all("Take use_reentrant=True" in said for said in pool.run(recomputed, True))


def refusing(rank: int, world: int, group: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    model, whole = model_of("esm")
    plan = autotp.plan(model, TP, example_inputs=whole)
    told = []
    asked: list[dict[str, Any]] = [
        {"dp": 4, "mesh": mesh},
        {"dp": 3},
        {"dp": 2, "mesh": DeviceMesh("cpu", list(range(4)), mesh_dim_names=("tp",))},
        {"dp": 2, "mesh": mesh, "plan": plan},
        {"dp": 0},
        {"fully_shard": True},
        {"dp": 2, "tp": "auto"},
    ]
    for each in asked:
        try:
            autotp.compile(model, example_inputs=whole, **each)
        except (InputError, PlanError) as error:
            told.append(f"{type(error).__name__} {error}")
    try:
        autotp.compile(Contrastive(), dp=2, mesh=mesh)
    except InputError as error:
        told.append(str(error))
    return told


def test_what_does_not_fit_is_refused_on_every_rank(pool):
    for told in pool.run(refusing):
        for text, words in zip(
            told,
            ["dimension 'dp' of that size", "make up the world of 4", "none", "the plan is for dp=1", "at least 1",
             "give dp", "Give tp as a number", "needs example_inputs"],
            strict=True,
        ):  # fmt: skip
            assert words in text


def test_a_plan_over_two_axes_prices_both():
    model, whole = model_of("bert")
    plan = autotp.plan(model, TP, dp=DP, example_inputs=whole)
    split = autotp.plan(model, TP, dp=DP, fully_shard=True, example_inputs=whole)
    alone = autotp.plan(model, TP, example_inputs=whole)
    held = sum(torch.tensor(p.local).prod().item() for p in plan.parameters) * 8
    assert plan.batch.sent == pytest.approx(held)  # an all-reduce over two ranks sends the value once
    assert split.batch.sent == pytest.approx(1.5 * held)  # two gathers and a reduce-scatter: half of it each
    assert split.memory.states == pytest.approx(plan.memory.states / 2)
    assert split.totals.local_parameters == pytest.approx(plan.totals.local_parameters / 2, abs=1)
    assert plan.placements == alone.placements and alone.batch.size == 1
    assert "2 x 2 ranks (dp x tp)" in plan.report() and "over dp=2" in plan.report() and "over dp" not in alone.report()
    assert autotp.Plan.from_json(split.to_json()).batch == split.batch


def test_the_program_over_dp_is_sent_to_the_other_ranks():
    model, whole = model_of("bert")
    given = autotp.Inputs(**whole), torch.device("cpu"), False, CaptureRequest(dp=DP)
    program = capture_model(model, *given)[0]
    assert any(node.target in conversions.FUNCTIONS.values() for node in program.graph.nodes)
    assert unpack(pack(program), torch.device("cpu")).digest() == program.digest()


def test_esm2_15b_over_eight_ranks():
    """ESM-2's largest shape (Lin et al. 2023): 48 layers, hidden 5120, 40 heads."""
    shape = {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "intermediate_size": 20480}
    with torch.device("meta"):
        model = transformers.EsmForMaskedLM(transformers.EsmConfig(**{**ESM, **shape})).bfloat16().eval()
    ids = torch.zeros(4, 1024, dtype=torch.long)
    plan = autotp.plan(model, 4, dp=2, example_inputs={"input_ids": ids})
    assert 15.0e9 < plan.totals.parameters < 15.3e9 and plan.totals.local_parameters < 0.26 * plan.totals.parameters
    shares = {part.name: part.share for part in plan.sublayers}
    assert 0.01 < shares["attention"] < 0.6 and 0.01 < shares["feed-forward"] < 0.6
    assert 0 < plan.batch.seconds < plan.batch.backward  # it can hide there
    assert all(name in plan.report() for name in shares)


def captured(model: nn.Module, *inputs: Tensor) -> Any:
    return capture_model(model, autotp.Inputs(*inputs), torch.device("cpu"))[0]


def test_what_mixes_examples_is_gathered_and_said():
    model, whole = model_of("contrastive")
    plan = autotp.plan(model, TP, dp=DP, example_inputs=whole)
    assert any("mixes examples" in note for note in plan.notes)
    apart = autotp.plan(nn.Linear(16, 32), TP, dp=DP, example_inputs=torch.randn(4, 16))
    assert not any("mixes examples" in note for note in apart.notes)


def last_by(numbers: Any) -> type[nn.Module]:
    """A module that reads a token of each example, by the numbers of rows that a function of the batch's gives."""

    class Last(nn.Linear):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:  # type: ignore[override]
            rows, y = numbers(torch.arange(x.shape[0]), at), super().forward(x)
            return y.clone().index_put((rows, at), y[rows, 0])[rows, at]

    return Last


@pytest.mark.parametrize(
    ("numbers", "mixes"),
    [
        (lambda rows, at: rows, False),
        (lambda rows, at: rows[:, None].expand(-1, 3), False),
        (lambda rows, at: rows + 0, False),
        (lambda rows, at: rows - 1, True),
        (lambda rows, at: rows.flip(0), True),
        (lambda rows, at: rows * 0, True),
    ],
)
def test_a_lookup_in_each_examples_own_rows_is_its_own(numbers, mixes):
    """What is read by the number of the example needs no other example; by any other number it may."""
    x, at = torch.randn(4, 5, 16), torch.tensor([0, 4, 2, 2])
    wide = numbers(torch.arange(4), at).ndim
    at = at if wide == 1 else at[:, None].expand(-1, 4 if mixes else 3)
    report = autotp.verify(last_by(numbers)(16, 16), TP, (x, at.contiguous()), dp=DP)
    assert report.ok, report
    plan = autotp.plan(last_by(numbers)(16, 16), TP, dp=DP, example_inputs=(x, at.contiguous()))
    assert any("mixes examples" in note for note in plan.notes) == mixes


def test_the_number_of_an_example_may_say_a_column_too():
    class Column(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            rows = torch.arange(x.shape[0])
            return super().forward(x)[rows, rows] + super().forward(x)[rows, rows + 1]

    report = autotp.verify(Column(16, 16), TP, (torch.randn(4, 8, 16),), dp=DP)
    assert report, report


def test_a_batch_of_a_fixed_size_is_refused():
    class Fixed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).view(4, -1)

    with pytest.raises(autotp.AutoTPError, match="first dimension of the first input"):
        autotp.plan(Fixed(16, 32), TP, dp=DP, example_inputs=torch.randn(4, 16))

    class Half(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + torch.cat(torch.unbind(y.view(4, -1)))[: self.out_features]

    with pytest.raises(autotp.AutoTPError, match="of the input 'y' alone"):
        autotp.plan(Half(16, 32), TP, dp=DP, example_inputs=(torch.randn(4, 16), torch.randn(4, 16)))
    one = autotp.plan(nn.Linear(16, 32), TP, dp=DP, example_inputs=torch.randn(1, 16))  # of one example: any size
    assert one.batch.size == DP


def test_one_rank_on_the_batch_axis_changes_nothing():
    program = captured(nn.Linear(4, 4), torch.randn(2, 4))
    assert DealAxis(BatchRules, 1).idle(program) == "dp=1" and not DealAxis(BatchRules, 2).idle(program)


def dropped(rank: int, world: int, group: Any) -> Tensor:
    """The scores of one slice that all dp ranks pass, with live dropout."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = transformers.EsmForMaskedLM(transformers.EsmConfig(**{**ESM, "hidden_dropout_prob": 0.3})).train()
    ids = torch.randint(4, 30, (2, 12))
    sharded: Any = autotp.compile(model, dp=DP, mesh=mesh, example_inputs={"input_ids": ids})
    assert not any("mixes examples" in note for note in sharded.plan.notes)
    layer = sharded.esm.encoder.layer[0]
    assert [type(each).__name__ for each in (sharded, layer)] == ["EsmForMaskedLM", "EsmLayer"]  # Trainer asks for it
    return sharded(ids).logits.detach()


def test_every_slice_has_masks_of_its_own(pool):
    scores = pool.run(dropped)
    assert difference(scores[1], scores[0]) < 1e-5 and difference(scores[3], scores[2]) < 1e-5  # of one tp group
    assert difference(scores[2], scores[0]) > 1e-2
