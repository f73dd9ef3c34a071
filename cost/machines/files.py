"""Flat descriptions in .json and .toml files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from autotp.errors import InputError
from autotp.ir.files import parse_json, parse_toml, read_text

SUFFIXES = (".json", ".toml")
LARGEST = 1 << 16  # bytes: a description has about one thousand


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields that a file holds, by the format that its suffix says.

    Raises:
        InputError: another suffix, no such file, a large one, text that is not in that format, or no fields in it.
    """
    file, suffix = Path(path), _suffix(path)
    text = read_text(file, LARGEST, error=InputError)
    data = (parse_json if suffix == ".json" else parse_toml)(text, str(file), error=InputError)
    if not isinstance(data, dict):
        raise InputError(f"{file} holds a {type(data).__name__}: it must hold the fields of one cluster.")
    return data


def write(path: str | PathLike[str], data: Mapping[str, Any]) -> None:
    """Write fields that are strings, numbers, flags and mappings of those, in the format that the suffix says.

    Raises:
        InputError: another suffix, or the file cannot be written.
    """
    file, suffix = Path(path), _suffix(path)
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n" if suffix == ".json" else _toml(data)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}. Check the path.") from None


def _suffix(path: str | PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise InputError(f"{Path(path)} must end in {' or '.join(SUFFIXES)}: the suffix says the format.")
    return suffix


def _toml(data: Mapping[str, Any]) -> str:
    """Plain fields first, as TOML wants it, then a table for each mapping. JSON's scalars are TOML's."""
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping)}
    lines = [f"{k} = {_scalar(v)}" for k, v in data.items() if k not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_scalar(k)} = {_scalar(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _scalar(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that only TOML escapes
