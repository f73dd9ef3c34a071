"""`make gpu`: its parts at tiny sizes on the CPU, parts that fail or take too long, and going on where one stopped."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decoding, fused, layers, page, parts, products, runner, suite, training
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.helpers.kernel_work import WORK

FORK = multiprocessing.get_context("fork")


def fails() -> Any:
    raise ValueError("no luck\nat all")


def dies() -> Any:
    sys.exit(7)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """A part with these items in a forked process; gives its state after a run of so many seconds."""

    def forked(number: str, device: str, folder: Path, seconds: float) -> tuple[int, bool]:
        parts.path_of(folder, number).with_suffix(".log").write_text("begun\nthe last line\n")
        process = FORK.Process(target=runner.work, args=(number, device, folder, seconds))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        process.kill()
        process.join()
        return process.exitcode or 0, late

    def run(items: Mapping[str, Callable[[], Any]], seconds: float = 30.0, **options: Any) -> parts.State:
        made = SimpleNamespace(TITLE="Fakes", items=lambda scale: items, section=lambda results: f"{sorted(results)}\n")
        monkeypatch.setattr(runner, "module", lambda number: made)
        monkeypatch.setattr(page, "module", lambda number: made)
        states = runner.run_all(["2"], "cpu", tmp_path, lambda text: None, limit=seconds, **options)
        return states.get("2", parts.State({}))

    monkeypatch.setattr(runner, "_process", forked)
    monkeypatch.setattr(runner, "key", lambda number, device: {"device": device})
    return run


def test_what_fails_stops_nothing_else_and_stands_in_the_page(part):
    state = part({"a": lambda: {"x": 1}, "b": fails, "c": dies, "d": lambda: {"x": 2}})
    assert state.results == {"a": {"x": 1}, "d": {"x": 2}} and state.complete and not state.running
    assert state.faults["b"] == "ValueError: no luck\nat all"
    assert state.faults["c"] == "its process ended with code 7: the last line"
    text = page.page({"2": state}, "a device", "today")
    assert "### Fakes" in text and "Failed: b: ValueError: no luck at all." in text
    assert "| 2 fused | 2 of 4 | 2 |" in text and "| 1 suite | not run | 0 | - |" in text


def test_what_takes_too_long_is_ended_and_what_had_less_than_all_the_time_is_tried_again(part):
    def hangs() -> Any:
        time.sleep(60)

    state = part({"a": lambda: {}, "b": hangs, "c": lambda: {}}, seconds=1.0)
    assert list(state.results) == ["a", "c"] and state.faults == {"b": "it ran past 1 s"}


def test_it_goes_on_where_it_stopped_and_runs_nothing_twice(part, tmp_path):
    calls = tmp_path / "calls"

    def once(name: str) -> Any:
        with calls.open("a") as file:
            file.write(name)
        return {}

    items = {name: lambda name=name: once(name) for name in "abc"}
    assert not part(items, budget=0.0).names and not calls.exists()
    path = parts.path_of(tmp_path, "2")
    parts.save(path, parts.State({"device": "cpu"}, list("abc"), {"a": {}}))
    part(items)
    part(items)
    assert calls.read_text() == "bc"
    part(items, again=True)
    assert calls.read_text() == "bcabc"
    parts.save(path, parts.State({"device": "another"}, list("abc"), {"a": {}, "b": {}, "c": {}}))
    part(items)
    assert calls.read_text() == "bcabcabc"


def test_a_missing_package_is_named(part, monkeypatch, tmp_path):
    part({})
    monkeypatch.setattr(runner, "module", lambda number: __import__("hypothesis_of_another_planet"))
    [state] = runner.run_all(["2"], "cpu", tmp_path, print, limit=30.0, again=True).values()
    assert state.faults["all"].startswith("not installed: hypothesis_of_another_planet (")


def test_a_process_is_ended_with_its_time(monkeypatch, tmp_path):
    def words(*code: str) -> None:
        monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, *code])

    words("-c", "import time; time.sleep(60)")
    assert runner._process("2", "cpu", tmp_path, 0.2) == (0, True)
    words("-c", "print('why'); raise SystemExit(3)")
    assert runner._process("2", "cpu", tmp_path, 30.0) == (3, False) and "why" in (tmp_path / "2-fused.log").read_text()
    monkeypatch.undo()
    assert runner.command("2", "cuda", tmp_path, 1.0)[1:5] == ["-m", "benchmarks.gpu", "--child", "2"]


def test_without_a_device_it_says_so_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "run_all", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setattr(command, "write_section", lambda *_: pytest.fail("it wrote"))
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_command_writes_the_page_and_says_whether_all_is_fine(monkeypatch, capsys, tmp_path):
    target, fine = tmp_path / "page.md", parts.State({}, ["q"], {"q": {}})
    monkeypatch.setattr(page, "module", lambda number: SimpleNamespace(TITLE="T", section=lambda results: "so\n"))
    words = ["--device", "cpu", "--parts", "2", "--page", str(target)]
    for state, code in ((fine, 0), (dataclasses.replace(fine, faults={"q": "why"}), 1)):
        monkeypatch.setattr(command, "run_all", lambda *_, state=state, **__: {"2": state})
        assert command.main(words) == code
        capsys.readouterr()
    assert "## On a GPU" in target.read_text() and "### T" in target.read_text()
    with pytest.raises(SystemExit):
        command.main(["--parts", "9"])


def test_results_hold_for_one_device_and_its_sources():
    one = parts.key("2", "cpu")
    assert one == parts.key("2", "cpu") and one["device"] == "cpu"
    assert one["sources"] != parts.key("3", "cpu")["sources"]


def test_all_that_is_asked_is_measured():
    assert list(parts.PARTS) == list("123456")
    assert {name.partition(";")[0] for name in fused.items(FULL)} == set(WORK)
    assert {name.partition(";")[2].strip() for name in fused.items(FULL)} == {
        "8B, fp32", "8B, bf16", "70B, fp32", "70B, bf16"
    }  # fmt: skip
    stacks = list(layers.items(FULL))
    assert "70B, 8192 tokens, inductor" in stacks and "8B, 1024 tokens, eager" in stacks
    assert list(decoding.items(FULL)) == ["8B, 16 layers, tp=1", "8B, 16 layers, tp=8"]
    files = list(suite.items(FULL))
    assert "tests/kernels/test_kernels.py" in files and "tests/runtime/lower/test_on_devices.py" in files


def test_kernels_and_products_at_tiny_sizes():
    items = fused.items(TINY)
    for name in ("bias_gelu; 8B, fp32", "norm, rms; 8B, fp32"):
        found = {name: items[name]()}
        assert found[name]["difference"] < 1e-4
        assert f"| {name} |" in fused.section(found)
    record = {"seconds": {fused.KERNEL: 1e-6}, "ratios": {fused.EAGER: 1.5, fused.COMPILED: 1.01, fused.COPY: 0.8}}
    told = fused.section({"x": {fused.FORWARD: record, fused.BOTH: record}})
    assert "0.80 missed" in told and told.rstrip().endswith("| inference and training | nowhere |")
    [name, *_], found = list(products.items(TINY)), {}
    found[name] = products.items(TINY)[name]()
    for way in (products.TENSORWISE, products.ROWWISE):
        assert found[name]["checked"][way]["off"] < 0.1 and found[name]["rates"][way] > 0
    assert f"| {name} | 16 x 128 x 96 |" in products.section(found)


def test_a_ranks_layers_at_tiny_sizes():
    results = {name: item() for name, item in layers.items(TINY).items()}
    told = layers.section(results)
    assert "| 8B, 8 tokens, eager |" in told and "Mean error" in told and "preset local" in told
    [stack] = [r for name, r in results.items() if name != layers.RATES]
    assert stack["of hand"] > 0 and stack["predicted"]["autotp"] < stack["predicted"]["whole"]


def test_training_at_tiny_sizes():
    results = {name: item() for name, item in training.items(TINY).items()}
    assert results["1B"]["off"] < 1e-4 and results["1B"]["ratio"] > 0
    assert "| 1B |" in training.section(results)


def test_decoding_of_one_of_two_ranks_at_tiny_sizes(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", (decoding.DECODE,))
    name = "8B, 1 layers, tp=2"
    found = {name: decoding.items(TINY)[name]()}
    assert not found[name]["decode"]["faults"] and found[name]["limit"] > 0
    told = decoding.section(found)
    assert f"| {name}, decode, a CUDA graph |" in told


def test_reports_of_pytest_are_read():
    text = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="no&#10;more"/></testcase>
    <testcase name="c"><skipped/></testcase></testsuite></testsuites>"""
    found = suite.read(text)
    assert found == {"counts": {"passed": 1, "failed": 1, "skipped": 1}, "failures": ["b: no"]}
    assert "- b: no" in suite.section({"f": {**found, "missing": ["triton"]}})
