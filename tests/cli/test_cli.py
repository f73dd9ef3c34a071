"""The command line: what each command prints, writes and answers with, run in this process."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard
from transformers import LlamaConfig

import autotp
from autotp.cli.screen import Screen
from autotp.cost import Cluster
from autotp.cost.machines.calibrate import SIZES
from autotp.plans.plan import Plan
from autotp.proof.report import Decoded, Report
from tests.helpers.modules.custom_ops import registered, turn
from tests.helpers.modules.factories import SMALL

UP = "model.layers.0.mlp.up_proj.weight"


# plan


def test_plan_of_a_folder_prints_the_table_and_writes_the_plan(run, folder, plan, tmp_path):
    done = run("plan", folder, "--tp", 4, "--save", "plan.json")
    assert done.exit_code == 0 and "LlamaForCausalLM  tp=4 on h100  training, 2 x 16 tokens" in done.stdout
    assert re.search(r"up_proj.weight +column-parallel, dim 0", done.stdout)
    assert "priced for input_ids (2 x 16)" in done.stderr and "wrote plan.json" in done.stderr
    saved = Plan.load(tmp_path / "plan.json")
    assert saved.placements == plan.placements and saved.totals == plan.totals


def test_a_saved_plan_is_shown_and_takes_nothing_else(run, plan):
    plan.save("plan.json")
    done = run("plan", "plan.json")
    assert done.exit_code == 0 and [x.rstrip() for x in done.stdout.splitlines()] == str(plan).splitlines()
    full = run("plan", "plan.json", "--full")
    assert [" ".join(x.split()) for x in full.stdout.splitlines() if "down_proj.weight" in x] == [
        " ".join(x.split()) for x in plan.report().splitlines() if "down_proj.weight" in x
    ]
    refused = run("plan", "plan.json", "--tp", 4)
    assert refused.exit_code == 2 and "plan.json is a saved plan, which is complete" in refused.stderr


@pytest.mark.parametrize("number", [{"format": 99}, {"schema": 2}])
def test_a_plan_in_another_format_is_refused_by_its_number(run, tmp_path, number):
    (tmp_path / "old.json").write_text(json.dumps({**number, "decisions": {}}))
    done = run("plan", "old.json")
    (found,) = number.values()
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and f"old.json is a plan in format {found}, and" in told and "Plan again" in told


def test_json_is_the_plan_and_nothing_else(run):
    done = run("plan", "tests.helpers.modules.factories:noisy", "--tp", 2, "--json")
    assert done.exit_code == 0 and Plan.from_json(done.stdout).tp == 2
    assert "a factory that prints" in done.stderr and done.stdout.startswith("{")
    assert (
        "a factory that prints" in run("plan", "tests.helpers.modules.factories:noisy", "--tp", 2).stdout
    )  # who else reads stdout


def test_what_steers_planning_arrives(run, folder):
    cluster = replace(Cluster.preset("l40s"), name="mine")
    cluster.save("mine.toml")
    done = run(
        "plan", folder, "--mesh", "1x2", "--cluster", "mine.toml", "--objective", "prefill", "--batch", 3, "--seq", 8,
        "--dtype", "bfloat16", "--pin", f"{UP}=replicate", "--memory", "1GB", "--no-sequence-parallel", "--json",
    )  # fmt: skip
    made, freely = Plan.from_json(done.stdout), Plan.from_json(run("plan", folder, "--tp", 2, "--json").stdout)
    assert (made.tp, made.cluster, made.objective) == (2, "mine", "prefill")
    assert made.placements[UP] != freely.placements[UP]
    assert {p.dtype for p in made.parameters} == {"bfloat16"} != {p.dtype for p in freely.parameters}
    assert "priced for input_ids (3 x 8)" in done.stderr


def test_auto_takes_a_degree_and_shows_those_it_planned(run):
    done = run("plan", SMALL)
    assert done.exit_code == 0 and "tp='auto' took tp=1" in done.stdout and "largest batch" in done.stdout


def test_a_mesh_of_two_axes_is_passed_on(run, monkeypatch):
    asked: dict[str, Any] = {}

    def keep(model: nn.Module, **given: Any) -> None:
        asked.update(given)
        raise autotp.AutoTPError("enough")

    monkeypatch.setattr(autotp, "plan", keep)
    assert run("plan", SMALL, "--mesh", "2x4").exit_code == 4 and (asked["dp"], asked["tp"]) == (2, 4)
    assert "fully_shard" not in asked and "ep" not in asked
    for text, ep in (("2", 2), ("auto", "auto")):
        assert run("plan", SMALL, "--mesh", "2x4", "--ep", text, "--imbalance", "1.5").exit_code == 4
        assert (asked["ep"], asked["imbalance"]) == (ep, 1.5)
    assert run("plan", SMALL, "--mesh", "2x4", "--fully-shard").exit_code == 4 and asked["fully_shard"] is True
    asked.clear()
    assert run("plan", SMALL, "--mesh", "1x4").exit_code == 4 and asked["tp"] == 4 and "dp" not in asked


def test_a_mesh_of_two_axes_is_planned(run):
    done = run("plan", SMALL, "--mesh", "2x4", "--fully-shard", "--save", "plan.json", "--json")
    made = Plan.from_json(done.stdout)
    assert (made.batch.size, made.batch.fully_shard, made.tp) == (2, True, 4) and "on each dp rank" in done.stderr
    assert "2 x 4 ranks" in run("explain", SMALL, "0.weight", "--mesh", "2x4").stderr
    assert run("plan", SMALL, "--tp", 2, "--fully-shard").exit_code == 2  # there is one axis


@pytest.mark.parametrize(
    ("flag", "name", "start"), [("--html", "page.html", "<!doctype html"), ("--trace", "trace.json", "{")]
)
def test_drawings_are_written(run, folder, flag, name, start, tmp_path):
    done = run("plan", folder, "--tp", 2, flag, name)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / name).read_text().lower().startswith(start) and f"wrote {name}" in done.stderr


@pytest.mark.parametrize("columns", [60, 80, 95, 160])
def test_tables_fit_the_console(run, plan, columns):
    plan.save("plan.json")
    lines = run("plan", "plan.json", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= max(columns, 80)  # names stay whole, so a narrower console breaks the lines itself
    if columns >= 80:  # no word is cut there
        assert any(
            re.search(r"gate_proj.weight +column-parallel, dim 0 +128 x 64 +32 x 64$", x.rstrip()) for x in lines
        )
        assert any(re.search(r"gather +S\(2\) -> I", line) for line in lines)


# sweep


def test_sweep_compares_degrees(run, folder):
    done = run("sweep", folder, "--tp", "1,2", columns=80)
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d+ ", line)]
    assert done.exit_code == 0 and [row[0] for row in rows] == ["1", "2"]
    assert max(map(len, done.stdout.splitlines())) <= 80 and "tokens/s" in done.stdout
    told = json.loads(run("sweep", SMALL, "--tp", "1,2", "--json").stdout)
    assert [row["tp"] for row in told["rows"]] == [1, 2] and told["best"] == 1


def test_a_sweep_in_which_nothing_fits_says_no(run):
    done = run("sweep", SMALL, "--tp", "1,2", "--memory", "1KB")
    assert done.exit_code == 1 and "too much" in done.stdout and "no degree fits" in done.stderr
    assert run("sweep", SMALL, "--tp", "1,2", "--memory", "1GB").exit_code == 0


def test_sweep_draws_curves(run, tmp_path):
    done = run("sweep", SMALL, "--tp", "1,2", "--plot", "out.svg")
    assert done.exit_code == 0, done.stderr
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_sweep_over_devices_compares_meshes(run, tmp_path):
    done = run("sweep", SMALL, "--devices", "2", "--global-batch", "16", "--json", "--plot", "out.svg")
    told = json.loads(done.stdout)
    assert done.exit_code == 0, done.stderr
    assert {row["mesh"]["dp"] * row["mesh"]["tp"] for row in told["rows"]} == {2} and told["rows"][0]["why"] == ""
    assert "<svg" in (tmp_path / "out.svg").read_text()
    none = run("sweep", SMALL, "--devices", "2", "--memory", "1KB", "--tp", "1")
    assert none.exit_code == 1 and "nothing fits" in none.stdout
    assert run("sweep", SMALL, "--global-batch", "8").exit_code == 2


# explain


def test_explain_says_what_else_there_was(run, folder):
    done = run("explain", folder, UP, "--tp", 4)
    assert done.exit_code == 0 and "chosen" in done.stdout and "binds:" in done.stdout
    told = json.loads(run("explain", SMALL, "0.weight", "--tp", 4, "--json").stdout)
    assert told["tp"] == 4 and told["alternatives"][0]["chosen"] and len(told["alternatives"]) > 1


def test_explain_where_the_degree_is_chosen(run):
    done = run("explain", SMALL, "0.weight")
    assert done.exit_code == 0 and "chosen" in done.stdout


def test_explain_refuses_a_saved_plan_and_says_what_that_knows(run, plan):
    plan.save("plan.json")
    done = run("explain", "plan.json", UP)
    assert done.exit_code == 1 and "Shard(0) by 32, column-parallel" in done.stderr and "Make it again" in done.stderr
    assert run("explain", "plan.json", "model.norm.wait").exit_code == 2


# verify


def test_verify_proves_a_model(run, folder):
    done = run("verify", folder, "--tp", 4)
    assert done.exit_code == 0 and re.search(r"^equal$", done.stdout, re.MULTILINE) and "4, simulated" in done.stdout
    assert re.search(r"captured graph against the model +\d\.\de", done.stdout)  # small enough for real weights


def test_verify_decodes(run, monkeypatch):
    refused = run("verify", SMALL, "--generate", 3)
    assert refused.exit_code == 2 and "carries nothing from call to call" in refused.stderr.replace("\n", " ")
    decoded = Decoded(3, 4, 4, 90, 1e-16, 0.0)
    report = Report(2, None, 0.0, 0.0, 0.0, 1, decoded=decoded)
    asked: list[int] = []
    monkeypatch.setattr(autotp, "verify", lambda *_, generate, **__: (asked.append(generate), report)[1])
    done = run("verify", SMALL, "--generate", 3)
    assert asked == [3] and re.search(r"calls of the model +4: a prefill, 3 decoded", done.stdout)
    assert re.search(r"largest error of these +1.0e-16, 4 cached tensors", done.stdout)


def test_verify_a_saved_plan(run):
    assert run("plan", SMALL, "--tp", 4, "--save", "plan.json").exit_code == 0
    told = json.loads(run("verify", SMALL, "--plan", "plan.json", "--json").stdout)
    assert told["ok"] and told["tp"] == 4 and told["difference"] is None and told["output_error"] < told["tolerance"]
    assert run("verify", SMALL, "--plan", "plan.json", "--tp", 2).exit_code == 2
    staged = run("verify", SMALL, "--plan", "plan.json", "--pp", 2)
    assert staged.exit_code == 2 and "has no repeated blocks" in staged.stderr.replace("\n", " ")
    refused = run("plan", SMALL, "--tp", 2, "--pp", 2)
    assert refused.exit_code == 2 and "plan() takes no pp" in refused.stderr.replace("\n", " ")


def test_verify_certifies(run):
    table = run("verify", SMALL, "--certify")
    assert table.exit_code == 0 and re.search(r"types, by spmd_types [\d.]+ +accepted", table.stdout)
    found = json.loads(run("verify", SMALL, "--certify", "--json").stdout)["certificate"]
    assert found["refusal"] is None and found["operators"] > 0


def test_verify_notices_a_wrong_rule(run):
    with registered(turn, rule="...n->...n"):  # it turns along n, which must not be split
        command = ("verify", "tests.helpers.modules.factories:turned", "--pin", "up.weight=shard:0")
        done, told = run(*command), run(*command, "--json")
    assert done.exit_code == told.exit_code == 1 and "differs (forward)" in done.stdout
    found = json.loads(told.stdout)
    assert not found["ok"] and "turn" in found["difference"]["op"]


def test_what_json_has_no_word_for_is_null(run, folder, monkeypatch):
    monkeypatch.setattr("autotp.pretrained.MAX_WEIGHT_BYTES", 1)
    told = json.loads(run("verify", folder, "--json").stdout)
    assert told["ok"] and told["capture_error"] < 1e-6  # on random weights, for there are none
    unknown = property(lambda trial: setattr(trial, "skip", "it fails"))
    monkeypatch.setattr("autotp.capture.selfcheck.Trial.original", unknown)
    done, told = (run("verify", SMALL, *x) for x in ([], ["--json"]))
    assert done.exit_code == told.exit_code == 1 and "not compared: it fails" in done.stdout
    found = json.loads(told.stdout)
    assert not found["ok"] and found["capture_error"] is None and found["unproved"] == "it fails"


def test_verify_says_that_a_model_is_too_large(run, monkeypatch):
    assert "the proof needs" not in run("verify", SMALL).stderr
    monkeypatch.setattr("autotp.cost.machines.this_machine.memory", lambda: 1e3)
    assert "the proof needs about 0 GiB" in run("verify", SMALL).stderr


# calibrate


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], matmuls=((64, 64), (16, 128)), budget=0.005))


def test_calibrate_writes_a_cluster(run, quick):
    done = run("calibrate", "--out", "here.toml", "--name", "here", "--json")
    assert done.exit_code == 0 and Cluster.load("here.toml").to_dict() == json.loads(done.stdout)
    assert run("plan", SMALL, "--tp", 2, "--cluster", "here.toml").exit_code == 0
    assert "median" in run("calibrate").stdout


def test_calibrate_refuses_before_it_measures(run, monkeypatch):
    monkeypatch.setattr(autotp, "calibrate", lambda **given: pytest.fail("it measured"))
    done = run("calibrate", "--out", "here.yaml")
    assert done.exit_code == 2 and "here.yaml must end in .json or .toml" in done.stderr


def test_a_plan_for_serving_says_what_fits(run, tmp_path):
    """The pool is what a device has beside weights; half the context is twice the sequences; on two ranks twice the
    tokens."""
    sizes: Any = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    asked = ["--objective", "serve", "--context", 16, "--concurrent", 4, "--tp", "1,2", "--json"]
    found = json.loads(run("plan", tmp_path, *asked).stdout)
    one, two = found["rows"]
    assert found["holds"] == 1 and one["sequences"]["8"] == one["tokens"] // 8
    assert 1.9 < two["tokens"] / one["tokens"] < 2.1 and one["tokens_per_second"] > 0 < two["first_token_s"]
    none = run("sweep", tmp_path, *asked[:6], "--tp", 1, "--memory", "1KB")
    assert none.exit_code == 1 and "no degree holds them all" in none.stdout
    bare = run("plan", SMALL, *asked[:6], "--tp", 1)
    assert bare.exit_code == 2 and "keeps nothing" in bare.stderr


def test_help_and_version(run):
    done = run("--help", columns=80)
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    for name in ("plan", "sweep", "explain", "verify", "calibrate", "tune", "serve", "doctor"):
        assert name in done.stdout and run(name, "--help").exit_code == 0
    assert run("--version").stdout.strip() == f"autotp {autotp.__version__}"
    assert "Exit codes" in done.stdout


def test_options_that_steer_say_what_the_arguments_say():
    """Every field of the library's steering is an option, with the same default."""
    from autotp.cli import flags as cli  # noqa: PLC0415
    from autotp.driver.options import Steering, pick  # noqa: PLC0415

    given: Any = cli.SteeringOptions().arguments() | {"within_node": cli.DegreeOptions().within_node}
    assert given == pick({}, Steering)


