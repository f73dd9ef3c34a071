"""The places where results, progress and errors go: tables or JSON on stdout, all else on stderr, from rank 0 alone."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from autotp.log import telling, under_way

TABLE = re.compile(r"\S {2,}\S.* {2,}\S")  # three columns of a row
PATIENCE = 1.0  # seconds after which work shows that it goes on


@dataclass(frozen=True)
class Screen:
    """Output

    Attributes:
        json: Print JSON on stdout, and nothing else.
        debug: Show tracebacks, warnings and the log.
    """

    json: bool = False
    debug: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout, init=False, repr=False)

    def result(self, renderable: RenderableType, data: Callable[[], Mapping[str, Any] | str]) -> None:
        """Print the result: `renderable` for people, or as JSON the text or plain data of `data`.

        Args:
            renderable: for people. data: for --json; computed only then.
        """
        if rank() != 0:
            return
        if self.json:
            value = data()
            text = (value if isinstance(value, str) else as_json(value)) + "\n"
        else:
            console = Console(file=self.out, highlight=False)
            with console.capture() as output:
                console.print(renderable, crop=False)  # a name is longer than some terminals
            text = output.get()
        self.out.write(text)
        self.out.flush()  # a reader that has had enough says so here

    def say(self, text: str, style: str = "dim") -> None:
        """Print a line beside the result, on stderr."""
        if rank() == 0:
            _stderr().print(Text(text, style=style), soft_wrap=True)

    def fail(self, text: str, kind: str, code: int, everywhere: bool = False) -> None:
        """Print an error: a line on stderr, and JSON on stdout for programs. `everywhere`: on other ranks too."""
        if rank() == 0 or everywhere:
            who = "autotp" if rank() == 0 else f"autotp, rank {rank()}"
            _stderr().print(Text.assemble(f"{who}: ", ("error: ", "bold red"), one_line(text)), soft_wrap=True)
        if rank() == 0 and self.json:
            print(as_json({"error": {"kind": kind, "message": text, "code": code}}), file=self.out)

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that work goes on: on a terminal after a second, by a line that goes away afterwards; elsewhere after
        two, and then ever less often, by lines that stay.

        Args:
            what: is going on.

        Yields: a function that names other work, which goes on now.
        """
        console, now = _stderr(), Now(what)
        if rank() != 0:
            yield now.change
            return
        if not console.is_terminal:
            with telling(now, self.say):
                yield now.change
            return
        from rich import progress as rich  # noqa: PLC0415  on terminals

        columns = rich.SpinnerColumn(), rich.RenderableColumn(now), rich.TimeElapsedColumn()
        progress = rich.Progress(*columns, console=console, transient=True)
        progress.add_task(what, total=None)
        late = threading.Timer(PATIENCE, progress.start)
        late.daemon = True
        late.start()
        try:
            yield now.change
        finally:
            late.cancel()
            late.join()
            progress.stop()


@dataclass
class Now:
    """The work that goes on; prints with the stages of it that are under way."""

    what: str

    def change(self, what: str) -> None:
        """Name other work, which goes on now."""
        self.what = what

    def __str__(self) -> str:
        return ": ".join([self.what, *under_way])

    def __rich__(self) -> Text:
        return Text(str(self))


def one_line(text: str) -> str:
    """Return a message of several lines as one, without the rows of tables in it."""
    lines = [line.strip() for line in text.splitlines()]
    words = [line for i, line in enumerate(lines) if line and not (i and TABLE.search(line))]
    text = ""
    for line in words:
        text += line + (" " if line.endswith((".", ":", ";")) else "; ")
    return text.removesuffix("; ").strip()


def rank() -> int:
    """Return this process's rank under torchrun, otherwise 0."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isdigit() else 0


def as_json(data: Any) -> str:
    """Return plain data as JSON text; numbers that JSON has no word for become null."""
    return json.dumps(_finite(data), indent=1, ensure_ascii=False)


def _finite(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(k): _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
