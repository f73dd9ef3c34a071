"""The package as a module whose public names are imported when they are first used: torch takes two seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazily(homes: Mapping[str, str]) -> type[ModuleType]:
    """A class of modules that have these names, each from its home.

    A property, unlike a module's `__getattr__`, keeps its name when a submodule is called the same: importing
    `autotp.plan` would otherwise put that module in the place of the function.

    Args:
        homes: public name -> the submodule that has it, such as "autotp.api".
    """

    class Package(ModuleType):
        """A package that imports when it is asked."""

        def __dir__(self) -> list[str]:
            return sorted({*self.__dict__, *homes})

    for name, home in homes.items():
        setattr(Package, name, _property(name, home))
    return Package


def _property(name: str, home: str) -> property:
    """Another value may be put in its place and taken away again; a submodule of that name is left out."""

    def get(package: ModuleType) -> Any:
        own = package.__dict__
        return own[name] if name in own else getattr(import_module(home), name)

    def put(package: ModuleType, value: Any) -> None:
        if not isinstance(value, ModuleType):
            package.__dict__[name] = value

    def drop(package: ModuleType) -> None:
        del package.__dict__[name]

    return property(get, put, drop)
