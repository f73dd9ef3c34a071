"""Ranks of a server on this machine, started by torchrun's own launcher, and watched; of several replicas the front."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autotp.errors import InputError, RankError

from .rank import DRAIN_SECONDS, LOOK_SECONDS, Options, run

# Everything between ranks stays on the loopback address; the ranks meet by a file, so that no store listens.
ALONE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


CHUNK, LOOKS, LINGER_SECONDS = 1 << 16, 10, 2.0  # bytes passed on at once; for what is still on its way at an end
GONE = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: application/json\r\nretry-after: 1\r\n\r\n"
    b'{"error": {"message": "a replica has ended", "type": "server_error", "param": null, "code": null}}'
)


class Front:
    """Connections of clients, each passed on to the replica with the fewest; a replica answers one request on each.

    Attributes:
        open: connections under way, by the socket of the replica.
    """

    def __init__(self, sockets: Sequence[Path]) -> None:
        self.open = dict.fromkeys(sockets, 0)

    async def serve(self, listening: socket.socket) -> None:
        """Take connections, for ever."""
        server = await asyncio.start_server(self._pass, sock=listening)
        await server.serve_forever()

    def end(self) -> None:
        """Let the last bytes of answers go out, for a while: replicas have ended."""
        for _ in range(LOOKS):
            time.sleep(LOOK_SECONDS * any(self.open.values()))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes from a client, and the answer; where there is none, say so."""
        request, answered = b"", False
        with suppress(OSError):
            request = await reader.read(CHUNK)
        replica = min(self.open, key=self.open.__getitem__)
        self.open[replica] += 1
        with suppress(OSError, TimeoutError):
            with suppress(OSError):
                answer, to_replica = await asyncio.open_unix_connection(replica)
                to_replica.write(request)
                rest = asyncio.create_task(_copy(reader, to_replica))
                rest.add_done_callback(lambda _: to_replica.close())  # the client has gone
                answered = await _copy(answer, writer)
                rest.cancel()
            if not answered:
                writer.write(GONE)
                writer.write_eof()
                async with asyncio.timeout(LINGER_SECONDS):  # else what a client still sends may cost it the answer
                    while await reader.read(CHUNK):
                        pass
        self.open[replica] -= 1
        writer.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> bool:
    """Pass on what comes to the end of either; return whether there was anything."""
    some = False
    with suppress(OSError):
        while data := await source.read(CHUNK):
            some = True
            sink.write(data)
            await sink.drain()
    return some


def serve(options: Options) -> None:
    """Serve a folder until Ctrl-C or SIGTERM.

    Args:
        options: what and how; their `folder` is made here.

    Raises:
        InputError: the ranks cannot run here. RankError: a rank ended; the error has its number and why.
    """
    tp, dp, world = options.tp, options.dp, options.tp * options.dp
    if torch.cuda.is_available() and world > torch.cuda.device_count():
        raise InputError(f"--tp {tp} --dp {dp}: this machine has {torch.cuda.device_count()} CUDA devices.")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise InputError(f"--host {options.host} --port {options.port}: {error.strerror or error}.") from error
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(ALONE)
    with tempfile.TemporaryDirectory(prefix="autotp-serve-") as folder:
        options = replace(options, folder=Path(folder))
        front = Front(options.sockets)
        if options.sockets:
            Thread(target=asyncio.run, args=[front.serve(listening)], daemon=True).start()
        else:
            listening.close()  # the first rank listens there
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world, run_id=secrets.token_hex(8), max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint=str(Path(folder) / "rendezvous"), rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1", shutdown_timeout=DRAIN_SECONDS + 5,
        )  # fmt: skip
        try:
            elastic_launch(config, entrypoint=run)(options)
        except SignalException as stopped:
            if stopped.sigval not in (signal.SIGINT, signal.SIGTERM):
                raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            why = failure.message if isinstance(failure.message, str) else failure.message["message"]
            where = f"rank {rank % tp} of {tp}" + (f" of replica {rank // tp}" if options.sockets else "")
            raise RankError(f"serving has ended: {where} ended with code {failure.exitcode}. {why}".strip()) from None
        finally:
            front.end()
