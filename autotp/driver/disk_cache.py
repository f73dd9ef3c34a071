"""A folder of the user's own with bytes by key: who may have written them, whole or not at all, within a size.

Off unless `AUTOTP_CACHE` names a folder, or is "1" for the user's own cache folder. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotp.log import log

NAME = "AUTOTP_CACHE"
OFF, ON = ("", "0", "off", "false", "no"), ("1", "on", "true", "yes")
MOST = 1 << 30  # bytes of all files together; the ones that were not used for longest go
LARGEST = MOST >> 2  # bytes of one file
HEAD = b"autotp cache 1\n"  # of every file; another number is another format
SUFFIX, HALF = ".autotp", ".part"  # names of files, and of those that are still being written
STALE = 24 * 3600.0  # seconds after which a file that is still being written belongs to nobody
WINDOWS = not hasattr(os, "getuid")


def wish() -> Path | None:
    """The folder that the environment names; None where it names none."""
    value = os.environ.get(NAME, "").strip()
    if value.lower() in OFF:
        return None
    return usual() if value.lower() in ON else Path(value).expanduser()


def usual() -> Path:
    """The user's own cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "autotp"


def own_folder() -> Folder | None:
    """The folder that the environment names, which is made where there is none; None, and a line in the log, where
    it cannot be used or others could write to it."""
    path = wish()
    if path is None:
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        odd = _foreign(path.stat())
        if not path.is_dir():
            odd = "it is no folder"
    except OSError as error:
        odd = error.strerror or str(error)
    if odd:
        log.warning("%s=%s is not used: %s. What it holds runs here: name a folder of your own.", NAME, path, odd)
        return None
    return Folder(path)


def _foreign(status: os.stat_result) -> str:
    """Why what has this owner and these rights may be somebody else's; "" where it is the user's own."""
    if WINDOWS:
        return ""
    if status.st_uid != os.getuid():
        return f"it belongs to another user (uid {status.st_uid})"
    return "others can write to it (chmod go-w)" if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP) else ""


@dataclass(frozen=True)
class Folder:
    """Bytes by key, for several processes at once. What cannot be read or written is a line in the log."""

    path: Path

    def read(self, key: str) -> bytes | None:
        """What was written under this key; None where nothing was, or it is damaged, foreign or of another format."""
        path, data = self._place(key), b""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
                odd = _foreign(os.fstat(file.fileno()))
                data = b"" if odd else file.read(MOST)
            if not odd:
                data, odd = _payload(key, data)
        except FileNotFoundError:
            return None
        except OSError as error:
            odd = error.strerror or str(error)
        if odd:
            log.warning("%s is ignored: %s", path, odd)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep bytes for later processes. Others see all of them or none; of several writers the last wins.

        Args:
            key: one line. data: at most `LARGEST` bytes.
        """
        if len(data) > LARGEST:
            log.info("%s: %d bytes are too many to keep", self.path, len(data))
            return
        try:
            number, half = tempfile.mkstemp(suffix=HALF, dir=self.path)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(HEAD + _seal(key, data) + data)
                os.replace(half, self._place(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(half)
                raise
        except OSError as error:  # a full disk: the work is done, and is done again next time
            log.warning("nothing is kept in %s: %s", self.path, error.strerror or error)
        self.shrink(MOST)

    def files(self) -> list[tuple[Path, int, float]]:
        """Files of this cache with their bytes and when they were used, the latest first."""
        return sorted(self._files(SUFFIX), key=lambda x: -x[2])

    def shrink(self, most: int) -> tuple[int, int]:
        """Delete the files that were not used for longest until at most so many bytes are left.

        Returns: how many were deleted, and their bytes.
        """
        for path, _, last_use in self._files(HALF):
            if time.time() - last_use > STALE:
                _delete(path)
        total, count, freed = 0, 0, 0
        for path, size, _ in self.files():
            total += size
            if total > most:
                count, freed = count + 1, freed + size
                _delete(path)
        return count, freed

    def _files(self, suffix: str) -> Iterator[tuple[Path, int, float]]:
        with contextlib.suppress(OSError):
            for path in self.path.glob(f"*{suffix}"):
                with contextlib.suppress(OSError):  # another process has deleted it
                    status = path.lstat()
                    yield path, status.st_size, status.st_mtime

    def _place(self, key: str) -> Path:
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"


def _seal(key: str, data: bytes) -> bytes:
    digest = hashlib.sha256(key.encode() + b"\n" + data).hexdigest()
    return f"{key}\n{digest}\n".encode()


def _payload(key: str, data: bytes) -> tuple[bytes, str]:
    """What a file holds under this key, or why it is not read."""
    if not data.startswith(HEAD):
        return b"", "it is in another format, or none of autotp's"
    parts = data[len(HEAD) :].split(b"\n", 2)
    if len(parts) < 3 or parts[0] != key.encode():
        return b"", "it holds another key"
    if _seal(key, parts[2]) != b"\n".join(parts[:2]) + b"\n":
        return b"", "it is damaged"
    return parts[2], ""


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
