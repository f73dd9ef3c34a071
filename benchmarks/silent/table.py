"""Trying cells: a pool of ranks that stay up between them, and the originals' numbers."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes.cpu import cpu_seconds
from tests.helpers.processes.pool import Pool

from .cells import Cell
from .judge import Outcome, judged
from .models import llama
from .rank import Report, again, attempt, wanted
from .ways_in import WAYS_IN
from .ways_to_part import WAYS_TO_PART

PATIENCE, LIMIT = 240.0, 60.0  # seconds: until ranks count as hung, and of the group's time-out
SOURCES = {"source": 7, "other": 8}  # folders of transformers that are loaded, and their seeds


class Table:
    """Tries cells.

    Args:
        pool: of exactly the ranks of the cells' mesh; libraries take the whole world.
        folder: for what is saved, and the originals' numbers.
    """

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.originals: dict[Any, Path] = {}

    def tried(self, cell: Cell, blind: bool = False, limit: float = LIMIT) -> Outcome:
        """What becomes of a cell.

        Args:
            blind: whether ranks are not compared, as a control. limit: of the group's time-out, in seconds.
        """
        began = cpu_seconds()
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder, part = Path(name), WAYS_TO_PART[cell.way_to_part]
            numbers = self._numbers(cell)
            answers = self._ask(cell, attempt, cell, folder, self._source(cell), numbers, limit, blind)
            at = folder / "parted"
            parted = float(at.read_text()) if at.exists() else 0.0
            ended = {rank for rank in range(cell.mesh.world) if rank not in answers and self.pool.ended(rank)}
            outcome = judged(cell, answers, ended, parted)
            ends = part.ends or outcome.stopped
            if outcome.fine and not ends:
                outcome = self._usable(outcome, limit)
            if not outcome.fine or ends:
                self.pool.close()
        return replace(outcome, cpu=cpu_seconds() - began)

    def _usable(self, outcome: Outcome, limit: float) -> Outcome:
        """The outcome, where the call is right afterwards."""
        answers = self._ask(outcome.cell, again, limit)
        for rank in range(outcome.cell.mesh.world):
            report = answers.get(rank)
            if report is None or report.error or report.wrong:
                how = "never answered" if report is None else f"{report.error}{report.wrong}: {report.text}"
                return replace(outcome, what="unusable", text=f"rank {rank}: {how}; before: {outcome.text}")
        return outcome

    def _ask(self, cell: Cell, function: Any, *args: Any) -> dict[int, Report]:
        """The reports of the ranks that answer; a fault of the table itself is raised."""
        dies = cell.way_to_part == "death"
        answers = self.pool.ask(
            function, *args, world=cell.mesh.world, timeout=PATIENCE, grace=PATIENCE if dies else 3.0
        )
        for rank, (well, found) in answers.items():
            if not well:
                self.pool.close()
                raise RuntimeError(f"{cell}: rank {rank}: {found}")
        return {rank: report for rank, (_, report) in answers.items()}

    def _numbers(self, cell: Cell) -> list[Path]:
        """Files of the originals' numbers, by rank."""
        files = []
        for rank in range(cell.mesh.world):
            place = cell.mesh.place(rank) if cell.mesh.axis in ("dp", "cp") else 0
            key = cell.way_in, WAYS_IN[cell.way_in].model, cell.mesh.axis, place
            if key not in self.originals:
                path = self.folder / f"{uuid.uuid4().hex}.pt"
                with tempfile.TemporaryDirectory(dir=self.folder) as name, contextlib.redirect_stdout(None):
                    usual = replace(cell, way_to_part="batch")
                    torch.save(wanted(usual, rank, Path(name), self._source(cell)), path)
                self.originals[key] = path
            files.append(self.originals[key])
        return files

    def _source(self, cell: Cell) -> Path:
        """A folder of transformers with other weights."""
        layers = 2 if cell.mesh.pp > 1 else 1
        for name, seed in SOURCES.items():
            place = self.folder / f"{layers}" / name
            if not place.exists():
                llama(layers, seed).save_pretrained(place)
        return self.folder / f"{layers}" / "source"
