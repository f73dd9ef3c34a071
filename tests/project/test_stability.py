"""docs/api.md's "What is stable": public names and their arguments, formats of plans and checkpoints that are read."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.errors import PlanError
from autotp.plans.saved import FORMAT

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests/golden/saved"  # what versions wrote, never rewritten: a later one adds its own


def model() -> nn.Module:
    """The model whose plan and checkpoint versions wrote."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def sharded() -> Any:
    return autotp.compile(model(), 1, example_inputs=torch.randn(2, 8))


def signature(value: Any) -> str:
    """The arguments of a function or a class, their order, kinds and defaults, without types."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    words = []
    for p in inspect.signature(value).parameters.values():
        default = "" if p.default is p.empty else "=..." if callable(p.default) else f"={p.default!r}"
        words.append(f"{p.kind.name.lower()} {p.name}{default}")
    return ", ".join(words)


def public() -> str:
    """Every public name with its arguments, and of classes the public methods with theirs."""
    lines = []
    for name in sorted(n for n in autotp.__all__ if not n.startswith("__")):
        value = getattr(autotp, name)
        lines.append(f"{name}: {signature(value)}")
        for member, function in sorted(vars(value).items()) if inspect.isclass(value) else ():
            if not member.startswith("_") and isinstance(function, FunctionType | classmethod | staticmethod):
                lines.append(f"{name}.{member}: {signature(getattr(value, member))}")
    return "\n".join(lines)


def test_public_names_keep_their_arguments(golden):
    """A name or argument that goes is refused by name for one minor version: change the file with the refusal."""
    golden("public-names", public())
    assert "plan: positional_or_keyword model, positional_or_keyword tp" in public()


def test_the_version_stands_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", autotp.__version__)
    assert f"\nversion: {autotp.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    dated = [line for line in lines if line.startswith("## ")]
    assert re.fullmatch(rf"## {re.escape(autotp.__version__)} - \d{{4}}-\d\d-\d\d", dated[0]) and len(lines) <= 20


def test_the_plan_of_this_format_is_read():
    kept = (KEPT / f"plan-format-{FORMAT}.json").read_text(encoding="utf-8")
    plan = autotp.Plan.from_json(kept)
    assert plan.tp == 2 and plan.parameters[0].local == (8, 8)
    assert autotp.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_with_the_command(number):
    data = json.loads((KEPT / f"plan-format-{FORMAT}.json").read_text(encoding="utf-8"))
    with pytest.raises(PlanError, match=rf"format {number}, .*reads format {FORMAT}. Plan again with autotp.plan"):
        autotp.Plan.from_json(json.dumps({**data, "format": number}))


@pytest.mark.parametrize("name", sorted(p.name for p in KEPT.glob("checkpoint-*")))
def test_a_checkpoint_that_a_version_wrote_is_read(name):
    module = sharded()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    module.load_checkpoint(KEPT / name)
    assert {k: v.tolist() for k, v in module.full_state_dict().items()} == values()
    assert not torch.equal(module.full_state_dict()["0.weight"], torch.zeros(16, 8))


def values() -> dict[str, Any]:
    """What they hold: small numbers that no random number generator decides."""
    shapes = {name: p.shape for name, p in model().named_parameters()}
    return {name: torch.arange(float(s.numel())).view(s).tolist() for name, s in shapes.items()}


def write() -> None:
    """Write this version's own, once: python -c 'from tests.project.test_stability import write; write()'."""
    module = sharded()
    module.load_state_dict({name: torch.tensor(x) for name, x in values().items()})
    for form in ("dcp", "huggingface"):
        module.save_checkpoint(KEPT / f"checkpoint-{autotp.__version__}-{form}", format=form)
    autotp.plan(model(), 2, example_inputs=torch.randn(2, 8)).save(KEPT / f"plan-format-{FORMAT}.json")
