"""Adapters beside a model are models of their own: each answers what the unsharded model with it generates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from autotp.cli import app
from autotp.errors import InputError
from autotp.pretrained import from_pretrained
from autotp.runtime.generation import batch_manager
from tests.helpers.processes.serving import adapter, client_of, example, generated, here, raw, text_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # read by peft
MODELS = ("small", "a.1", "b")
PROMPTS = ("The quick brown fox jumps", "The quick brown fox")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of a model and of two adapters, one of which scales what it changes too."""
    base, *others = [tmp_path_factory.mktemp("adapted") / name for name in MODELS]
    example().small_model(base)
    for seed, folder in enumerate(others):
        adapter(base, folder, seed, use_dora=bool(seed))
    return [base, *others]


def answers(address: str) -> dict[tuple[str, str], str]:
    """What clients of all models at once are answered."""

    def ask(pair: tuple[str, str]) -> str:
        status, body, _ = raw(address, text_of(model=pair[0], prompt=pair[1]))
        assert status == 200 and body["model"] == pair[0], body
        return body["choices"][0]["text"].replace("�", "")  # bytes that make no character yet are kept back

    pairs = [(name, prompt) for prompt in PROMPTS for name in MODELS]
    with ThreadPoolExecutor(len(pairs)) as threads:
        return dict(zip(pairs, threads.map(ask, pairs), strict=True))


def test_each_adapter_is_a_model_beside_the_others(folders):
    texts = {(f.name, prompt): text for f in folders for prompt, text in generated(folders[0], f, PROMPTS).items()}
    assert len({texts[name, PROMPTS[0]] for name in MODELS}) == len(MODELS)
    with here(folders[0], adapters=folders[1:]) as (address, served):
        programs = served.module._programs_made.total
        for _ in range(2):
            assert answers(address) == texts
        assert served.module._programs_made.total == programs  # one for each adapter, there before the first request
        with client_of(address) as client:
            assert tuple(model.id for model in client.models.list().data) == MODELS
        assert raw(address, text_of(model="c"))[0] == 404
        with patch.object(batch_manager, "activate", lambda module, name: None):  # one adapter for all
            assert answers(address) != texts


def test_a_folder_that_is_no_adapter_of_the_model_is_said(folders, tmp_path):
    done = CliRunner().invoke(app, ["serve", str(folders[0]), str(tmp_path)])
    assert done.exit_code == 2 and "adapter_config.json" in done.stderr
    done = CliRunner().invoke(app, ["serve", *map(str, folders), str(folders[1])])
    assert done.exit_code == 2 and "one name" in done.stderr
    example().small_model(tmp_path / "wide", heads=8)
    with pytest.raises(Exception, match=r"lora_A.*\[4, 96\], the model has \[4, 128\]"):
        from_pretrained(tmp_path / "wide", 1, objective="decode", adapters={"a": folders[1]})
    with pytest.raises(InputError, match="adapter_config.json"):
        from_pretrained(folders[0], 1, objective="decode", adapters={"a": tmp_path})
