"""Ranks of this process: finding them, and making sure that they agree and fail together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp import compat
from autotp._version import __version__
from autotp.errors import InputError, RankError
from autotp.text import BESIDE, axis_text, counted, divisors, message_of, processor

from .channel import Channel, by_value, rank_list
from .lockstep import channel_of, lost, meet

T = TypeVar("T")
Facts = dict[str, Any]  # names and values that ranks compare, in words that are the same in every process
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_LINES = 20  # of differences in a message
KERNELS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG")  # pick some
SETTLE_SECONDS = 0.1  # seconds at exit for gloo's threads


def check_degree(tp: object, world: int | None = None) -> int:
    """Return `tp` where it is a tensor-parallel degree that a world of `world` ranks (None: no ranks yet) can have.

    Args:
        tp: what the user gave. world: how many ranks there are, where that is known.

    Raises:
        InputError: not an int, less than 1, or not a divisor of the world.
    """
    if isinstance(tp, bool) or not isinstance(tp, int):
        raise InputError(f"tp={tp!r} is {type(tp).__name__}: the tensor-parallel degree is an int, such as tp=4.")
    if tp < 1:
        raise InputError(f"tp={tp}: the tensor-parallel degree counts ranks, so it is at least 1.")
    if world is None or world % tp == 0:
        return tp
    if tp > world:
        raise InputError(
            f"tp={tp} is larger than the world: there {'are' if world > 1 else 'is'} {counted(world, 'rank')}. "
            f"Launch {tp} with {_torchrun(tp)}, or pass a smaller tp."
        )
    raise InputError(
        f"tp={tp} does not divide the world of {world} ranks: every rank belongs to one group of tp ranks. "
        f"Choose tp from {divisors(world)}, or launch a multiple of {tp} ranks."
    )


@dataclass(frozen=True, eq=False)
class Ranks:
    """The group of tp ranks that this process belongs to.

    Args:
        mesh: its 1-D device mesh; None in one plain process.
        rank: this process's place in the group, 0 to tp - 1.
        tp: the number of ranks in the group.
        group: its process group, named `group_name`.
        device: where this rank holds its part: `cuda:LOCAL_RANK`, or the CPU.
        batch: likewise the ranks of this one's place in tp on all axes beside it together, over which gradients are
            summed; `beside`: likewise those of each of these axes.
        every: likewise the ranks of all axes, which plan together; `axes` names them in messages.
        line: with pipeline stages, the ranks of all stages that are called with the same inputs; `place`: those of all
            axes that have the same stages.
    """

    mesh: DeviceMesh | None
    rank: int
    tp: int
    group: ProcessGroup | None
    group_name: str
    device: torch.device
    batch: Ranks | None = None
    every: Ranks | None = None
    line: Ranks | None = None
    place: Ranks | None = None
    axes: str = "tp"
    beside: Mapping[str, Ranks] = field(default_factory=dict)

    @property
    def planners(self) -> Ranks:
        """The ranks that must have the same model and plan."""
        return self.every or self

    @property
    def joint(self) -> Ranks:
        """The ranks that run one program together."""
        return self.line or self

    def holding(self, model: nn.Module) -> Ranks:
        """Return these ranks for a model: in one plain process with the model's device, or with the CUDA device, if
        there is one, for a model on the meta device."""
        if self.mesh is not None or not isinstance(model, nn.Module):  # which is refused later
            return self
        values = (*model.parameters(), *model.buffers())
        device = next((x.device for x in values if not x.is_meta), None)
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return replace(self, device=device or self.device)

    def along(self, axis: str) -> Ranks:
        """Return the ranks along an axis beside tp; this process alone where there is no such axis."""
        return self.beside.get(axis, PLAIN_PROCESS)

    def over(self, degrees: Mapping[str, int]) -> DeviceMesh | None:
        """Make a mesh of these degrees over the same ranks; None where these are the world. A collective call."""
        if self.mesh is None:
            return None
        members = dist.get_process_group_ranks(self.group)
        if len(members) == dist.get_world_size():
            return None
        ranks = torch.tensor(members).view(*degrees.values())
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=tuple(degrees))

    @property
    def channel(self) -> Channel | None:
        """Channel by which the ranks keep in step; None for axes beside tp. The first call is collective."""
        if "tp" not in self.axes or self.group is None:
            return None
        return channel_of(self.group, self.rank, self.tp, self.device, self.axes)

    @staticmethod
    def find(tp: int | None = None, mesh: DeviceMesh | None = None, dp: int = 1, cp: int = 1) -> Ranks:
        """Find the tp ranks: of `mesh`, of the process group there is, or of one made here under torchrun.

        Args:
            tp: the degree; None takes the mesh's or the world's size (its part beside `dp` and `cp`).
            mesh: 1-D, or with a dimension named "tp". Without one, a world larger than `tp` is cut into groups of
                `tp` ranks that follow each other: a mesh (dp, tp), or (dp, cp, tp).
            dp, cp: the sizes of axes beside tp; of more than one rank the mesh has a dimension of this name and size.
        Returns: `PLAIN_PROCESS` in a process that has no others.
        Raises:
            InputError: `tp` or `mesh` cannot be used, or they contradict each other.
            RankError: this rank is not in the mesh, or has no device.
        """
        degrees = {name: n for name, n in zip(BESIDE, (dp, cp), strict=True) if n > 1}
        if tp is not None:
            check_degree(tp)
        if mesh is not None:
            mesh = _with_tp(mesh, degrees)
            return _with_axes(_of_mesh(_tp_axis(mesh), tp), mesh, degrees)
        if not (dist.is_available() and dist.is_initialized()):
            if not all(name in os.environ for name in TORCHRUN):
                return PLAIN_PROCESS
            _check_world(tp, degrees, int(os.environ["WORLD_SIZE"]))
            _start()
        world = dist.get_world_size()
        tp = _check_world(tp, degrees, world)
        # The group there is may have been made for CPUs on a machine with GPUs: its backend says what it serves.
        kind = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
        if kind == "cuda":
            _own_device(dist.get_rank())
        if tp == world:
            return _of_mesh(init_device_mesh(kind, (tp,), mesh_dim_names=("tp",)), tp)
        sizes = (degrees or {"dp": world // tp}) | {"tp": tp}
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return _with_axes(_of_mesh(mesh["tp"], tp), mesh, degrees)


PLAIN_PROCESS = Ranks(None, 0, 1, None, "", torch.device("cpu"))  # the only rank, of no process group


def _check_world(tp: int | None, degrees: Mapping[str, int], world: int) -> int:
    """Return the tp degree in a world of this many ranks, each of which has one place on every axis."""
    beside = prod(degrees.values())
    if beside > 1 and (world % beside or tp not in (None, world // beside)):
        raise InputError(
            f"{axis_text(degrees, ', ')} and tp={tp or 'the rest'} do not make up the world of {world} ranks: "
            f"{' x '.join((*degrees, 'tp'))} must be {world}. Pass a mesh with dimensions of these names, such as "
            f"{_mesh_text(degrees, tp or 1)}, to use a part of the world."
        )
    return check_degree(world // beside if tp is None else tp, world)


def _mesh_text(degrees: Mapping[str, int], tp: int) -> str:
    return f"init_device_mesh(..., {(*degrees.values(), tp)}, mesh_dim_names={(*degrees, 'tp')})"


def axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Read the degrees of a mesh that gives all of them.

    Args:
        mesh: with dimensions named dp, cp and tp, of which some may be left out, in this order.

    Raises:
        InputError: a dimension has no name or another, or a name twice; or their order is another one.
    """
    names = mesh.mesh_dim_names or ()
    if len(names) != mesh.ndim or not {*BESIDE, "tp"}.issuperset(names):
        raise InputError(
            f"the mesh has {mesh.ndim} dimensions named {names or 'nothing'}, and one that gives the degrees has "
            "some of dp, cp and tp: " + _mesh_text({"dp": 2, "cp": 2}, 2) + ". Or give the degrees as numbers."
        )
    check_order(names)
    return {name: mesh.size(i) for i, name in enumerate(names)}


