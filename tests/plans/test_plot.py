"""Sweeps as curves: every row is a point, where its value is, and the drawing needs nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers
from typer.testing import CliRunner

from autotp.cli import app
from autotp.errors import InputError
from autotp.plans.choices import Sweep
from autotp.plans.estimates import Degree
from autotp.plans.show.svg import ticks
from tests.helpers.models import planned

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def swept(factor: float, tps: tuple[int, ...] = (1, 2, 4, 8)) -> Sweep:
    """Figures that no other row has."""
    rows = [
        Degree(tp, factor / tp, 0.01 * factor * (tp - 1), 1e6, factor * 60 * GIB / tp, True, 1.0, "tokens", 1)
        for tp in tps
    ]
    return Sweep("Net", "h100", "training", "adamw", 4, 40 * GIB, tuple(rows))


def drawn(tmp_path, with_sp: Sweep, without_sp: Sweep | None = None) -> ElementTree.Element:
    with_sp.to_svg(tmp_path / "out.svg", without_sp)
    return ElementTree.parse(tmp_path / "out.svg").getroot()


def points(panel: ElementTree.Element, kind: str) -> list[tuple[float, float, str]]:
    found = [c for c in panel.iter(f"{SVG}circle") if c.get("class") == kind]
    return [(float(c.get("cx", "")), float(c.get("cy", "")), c.findtext(f"{SVG}title", "")) for c in found]


def panels(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [g for g in root.iter(f"{SVG}g") if g.get("class") == "panel"]


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]


def test_every_degree_is_a_point_in_every_panel(tmp_path):
    root = drawn(tmp_path, swept(1.0), swept(1.5))
    assert [p.findtext(f"{SVG}text") for p in panels(root)] == ["step", "memory per rank", "exposed communication"]
    for panel in panels(root):
        for kind in ("with", "without"):
            found = points(panel, kind)
            assert len(found) == 4 and [x for x, _, _ in found] == sorted({x for x, _, _ in found})
    assert {"with sequence parallelism", "without sequence parallelism", "1", "2", "4", "8", "tp"} <= set(words(root))


def test_points_are_where_their_values_are(tmp_path):
    time, memory, exposed = panels(drawn(tmp_path, swept(1.0), swept(1.5)))
    for panel in (time, memory):  # halves are equal steps down
        ys = [y for _, y, _ in points(panel, "with")]
        steps = [b - a for a, b in zip(ys, ys[1:], strict=False)]
        assert steps == pytest.approx([steps[0]] * 3, abs=0.02) and steps[0] > 1
        above = [a - b for (_, a, _), (_, b, _) in zip(points(panel, "with"), points(panel, "without"), strict=True)]
        assert above == pytest.approx([steps[0] * math.log2(1.5)] * 4, abs=0.03)
    ys = [y for _, y, _ in points(exposed, "with")]
    assert [(ys[0] - y) / (ys[0] - ys[1]) for y in ys] == pytest.approx([0, 1, 3, 7], abs=0.02)
    assert [told for _, _, told in points(time, "with")][1] == "tp=2, with: 500.000 ms"
    assert [told for _, _, told in points(memory, "without")][0] == "tp=1, without: 90.0 GiB"
    assert [told for _, _, told in points(exposed, "without")][0] == "tp=1, without: 0.0 us"


def test_another_figure_moves_its_point(tmp_path):
    before = points(panels(drawn(tmp_path, swept(1.0), swept(1.5)))[0], "with")
    rows = swept(1.0).rows
    after = points(
        panels(drawn(tmp_path, replace(swept(1.0), rows=(*rows[:3], replace(rows[3], seconds=0.2))), swept(1.5)))[0],
        "with",
    )
    assert before[:3] == after[:3] and after[3][1] < before[3][1] - 5


def test_the_limit_is_drawn_where_it_lies_within(tmp_path):
    _, memory, _ = panels(drawn(tmp_path, swept(1.0), swept(1.5)))
    assert "40.0 GiB a rank" in words(memory)
    (line,) = [p for p in memory.iter(f"{SVG}path") if p.get("class") == "limit"]
    (y,) = re.findall(r"M\S+ (\S+)H", line.get("d", ""))
    heights = {told: y for _, y, told in points(memory, "with")}
    assert heights["tp=1, with: 60.0 GiB"] < float(y) < heights["tp=2, with: 30.0 GiB"]
    none = drawn(tmp_path, replace(swept(1.0), limit=900 * GIB), swept(1.5))
    assert not any("a rank" in text for text in words(none))


def test_degrees_may_differ(tmp_path):
    time, *_ = panels(drawn(tmp_path, swept(1.0, (2, 4)), swept(1.5, (1, 2))))
    with_sp, without = points(time, "with"), points(time, "without")
    assert with_sp[0][0] == without[1][0] and len(with_sp) == len(without) == 2


def test_one_degree_is_enough(tmp_path):
    assert len(points(panels(drawn(tmp_path, swept(1.0, (1,)), swept(1.0, (1,))))[2], "with")) == 1


def test_a_sweep_is_drawn_alone(tmp_path):
    root = drawn(tmp_path, swept(1.0))
    beside = drawn(tmp_path, swept(1.0), swept(1.0))
    for one, two in zip(panels(root), panels(beside), strict=True):
        assert points(one, "with") == points(two, "with") and not points(one, "without")
    assert "as planned" in words(root) and not any("sequence parallelism" in text for text in words(root))


def test_it_needs_nothing_else(tmp_path):
    root = drawn(tmp_path, swept(1.0), swept(1.5))
    text = (tmp_path / "out.svg").read_text()
    assert (
        "prefers-color-scheme: dark" in text and "<script" not in text and "url(" not in text and "@import" not in text
    )
    assert not [e for e in root.iter() if any("href" in key or key == "src" for key in e.attrib)]
    assert text.count("http") == text.count("http://www.w3.org/2000/svg") == 1


def test_sweeps_of_different_things_are_refused(tmp_path):
    with pytest.raises(InputError, match="cluster is 'h100' in one and 'cpu' in the other"):
        swept(1.0).to_svg(tmp_path / "out.svg", replace(swept(1.0), cluster="cpu"))
    with pytest.raises(InputError, match="has no rows"):
        swept(1.0).to_svg(tmp_path / "out.svg", replace(swept(1.0), rows=()))
    assert not (tmp_path / "out.svg").exists()


@pytest.mark.parametrize("top", [1e-7, 0.003, 0.99, 1.0, 7.3, 100.0, 12345.0])
def test_ticks_are_round_and_reach_the_top(top):
    found = ticks(top)
    step = found[1]
    assert found[0] == 0 and found[-2] < top <= found[-1] * (1 + 1e-9) and len(found) <= 6
    assert f"{step:.1e}".split("e")[0] in ("1.0", "2.0", "2.5", "5.0")
    assert found == pytest.approx([i * step for i in range(len(found))])


# a plan

ROOT = Path(__file__).resolve().parents[2]
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
