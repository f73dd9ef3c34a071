"""What the command line's word for a model names: a config, a saved plan or a factory. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotp.errors import InputError
from autotp.ir import files

LARGEST = 100_000_000  # bytes: of the plan of a large model; a config has thousands
CONFIG = "config.json"


def config_path(text: str) -> Path | None:
    """The config.json that the text names; None where it names a factory."""
    path = Path(text)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise InputError(f"{text} holds no {CONFIG}. Name a folder or {CONFIG} of transformers.")
        return path / CONFIG
    if path.is_file():
        return path
    if ":" in text and os.sep not in text:
        return None
    raise InputError(
        f"{text}: no such file or folder. Name a folder or {CONFIG} of transformers (nothing is downloaded), or "
        "package.module:factory."
    )


def is_plan(text: str) -> bool:
    """Whether the text names the file of a saved plan."""
    path = Path(text)
    possible = path.suffix == ".json" and path.name != CONFIG and path.is_file()
    if not possible:
        return False
    keys = read_json(path).keys()
    return "decisions" in keys and ("format" in keys or "schema" in keys)  # schema: of formats 1 and 2, refused by name


def read_json(path: Path) -> Mapping[str, Any]:
    """The fields in a JSON file.

    Raises:
        InputError: it holds no such thing.
    """
    data = files.read_json(path, LARGEST, error=InputError)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}: it must hold a config or a saved plan.")
    return data
