"""`autotp serve` as a user starts it, on ranks: right tokens, an end that lets answers end, and a rank that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from typer.testing import CliRunner

from autotp.cli import app
from tests.helpers.processes.serving import (
    CLIENTS,
    NEW,
    PATIENCE,
    PROMPTS,
    adapter,
    client_of,
    example,
    generated,
    ranks_of,
    raw,
    started,
    text_of,
    until,
)  # fmt: skip

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and the unsharded model in it."""
    folder = tmp_path_factory.mktemp("served") / "small"
    model = example().small_model(folder)
    GenerationConfig(use_cache=False).save_pretrained(folder)  # as it is after a training
    return folder, model


def listeners(pid: int) -> set[str]:
    """Addresses, in hexadecimal, on which a process and its children listen."""
    children = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    inodes = {os.readlink(f) for each in (pid, *children) for f in Path(f"/proc/{each}/fd").iterdir() if f.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def asked_at_once(address: str, models: Sequence[str]) -> list[str]:
    """What as many clients at once are answered, every other one in a stream."""

    def ask(i: int) -> str:
        with client_of(address) as client:
            asked: Any = {"model": models[i], "prompt": PROMPTS[i], "max_tokens": NEW, "stream": i % 2 == 0}
            made = client.completions.create(**asked)
            text = "".join(x.choices[0].text for x in made) if i % 2 == 0 else made.choices[0].text
            return text.replace("�", "")

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(ask, range(len(models))))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # read by peft
def test_ranks_answer_and_drain(small, tmp_path):
    folder = small[0]
    adapter(folder, tmp_path / "other", 1)
    own, others = generated(folder, folder, PROMPTS), generated(folder, tmp_path / "other", PROMPTS)
    for more in ("--tp", "2"), ("--dp", "2"):
        with started(folder, tmp_path / "other", "--pool", "8192", *more) as (address, process, lines):
            assert sum(f"tp={2 if more[0] == '--tp' else 1}" in x for x in lines) == 1  # the plan, once
            assert any(x.startswith("serving small, other at ") for x in lines)
            assert listeners(process.pid) == {"0100007F"}  # 127.0.0.1 alone
            texts = asked_at_once(address, ["other" if i % 3 else "small" for i in range(CLIENTS)])
            assert texts == [(others if i % 3 else own)[prompt] for i, prompt in enumerate(PROMPTS)]
            # Ctrl-C reaches the launcher and the ranks; what is under way ends.
            with ThreadPoolExecutor(4) as threads:
                last = [threads.submit(raw, address, text_of(max_tokens=200)) for _ in range(4)]
                time.sleep(0.3)
                os.killpg(process.pid, signal.SIGINT)
                results = [call.result()[:2] for call in last]
            assert [(status, body["usage"]["completion_tokens"]) for status, body in results] == [(200, 200)] * 4
            assert process.wait(PATIENCE) == 0 and not ranks_of(process)
        until(lambda: lines[-1:] == ["stopped\n"])
        assert sum(" tokens/s, 0 answers under way" in x for x in lines) >= (1 if more[0] == "--tp" else 2), lines


def test_a_rank_that_dies_is_named_and_a_restart_serves(small):
    """Beside another replica, whose answers end, and then alone, as a supervisor starts it again."""
    for dp, name in ((2, "rank 1 of 2 of replica 1"), (1, "rank 1 of 2")):
        options = "--tp", "2", "--dp", dp, "--pool", "8192", "--concurrent", "15"
        with started(small[0], *options) as (address, process, lines):
            if dp > 1:  # sixteen answers at once are all that two replicas of eight each take
                with ThreadPoolExecutor(17) as threads:
                    calls = [threads.submit(raw, address, text_of(max_tokens=200)) for _ in range(17)]
                    assert sorted(call.result()[0] for call in calls) == [200] * 16 + [429]
            with ThreadPoolExecutor(dp) as threads:  # one on each
                calls = [threads.submit(raw, address, text_of(max_tokens=200)) for _ in range(dp)]
                time.sleep(0.2)  # amid the answers: the other replica ends its own in time, on a slow machine too
                os.kill(ranks_of(process)[-1], signal.SIGKILL)
                results = [call.result()[:2] for call in calls]
            assert sorted(status for status, _ in results) == [200] * (dp - 1) + [503]
            assert all(body["usage"]["completion_tokens"] == 200 for status, body in results if status == 200)
            assert process.wait(PATIENCE) not in (0, None)
        until(lambda: lines)
        assert any(f"{name} ended with code -9. Signal 9 (SIGKILL)" in line for line in lines), lines[-5:]


BAD = [("--dp", "0"), ("--host", "192.0.2.1"), ("--dtype", "int8"), ("--pool", "0")]


@pytest.mark.parametrize("more", BAD, ids=" ".join)
def test_what_cannot_be_served_is_said_at_once(more, tmp_path):
    (tmp_path / "config.json").touch()
    done = CliRunner().invoke(app, ["serve", str(tmp_path), *more])
    assert done.exit_code == 2 and done.stderr.startswith("autotp: error: ") and more[0] in done.stderr