def test_pins_are_torch_placements():
    from autotp.cli.flags import read_pins  # noqa: PLC0415

    forms = [f"x={text}" for text in ("shard:1", "Shard(1)", "S(1)", "s:1", "shard: 1")]
    assert all(read_pins([form]) == {"x": Shard(1)} for form in forms)
    assert read_pins(["a=b=shard:-1"]) == {"a=b": Shard(-1)}
    with pytest.raises(autotp.AutoTPError, match="given twice"):
        read_pins(["x=shard:0", "x=replicate"])


def test_tune_measures_what_a_model_has_and_keeps_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTP_CACHE", str(tmp_path))
    done = run("tune", SMALL, "--tp", 2, "--seq", 8, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["file"] == str(tmp_path / "measured.json")
    assert {row["name"] for row in found["measured"]} == {"bias_gelu"}
    kept = (tmp_path / "measured.json").read_text()
    assert all(row["line"] in kept and row["without"] > 0 and row["with"] > 0 for row in found["measured"])
    assert len(json.loads(kept)["lines"]) == len(found["measured"]) == 1
    texts: list[str] = []
    monkeypatch.setattr(Screen, "working", lambda self, what: nullcontext(texts.append))
    shown = run("tune", SMALL, "--tp", 2, "--seq", 8)  # from the file
    assert texts[-1] == "measured 1: bias_gelu"
    assert all(row["why"] in shown.stdout for row in found["measured"])
    assert (tmp_path / "measured.json").read_text() == kept
