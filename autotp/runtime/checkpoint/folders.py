"""A folder that appears whole or not at all: written beside its place, brought to disk, then put there in one step."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from autotp.comm.ranks import Ranks, together
from autotp.errors import StateError

T = TypeVar("T")
AT_FDCWD, RENAME_EXCHANGE = -100, 2
OWN, DIGESTS = "autotp.json", "autotp.digests.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.distcp", ".metadata", DIGESTS)


def writing(path: Path, write: Callable[[], T]) -> T:
    """Return `write()`; its errors become those of saving `path`."""
    try:
        return write()
    except StateError:
        raise
    except Exception as error:  # the disk's, the file system's, those of the libraries that write
        raise StateError(f"{path} could not be saved; what was there is still there: {error!r}") from error


def write_on_first(ranks: Ranks, doing: str, path: Path, write: Callable[[], None]) -> None:
    """Let the first rank write; where that fails all ranks raise. A collective call.

    Args:
        ranks: that save. doing: what `write` does, for messages. path: that is saved. write: called on rank 0.
    """
    together(ranks, doing, lambda: writing(path, write) if ranks.rank == 0 else None)


def draft_of(path: Path) -> Path:
    """Return where a folder is written until it is complete."""
    return path.with_name(f".{path.name}.saving")


def previous_of(path: Path) -> Path:
    """Return where the previous folder is kept for a moment, on file systems that cannot exchange two folders."""
    return path.with_name(f".{path.name}.previous")


def present(path: Path) -> Path:
    """Return the folder to read: `path`, or the previous one that a save which was cut off has left beside it."""
    return previous_of(path) if not path.exists() and previous_of(path).exists() else path


def begin(path: Path) -> None:
    """Make an empty draft of the folder `path`; the rest of an earlier save that was cut off is deleted.

    Raises:
        StateError: `path` is a file, a link, or a folder with something in it that is no checkpoint.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise StateError(f"{path} is a {'link' if path.is_symlink() else 'file'}: a checkpoint is saved as a folder.")
    names = os.listdir(path) if path.exists() else []  # a folder that cannot be read is an error here, not in a glob
    if names and not any(fnmatch.filter(names, pattern) for pattern in (*WEIGHTS, OWN)):
        raise StateError(
            f"{path} holds {names[0]} and no checkpoint, and saving would replace the folder. "
            "Save into a folder of its own."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() and previous_of(path).exists():
        os.rename(previous_of(path), path)
    for old in (draft_of(path), previous_of(path)):
        shutil.rmtree(old, ignore_errors=True)
    draft_of(path).mkdir()


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the folder's files of a pattern, by name. A glob of Python 3.13 leaves out what cannot be listed."""
    return [folder / name for name in sorted(fnmatch.filter(os.listdir(folder), pattern))]


@contextlib.contextmanager
def dropped_on_failure(path: Path, drafted: bool) -> Iterator[None]:
    """Clear the draft of a save that fails: it would keep a full disk full.

    Args:
        path: of the save. drafted: whether this rank made the draft; by the time it fails no other one writes to it.
    """
    try:
        yield
    except BaseException:
        if drafted:
            shutil.rmtree(draft_of(path), ignore_errors=True)
        raise


def _keep_others(path: Path, draft: Path) -> None:
    """Copy other files of the previous checkpoint, such as a tokenizer's, which the draft does not have."""
    ignored = shutil.ignore_patterns(*WEIGHTS, OWN)
    names = [p.name for p in path.iterdir()]
    for name in sorted(set(names) - ignored(str(path), names)):
        if (draft / name).exists():
            continue
        if (path / name).is_dir():
            shutil.copytree(path / name, draft / name)
        else:
            shutil.copy2(path / name, draft / name)


def commit(path: Path) -> None:
    """Put the complete draft in the place of `path`; up to that step the previous folder is there, untouched.

    Other files of the previous checkpoint, such as a tokenizer's, are kept.
    """
    draft = draft_of(path)
    if path.exists():
        _keep_others(path, draft)
    for folder, _, files in os.walk(draft):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))
    if not path.exists():
        os.rename(draft, path)
    elif not _exchange(draft, path):
        os.rename(path, previous_of(path))
        os.rename(draft, path)
    _sync(path.parent)
    for old in (draft, previous_of(path)):
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, where the system and the file system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