def mesh_of(tp: Any, mesh: DeviceMesh | None) -> tuple[Any, DeviceMesh | None]:
    """Return the degree that `tp` asks for, and the mesh. `tp` may be a mesh itself, or name the dimensions of one:
    their sizes are then the degree, and the returned mesh has one dimension tp in their place.

    Args:
        tp: as a public function was given it, names of the last dimensions too. mesh: likewise.

    Raises:
        InputError: there are two, or `tp` does not name its last dimensions, in this order.
    """
    if isinstance(tp, DeviceMesh):
        if mesh is not None:
            raise InputError("the mesh is given twice, in place of tp and as mesh=. Leave one out.")
        return tp, tp
    if not isinstance(mesh, DeviceMesh) or not isinstance(tp, tuple) or not all(isinstance(n, str) for n in tp):
        return tp, mesh
    names = tuple(mesh.mesh_dim_names or ())
    before = len(names) - len(tp)
    if not tp or names[before:] != tp:
        raise InputError(
            f"tp={tp} is not how the mesh with dimensions {names} ends: tp is of its last dimensions, in their order, "
            "for ranks that follow each other differ in the last one."
        )
    flat = mesh.mesh.flatten(before)
    return tuple(mesh.shape[before:]), DeviceMesh(mesh.device_type, flat, mesh_dim_names=(*names[:before], "tp"))


