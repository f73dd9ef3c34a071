"""What a test patched: what is shared between tests was made without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


class Same:
    """Equal to itself alone, whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Patches:
    """The names in modules, and in their classes, that stand for something else than when this was made.

    Args:
        prefixes: of the modules' names.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self.usual = {(name, key): value for name, key, value in self._names()}

    def now(self) -> Iterator[tuple[str, str, Any]]:
        """Module, name and value of each."""
        return ((m, k, v) for m, k, v in self._names() if self.usual.get((m, k)) is not v)

    def _names(self) -> Iterator[tuple[str, str, Any]]:
        """Every name of the modules, and of the classes in them, with what it stands for."""
        for name, module in [(n, m) for n, m in list(sys.modules.items()) if n.startswith(self.prefixes)]:
            for key, value in vars(module).items():
                yield name, key, value
                if isinstance(value, type) and value.__module__ == name:
                    yield from ((name, f"{key}.{k}", v) for k, v in vars(value).items() if not k.startswith("__"))
