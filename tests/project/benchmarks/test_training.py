"""The training over each mesh: two hundred steps, a run that goes on, what is written; and curves of equal bits."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ET

import pytest
import torch

from benchmarks.equal_bits.__main__ import off, page, picture
from benchmarks.training.runs import BITS, ONE, RUNS, Text, Trained, rate_of

training = importlib.import_module("benchmarks.training.__main__")


@pytest.mark.ranks
@pytest.mark.timeout(7200)  # 700 CPU seconds on a slow machine, where others run beside it
def test_two_hundred_steps_learn_alike_and_the_model_speaks(tmp_path, capsys):
    meshes = ["tp=2", "pp=2 x tp=2", *BITS]
    training.main(["--steps", "200", "--folder", str(tmp_path), "--only", *meshes])
    printed = capsys.readouterr().out
    parts = training.parts_of(tmp_path, training.FIGURE)
    found = {name: training.part(name, 200, parts) for name in (ONE, *meshes)}  # as it was kept
    assert "Equal to the bit" in printed and "served by `autotp serve`" in printed
    off = training.apart(found, "losses")
    # Rounding grows as training goes on: of one rank whose sums have another order too.
    assert all(max(off[name][:30]) < 1e-6 and max(off[name]) < 3e-2 for name in meshes)
    assert found[ONE]["losses"][-1] < 0.6 * found[ONE]["losses"][0]
    assert max(off["tp=2"]) > 0  # negative control: other sums have other bits
    kept = next(parts.glob("tp-invariant-2-tp-2-*.json"))
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"norms": found[ONE]["norms"]}))
    training.main(["--steps", "200", "--folder", str(tmp_path), "--only", *BITS])
    assert "NOT EQUAL" in capsys.readouterr().out


def test_a_run_goes_on_with_the_same_bits(tmp_path):
    ids, losses = [Text().batch(step) for step in range(2)], []
    whole, again = Trained(RUNS[ONE], ids[0]), Trained(RUNS[ONE], ids[0])
    assert again.load(tmp_path / "kept") == {}
    losses.append(whole.step(ids[0], rate_of(0, 2)))
    whole.save(tmp_path / "kept", {"losses": losses})
    assert again.load(tmp_path / "kept") == {"losses": losses}
    wanted = whole.step(ids[1], rate_of(1, 2))
    assert again.step(ids[1], rate_of(1, 2)) == wanted and Trained(RUNS[ONE], ids[0]).step(ids[1], 0.0) != wanted


def test_the_page_and_the_picture():
    run = {"losses": [5.0, 4.0], "norms": [2.0, 1.0], "cpu_s": 0.5, "load": 0.1, "date": "x"}
    runs = {ONE: run, "tp=2": run | {"losses": [5.0, 4.004]}}
    made = dict.fromkeys(("command", "cores", "machine", "torch", "transformers", "python", "date"), "x")
    record = {**made, "steps": 2, "parameters": 7, "files": 1, "bytes": 9, "digest": "0" * 64}
    record |= {"runs": runs, "said": "a"}
    assert "| tp=2 | 2 | 4.5020 | 2 | 1.0e-03 | 0.0e+00 | 0.50 | 0.1 |" in training.page(record)
    lines = ET.fromstring(training.picture(runs)).iter("{http://www.w3.org/2000/svg}polyline")
    assert len([line for line in lines if len(line)]) == 5


def test_letters_of_the_tokenizer_are_bytes():
    text = "def f(x):\n\treturn 'ä'\n"
    assert training.tokenizer()(text)["input_ids"] == list(text.encode())
    assert training.tokenizer().decode(torch.tensor(list(text.encode()))) == text


# ---- equal bits ------------------------------------------------------------------------------------------------------

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