def _with_tp(mesh: DeviceMesh, degrees: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh, with a tp of one rank where it has dp or cp alone."""
    names = getattr(mesh, "mesh_dim_names", None) or ("",)
    if not degrees or not {*BESIDE}.issuperset(names):
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(*names, "tp"))


def check_order(names: Sequence[str]) -> None:
    """Refuse a mesh whose dimensions of these names are not in the order in which ranks are counted."""
    axes = ("pp", *BESIDE, "tp")
    order = [name for name in names if name in axes]
    for name in order:
        if order.count(name) > 1:
            raise InputError(f"the mesh names the axis {name!r} twice, in {tuple(names)}: give each dimension its own.")
    if (right := [name for name in axes if name in order]) != order:
        raise InputError(
            f"the mesh has the axes in the order {', '.join(order)}, and it is {', '.join(right)}: ranks of a tp "
            "group follow each other, and then those of cp. Make it with the dimensions in this order."
        )


def _with_axes(ranks: Ranks, mesh: DeviceMesh, degrees: Mapping[str, int]) -> Ranks:
    """Return the tp ranks with those of the mesh's axes beside tp that are asked for."""
    names = mesh.mesh_dim_names or ()
    for axis, size in degrees.items():
        if axis not in names or mesh[axis].size() != size:
            has = f"one of {mesh[axis].size()}" if axis in names else "none"
            raise InputError(
                f"{axis}={size} needs a mesh with a dimension '{axis}' of that size, and it has {has}: "
                f"{_mesh_text(degrees, ranks.tp)}."
            )
    if not degrees:
        return ranks
    check_order(names)
    beside = {axis: _of_mesh(mesh[axis], None) for axis in degrees}
    batch = next(iter(beside.values())) if len(degrees) == 1 else _of_mesh(compat.flat_mesh(mesh[tuple(degrees)]), None)
    every = _of_mesh(compat.flat_mesh(mesh[*degrees, "tp"]), None)
    return replace(
        ranks,
        batch=replace(batch, axes=" x ".join(degrees)),
        every=replace(every, axes=f"{', '.join(degrees)} and tp"),
        beside=beside,
    )


def no_ranks_error(tp: int, degrees: Mapping[str, int]) -> RankError:
    """Make the error for calling a module in a process that has no ranks.

    Args:
        tp: ranks that it is split over. degrees: of axes beside tp, by name.
    """
    axes = {**degrees, "tp": tp}
    count = prod(axes.values())
    return RankError(
        f"This module is split over {axis_text(axes)} ranks, and this is one plain process with no ranks, so it "
        f"cannot be called here (its plan can be printed). Launch the script on {count} ranks: {_torchrun(count)}"
    )


def agree(ranks: Ranks, what: str, mine: Mapping[str, Any]) -> None:
    """Raise the same error on every rank unless every rank passes the same mapping. A collective call.

    Args:
        ranks: that compare. what: what is compared, such as "the plan", for the message.
        mine: this rank's values by name: digests, texts, or anything that `str` describes.
    Raises:
        RankError: for each name that differs, which ranks have which value.
    """
    everyone = from_all(ranks, {name: str(x) for name, x in mine.items()}, f"comparison of {what}")
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    differing = [
        f"  {name}: {by_value(values)}"
        for name in names
        if len(set(values := [theirs.get(name, "(missing)") for theirs in everyone])) > 1
    ]
    if differing:
        if len(differing) > MAX_LINES:
            differing[MAX_LINES:] = [f"  and {len(differing) - MAX_LINES} more"]
        raise RankError(
            "\n".join((f"The {ranks.tp} {ranks.axes} ranks do not agree on {what}:", *differing))
            + "\nEvery rank of a tp group must run the same script on the same versions, with the same model and the "
            "same inputs. Usual causes: a checkpoint or config that differs between ranks, a different random seed, "
            "or a sampler that gives tp ranks different batches (it should shard over data-parallel ranks only)."
        )


def together(ranks: Ranks, what: str, fn: Callable[[], T]) -> T:
    """Run `fn()`; if it fails on one rank, every rank raises instead of waiting for it.

    Args:
        ranks: that do it. what: what `fn` does, such as "capturing the model", for the message.
        fn: local work, with no collective in it.
    Raises:
        RankError: on a rank where `fn` succeeded, naming the ranks where it failed, and their messages.
        Exception: on a rank where `fn` failed, its own.
    """
    try:
        result = fn()
    except Exception as error:
        from_all(ranks, message_of(error), what)
        raise
    messages = from_all(ranks, None, what)
    failed = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failed:
        report = "\n".join(f"  {ranks.axes} rank {rank}: {message}" for rank, message in failed.items())
        raise RankError(
            f"Here {what} worked, but it failed on {rank_list(list(failed))} of {ranks.tp}, so every rank "
            f"stops:\n{report}"
        )
    return result


def of_first(ranks: Ranks, what: str, fn: Callable[[], T]) -> T:
    """Run `fn()` on rank 0 and return its result on every rank; where it fails, all fail. A collective call.

    Args:
        ranks: that wait for it. what: what `fn` does, for messages.
        fn: local work of one rank, whose result pickles.
    """
    first = together(ranks, what, lambda: None if ranks.rank else fn())
    return broadcast(ranks, first)  # type: ignore[return-value]


def broadcast(ranks: Ranks, obj: T) -> T:
    """Send tp rank 0's `obj` (anything that pickles) to every rank and return it. A collective call."""
    if ranks.tp == 1:
        return obj
    meet(ranks.channel, "broadcast of an object")
    box = [obj]
    with _telling(ranks):
        dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]


