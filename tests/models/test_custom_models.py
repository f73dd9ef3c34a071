"""Models with operators of their own: split by a user's rule, whole without one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.errors import PlanError
from tests.helpers.modules import custom_ops
from tests.helpers.modules.custom_ops import PROJECT, Projected, Turned, example, project, registered, turn


def test_without_a_rule_the_operator_is_blamed():
    plan = autotp.plan(Projected(), 2, example_inputs=example())
    assert [p.reason for p in plan.parameters if p.name in ("w", "bias")] == [
        "autotp_tests.project has no rule, so it runs whole"
    ] * 2
    assert any("autotp_tests.project" in note and "register_rule" in note for note in plan.notes)
    assert "autotp_tests.project has no rule, so it runs whole" in plan.report()


def test_an_operator_that_keeps_no_parameter_whole_is_noted():
    model = Turned().eval()
    plan = autotp.plan(model, 2, example_inputs=example())
    assert plan.placements["up.weight"] != plan.placements["down.bias"]  # split all the same
    assert "operators without a rule run whole: autotp_tests.turn" in plan.report()
    with registered(turn, rule="..._->..._", linear="x"):
        assert "without a rule" not in str(autotp.plan(model, 2, example_inputs=example()))


def test_with_a_rule_it_is_split():
    with registered():
        report = autotp.verify(Projected(), 2, example())
    assert report and report.plan is not None and not report.plan.notes
    roles = {p.name: p.role for p in report.plan.parameters}
    assert roles["w"] == roles["bias"] == "column-parallel" and roles["down.weight"] == "row-parallel"


def test_a_wrong_rule_is_noticed_in_the_model():
    with registered(rule="...k,nk,n->...n"):
        report = autotp.verify(Projected(16, 16), 2, example())
    assert not report and report.difference is not None and "project" in report.difference.op


@pytest.mark.parametrize("options", [None, {"rule": "..._->..._", "linear": "x"}], ids=["whole", "split"])
def test_an_operator_without_a_derivative_is_verified_forward(options):
    with registered(turn, **options) if options else contextlib.nullcontext():
        report = autotp.verify(Turned().eval(), 2, example())
    assert report and "no gradients, for the original has none" in str(report)
    assert "no autograd formula was registered" in report.forward_only


def test_a_plan_is_not_used_without_its_rules(tmp_path):
    torch.manual_seed(0)
    model = Projected()
    with registered():
        autotp.plan(model, 2, example_inputs=example()).save(tmp_path / "plan.json")
    plan = autotp.Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"splits autotp_tests.project by a rule that is not known here"):
        autotp.verify(model, 2, example(), plan=plan)


def on_one_rank_only(rank: int, world: int, group: Any) -> str:
    """What a rank is told where only the first has the rule."""
    torch.manual_seed(0)
    model, x = Projected(), example()
    with registered() if rank == 0 else contextlib.nullcontext(), pytest.raises(autotp.AutoTPError) as caught:
        autotp.compile(model, example_inputs=x, mesh=DeviceMesh.from_group(group, "cpu"))
    return str(caught.value)


def test_a_rule_that_only_one_rank_has_is_an_error_on_all(pool):
    told = pool.run(on_one_rank_only, world=2)
    assert all("splits autotp_tests.project by a rule that is not known here" in text for text in told), told


def on_ranks(rank: int, world: int, group: Any, name: str, options: dict[str, Any] | None) -> tuple[float, float]:
    """Largest differences of output and gradients, and whether the first parameter is split."""
    torch.manual_seed(0)
    model: nn.Module = getattr(custom_ops, name)()
    x = example()
    with registered(turn if name == "Turned" else project, **options) if options else contextlib.nullcontext():
        sharded: Any = autotp.compile(model, example_inputs=x, mesh=DeviceMesh.from_group(group, "cpu"))
        y, wanted = sharded(x), model(x)
    error = (y - wanted).abs().max().item()
    if name == "Projected":
        y.square().sum().backward()
        wanted.square().sum().backward()
        found = sharded.full_grad_dict()
        error = max([error, *((found[n] - p.grad).abs().max().item() for n, p in model.named_parameters())])
    held = sum(p.to_local().numel() for p in sharded.parameters())
    return error, held / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("Projected", None, 0.8),
        ("Projected", PROJECT, 0.55),
        ("Turned", None, 0.55),
        ("Turned", {"rule": "..._->..._", "linear": "x"}, 0.55),
    ],
    ids=["whole", "split", "no derivative, whole", "no derivative, split"],
)
def test_on_ranks(pool, name, options, share):
    for error, held in pool.run(on_ranks, name, options, world=2):
        assert error < 1e-4
        assert held < share
