"""What the tests of the command line share: a folder of a model, its plan, and a command run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner, Result

import autotp
from autotp.cli import app
from autotp.plans.plan import Plan
from tests.helpers.models import DECODER

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of transformers, with a config and no weights."""
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return str(path)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """A command in an empty folder; it must never leave with a traceback of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotp.log.LATE", 1e6)  # no line of progress, however slow the machine is

    def run(*args: object, columns: int = 110) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.fixture(scope="module")
def plan(folder) -> Plan:
    """What the library itself plans for the folder."""
    return autotp.plan(transformers.AutoModelForCausalLM.from_config(_config(folder)), 4)


def _config(folder: str) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)
