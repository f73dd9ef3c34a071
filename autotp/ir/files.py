"""JSON and TOML files that anybody may have written: sizes, nesting and numbers are bounded before they are used."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from autotp.errors import AutoTPError
from autotp.text import amount

PathLike = str | os.PathLike[str]  # as users give paths
MAX_FILE_BYTES = 16 << 20  # bytes of a file, where its reader says nothing else
MAX_DEPTH = 64  # lists and mappings within each other, or parts of a dotted key
MAX_NUMBER = 1 << 63  # whole numbers beyond this are no size of anything
QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')


@contextmanager
def opened(path: Path, most: float = math.inf, *, error: type[AutoTPError]) -> Iterator[BinaryIO]:
    """Open a regular file of at most so many bytes for reading: never a pipe or a device, which may not end.

    Args:
        path: of the file. most: bytes. error: the class of what is raised.

    Raises:
        AutoTPError: of the kind `error`: there is no such file, it is another kind of file, or it is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer
    except (OSError, ValueError) as e:
        raise error(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}. Check the path.") from e
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "folder" if stat.S_ISDIR(status.st_mode) else "pipe or device"
            raise error(f"{path} is a {kind}: give a regular file.")
        if status.st_size > most:
            raise error(
                f"{path} has {amount(status.st_size)}, and at most {amount(most)} are read. Is it the right file?"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_text(path: Path, most: float = MAX_FILE_BYTES, *, error: type[AutoTPError]) -> str:
    """Return the text of a file.

    Args:
        path: of the file. most: bytes. error: the class of what is raised.

    Raises:
        AutoTPError: of the kind `error`: as `opened`, or it is not UTF-8.
    """
    with opened(path, most, error=error) as file:
        try:
            return file.read().decode("utf-8")
        except UnicodeDecodeError as e:
            raise error(f"{path} is not text in UTF-8 ({e}). Is it the right file?") from e
        except OSError as e:
            raise error(f"{path} cannot be read: {e.strerror or e}.") from e


def read_json(path: Path, most: float = MAX_FILE_BYTES, *, error: type[AutoTPError]) -> Any:
    """Return what a JSON file holds; errors are of the kind `error`."""
    return parse_json(read_text(path, most, error=error), str(path), error=error)


def parse_json(text: str, name: str, *, error: type[AutoTPError]) -> Any:
    """Return what JSON text says, where nothing in it is nested too deep or too large a number.

    Raises:
        AutoTPError: of the kind `error`, which calls the text `name`.
    """
    return _parsed(json.loads, text, "JSON", name, error)


def parse_toml(text: str, name: str, *, error: type[AutoTPError]) -> dict[str, Any]:
    """Return what TOML text says, within the same bounds; dotted keys nest too."""
    lines = (line.partition("#")[0] for line in QUOTED.sub("", text).splitlines())
    keys = (key for line in lines for key in re.split(r"[=,\[\]{}]", line))
    if any(key.count(".") >= MAX_DEPTH for key in keys):  # a parser takes minutes for thousands
        raise error(f"{name} is not TOML that is read here: a key has more than {MAX_DEPTH} parts. Correct the file.")
    return _parsed(tomllib.loads, text, "TOML", name, error)


def _parsed(parse: Any, text: str, kind: str, name: str, error: type[AutoTPError]) -> Any:
    try:
        data = parse(text)
    except RecursionError:
        raise error(f"{name} is nested too deep to be read as {kind}. Correct the file.") from None
    except ValueError as e:  # what both formats' errors derive from, and numbers of thousands of digits
        raise error(f"{name} is not {kind}: {e}. Correct the file.") from e
    bounded(data, name, error=error)
    return data


def bounded(data: Any, name: str, *, error: type[AutoTPError]) -> None:
    """Refuse what is nested deeper than `MAX_DEPTH`, and whole numbers beyond `MAX_NUMBER`.

    Args:
        data: as JSON gave it. name: of the file or text, for the message. error: the class of what is raised.
    """
    level, depth = [data], 0
    while level:
        if depth > MAX_DEPTH:
            raise error(f"{name} is nested more than {MAX_DEPTH} deep. Correct the file.")
        if number := next((x for x in level if isinstance(x, int) and abs(x) > MAX_NUMBER), None):
            raise error(f"{name} holds the number {_short(number)}, which is no size of anything. Correct the file.")
        inner: list[Any] = []
        for x in level:
            if isinstance(x, dict | list):
                inner += x.values() if isinstance(x, dict) else x
        level, depth = inner, depth + 1


def _short(number: int) -> str:
    digits = str(number)
    return digits if len(digits) <= 30 else f"{digits[:20]}... of {len(digits)} digits"
