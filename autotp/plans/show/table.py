"""A table without lines that fits a narrow console too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

WIDTH, NARROW = 110, 80  # of plans as text, and what they fit into


class Columns(Table):
    """Columns as wide as their cells, closer together and under shorter names where the console is narrow."""

    def __init__(self, sides: str, names: Sequence[str], short: Sequence[str]) -> None:
        """Columns justified left ("l") or right ("r"); `short`: their names on a narrow console."""
        super().__init__(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for side, name in zip(sides, names, strict=True):
            self.add_column(name, justify="right" if side == "r" else "left", overflow="fold")
        self.short = tuple(short)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The rows, as wide as the console allows."""
        if options.max_width < WIDTH - 2:  # tables are set in by two
            self.padding = (0, 1, 0, 0)
            for column, name in zip(self.columns, self.short, strict=True):
                column.header = name
        yield from super().__rich_console__(console, options)
