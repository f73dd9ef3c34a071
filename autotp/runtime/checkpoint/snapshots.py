"""Snapshots of a run in memory of its nodes: taken beside training, and read by the ranks that come after a failure."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp import compat
from autotp.comm.channel import Peers, connected
from autotp.comm.ranks import Ranks, agree, from_all, together
from autotp.comm.turn import Turn
from autotp.errors import InputError, RankError, StateError
from autotp.ir.graph import NamedTensors
from autotp.log import log
from autotp.runtime import state
from autotp.runtime.storage import Box, ShardState
from autotp.text import counts

from . import shared_memory
from .archives import Tensors
from .loading import load
from .optimizers import PREFIX
from .saving import as_json, collect
from .shared_memory import KeptStep, Layout, Owner, Record, Slot

SECONDS = 600.0  # that a connection may be silent: as good as never
_open = set[Path]()  # folders that this process keeps steps in


@Turn("snapshot()")
def snapshot(
    self: Any, optimizer: Optimizer, *, every: int = 1, redundancy: int = 0,
    extra: Callable[[], dict[str, Any]] | None = None,
) -> Snapshots:  # fmt: skip
    """Keep weights and optimizer states in shared memory of the node, for ranks that torchrun starts after a failure.

    They are copied after a step of the optimizer, beside the next forward and backward; the step after that waits
    until all ranks have copied. A module of `autotp.compile(resume=True)` has the weights of the latest step that is
    kept; here the optimizer gets its states, and torch's generators what they had. A collective call.

    Args:
        self: the module. optimizer: of its parameters; its steps are counted from here on.
        every: keep each step of so many; no more steps than that are lost.
        redundancy: 1 keeps a second copy in the memory of a neighbour, on another node where there are several.
        extra: gives what else is kept, such as the place in the data, as JSON can say it; called after those steps.

    Returns: a context that gives the memory back where no error leaves it; its `step` is how many are done. Printed,
        it says which memory and copies that takes.

    Raises:
        InputError: an argument that cannot be used.
        StateError: torchrun gave the run no name, memory does not suffice, or the optimizer's states cannot be saved.
        RankError: that is so on another rank.
    """
    return Snapshots(self._shards, optimizer, self.__dict__.pop("_kept", None), every, redundancy, extra)


def resumed(module: Any, resumes: bool) -> Any:
    """Return the module; where it resumes, with the weights that memory of the nodes holds of its run."""
    if resumes:
        module.__dict__["_kept"] = resume(module._shards)
    return module


def resume(shards: ShardState) -> KeptStep | None:
    """Load the weights of the latest step that memory of the nodes holds whole. A collective call.

    Returns: what is kept of it, of which an optimizer is loaded later; None where memory holds nothing of this run.

    Raises:
        StateError: the run has no name, or what was kept is gone in part.
        RankError: that is so on another rank.
    """
    ranks = shards.planners
    owner = together(ranks, "reading what the run is called", lambda: Owner.of(shards))
    folder = together(ranks, "opening memory of the node", owner.open)
    places, local = nodes(ranks, folder)
    rank = ranks.rank

    def look() -> list[tuple[Record, bool]]:  # the ranks of a node share the reading
        return [(record, record.holds()) for record in shared_memory.records_of(owner)[local.index(rank) :: len(local)]]

    of_ranks = from_all(ranks, together(ranks, "reading what memory holds", look), "what memory holds")
    records = shared_memory.latest([pair for local_records in of_ranks for pair in local_records])
    names = {record.file.name for record in records}
    if rank == local[0]:  # what was cut off, and the step before
        shared_memory.drop(folder, lambda name: name not in names)
    if not records:
        return None
    on_node = defaultdict[Hashable, list[Record]](list)
    for place, local_records in zip(places, of_ranks, strict=True):
        on_node[place] += [record for record, holds in local_records if holds and record.file.name in names]
    archive = together(
        ranks, "opening what is kept", lambda: KeptStep(ranks, folder, records, [on_node[place] for place in places])
    )
    load(shards, archive)
    return archive


class Snapshots:
    """Steps of a run in memory of its nodes: made by `ShardedModule.snapshot`. Printed, it says how much memory.

    As a context it closes at the end, but where an error leaves it: then others may go on from what is kept.

    Attributes:
        step: how many steps of the optimizer are done, those before a failure that memory held among them.
        extra: what `extra` gave on rank 0 after the step that this start goes on from; empty at the first start.
    """

    def __init__(
        self, shards: ShardState, optimizer: Optimizer, archive: KeptStep | None, every: int, redundancy: int,
        extra: Callable[[], dict[str, Any]] | None,
    ) -> None:  # fmt: skip
        self._shards, self._optimizer, self._every, self._give = shards, optimizer, every, extra
        self._ranks, self._rank = shards.planners, shards.planners.rank
        together(self._ranks, "reading the options", lambda: _refuse(shards, every, redundancy))
        agree(self._ranks, "what is kept", {"every": every, "redundancy": redundancy})
        self._owner = together(self._ranks, "opening memory of the node", lambda: _opened(shards))
        self._folder = self._owner.folder
        self.step, self.extra = 0, dict[str, Any]()
        if archive is not None:
            self._go_on(archive)
        self._settled = self.step
        epochs = [int(file.name.split("-")[0]) for file in self._folder.glob("*.data")]
        self._epoch = 1 + max(from_all(self._ranks, max(epochs, default=0), "starts of the run"))
        self._names = state.first_names(shards)  # asking the whole skeleton takes as long as copying a small model
        self._slots, self._copies = dict[Path, Slot](), dict[int, Any]()
        self._pending, self._number = list[Future[Any]](), 0
        self._meet(redundancy)
        self._text = self._prepare()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.wait()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]

    def _go_on(self, archive: KeptStep) -> None:
        """Load the optimizer's states, and put back the random numbers that come next."""
        load(self._shards, archive, optimizer=self._optimizer, weights=False)
        self.step, self.extra = archive.records[0].step, archive.extra["extra"]
        texts = archive.records[self._rank % len(archive.records)].notes["random"]
        states = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in texts]
        compat.draw_from(states, self._shards.device)

    def _meet(self, redundancy: int) -> None:
        """Find the ranks of this node, and connect to those that hold second copies."""
        places, self._local = nodes(self._ranks, self._folder)
        self._to, self._from, self._peers = -1, list[int](), {}
        if redundancy and len(places) > 1:
            to = neighbours(places)
            self._to, self._from = to[self._rank], [rank for rank, other in enumerate(to) if other == self._rank]
            self._peers = connect(self._ranks)
        elif redundancy:
            log.warning("redundancy=1: there is one rank, and no other to hold a second copy of what it keeps")

    def _prepare(self) -> str:
        """Take the memory that copies need, as far as that is known; return a text of it and of a copy's cost."""
        layout = Layout(_expected(self._shards, self._optimizer))
        sizes = from_all(self._ranks, layout.size, "bytes to keep")
        last = sum(file.stat().st_size for file in self._folder.glob("*.data")) / 1e6
        from_all(self._ranks, None, "memory of the start before")

        def take() -> None:
            for number in (0, 1):
                self._slot(self._rank, number, layout.size)
                for rank in self._from:
                    self._slot(rank, number, sizes[rank])

        together(self._ranks, "taking memory of the node", take)
        local, node = 2 * layout.size / 1e6, sum(2 * sizes[rank] for rank in self._local) / 1e6
        sending = f", and one sending to rank {self._to}" if self._to >= 0 else ""
        until = f"; until the first step is kept also {last:,.1f} MB of the start before" if last else ""
        copies = "".join(f"; {2 * sizes[rank] / 1e6:,.1f} MB for rank {rank}" for rank in self._from)
        return (
            f"every {self._every}: {layout.bytes / 1e6:,.1f} MB of this rank are copied into {self._folder}, beside "
            f"the next step: about 1.3 of one copy{sending}\n"
            f"memory: two files of it in turn, {local:,.1f} MB; {node:,.1f} MB of all ranks of this node"
            f"{copies}{until}"
        )

    def __str__(self) -> str:
        return self._text

    def _slot(self, rank: int, number: int, size: int) -> Slot:
        """Return one of a rank's files on this node, made again where its size differs."""
        file = self._folder / f"{self._epoch}-{rank}-{number}{'' if rank == self._rank else '-copy'}"
        slot = self._slots.get(file)
        if slot is None or len(slot.data) != size:
            slot = self._slots[file] = Slot(file, size)
            self._copies.pop(number, None)
        return slot

    # ---- beside steps --------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        """Begin to copy, after a step of the optimizer."""
        self.step += 1
        if self.step % self._every:
            return
        try:  # an error here is one on all ranks, before the next step
            number = self._number
            takes = [partial(receive_file, self._peers[r], partial(self._slot, r, number)) for r in self._from]
            self._pending = [*map(_beside, (self._copying(), *takes))]
        except Exception as error:
            self._pending = [Future()]
            self._pending[0].set_exception(error)

    @Turn("a copy of a step")
    @torch.no_grad()
    def _copying(self) -> Callable[[], None]:
        """Return a function that copies this step into the next file: all that it reads is looked up by now."""
        tensors, notes = collect(self._shards, self._optimizer, self._give and self._give(), self._names)
        layout, number = Layout(tensors), self._number
        slot = self._slot(self._rank, number, layout.size)
        before = self._copies.get(number)
        if before is None or before[0] != layout.key:  # the same memory is copied at every step
            self._copies[number] = before = layout.key, layout.copies_to(slot), json.dumps(layout.table)
        _, copies, table = before
        ready = None
        if self._shards.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        notes["random"] = [bytes(x.numpy()).hex() for x in compat.random_states(self._shards.device)]
        head = {
            "run": self._owner.run, "model": self._owner.model, "epoch": self._epoch, "step": self.step,
            "place": self._rank, "settled": self._settled, "size": layout.size, "notes": notes,
        }  # fmt: skip
        text, versions = as_json(head)[:-1], [x._version for x in layout.sources]

        def copying() -> None:
            if ready is not None:
                ready.synchronize()
            slot.begin()
            digests = shared_memory.copy(copies)
            if versions != [x._version for x in layout.sources]:
                raise StateError(
                    "weights or states were written while they were copied: between two steps of the optimizer call "
                    "wait() of what snapshot() returned before you write to them."
                )
            record = shared_memory.sealed(f'{text}, "digests": {json.dumps(digests)}, "table": {table}}}')
            slot.commit(record)
            if self._to >= 0:
                send_file(self._peers[self._to], record, memoryview(slot.map))

        return copying

    def wait(self) -> None:
        """Wait until all ranks have kept the step that is being copied, as each step of the optimizer does first.

        Raises:
            StateError: it could not be kept, for want of memory or because weights were written meanwhile.
            RankError: that is so on another rank.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        together(self._ranks, "keeping a step", lambda: [future.result() for future in pending] and None)
        self._settled, self._number = self.step - self.step % self._every, 1 - self._number
        if self._local[0] == self._rank:
            shared_memory.drop(self._folder, lambda name: int(name.split("-")[0]) < self._epoch)

    def close(self) -> None:
        """End it, and give the memory back, of all ranks. A collective call."""
        self.wait()
        self._end()
        from_all(self._ranks, None, "the end of snapshots")
        if self._local[0] == self._rank:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """Keep no further steps; those that are kept stay."""
        for hook in self._hooks:
            hook.remove()
        for peer in self._peers.values():
            peer.close()
        _open.discard(self._folder)

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()


def _refuse(shards: ShardState, every: int, redundancy: int) -> None:
    state.refuse_meta(shards)
    if not counts(every) or redundancy not in (0, 1):
        raise InputError(
            f"every={every!r}, redundancy={redundancy!r}: keep every so many steps, at least 1, with 0 or 1 "
            "second copies."
        )
    if shards.staged:
        raise StateError("snapshot() of a pipeline: memory is of modules without stages. Save checkpoints of it.")


def _opened(shards: ShardState) -> Owner:
    owner = Owner.of(shards)
    if owner.folder in _open:
        raise StateError(
            "this process keeps steps of such a model already: close() the first snapshot() before another begins."
        )
    owner.open()
    _open.add(owner.folder)
    return owner


def _beside(do: Callable[[], None]) -> Future[None]:
    """Do something in a thread that does not keep the process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="autotp-snapshot", daemon=True).start()
    return future


