"""What each rank does in a cell: the way in, the call that follows, and the same again when the rank is undone."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from autotp.comm.channel import Channel
from autotp.errors import AutoTPError

from . import training
from .cells import Cell
from .context import LENGTH, Context, Numbers
from .models import ADAPTERS, alone, on_rank
from .ways_in import WAYS_IN, WayIn
from .ways_to_part import AMID, OURS, SHORT, WAYS_TO_PART, WayToPart

SEED, CALLS = 5, 2  # of all ranks; calls of another thread


@dataclass(frozen=True)
class Report:
    """What became of a cell on one rank.

    Attributes:
        error: the class of what it raised, and where; `text` of it.
        refused: whether that is an `AutoTPError`; raised: whether it is the rank's own, which the cell has it raise.
        wrong: in what its numbers differ from the original's. ended: when, in seconds since the epoch; began: likewise.
    """

    error: str = ""
    text: str = ""
    refused: bool = False
    raised: bool = False
    wrong: str = ""
    began: float = 0.0
    ended: float = 0.0


@dataclass
class Work:
    """The cell that a rank is at."""

    cell: Cell
    context: Context
    wanted: Numbers
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def way(self) -> WayIn:
        return WAYS_IN[self.cell.way_in]

    @property
    def part(self) -> WayToPart:
        return WAYS_TO_PART[self.cell.way_to_part]

    @property
    def writes(self) -> bool:
        """Whether weights are others afterwards."""
        return self.way.changes or self.part.writes

    @property
    def odd(self) -> bool:
        """Whether it is this rank that is otherwise."""
        return self.context.rank == self.cell.rank


UNUSED: dict[str, Any] = {"data": 0, "length": LENGTH, "options": {}, "use": None, "at": "", "left_out": False}
_works: list[Work] = []  # the latest
_copied: dict[Any, tuple[Context, set[str]]] = {}  # by model and mesh, with the ways in whose calls it has made


def wanted(cell: Cell, rank: int, folder: Path, source: Path) -> Numbers:
    """The numbers of the original, as this rank is to get them."""
    context = alone(cell.model, cell.mesh, rank, folder, source)
    context.model.train(WAYS_IN[cell.way_in].training)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(WAYS_IN[cell.way_in], context) | training.after(context)


def attempt(
    rank: int, world: int, group: Any, cell: Cell, folder: Path, source: Path, numbers: list[Path], limit: float,
    blind: bool,
) -> Report:  # fmt: skip
    """The way in, with one rank that is otherwise, and the call that follows.

    Args:
        rank, world, group: as the pool gives them. cell: see there. folder, source: see `Context`.
        numbers: by rank, the file of the original's. limit: of the process group's time-out, in seconds.
        blind: whether ranks that part are not compared, as a control.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with warnings.catch_warnings(), _blind() if blind else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        context = _made(cell, rank, folder, source)
        work = Work(cell, context, torch.load(numbers[rank]) if cell.model != "dropping" else {})
        _works[:] = [work]
        set_timeouts(limit)
        if cell.warm or cell.model == "dropping":
            _seed(work)
            out = _run(work.way, context) | training.after(context)
            work.wanted = work.wanted or out
            restore(context, work.way, work.writes)
        set_timeouts(SHORT if work.part.long else limit)
        torch.manual_seed(SEED)
        return _attempt(work)


def _made(cell: Cell, rank: int, folder: Path, source: Path) -> Context:
    """A context with a module of its own; where captures take long a copy of one that has made the call before."""
    way, key = WAYS_IN[cell.way_in], (cell.model, cell.mesh)
    if not way.copied:
        context = on_rank(cell.model, cell.mesh, rank, folder, source)
        context.model.train(way.training)
        return context
    if key not in _copied:
        _copied[key] = on_rank(cell.model, cell.mesh, rank, folder, source), set()
    context, known = _copied[key]
    if cell.way_in not in known:
        restore(context, way, True)
        way.run(context)
        known.add(cell.way_in)
    # Torch's data parallelism cannot be copied: there it is the module itself, which is usable after each cell.
    model = copy.deepcopy(context.model) if cell.mesh.axis == "tp" else context.model
    context = replace(context, model=model, folder=folder, **UNUSED)
    restore(context, way, True)
    return context


