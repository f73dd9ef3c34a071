"""Ranks of a server: each has its part of the model, and the first one takes the requests."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import AutoTokenizer, ContinuousBatchingConfig

from autotp.errors import InputError, RankError
from autotp.pretrained import from_pretrained
from autotp.runtime.generation.batch_manager import manager_of

from .answers import Answers
from .app import LOCAL, app_of

# To end answers in, below the 30 after which torch's launcher kills a rank; between lines; between looks.
DRAIN_SECONDS, REPORT_SECONDS, LOOK_SECONDS = 25, 10.0, 0.2
CONNECTIONS = 8  # connections and tasks for each answer that may be under way
PAGE, CPU_TOKENS, CPU_SHARE = 64, 512, 0.5  # tokens of a page; of a batch on a CPU; of its memory that all ranks take


@dataclass(frozen=True)
class Options:
    """Options of a server.

    Attributes:
        folders: of the model, and of adapters beside it. tp: ranks of a replica. dp: replicas.
        dtype: of the weights, or None.
        host, port: to listen on. key: that clients show, or empty. origins: of pages whose scripts may ask.
        max_tokens: of an answer. most: answers at once. pool: tokens that are kept of all requests, or None.
        cluster: to plan for, a preset or a file, or None.
        folder: of files and sockets by which the ranks meet, which is the user's alone.
    """

    folders: Sequence[Path]
    tp: int
    dp: int
    dtype: torch.dtype | None
    host: str
    port: int
    key: str
    origins: tuple[str, ...]
    max_tokens: int
    most: int
    pool: int | None
    cluster: str | None = None
    folder: Path = Path()

    @property
    def sockets(self) -> list[Path]:
        """Sockets on which replicas listen; none for one alone."""
        return [self.folder / f"replica{i}" for i in range(self.dp) if self.dp > 1]


def run(options: Options) -> None:
    """Serve on this rank until all are told to end; a process ends with it.

    Raises:
        AutoTPError: another rank has failed, or the folder cannot be served.
    """
    folder, *adapters = options.folders
    beside = {str(i): path for i, path in enumerate(adapters, 1)}  # a module's name has no dot
    (replica, rank), cuda = divmod(int(os.environ["RANK"]), options.tp), torch.cuda.is_available()
    world = options.tp * options.dp
    batches = ContinuousBatchingConfig(page_size=PAGE, scheduler_type="fair")
    batches.num_blocks = None if options.pool is None else -(-options.pool // PAGE)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # ranks share cores, and one memory
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        batches.max_batch_tokens, batches.max_memory_percent = CPU_TOKENS, CPU_SHARE / world
    # A file, and no port, is what the ranks of one node meet by.
    store: Any = dist.FileStore(str(options.folder / f"ranks{replica}"), options.tp)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=options.tp)
    module: Any = from_pretrained(
        folder, options.tp, dtype=options.dtype, objective="decode", adapters=beside, cluster=options.cluster
    )
    with module._calls.turn("serving"), torch.no_grad():
        manager = manager_of(module, None, batches, None, choices=True, adapters=[*beside])
    manager.output_router.output_queue.queue = deque(maxlen=0)  # of results for clients that have gone
    manager.start()
    for number in (signal.SIGINT, signal.SIGTERM):  # what ends is the first rank's server, and then all others
        signal.signal(number, lambda *_: None)
    if rank == 0:
        if replica == 0:
            print(module.plan, flush=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        models = dict(zip(map(model_name, options.folders), ["", *beside], strict=True))
        answers = Answers(
            models, module, tokenizer, manager, _context(module, manager), options.max_tokens,
            -(-options.most // options.dp),
        )  # fmt: skip
        asyncio.run(_serve(options, answers, replica))
        manager.stop(timeout=DRAIN_SECONDS)
    while manager.is_running():
        time.sleep(LOOK_SECONDS)
    if (error := manager.background_thread_status.fatal_error) is not None:
        raise error
    os._exit(0)  # the launcher reads no result by now, and would let this process wait


def model_name(folder: Path) -> str:
    """Return the name that a folder is served under."""
    return folder.resolve().name


async def _serve(options: Options, answers: Answers, replica: int) -> None:
    """Serve HTTP until a signal, or the end of the manager; report when all replicas are ready, and the speed."""
    sockets, name = options.sockets, f"replica {replica}: " if options.sockets else ""
    server = uvicorn.Server(
        uvicorn.Config(
            app_of(answers, options.key, options.origins, options.host in LOCAL), options.host, options.port,
            uds=str(sockets[replica]) if sockets else None,
            headers=[("connection", "close")] if sockets else [],  # so that the next request goes where there is room
            log_level="error", timeout_graceful_shutdown=DRAIN_SECONDS,
            limit_concurrency=CONNECTIONS * answers.most, server_header=False,
        )
    )  # fmt: skip
    server.handle_exit = lambda *_: setattr(server, "should_exit", True)  # type: ignore[method-assign]  always by finishing what is begun
    serving, last, before, going = asyncio.create_task(server.serve()), 0.0, 0, True
    while going:
        going = not (await asyncio.wait([serving], timeout=LOOK_SECONDS))[0]
        server.should_exit |= answers.failure is not None
        now = time.monotonic()
        if not last and server.started and all(path.exists() for path in sockets):
            last, where = now, f"http://{options.host}:{options.port}/v1"
            names, room = ", ".join(answers.models), answers.context
            if replica == 0:
                print(f"serving {names} at {where} with {room} tokens for a prompt and its answer", flush=True)
        elif last and (now - last >= REPORT_SECONDS or not going):
            if answers.tokens != before:
                rate = (answers.tokens - before) / (now - last)
                print(f"{name}{rate:.1f} tokens/s, {answers.running} answers under way", flush=True)
            last, before = now, answers.tokens
    await serving


def _context(module: Any, manager: Any) -> int:
    """Return the tokens that a prompt and its answer may have: as many as the model takes and the pools hold."""
    cache = manager.batch_processor.cache
    room = cache.num_blocks * PAGE - len(cache.cache_allocators) * cache.tokens_per_sector
    return min(room, getattr(module.config.get_text_config(), "max_position_embeddings", None) or room)


# ---- the launcher, and of several replicas the front -----------------------------------------------------------------


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
        """Wait a while for the last bytes of answers: replicas have ended."""
        for _ in range(LOOKS):
            time.sleep(LOOK_SECONDS * any(self.open.values()))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a client's request, and the answer, or an error where there is none."""
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
    """Copy bytes until either side ends; return whether there were any."""
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
        options: of the server; their `folder` is made here.

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
            local_addr="127.0.0.1",
        )  # fmt: skip
        try:
            elastic_launch(config, entrypoint=run)(options)
        except SignalException as stopped:
            if stopped.sigval not in (signal.SIGINT, signal.SIGTERM):
                raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            reason = failure.message if isinstance(failure.message, str) else failure.message["message"]
            where = f"rank {rank % tp} of {tp}" + (f" of replica {rank // tp}" if options.sockets else "")
            raise RankError(
                f"serving has ended: {where} ended with code {failure.exitcode}. {reason}".strip()
            ) from None
        finally:
            front.end()
