"""The curves and the section of `benchmarks.equal_bits`."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.equal_bits.__main__ import off, page, picture

SCREENS = {
    "ordinary": {1: [2.0, 1.0], 2: [2.0, 1.0 + 2e-7], 4: [2.0, 1.0 - 1e-7]},
    "tp_invariant=8": {tp: [2.0, 1.0] for tp in (1, 2, 4)},
}


def test_curves_are_what_losses_are_off_one_rank():
    assert off(SCREENS["ordinary"])[4] == pytest.approx([0.0, -1e-7])
    svg = ET.fromstring(picture(SCREENS, "2 steps"))
    lines = [x for x in svg.iter("{http://www.w3.org/2000/svg}polyline") if len(x)]
    ends = [float(x.attrib["points"].split(",")[-1]) for x in lines]
    assert len(ends) == 6 and len(set(ends[:3])) == 3 and len(set(ends[3:])) == 1


def test_the_section_says_where_runs_part():
    made = dict.fromkeys(("command", "cores", "machine", "torch", "python", "date", "load_before"), "x")
    costs = {1: {"cpu_s": 1.0, "cpu_ratio": 1.25}}
    text = page({**made, "steps": 2, "rounds": 1, "losses": SCREENS, "costs": costs})
    assert "| ordinary, tp=2 | 2 | 2.0e-07 |" in text and "| tp_invariant=8, tp=4 | none | 0.0e+00 |" in text
    assert "| tp=1 | 1.00 | 1.25 |" in text