def from_all(ranks: Ranks, obj: T, what: str) -> list[T]:
    """Gather every rank's `obj` (anything that pickles), in rank order. A collective call.

    Args:
        ranks: those that give one. obj: this rank's. what: what is compared or told, for messages.
    """
    if ranks.tp == 1:
        return [obj]
    data, channel = pickle.dumps(obj), ranks.channel
    # Small ones go with the turn: in a collective that one rank leaves, others wait for the group's time-out.
    messages = meet(channel, what, data if channel is not None and len(data) <= channel.room else b"")
    with _telling(ranks):
        if not all(messages):
            messages = [b""] * ranks.tp
            dist.all_gather_object(messages, data, group=ranks.group)
        return [pickle.loads(message) for message in messages]


@contextlib.contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    """Wrap collectives of objects: they are no part of a program (of a dry run, say), and errors name the lost rank."""
    try:
        with compat.without_modes():
            yield
    except RuntimeError as error:
        lost(error, ranks.group_name)
        raise


def versions() -> Facts:
    """Return the versions that must be equal on every rank, for `agree`."""
    return {"python": platform.python_version(), "torch": torch.__version__, "autotp": __version__}


def machine(device: torch.device) -> Facts:
    """Return facts on which the bits of a kernel depend beside its operands and versions, for `agree`."""
    return {
        "threads": torch.get_num_threads(),
        "processor": f"{torch.backends.cpu.get_cpu_capability()} {processor()}",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **{name: os.environ.get(name, "unset") for name in KERNELS},
    }


def _tp_axis(mesh: object) -> DeviceMesh:
    """Return the 1-D mesh of the tp ranks in the user's mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh is {type(mesh).__name__}: pass a torch.distributed DeviceMesh, or leave it out.")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" not in names:
        raise InputError(
            f"The mesh has {mesh.ndim} dimensions named {names or 'nothing'}, and none is 'tp': name the "
            'tensor-parallel one with init_device_mesh(..., mesh_dim_names=("dp", "tp")), or pass a 1-D mesh.'
        )
    return mesh["tp"] if mesh.ndim > 1 else mesh


def _of_mesh(mesh: DeviceMesh, tp: int | None) -> Ranks:
    if mesh.get_coordinate() is None:
        raise RankError(f"Rank {dist.get_rank()} is not in {mesh}: call this on the mesh's own ranks only.")
    if tp is not None and tp != mesh.size():
        raise InputError(f"tp={tp}, but the mesh has {mesh.size()} tp ranks: pass the one or the other.")
    _settle_at_exit()
    group = mesh.get_group()
    device = _own_device(dist.get_rank()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
    return Ranks(mesh, mesh.get_local_rank(), mesh.size(), group, group.group_name, device)


def _start() -> None:
    """Make the process group of the ranks that torchrun launched."""
    cuda = torch.cuda.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and here > torch.cuda.device_count():  # said by every rank of this node, before any of them waits
        raise RankError(
            f"{here} ranks were launched on this node, which has {torch.cuda.device_count()} CUDA devices: each rank "
            'needs its own. Launch fewer, or call torch.distributed.init_process_group("gloo") first to run on the CPU.'
        )
    if cuda:
        _own_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")


@functools.cache
def _settle_at_exit() -> None:
    """Release the GIL for a moment before the interpreter ends, once per process.

    A gloo thread that still has to free the last collective's tensors needs the GIL. If it asks while the interpreter
    ends, the process aborts ("terminate called without an active exception"), after all the work went well: up to one
    run in five of a short script, with `destroy_process_group` or without.
    """
    atexit.register(time.sleep, SETTLE_SECONDS)


def _own_device(rank: int) -> torch.device:
    """Make `cuda:LOCAL_RANK` the current device, which NCCL's object collectives use, and return it."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    torch.cuda.set_device(device)
    return device


def _torchrun(tp: int) -> str:
    typed = sys.argv[0] if sys.argv else ""
    script = Path(typed)
    is_script = script.suffix == ".py" and script.is_file() and not script.stem.startswith("__")
    return f"torchrun --nproc-per-node {tp} {typed if is_script else 'your_script.py'}"
