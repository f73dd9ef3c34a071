"""A server in this process, and servers that are started as a user starts them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import uvicorn
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, ContinuousBatchingConfig, LlamaForCausalLM

import autotp
from autotp.runtime.generation.batch_manager import manager_of
from autotp.serving.answers import Answers
from autotp.serving.app import app_of
from tests.helpers.examples import example_of

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 120.0  # seconds
NEW, CLIENTS = 12, 16
PROMPTS = ["The quick brown fox "[: 3 + i] * (1 + i % 3) for i in range(CLIENTS)]


def example() -> ModuleType:
    """The module of examples/serve_client.py."""
    return example_of("serve_client")


def adapter(base: Path, folder: Path, seed: int, **options: Any) -> None:
    """Save an adapter with weights that show."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data += 0.3 * torch.randn_like(p)
    model.save_pretrained(folder)


def generated(base: Path, folder: Path, prompts: Sequence[str]) -> dict[str, str]:
    """What the unsharded model generates by itself, or with an adapter, as text, by prompt."""
    tokenizer, model, texts = AutoTokenizer.from_pretrained(base), LlamaForCausalLM.from_pretrained(base), {}
    whole: Any = PeftModel.from_pretrained(model, folder) if folder != base else model
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = whole.eval().generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        texts[prompt] = str(tokenizer.decode(made)).replace("�", "")  # bytes that make no character yet are kept back
    return texts


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextlib.contextmanager
def here(
    folder: Path,
    most: int = 64,
    key: str = "",
    origins: Sequence[str] = (),
    scheduler: str = "fair",
    blocks: int = 64,
    adapters: Sequence[Path] = (),
) -> Iterator[tuple[str, Answers]]:
    """The address of a server over one rank, which is this process, and what answers there."""
    beside = {path.name.replace(".", "_"): path for path in adapters}
    module: Any = autotp.from_pretrained(folder, 1, objective="decode", adapters=beside)
    options = ContinuousBatchingConfig(page_size=16, num_blocks=blocks, max_batch_tokens=64, scheduler_type=scheduler)
    with torch.no_grad():
        manager = manager_of(module, module.generation_config, options, None, choices=True, adapters=[*beside])
    manager.output_router.output_queue.queue = deque(maxlen=0)
    manager.start()
    answers = Answers(
        {"small": "", **{path.name: name for name, path in beside.items()}},
        module,
        AutoTokenizer.from_pretrained(folder),
        manager,
        16 * (blocks - 1),
        512,
        most,
    )
    app, port = app_of(answers, key, origins, True), free_port()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}", answers
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        manager.stop(timeout=PATIENCE)


def until(holds: Any) -> None:
    """Wait until something holds, for a while."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def started(*options: Any) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """A server of its own: its address, its process, which leads a group, and the lines that it prints."""
    port = free_port()
    command = [sys.executable, "-m", "autotp", "serve", "--port", str(port), *map(str, options)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        try:
            until(lambda: process.poll() is not None or any(line.startswith("serving ") for line in [*lines]))
            yield f"http://127.0.0.1:{port}", process, lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reader.join(PATIENCE)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The process numbers of a server's ranks, in their order."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and "spawn_main" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return sorted(found)


def client_of(address: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=100)


def raw(address: str, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of an answer to a body, which is sent as it is where it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=100)) as connection:
        connection.request("POST", path, data, {"content-type": "application/json"} | headers)
        response = connection.getresponse()
        text = response.read().decode()
    return response.status, json.loads(text) if text.startswith("{") else text, dict(response.getheaders())


def text_of(**more: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": "abc", "max_tokens": NEW} | more
