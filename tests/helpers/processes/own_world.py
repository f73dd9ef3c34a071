"""Ranks that are a world of their own, as torchrun starts them: for libraries that take the whole process group."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes.pool import PATIENCE


def run(fn: Callable[..., Any], *args: Any, world: int) -> list[Any]:
    """Call `fn(rank, *args)` in `world` new processes.

    Returns:
        The picklable results, by rank.

    Raises:
        RuntimeError: it failed on some rank; the message holds the tracebacks.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.processes.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(rank, world, folder, theirs, pickle.dumps((fn, args))))
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        answers = [_answer(pipe) for pipe in pipes]
        for worker in workers:
            worker.kill()
            worker.join()
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise RuntimeError(f"{fn.__name__} failed in a world of {world}:\n" + "\n".join(failed))
    return [found for _, found in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(PATIENCE) else (False, "hung")
    except (EOFError, ConnectionError):
        return False, "crashed"


def _work(rank: int, world: int, folder: str, pipe: Connection, call: bytes) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        if world > 1:
            store = dist.FileStore(str(Path(folder) / "store"), world)  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        fn, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=FutureWarning)  # of these libraries, about one another
            pipe.send_bytes(pickle.dumps((True, fn(rank, *args))))
    except Exception:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
