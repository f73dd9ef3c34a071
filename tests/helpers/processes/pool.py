"""One pool of gloo worker processes, kept for the tests of a file: starting processes costs more than most tests.

They are forked from one process that has imported torch and transformers (`preloaded.py`), so that new workers,
after a test whose ranks failed, cost little.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.helpers.sharing.shared_captures import shared_captures, sharing_captures

SIZE = 4
GRACE = 3.0  # seconds that the other ranks get once one rank has failed
PATIENCE = 600.0  # seconds until ranks count as hung: far more than any test takes, on a machine however slow


class WorkerError(RuntimeError):
    """A function failed, crashed or hung on some rank; the message holds the remote tracebacks."""


class Pool:
    """As many workers as a call has wanted, `SIZE` at most, and within them one group of the first n for every n.

    Where some crash, hang or fail (their groups are then out of step) all are killed, and the next `run` starts new
    ones.
    """

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, world: int = SIZE, timeout: float = PATIENCE) -> list[Any]:
        """`fn(rank, world, group, *args)` on the ranks of a world, at the same time.

        Args:
            fn: a function that a worker can import (top level of a module).
            args: picklable arguments, the same for every rank.
            world: number of ranks, 1 to `SIZE`.
            timeout: seconds until the workers count as hung.

        Returns:
            The picklable results, by rank.

        Raises:
            WorkerError: `fn` failed, crashed or hung somewhere.
        """
        answers = self.ask(fn, *args, world=world, timeout=timeout)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        failures += [f"rank {rank}: crashed or hung" for rank in range(world) if rank not in answers]
        if failures:
            if len(answers) < world:
                self._dump()
            self.close()
            raise WorkerError(f"{fn.__name__} failed in a world of {world}:\n" + "\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def ask(
        self, fn: Callable[..., Any], *args: Any, world: int, timeout: float, grace: float = GRACE
    ) -> dict[int, tuple[bool, Any]]:
        """As `run`, and what each rank answered: whether it is well, and its result or traceback.

        Args:
            fn, args, world, timeout: see `run`. grace: seconds that the others get once one rank has failed.

        Returns:
            The answers by rank, without ranks that crashed or hung; the caller closes the pool where some did.
        """
        if len(self._workers) < world or not all(worker.is_alive() for worker in self._workers):
            self.close()
            self.start(world)
        message = pickle.dumps((fn, world, args, sharing_captures()))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(message)
        return self._answers(world, timeout, grace)

    def ended(self, rank: int) -> bool:
        """Whether the process of this rank has ended."""
        return not self._workers[rank].is_alive()

    def _dump(self) -> None:
        """The stacks of all threads of the workers that live, on the log: where they hang."""
        for worker in self._workers:
            if worker.is_alive() and hasattr(signal, "SIGUSR1"):
                with contextlib.suppress(ProcessLookupError):  # it ended by now
                    os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def close(self) -> None:
        """End the workers, those that do not end by themselves by force; the next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 1
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._pipes, self._folder = [], [], None

    def start(self, size: int = SIZE) -> None:
        """Start `size` workers, and wait until they have their groups."""
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.processes.preloaded"])
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(rank, size, self._folder.name, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv_bytes()

    def _answers(self, world: int, timeout: float, grace: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world])}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionError):  # it crashed
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                if not answers.get(rank, (False,))[0]:
                    deadline = min(deadline, time.monotonic() + grace)
        return answers


def _work(rank: int, size: int, folder: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable()  # a worker that dies says where each of its threads was
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # and so does one that hangs
    torch.set_num_threads(1)
    _share_a_device()
    store = dist.FileStore(str(Path(folder) / "store"), size)  # pyright: ignore[reportPrivateImportUsage]
    # A dead rank must never keep the others longer than any test waits.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    groups = {world: dist.new_group(list(range(world))) for world in range(1, size + 1)}
    with contextlib.suppress(EOFError, ConnectionError):  # the session is over
        pipe.send_bytes(b"ready")
        while True:
            message = pipe.recv_bytes()
            pipe.send_bytes(_answer(rank, message, groups))
    dist.destroy_process_group()


def _share_a_device() -> None:
    """All groups of this process wait in one thread: gloo gives each one of its own, which wakes 100 times a second."""
    device = dist.ProcessGroupGloo.create_device(interface="lo")

    class Shared(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Shared


def _answer(rank: int, message: bytes, groups: dict[int, Any]) -> bytes:
    try:
        fn, world, args, sharing = pickle.loads(message)
        torch.manual_seed(0)  # what ran before, on some of the ranks, decides nothing
        with shared_captures(sharing), warnings.catch_warnings():
            warnings.simplefilter("error")
            # Dynamo itself instantiates the autograd.Functions that it traces (torch 2.13).
            warnings.filterwarnings("ignore", ".*Function.* should not be instantiated", DeprecationWarning)
            # It reads `grad` of what it traces, and hides that warning where warnings are shown (torch 2.13).
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            # Its advice to who writes to what a wrapped module returns, which no program does (torch 2.13).
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # by Inductor's own imports
            return pickle.dumps((True, fn(rank, world, groups[world], *args)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
