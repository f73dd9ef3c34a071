"""The page of a plan: its parts and figures, nothing from elsewhere, and what a browser makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autotp.ir.layouts import Shard
from autotp.plans.plan import Plan
from autotp.plans.show.html import html, write_html
from autotp.plans.show.timeline import timeline
from autotp.text import seconds
from tests.helpers.models import planned

VOID = {"meta", "br", "wbr", "rect", "path", "circle", "link", "img"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page(HTMLParser):
    """The elements of a page with their attributes and text; `open` are those not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str], tuple[int, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [], tuple(self.open)))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.handle_data(" " * (tag in ("td", "th")))
            assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for i in self.open:
            self.elements[i][2].append(data)

    def find(self, tag: str, inside: str = "", **wanted: str) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of these elements, within the section of that id."""
        found = []
        for name, attrs, text, above in self.elements:
            ids = [self.elements[i][1].get("id") for i in above]
            same = all(wanted[k] in (attrs.get(k.rstrip("_")) or "").split() for k in wanted)
            if name == tag and same and (not inside or inside in ids):
                found.append((attrs, " ".join("".join(text).split())))
        return found


def page(plan: Plan) -> Page:
    read = Page(html(plan))
    assert not read.open
    return read


def boxes(plan: Plan) -> list[tuple[float, float, str]]:
    """Left edge, width and kind of every box of the timeline."""
    found = page(plan).find("rect", "timeline", class_="box")
    return [(float(a["x"] or 0), float(a["width"] or 0), str(a["class"]).split()[1]) for a, _ in found]


def external(text: str) -> list[str]:
    """What a browser would load, or run."""
    return re.findall(r"<script|<link|<img|<iframe|@import|url\(|\bsrc=|\bhref=|https?:", text)


def test_its_parts_are_there():
    plan = planned("llama", 4)[0]
    read = page(plan)
    assert [text for _, text in read.find("h1")] == ["llama"]
    sections = [attrs["id"] for attrs, _ in read.find("section")]
    assert sections == ["totals", "timeline", "blocks", "whole"] + ["notes"] * bool(plan.notes)
    told = dict(zip([x for _, x in read.find("dt")], [x for _, x in read.find("dd")], strict=True))
    assert told["predicted step"].startswith(seconds(plan.totals.seconds)) and "parameters per rank" in told
    assert f"{plan.totals.communication / plan.totals.seconds:.1%}" in [x for _, x in read.find("b")]


def test_it_says_whether_it_fits():
    plan = planned("llama", 4)[0]
    over = replace(plan, memory=replace(plan.memory, parameters=2.0**40))
    unknown = replace(plan, cluster="nowhere", machines={})
    remarks = [[(x, a.get("class")) for a, x in page(p).find("span")] for p in (plan, over, unknown)]
    assert ("FITS into the 74.5 GiB of a device", None) in remarks[0]
    assert ("does NOT fit into the 74.5 GiB of a device", "limit") in remarks[1]
    assert ("at the peak", None) in remarks[2] and "fit" not in str(remarks[2]).lower()


def test_every_kind_of_block_is_there_with_splits_and_collectives():
    plan = planned("llama", 4)[0]
    read = page(plan)
    articles = [text for _, text in read.find("article", "blocks")]
    assert len(articles) == sum(b.first == i for i, b in enumerate(plan.blocks))
    (attention,) = [x for x in articles if x.startswith("attention")]
    assert attention.startswith("attention model.layers.0.self_attn × 2") and "per rank 2 heads, 1 kv head" in attention
    assert "q_proj.weight column-parallel, dim 0 64 x 64 16 x 64" in " ".join(attention.split())
    assert (
        "f* P → I linear (o_proj) all-reduce" in attention and "f I → R mul (input_layernorm) no forward" in attention
    )
    assert len(read.find("svg", "blocks", class_="glyph")) == sum(
        len(b.parameters) for i, b in enumerate(plan.blocks) if b.first == i
    )


def testglyphs_show_the_cut():
    plan = planned("llama", 4)[0]
    own = page(plan).find("rect", "blocks", class_="own")
    split = [p for i, b in enumerate(plan.blocks) if b.first == i for p in plan.parameters if p.name in b.parameters]
    assert len(own) == sum(p.role != "whole" for p in split)
    down = [float(attrs["height"] or 0) for attrs, _ in own if attrs["width"] == "30"]
    across = [float(attrs["width"] or 0) for attrs, _ in own if attrs["height"] == "20"]
    assert down == [20 / 4] * sum(
        p.role != "whole" and isinstance(p.layout, Shard) and p.layout.dim == 0 for p in split
    )
    assert across == [30 / 4] * (len(own) - len(down)) and down and across
    assert not page(planned("llama", 1)[0]).find("rect", "blocks", class_="own")


def test_the_timeline_is_to_scale():
    plan = planned("llama", 4)[0]
    events, drawn = timeline(plan), boxes(plan)
    assert plan.layer is not None and len(drawn) == len(events)
    width = sum(w for _, w, _ in drawn)
    for e, (_, w, kind) in zip(events, drawn, strict=True):
        assert w / width == pytest.approx(e.seconds / plan.layer.seconds, abs=1e-5)
        assert (kind == "communication") == (e.track == "communication")
    share = sum(w for _, w, kind in drawn if kind == "communication") / width
    assert share == pytest.approx(sum(p.communication for p in plan.sublayers) / plan.layer.seconds, abs=1e-4)
    first = plan.layer.steps[0]
    slower = replace(plan.layer, steps=(replace(first, forward=2 * first.forward), *plan.layer.steps[1:]))
    assert boxes(replace(plan, layer=slower))[0][1] > 1.5 * drawn[0][1]  # and another time would show


def test_sublayers_and_steps_are_listed():
    plan = planned("llama", 4)[0]
    read = page(plan)
    cells = [text for _, text in read.find("td", "sublayers")]
    for part in plan.sublayers:
        at = cells.index(part.name)
        assert cells[at + 1] == seconds(part.compute)
        assert cells[at + 2] == (seconds(part.communication) if part.communication else "")
    takes = [float(text.split()[0]) for attrs, text in read.find("td", "steps") if attrs.get("data-label") == "takes"]
    assert plan.layer is not None
    assert sum(takes) == pytest.approx(1e6 * plan.layer.seconds, abs=0.06 * len(takes))


def test_what_is_whole_is_listed_with_its_reason():
    plan = planned("bert", 4)[0]
    read = page(plan)
    listed = [text for _, text in read.find("li", "whole")]
    reasons = {text for _, text in read.find("p", "whole")}
    whole = [p for p in plan.parameters if p.role == "whole"]
    assert whole and reasons == {p.reason for p in whole}
    assert len(listed) == len({p.first for p in whole}) and all(
        any(x.startswith(p.first) for x in listed) for p in whole
    )
    assert not any(x.startswith(p.name + " ") for x in listed for p in plan.parameters if p.role != "whole")


def test_it_needs_nothing_else():
    text = html(planned("llama", 4)[0])
    assert external(text) == [] and "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert external(text.replace("<style>", '<style>@import "x.css";')) == ["@import"]


def test_names_are_escaped():
    plan = replace(planned("llama", 4)[0], model="<script>alert(1)</script>", notes=("a < b & c",))
    text = html(plan)
    assert "<script" not in text and "a &lt; b &amp; c" in text


@pytest.mark.parametrize("name", ["convolutions", "einsum"])
def test_models_without_layers_have_a_page(name):
    read = page(planned(name, 4)[0])
    assert "A step, as predicted" in [text for _, text in read.find("h2")] and not read.find("table", id="sublayers")


def test_a_plan_without_times_has_a_page():
    read = page(replace(planned("llama", 4)[0], layer=None))
    assert "timeline" not in [attrs["id"] for attrs, _ in read.find("section")]


def test_a_loaded_plan_has_the_same_page(tmp_path):
    plan = planned("llama", 4)[0]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    write_html(plan, tmp_path / "a.html")
    loaded.to_html(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


# in a browser


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)} is installed")
    return found


PROBE = """<script>addEventListener("load", () => {
  const scrolls = e => { while (e = e.parentElement) if (e.classList.contains("wide")) return true; return false; };
  document.querySelectorAll("details").forEach(d => d.open = true);
  const out = [...document.body.querySelectorAll("*")].filter(
    e => !scrolls(e) && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 60));
  Object.assign(parent.document.body.dataset, {width: innerWidth, out: out.join(" | ")});
  parent.document.body.innerHTML = document.body.innerHTML; });</script>"""


def rendered(browser: str, folder: Path, text: str, width: int) -> Page:
    """The page as the browser holds it; on its body, how wide the window was and what stuck out of it.

    It stands in a frame of that width, as a browser's own window is never narrower than 500.
    """
    inner = escape(text.replace("</body>", PROBE + "</body>"))
    (folder / "out.html").write_text(f'<body><iframe style="width: {width}px; border: 0" srcdoc="{inner}"></iframe>')
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    command += ["--window-size=1700,900", "--dump-dom", f"file://{folder}/out.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return Page(done.stdout)


@pytest.mark.ranks
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_it_without_overflow(browser, tmp_path, width):
    plan = planned("llama", 4)[0]
    read = rendered(browser, tmp_path, html(plan), width)
    sections = [attrs["id"] for attrs, _ in read.find("section")]
    assert sections[:4] == ["totals", "timeline", "blocks", "whole"]
    assert len(read.find("rect", "timeline", class_="box")) == len(timeline(plan))
    ((body, _),) = read.find("body")
    assert body["data-width"] == str(width) and body["data-out"] == ""


@pytest.mark.ranks
def test_a_browser_notices_overflow(browser, tmp_path):
    text = html(planned("llama", 4)[0]).replace("<h1>", '<h1 style="width: 900px">')
    ((body, _),) = rendered(browser, tmp_path, text, 400).find("body")
    assert "h1" in str(body["data-out"])
