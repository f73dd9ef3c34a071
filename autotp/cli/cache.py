"""`autotp cache`."""

from __future__ import annotations

from typing import Annotated

import typer

from autotp.driver import disk_cache
from autotp.text import amount

from .command import FINE
from .screen import Screen


def cache(
    screen: Screen, clear: Annotated[bool, typer.Option("--clear", metavar="", help="Delete its files.")] = False
) -> int:
    """Say where captures and plans are kept, and how much that is.

    The folder is the one that AUTOTP_CACHE names; nothing is kept without it.
    """
    folder = disk_cache.own_folder()
    data = {"folder": None if folder is None else str(folder.path), "files": 0, "bytes": 0, "deleted": 0}
    if folder is None:
        screen.result(f"no cache: {disk_cache.NAME} names no folder (1: the usual one)", lambda: data)
        return FINE
    if clear:
        data["deleted"], _ = folder.shrink(0)
    sizes = [size for _, size, _ in folder.files()]
    data |= {"files": len(sizes), "bytes": sum(sizes)}
    text = f"{folder.path}: {len(sizes)} files, {amount(sum(sizes))} of at most {amount(disk_cache.MOST)}"
    screen.result(f"{text}, {data['deleted']} deleted" if clear else text, lambda: data)
    return FINE
