"""Lines of text in columns, none of which breaks a name."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .table import NARROW, WIDTH

HOLD = "\xa0"  # a blank at which no line ends


@dataclass(frozen=True)
class Lines:
    """What `lay` gives for the console's width, line by line; a line that is longer is left as it is."""

    lay: Callable[[int], Iterable[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, not folded."""
        for line in self.lay(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line


def fitted(full: Sequence[int], narrow: Sequence[int], width: int) -> list[int]:
    """Widths of columns between those of a narrow console and the full ones."""
    share = min(max(width - NARROW, 0) / (WIDTH - 2 - NARROW), 1.0)
    return [int(least + share * (most - least)) for most, least in zip(full, narrow, strict=True)]


def columns(
    rows: Iterable[Sequence[str]], widths: Sequence[int], sides: str, width: int, indent: str = "  ", style: str = ""
) -> Iterator[Text]:
    """Rows in columns.

    Args:
        rows: of cells. widths: characters of each column. sides: "l" or "r" for each, left or right.
        width: of the screen. indent: before each line. style: of all of it, as rich names them.

    A cell that reaches into the next column, or beyond the width, sends what follows to a line of its own.
    """
    for row in rows:
        line, start = "", len(indent)
        for cell, size, side in zip(row, widths, sides, strict=True):
            text = cell.rjust(size) if side == "r" else cell
            if line and (len(line) >= start or start + len(text) > width):
                yield Text(line.rstrip(), style=style)
                line, start = "", start if start + len(text) <= width else len(indent) + 4
            line = line.ljust(start) + text
            start += size + 1
        yield Text(line.rstrip(), style=style)


def wrapped(text: str, width: int, first: str = "", then: str | None = None, style: str = "") -> Iterator[Text]:
    """A sentence over several lines, broken between words only (not at `HOLD`); `first` and `then` open them."""
    after = first if then is None else then
    for line in textwrap.wrap(text, width, initial_indent=first, subsequent_indent=after, break_long_words=False,
                              break_on_hyphens=False):  # fmt: skip
        yield Text(line.replace(HOLD, " "), style=style)
