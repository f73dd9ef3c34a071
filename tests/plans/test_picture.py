"""The picture of README.md is what its command draws, and shows what the plan says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import torch
import transformers
from typer.testing import CliRunner

from autotp.cli import app
from tests.helpers.models import planned

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.23.")


def test_the_readmes_picture_is_what_its_command_draws(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = "autotp plan llama-3-8b --tp 8 --svg llama-3-8b.svg"
    assert f"`{command}`" in readme and "(docs/assets/llama-3-8b.svg)" in readme
    words = [*command.split()[1:-1], str(tmp_path / "out.svg")]
    assert CliRunner().invoke(app, words).exit_code == 0
    if PINNED:
        kept = (ROOT / "docs/assets/llama-3-8b.svg").read_text(encoding="utf-8")
        assert (tmp_path / "out.svg").read_text(encoding="utf-8") == kept


def test_it_shows_every_matrix_whole_and_as_rank_0_holds_it(tmp_path):
    plan = planned("llama", 4)[0]
    plan.to_svg(tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "part"]
    texts = [{t.text for t in g.iter(f"{SVG}text")} for g in groups]
    assert len(groups) >= 4
    for p in plan.parameters:
        if len(p.shape) > 1:
            own, whole = " x ".join(map(str, p.local)), " x ".join(map(str, p.shape))
            name = p.name.removesuffix(".weight").rpartition(".")[2]
            assert any({own, whole, p.role} <= t and t & {name, "weight"} for t in texts), p.name
