"""Ranks of a server on this machine, started by torchrun's own launcher, and watched."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autotp.errors import InputError, RankError

from .rank import DRAIN_SECONDS, Options, run

# Everything between ranks stays on the loopback address; the ranks meet by a file, so that no store listens.
ALONE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def serve(options: Options) -> None:
    """Serve a folder until Ctrl-C or SIGTERM.

    Args:
        options: what and how; their `store` is made here.

    Raises:
        InputError: the ranks cannot run here. RankError: a rank ended; the error has its number and why.
    """
    if torch.cuda.is_available() and options.tp > torch.cuda.device_count():
        raise InputError(f"--tp {options.tp}: this machine has {torch.cuda.device_count()} CUDA devices.")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        socket.create_server((options.host, options.port), family=family).close()
    except OSError as error:
        raise InputError(f"--host {options.host} --port {options.port}: {error.strerror or error}.") from error
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(ALONE)
    with tempfile.TemporaryDirectory(prefix="autotp-serve-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=options.tp, run_id=secrets.token_hex(8), max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint=str(Path(folder) / "rendezvous"), rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1", shutdown_timeout=DRAIN_SECONDS + 5,
        )  # fmt: skip
        try:
            elastic_launch(config, entrypoint=run)(replace(options, store=str(Path(folder) / "ranks")))
        except SignalException as stopped:
            if stopped.sigval not in (signal.SIGINT, signal.SIGTERM):
                raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
            why = failure.message if isinstance(failure.message, str) else failure.message["message"]
            raise RankError(f"serving has ended: rank {rank} of {options.tp} ended {how}. {why}".strip()) from None
