"""Configs, plans and clusters that mean harm: nothing of them runs, is fetched, or ends in an error without a name."""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from autotp import Cluster
from autotp.cli import app
from autotp.cli.flags import ModelOptions
from autotp.cli.models import load
from autotp.errors import InputError
from tests.helpers.models import DECODER

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with code beside its config; that somebody is asked whether to run it fails the test."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("the user is asked to run code"))
    (tmp_path / "own.py").write_text("import sys\nsys.hostile_code_ran = True\n")
    return tmp_path


def written(folder: Path, **fields: Any) -> str:
    config = transformers.LlamaConfig(**DECODER).to_dict() | fields
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoModel": "own.OwnModel"}


def test_code_of_a_config_is_not_run_and_nobody_is_asked(folder):
    with pytest.raises(InputError, match=r"code of its own \(auto_map\), which is not run: build the model in a"):
        load(written(folder, model_type="own", auto_map=OWN), ModelOptions())
    known = load(written(folder, auto_map=OWN, architectures=None), ModelOptions())
    assert type(known.model).__module__.startswith("transformers.")
    assert not hasattr(sys, "hostile_code_ran")


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": "user/repo"},
        {"attn_implementation": "user/repo@main:function"},
        {"attn_implementation": {"": "sdpa", "text_config": "user/repo"}},
        {"experts_implementation": "user/repo"},
        {"text_config": {"attn_implementation": "kernels-community/flash-attn2"}},
        {"attn_implementation": "flash_attention_2"},  # a name for a kernel that is fetched where it is not installed
    ],
)
def test_kernels_from_a_hub_are_refused(folder, fields):
    with pytest.raises(InputError, match=r"config.json: .*implementation|text_config is .*fetch code from a hub"):
        load(written(folder, **fields), ModelOptions())
    with pytest.raises(InputError, match="fetch code from a hub"):
        load(written(folder), ModelOptions(set=[f"{name}={json.dumps(x)}" for name, x in fields.items()]))


def test_kernels_of_here_are_not(folder):
    made: Any = load(written(folder, attn_implementation="sdpa"), ModelOptions()).model
    assert made.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (DEEP.encode(), "nested too deep"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"5", "holds a int"),
        (None, "holds no config.json"),
    ],
)
def test_the_command_line_names_the_file(tmp_path, content, said):
    file = tmp_path / "config.json"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    done = CliRunner().invoke(app, ["plan", str(tmp_path)])
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and said in told and "unexpected" not in told and tmp_path.name in told.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("deep.json", DEEP[:60_000], "nested too deep"),
        ("deep.toml", "a = " + DEEP[:60_000], "nested too deep"),
        ("dots.toml", "a" + ".a" * 20_000 + " = 1", "a key has more than 64 parts"),
        ("table.toml", "[a" + ".a" * 20_000 + "]", "a key has more than 64 parts"),
        ("inline.toml", "x = { a" + " . a" * 10_000 + " = 1 }", "a key has more than 64 parts"),
        ("quoted.toml", '"a"' + '."a"' * 10_000 + " = 1", "a key has more than 64 parts"),
        ("large.toml", "# " + "a" * 70_000, "at most 64.0 KiB are read"),
        ("number.json", '{"matmul_tile": 1' + "0" * 40 + "}", "which is no size of anything"),
    ],
)
def test_hostile_clusters_are_refused_at_once(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=said) as caught:
        Cluster.load(tmp_path / name)
    assert name in str(caught.value) and len(str(caught.value)) < 400


def test_what_toml_may_say_is_read(tmp_path):
    dots = "a sentence" + "." * 100  # in a text, and in a comment, they nest nothing
    (tmp_path / "mine.toml").write_text(f'preset = "h100"  # {dots}\nsource = "{dots}"\n')
    assert Cluster.load(tmp_path / "mine.toml").source == dots
