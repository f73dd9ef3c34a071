"""Tables without lines that fit a narrow console too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

WIDTH, NARROW = 110, 80  # of plans as text, and what they fit into


class Columns(Table):
    """A table of fixed columns, with smaller ones and other headings where the console has less than `WIDTH`."""

    def __init__(self, widths: Sequence[int | None], sides: str, narrow: Sequence[int | None], gap: int = 1) -> None:
        """Columns of these widths (None: as wide as it takes), justified left ("l") or right ("r"); `narrow`: of a
        console of `NARROW`."""
        super().__init__(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=False)
        for width, side in zip(widths, sides, strict=True):
            self.add_column(width=width, justify="right" if side == "r" else "left", overflow="fold")
        self.widths, self.narrow, self.short = widths, narrow, ()

    def headed(self, names: Sequence[str], short: Sequence[str]) -> Columns:
        """The same with headings, and those for narrow consoles."""
        for column, name in zip(self.columns, names, strict=True):
            column.header = name
        self.show_header, self.short = True, tuple(short)
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The rows, as wide as the console allows."""
        if options.max_width < WIDTH - 2:  # those that are set in by two
            self._fit(max(options.max_width - NARROW, 0) / (WIDTH - NARROW))
        yield from super().__rich_console__(console, options)

    def _fit(self, share: float) -> None:
        """Widths between those of a narrow console (0) and the full ones (1), and short headings."""
        for column, full, least in zip(self.columns, self.widths, self.narrow, strict=True):
            column.width = None if full is None or least is None else int(least + share * (full - least))
        for column, header in zip(self.columns, self.short, strict=False):
            column.header = header
        self.padding = (0, 1, 0, 0)
