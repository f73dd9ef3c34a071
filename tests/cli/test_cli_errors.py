"""The command line's errors: one line, a code, and silence on other ranks."""

from __future__ import annotations

import json

import pytest

import autotp
from tests.helpers.modules.factories import SMALL


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["plan", "nowhere"], 2, "nowhere: no such file or folder"),
        (["plan", "."], 2, "holds no config.json"),
        (["plan", "no_module:make"], 2, "ModuleNotFoundError: No module named 'no_module'"),
        (["plan", "tests.helpers.modules.factories:missing"], 2, "has no attribute 'missing'"),
        (["plan", "tests.helpers.modules.factories:broken"], 2, "RuntimeError: no such weights (--debug shows where)"),
        (["plan", "tests.helpers.modules.factories:bare"], 2, "return (module, example_inputs)"),
        (["plan", "tests.helpers.models:BATCH"], 2, "TypeError: 'int' object is not callable"),
        (["plan", SMALL, "--tp", "four"], 2, "--tp four: give a number of ranks"),
        (["sweep", SMALL, "--tp", "1;2"], 2, "--tp 1;2: give a number of ranks"),
        (["sweep", SMALL, "--tp", "1,auto"], 2, "--tp 1,auto: give numbers of ranks"),
        (["plan", SMALL, "--tp", "8x"], 2, "--tp 8x: give a number of ranks, such as 4, a product"),
        (["plan", SMALL, "--mesh", "2by4"], 2, "--mesh 2by4: give dp x tp"),
        (["plan", SMALL, "--mesh", "1x4", "--tp", "2"], 2, "--mesh 1x4 says tp=4, and --tp says 2"),
        (["plan", SMALL, "--mesh", "1x2x4", "--cp", "4"], 2, "--mesh 1x2x4 says cp=2, and --cp says 4"),
        (["plan", SMALL, "--mesh", "2x2x2x2"], 2, "or dp x cp x tp"),
        (["verify", SMALL, "--mesh", "2x2", "--batch", "3"], 2, "a batch of 3 is not divided"),
        (["verify", SMALL, "--mesh", "2x2", "--fully-shard"], 2, "changes none: leave out --fully-shard"),
        (["plan", SMALL, "--pin", "0.weight"], 2, "--pin 0.weight: give NAME=PLACEMENT"),
        (["plan", SMALL, "--pin", "0.weigt=shard:0"], 2, "Names are like 0.weight"),
        (["plan", SMALL, "--cluster", "abacus"], 2, "'abacus' is not a preset"),
        (["plan", SMALL, "--dtype", "int8"], 2, "--dtype int8: give a floating-point dtype"),
        (["plan", SMALL, "--save", "none/plan.json"], 2, "there is no folder"),
        (["plan", SMALL, "--save", "."], 2, "it is a folder"),
        (["plan", SMALL, "--batch", "0"], 2, "See autotp plan --help"),
        (["plan", SMALL, "--degree", "4"], 2, "No such option: --degree"),
        (["paln", SMALL], 2, "No such command 'paln'"),
        (["plan"], 2, "Missing argument 'MODEL'"),
        (["plan", SMALL, "--tp", "2", "--memory", "1KB"], 1, "no plan fits into memory=1000 B per rank"),
        (["plan", SMALL, "--tp", "16", "--within-node"], 1, "tp=16 leaves the node"),
        (["plan", SMALL, "--tp", "2", "--pin", "0.weight=Shard(5)"], 1, "which has 2 dimensions"),
        (["plan", "tests.helpers.modules.factories:branch", "--tp", "2"], 3, "Write it with torch.where"),
    ],
)
def test_errors_are_one_line_with_a_code(run, args, code, said):
    done = run(*args)
    lines = done.stderr.strip().splitlines()
    assert (done.exit_code, len(lines)) == (code, 1), done.stderr
    assert lines[0].startswith("autotp: error: ") and said in lines[0] and not done.stdout


def test_debug_shows_the_traceback(run):
    shown, hidden = (
        run("plan", "tests.helpers.modules.factories:broken", "--debug"),
        run("plan", "tests.helpers.modules.factories:broken"),
    )
    assert "Traceback" in shown.stderr and "in broken" in shown.stderr and shown.exit_code == 2
    assert "Traceback" not in hidden.stderr


def test_programs_get_errors_as_json(run):
    done = run("plan", SMALL, "--tp", 2, "--memory", "1KB", "--json")
    told = json.loads(done.stdout)["error"]
    assert done.exit_code == told["code"] == 1 and told["kind"] == "PlanError" and "no plan fits" in told["message"]
    wrong = run("plan", SMALL, "--degree", 2, "--json")
    assert json.loads(wrong.stdout)["error"]["kind"] == "UsageError" and wrong.exit_code == 2
    assert not run("plan", SMALL, "--degree", 2).stdout


def test_an_error_that_nobody_meant_is_one_line_too(run, monkeypatch):
    monkeypatch.setattr(autotp, "plan", lambda *args, **given: {}["key"])
    done = run("plan", SMALL)
    assert done.exit_code == 4 and done.stderr.startswith("autotp: error: unexpected KeyError: 'key' (--debug")


def test_other_ranks_are_silent(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for args in (["plan", SMALL, "--tp", 2], ["plan", "nowhere"], ["plan", "--degree", 3], ["doctor"]):
        done = run(*args)
        assert not done.stdout and not done.stderr, args
    monkeypatch.setenv("RANK", "0")
    assert run("plan", SMALL, "--tp", 2).stdout
