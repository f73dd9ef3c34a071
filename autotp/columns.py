"""Tables without lines that fit a narrow console too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

WIDTH = 110  # of plans as text


class Columns(Table):
    """A table of fixed columns, with other widths and headings where the console has less than `WIDTH` columns."""

    def __init__(self, widths: Sequence[int | None], sides: str, narrow: Sequence[int | None], gap: int = 1) -> None:
        """Columns of these widths (None: as wide as it takes), justified left ("l") or right ("r")."""
        super().__init__(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=False)
        for width, side in zip(widths, sides, strict=True):
            self.add_column(width=width, justify="right" if side == "r" else "left", overflow="fold")
        self.narrow, self.short = narrow, ()

    def headed(self, names: Sequence[str], short: Sequence[str]) -> Columns:
        """The same with headings, and those for narrow consoles."""
        for column, name in zip(self.columns, names, strict=True):
            column.header = name
        self.show_header, self.short = True, tuple(short)
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The rows, as wide as the console allows."""
        if options.max_width < WIDTH - 2:  # those that are set in by two
            self._narrow()
        yield from super().__rich_console__(console, options)

    def _narrow(self) -> None:
        changes: list[dict[str, Any]] = [{"width": width} for width in self.narrow]
        for change, header in zip(changes, self.short, strict=False):
            change["header"] = header
        for column, change in zip(self.columns, changes, strict=True):
            for name, value in change.items():
                setattr(column, name, value)
        self.padding = (0, 1, 0, 0)
