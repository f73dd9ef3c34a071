"""Work on local gloo ranks: a process of one thread for each."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.utils import logging as messages

from .measure import reason


def on_ranks(work: Callable[[], Any], ranks: int) -> list[Any]:
    """What a function finds on each rank, in rank order.

    Args:
        work: can be sent to processes; what it returns can be said in JSON.
        ranks: number of processes, joined in one gloo group.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, work, folder), nprocs=ranks)  # type: ignore[attr-defined]
        return json.loads(Path(folder, "found.json").read_text())


def _rank(rank: int, ranks: int, work: Callable[[], Any], folder: str) -> None:
    """One of the ranks; rank 0 writes what all found to the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads


def everywhere(work: Callable[[], Any]) -> tuple[Any, str]:
    """Call on every rank; return what comes of it, and why there is nothing, on any: all take the same steps."""
    found, why = None, ""
    try:
        found = work()
    except Exception as error:
        why = reason(error)
    whys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    return found, next(filter(None, whys), "")