@torch.no_grad()
def _expected(shards: ShardState, optimizer: Optimizer) -> Tensors:
    """Return all that will be kept: weights, and the optimizer's states, also those that its first step makes."""
    tensors = collect(shards, optimizer, None, state.first_names(shards))[0]
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    kinds_of = dict[int, dict[str, torch.dtype]]()
    for name, storage, parts in state.parameters_of(shards):
        if optimizer.state.get(parts[0]) or not all(p in groups and p.requires_grad for p in parts):
            continue
        group, boxes = groups[parts[0]], storage.boxes(parts)
        kinds = kinds_of.setdefault(id(group), _states(optimizer, group, parts[0].dtype))
        for key, dtype in kinds.items():
            empty = [Box(box.offset, torch.empty_like(box.tensor, dtype=dtype, device="meta")) for box in boxes]
            tensors[f"{PREFIX}{name}.{key}"] = storage.shape, empty
    return tensors


@torch.enable_grad()
def _states(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the states by element, and their types, that a step of such an optimizer makes: by that of a small one."""
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    try:
        arguments = inspect.signature(type(optimizer)).parameters
        small: Any = type(optimizer)([parameter], **{n: group[n] for n in optimizer.defaults if n in arguments})
        small.step()
    except Exception:  # a class of its own: the memory of its states is taken when they are there
        return {}
    states: NamedTensors = small.state[parameter]
    return {key: x.dtype for key, x in states.items() if isinstance(x, Tensor) and x.shape == parameter.shape}


# ---- second copies on other nodes ------------------------------------------------------------------------------------


def place_of(folder: Path) -> tuple[str, int, int]:
    """Return a key of the memory that holds a folder: equal on ranks that see the same files."""
    status = os.stat(folder)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else "", status.st_dev, status.st_ino


def nodes(ranks: Ranks, folder: Path) -> tuple[list[Hashable], list[int]]:
    """Return of each rank the memory of its folder, and the ranks that share this rank's. A collective call."""
    places: list[Hashable] = [*from_all(ranks, place_of(folder), "the nodes' memory")]
    return places, [rank for rank, place in enumerate(places) if place == places[ranks.rank]]


def neighbours(places: Sequence[Hashable]) -> list[int]:
    """Return of each rank the one that holds its second copy: on the next node where there are several, else the next.

    Args:
        places: of each rank, the memory that it is in.
    """
    nodes = list(dict.fromkeys(places))
    out = []
    for rank, place in enumerate(places):
        index = places[:rank].count(place)
        to = nodes[(nodes.index(place) + 1) % len(nodes)]
        members = [other for other, node in enumerate(places) if node == to]
        out.append(members[(index + (to == place)) % len(members)])
    return out


def connect(ranks: Ranks) -> Peers:
    """Connect to all other ranks, beside the connections that they take turns by. A collective call."""
    peers = connected(ranks.group, ranks.rank, ranks.tp)  # type: ignore[arg-type]  of several
    if peers is None:
        raise RankError("the ranks cannot connect to each other by TCP, to send_file each other what memory holds.")
    for peer in peers.values():
        peer.settimeout(SECONDS)
    return peers


def send_file(peer: socket, record: str, slot: memoryview) -> None:
    """Send a file and its record."""
    peer.sendall(f"{len(slot)} {record}\n".encode())
    peer.sendall(slot)


def receive_file(peer: socket, open_slot: Callable[[int], Slot]) -> None:
    """Receive a file and its record, which is written last, into the slot of its size that `open_slot` gives."""
    with peer.makefile("rb") as stream:
        size, _, record = stream.readline().decode().partition(" ")
        if record.endswith("\n"):  # else it came to its end
            slot = open_slot(int(size))
            slot.begin()
            if stream.readinto(slot.map) == len(slot.map):
                return slot.commit(record.removesuffix("\n"))
    raise StateError("the rank whose copy this one holds has ended.")