def again(rank: int, world: int, group: Any, limit: float) -> Report:
    """The way in on all ranks alike, after one was otherwise."""
    work, began = _works[0], time.time()
    context = work.context
    set_timeouts(limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work.undo.close()
            context.use, context.options, context.at = None, {}, ""
            restore(context, work.way, work.writes)
            _seed(work)
            return _reported(began, "", differences(_run(work.way, context), work.wanted, work.way.close))
        except BaseException as error:
            return _failed(began, "afterwards", error)


def _attempt(work: Work) -> Report:
    context, cell, began = work.context, work.cell, time.time()
    report = Report(began=began)
    try:
        if work.odd:
            _mark(context)
        _begin(work)
        with _beside(work) as problems:
            out = _run(work.way, context)
        wrong = "" if context.left_out else differences(out, work.wanted, work.way.close)
        report = _reported(began, "", "; ".join(filter(None, [wrong, *problems])))
    except BaseException as error:
        report = _failed(began, "in it", error)
    if report.refused or report.wrong or (report.error and not report.raised):
        return report
    if cell.way_to_part == "exception" and work.way.heard and report.raised:
        return report
    try:
        wrong = differences(training.after(context), work.wanted, work.way.close)
        return report if report.raised else _reported(began, "", wrong)
    except BaseException as error:
        return _failed(began, "after it", error)


def _begin(work: Work) -> None:
    """Be otherwise, where it is this rank; what happens amid the call is set on all, for all have the callbacks."""
    cell, context, part = work.cell, work.context, work.part
    if cell.variant.startswith(AMID):
        context.at, context.use = cell.at, _Use(work)
    if work.odd:
        if part.needs == "options":
            names = cell.variant.split(", ")
            context.options = next(options for options in work.way.options if list(options) == names)
        work.undo.enter_context(part.begin(context, cell.variant))


class _Use:
    """Counts the uses of a callback, and at one of them acts on the rank that is otherwise."""

    def __init__(self, work: Work) -> None:
        self.work, self.count = work, 0

    def __call__(self) -> None:
        self.count += 1
        act = self.work.part.act
        if self.work.odd and self.count == self.work.cell.use and act is not None:
            _mark(self.work.context)
            act(self.work.cell.variant.partition(" at ")[0])


def _mark(context: Context) -> None:
    """Note when this rank began to be otherwise, for whoever judges."""
    (context.folder / "parted").write_text(repr(time.time()))


@contextlib.contextmanager
def _beside(work: Work) -> Iterator[list[str]]:
    """Around the way in: calls of another thread on every rank, which are right or refused; what is wrong with them.

    What the thread hears counts as heard by its rank: ranks of other tp groups may be told of it in a thread or not.
    """
    problems, heard = list[str](), list[AutoTPError]()
    if work.cell.way_to_part != "threads":
        yield problems
        return

    changes = work.way.changes or work.way.model == "adapters"  # while the thread calls: it may see what is set or not

    def calls() -> None:
        for _ in range(CALLS):
            try:
                out = training.after(work.context)
                problems.append("" if changes else differences(out, work.wanted, work.way.close))
            except AutoTPError as error:
                heard.append(error)
            except Exception as error:
                problems.append(f"in a thread: {type(error).__name__}: {error}")

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        yield problems
    finally:
        thread.join()
    if heard and not any(problems):
        raise heard[0]


def _run(way: WayIn, context: Context) -> Numbers:
    context.model.zero_grad()
    return way.run(context)


def _seed(work: Work) -> None:
    """Seed as the rank is whose random numbers hold: the first of its tp group, with pp of all."""
    mesh, rank = work.cell.mesh, work.context.rank
    first = 0 if mesh.pp > 1 else rank - rank % mesh.tp
    torch.manual_seed(SEED)
    if work.cell.way_to_part == "seed" and first == work.cell.rank:
        with work.part.begin(work.context, ""):
            pass


def restore(context: Context, way: WayIn, weights: bool) -> None:
    """The mode that a way in is for; where they may be others also the weights and types that the module had first."""
    if weights:
        _load(context)
        if any(p.dtype != torch.float64 for p in context.model.parameters()):
            context.model.to(torch.float64)
            _load(context)
    if way.model == "adapters":
        context.model.set_adapter(ADAPTERS[0])
    context.model.train(way.training)


def _load(context: Context) -> None:
    if context.pipe is not None:
        context.pipe.load_checkpoint(context.initial, cast=True)
    else:
        context.model.load_state_dict(context.initial)


def differences(out: Numbers, original: Numbers, close: float) -> str:
    """In what numbers differ from the original's, by the largest of each; "" where in nothing."""
    for name, value in out.items():
        if name not in original:
            return f"{name} is not there in the original"
        other = original[name]
        if not isinstance(value, Tensor):
            if value != other:
                return f"{name} is {value!r}, and {other!r} in the original"
            continue
        value, other = value.detach().double(), other.detach().double()
        if value.shape != other.shape:
            return f"{name} is {tuple(value.shape)}, and {tuple(other.shape)} in the original"
        far = float((value - other).abs().max() / other.abs().max().clamp(min=1e-30)) if value.numel() else 0.0
        if not far <= close:
            return f"{name} is off by {far:.1e}"
    return ""


def _reported(began: float, where: str, wrong: str) -> Report:
    return Report(wrong=wrong, began=began, ended=time.time())


def _failed(began: float, where: str, error: BaseException) -> Report:
    refused, raised = isinstance(error, AutoTPError), OURS in str(error) and not isinstance(error, AutoTPError)
    text = str(error) if refused or raised else traceback.format_exc()[-2500:]
    return Report(f"{type(error).__name__} {where}", text, refused, raised, "", began, time.time())


def set_timeouts(seconds: float) -> None:
    """Of all process groups that there are by now."""
    for group in list(distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))


@contextlib.contextmanager
def _blind() -> Iterator[None]:
    """Within it ranks take turns, and each hears its own words from all."""
    exchange: Callable[..., list[bytes]] = Channel.exchange

    def deaf(self: Channel, what: str, message: bytes) -> list[bytes]:
        return [message] * len(exchange(self, what, message))

    with patch.object(Channel, "exchange", deaf):
        yield
