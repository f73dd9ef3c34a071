"""Models as the command line takes them: configs of transformers, factories, sizes; and what the doctor finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from autotp import Inputs, log
from autotp.cli import app, facts, screen
from autotp.cli.doctor import _uses, missing, uses
from autotp.cli.flags import ModelOptions
from autotp.cli.models import load, resized
from autotp.cli.screen import Screen, as_json, one_line
from autotp.errors import InputError
from tests.helpers.models import DECODER, ENCODER

ROOT = Path(__file__).resolve().parents[2]


def config(kind: type, path: Path, **fields: object) -> str:
    kind(**fields).save_pretrained(path)
    return str(path)


def test_a_config_is_built_without_weights(tmp_path):
    name = config(transformers.LlamaConfig, tmp_path, **DECODER, architectures=["LlamaForCausalLM"])
    given = load(name, ModelOptions())
    assert type(given.model) is transformers.LlamaForCausalLM and next(given.model.parameters()).is_meta
    assert given.model.training and given.sizes == "input_ids (2 x 16)"
    assert not load(f"{name}/config.json", ModelOptions(), training=False).model.training
    real = load(name, ModelOptions(dtype="bfloat16"), real=True).model
    assert not next(real.parameters()).is_meta and next(real.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "fields", "made"),
    [
        (transformers.LlamaConfig, DECODER, "LlamaForCausalLM"),
        (transformers.BertConfig, ENCODER, "BertForPreTraining"),
        (transformers.LlamaConfig, DECODER | {"architectures": ["LlamaModel"]}, "LlamaModel"),
        (transformers.LlamaConfig, DECODER | {"architectures": ["Foreign"]}, "LlamaForCausalLM"),
    ],
)
def test_the_class_is_the_one_that_the_config_names(tmp_path, kind, fields, made):
    assert type(load(config(kind, tmp_path, **fields), ModelOptions()).model).__name__ == made


def test_a_config_that_nobody_knows(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(InputError, match=r"config.json: transformers [\d.]+ cannot build it"):
        load(str(tmp_path), ModelOptions())
    for text, said in (("[]", "holds a list"), ("{", "is not JSON"), ("{}", "has no model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=said):
            load(str(tmp_path), ModelOptions())


def test_fields_of_a_config_can_be_set(tmp_path):
    name = config(transformers.LlamaConfig, tmp_path, **DECODER)
    given = load(name, ModelOptions(set=["num_hidden_layers=1", "tie_word_embeddings=true", "hidden_act=gelu"]))
    made: Any = given.model.config
    assert (made.num_hidden_layers, made.tie_word_embeddings, made.hidden_act) == (1, True, "gelu")
    for text, said in (("layers=1", "no attribute 'layers'"), ("num_hidden_layers", "give FIELD=VALUE")):
        with pytest.raises(InputError, match=said):
            load(name, ModelOptions(set=[text]))
    with pytest.raises(InputError, match="is a factory"):
        load("tests.helpers.modules.factories:small", ModelOptions(set=["x=1"]))


def test_a_factory_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("freshly_made.py").write_text(
        "from torch import nn, ones\nclass Holder:\n    net = nn.Linear(4, 4)\n"
        "def both():\n    return Holder.net, {'input': ones(2, 4)}\n"
    )
    given = load("freshly_made:both", ModelOptions(batch=6, dtype="float64"))
    assert isinstance(given.model, nn.Linear) and given.sizes == "input (6 x 4)"
    assert given.inputs.kwargs["input"].dtype == given.model.weight.dtype == torch.float64
    with pytest.raises(InputError, match="Linear needs example inputs"):
        load("freshly_made:Holder.net", ModelOptions())


def test_inputs_of_another_size_hold_the_same_values():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    made = resized(Inputs(ids, mask=torch.ones(2, 3), other=7, scale=torch.ones(5)), 3, 5)
    assert made.args[0].tolist() == [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [1, 2, 3, 1, 2]]
    assert made.kwargs["mask"].shape == (3, 5) and made.kwargs["other"] == 7 and made.kwargs["scale"].shape == (5,)
    assert resized(Inputs(ids), None, 2).args[0].tolist() == [[1, 2], [4, 5]]
    two = resized(
        Inputs(input_ids=torch.zeros(2, 16, dtype=torch.long), ids=torch.zeros(2, 12, dtype=torch.long)), 2, 32
    )
    assert two.kwargs["ids"].shape == (2, 24)  # the decoder's keep their ratio
    assert resized(Inputs(torch.ones(2, 6, 8)), 4, 3).args[0].shape == (4, 3, 8)


def test_sizes_that_the_inputs_do_not_have():
    with pytest.raises(InputError, match="hold no sequence"):
        resized(Inputs(torch.ones(2, 3, 8, 8)), None, 4)
    with pytest.raises(InputError, match="no tensor with a batch"):
        resized(Inputs(3), 2, None)


def test_a_length_beyond_the_config_is_remarked(tmp_path):
    name = config(transformers.LlamaConfig, tmp_path, **DECODER)
    assert "more than the config's max_position_embeddings, 64" in load(name, ModelOptions(seq=65)).remark
    assert not load(name, ModelOptions(seq=64)).remark


# doctor


def test_doctor_says_what_there_is():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["versions"]["torch"] == torch.__version__
    assert told["devices"][-1]["kind"] == "cpu" and told["uses"]["backend"] in ("gloo", "nccl")
    assert told["uses"]["launch"].startswith("torchrun --nproc-per-node")
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"}).stdout
    assert all(word in shown for word in ("Versions", "Devices", "Links", "What autotp would use", "Missing"))


def test_doctor_says_no_where_something_is_too_old(monkeypatch):
    monkeypatch.setattr(facts, "needs", lambda: {"torch": "99.1", "highspy": "1.10"})
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "110"})
    assert done.exit_code == 1 and "required: torch>=99.1" in done.stdout and "required: highspy" not in done.stdout


def test_the_least_version_is_read_beside_a_bound_above(monkeypatch):
    required = ["highspy<1.16,>=1.10", "sympy", 'triton>=3.6; extra == "test"']
    monkeypatch.setattr(facts.importlib.metadata, "requires", lambda name: required)
    assert facts.needs() == {"highspy": "1.10", "sympy": ""}


def found(**changed: object) -> dict:
    card = {"kind": "cuda", "index": 0, "name": "NVIDIA H100 80GB HBM3", "memory": 1, "preset": "h100"}
    processor = {"kind": "cpu", "index": 0, "name": "CPU", "memory": 1, "cores": 2, "threads": 2, "preset": "local"}
    links = {
        "backends": ["gloo", "nccl"],
        "peers": 2,
        "pairs": 2,
    }
    versions = {"torch": "2.13.0+cu130", "transformers": "5.23.0", "triton": "3.9.0"}
    whole = {"versions": versions, "needs": {"torch": "2.11"}, "devices": [card, card, processor], "links": links}
    return whole | changed


def test_unlike_devices_are_named_with_their_ratio():
    """By the presets of their names; where one has none, nothing is said of them."""
    card, processor = found()["devices"][1:]
    pair = [card | {"preset": "rtx4090"}, card | {"preset": "rtx3090"}, processor]
    told = found(devices=pair) | {"missing": []}
    told["uses"] = uses(told)
    assert (told["uses"]["here"], told["uses"]["ratio"]) == ("rtx4090,rtx3090", (7, 3))
    said = dict(_uses(told))
    assert "--cluster rtx4090,rtx3090" in said["to price"] and said["unlike devices"].startswith("7:3 by")
    assert uses(found())["ratio"] == (1,) and "unlike devices" not in dict(_uses(found() | {"uses": uses(found())}))
    assert uses(found(devices=[card, card | {"preset": None}, processor]))["here"] is None


def test_what_is_missing_follows_from_what_there_is():
    assert not list(missing(found())) and uses(found())["backend"] == "nccl" and uses(found())["ranks"] == 2
    lacking = {m["what"]: m["required"] for m in missing(found(links={**found()["links"], "backends": ["gloo"]}))}
    assert lacking == {"NCCL": True}
    alone = {
        m["what"]: m["required"]
        for m in missing(found(devices=found()["devices"][-1:], versions={"torch": "2.9.1", "transformers": None}))
    }
    assert alone == {"torch>=2.11": True, "transformers": False, "a CUDA device": False}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
    ],
)
def test_a_device_has_the_preset_of_its_name(name, preset):
    assert facts.preset(name) == preset


# what is shown


def test_work_shows_only_once_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(screen, "PATIENCE", 0.05)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Screen().working("quick work"):
        pass
    assert "quick work" not in capsys.readouterr().err
    with Screen().working("slow work"):
        appears("slow work", capsys)
    monkeypatch.delenv("FORCE_COLOR")
    with Screen().working("work in a log"):
        time.sleep(0.2)
    assert "work in a log" not in capsys.readouterr().err
    monkeypatch.setattr(log, "LATE", 0.02)
    with Screen().working("long work in a log") as working, log.stage("plan"):
        appears("long work in a log: plan: ", capsys)
        working("other work")
        appears("other work: plan: ", capsys)


def appears(text: str, capsys: pytest.CaptureFixture[str], seconds: float = 120.0) -> None:
    """Wait until this is on stderr, with nothing on stdout."""
    told, end = "", time.monotonic() + seconds
    while text not in told:
        assert time.monotonic() < end, told
        time.sleep(0.01)
        shown = capsys.readouterr()
        assert not shown.out
        told += shown.err


def test_messages_become_one_line_without_their_tables():
    text = "nothing fits:\n  tp   step   memory\n   1   2 ms   3 GiB\nTake less"
    assert one_line(text) == "nothing fits: Take less"
    assert one_line("a\n  b: 1\n  c: 2.\nd") == "a; b: 1; c: 2. d"
    assert json.loads(as_json({"x": [float("nan"), 1.5, (float("inf"),)]})) == {"x": [None, 1.5, [None]]}


# as a process


def python(*args: str, **env: str) -> subprocess.CompletedProcess:
    everything = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=everything, capture_output=True, text=True, timeout=900
    )


@pytest.mark.ranks
def test_as_a_module():
    refused = python("-m", "autotp", "plan", "nowhere")
    assert refused.returncode == 2 and not refused.stdout and "Traceback" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    shown = python("-m", "autotp", "plan", "nowhere", "--debug")
    assert shown.returncode == 2 and "Traceback" in shown.stderr


@pytest.mark.ranks
def test_a_reader_that_has_enough_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m autotp doctor --json | true"
    everything = os.environ | {"PYTHONUNBUFFERED": ""}  # what is printed lies in a buffer when the reader leaves
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=everything, capture_output=True, text=True, timeout=900
    )
    told = [line for line in done.stderr.splitlines() if not line.endswith("s so far")]
    assert (done.returncode, done.stdout, told) == (0, "", [])


DEAF = """
import time

def make():
    print("waits", flush=True)
    while {deaf}:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass
    time.sleep(600)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_ends_a_command_with_a_sentence(tmp_path, deaf):
    (tmp_path / "waiting.py").write_text(DEAF.format(deaf=deaf))
    command, everything = (
        [sys.executable, "-m", "autotp", "plan", "waiting:make"],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it, as its children would
    with subprocess.Popen(
        command, cwd=tmp_path, env=everything, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    told = told.splitlines()[-1]
    assert (process.returncode, told) == (130, "autotp: error: stopped by Ctrl-C, without a result.")
