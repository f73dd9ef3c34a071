"""Lines, grids and tables as text in columns, none of which breaks a name: a view is a sequence of these."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import table as rich
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

WIDTH, NARROW = 110, 80  # columns of a whole plan as text, and those that it fits into
HOLD = "\xa0"  # a blank at which no line ends


@dataclass(frozen=True)
class Line:
    """A sentence, wrapped between words (not at `HOLD`); `first` and `then` open its lines.

    Attributes:
        text: all of it; an empty one is a blank line. style: as rich names them.
        title: a heading, of which `text` is the detail: beside it where there is room, otherwise below.
    """

    text: str = ""
    first: str = ""
    then: str | None = None
    style: str = ""
    title: str = ""

    def render(self, width: int) -> Iterator[Text]:
        """Render as lines of so many columns."""
        beside = self.text if not self.title else f"{self.title}  {self.text}".rstrip()
        if self.title and len(beside) <= width:
            yield Text.assemble((self.title, self.style), beside.removeprefix(self.title))
        elif self.title:
            yield Text(self.title, self.style)
            yield from Line(self.text, "  ").render(width) if self.text else ()
        else:
            wrapper = textwrap.TextWrapper(width, self.first, break_long_words=False, break_on_hyphens=False)
            wrapper.subsequent_indent = self.first if self.then is None else self.then
            for line in wrapper.wrap(self.text) or [""]:
                yield Text(line.replace(HOLD, " "), self.style)


@dataclass(frozen=True)
class Grid:
    """Rows of cells in columns of given widths.

    Attributes:
        sides: "l" or "r" for each column. widths: of `WIDTH` columns in all; narrow: of `NARROW`, default the same.

    A cell that reaches into the next column, or beyond the width, sends what follows to a line of its own.
    """

    rows: Iterable[Sequence[str]]
    sides: str
    widths: Sequence[int]
    narrow: Sequence[int] = ()
    indent: str = "  "
    style: str = ""

    def render(self, width: int) -> Iterator[Text]:
        """Render as lines of so many columns."""
        share = min(max(width - NARROW, 0) / (WIDTH - 2 - NARROW), 1.0)
        sizes = [int(b + share * (a - b)) for a, b in zip(self.widths, self.narrow or self.widths, strict=True)]
        for row in self.rows:
            line, start = "", len(self.indent)
            for cell, size, side in zip(row, sizes, self.sides, strict=True):
                text = cell.rjust(size) if side == "r" else cell
                if line and (len(line) >= start or start + len(text) > width):
                    yield Text(line.rstrip(), self.style)
                    line, start = "", start if start + len(text) <= width else len(self.indent) + 4
                line = line.ljust(start) + text
                start += size + 1
            yield Text(line.rstrip(), self.style)


@dataclass(frozen=True)
class Table:
    """Rows of cells in columns as wide as they need.

    Attributes:
        sides: "l" or "r" for each column. names: of the columns; none: no heading. short: on a narrow console.
        indent, gap: blanks before the table, and between columns; narrow: the same on a narrow console.
    """

    rows: Iterable[Sequence[str]]
    sides: str
    names: Sequence[str] = ()
    short: Sequence[str] = ()
    indent: int = 0
    gap: int = 3

    def render(self, width: int) -> Iterator[RenderableType]:
        """Render the table for so many columns."""
        narrow = self.short and width < WIDTH
        names = (self.short if narrow else self.names) or [""] * len(self.sides)
        gap = self.gap - 1 if narrow else self.gap
        table = rich.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(self.names))
        for side, name in zip(self.sides, names, strict=True):
            table.add_column(name, justify="right" if side == "r" else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        yield Padding(table, (0, 0, 0, self.indent))


View = Iterable[Line | Grid | Table]


@dataclass(frozen=True)
class Sheet:
    """A view for a rich console: as wide as that, or of so many columns."""

    view: View
    width: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The view's lines, not folded, and its tables."""
        for part in self.view:
            width = options.max_width if isinstance(part, Table) else self.width or options.max_width
            for line in part.render(width):
                if isinstance(line, Text):
                    line.no_wrap, line.overflow = True, "ignore"
                yield line

    def __str__(self) -> str:
        return plain(self, self.width or WIDTH)


class Printed:
    """Base of objects that print as a sheet."""

    def __rich__(self) -> Sheet:
        """The sheet."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.__rich__())


def plain(content: RenderableType, width: int = WIDTH) -> str:
    """Return the text that rich draws, without colours and trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(
        content, crop=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
