"""What captures and plans depend on beside the model's modules, as one word that lasts from process to process.

That is the files of the user's own code, what the model's methods reach in them by name, the versions of what is
installed, and the switches of torch and of autotp that a capture may read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotp._version import __version__
from autotp.capture.model_key import DEEPEST, PLAIN, Untold

ROOT = Path(__file__).parents[1]
PACKAGES = ("transformers", "accelerate", "sympy", "highspy", "numpy", "scipy")  # what makes captures and plans
LOGS = ("AUTOTP_LOG", "AUTOTP_WAIT_LOG_S", "AUTOTP_VERIFY")
IDLE = {"AUTOTP_CACHE", "AUTOTP_TEST_CAPTURES", *LOGS}  # they change nothing
KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
PLACES = tuple({os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in KINDS})


def source_key(model: nn.Module, key: str) -> str:
    """A model's key in this process (`model_key`) as one for all processes.

    Raises:
        Untold: its methods read something whose equality cannot be told.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    places = sorted({kind.__module__ for kind in kinds})
    files = [_digest(file) for name in places if (file := _file(name))]
    tops = sorted({name.partition(".")[0] for name in places})
    reach = Reach()
    for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
        reach.value(kind.__qualname__, kind)
    words = key, files, [(top, _version(top)) for top in tops], _own_files(), reach.words, versions(), _switches()
    return hashlib.sha256(repr(words).encode()).hexdigest()


class Reach:
    """What functions of the user's own reach by name, in words that are the same in every process."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self._ids: set[int] = set()

    def value(self, name: str, x: Any, names: Iterable[str] = (), depth: int = 0) -> None:
        """Put down a value.

        Args:
            name: that it stands under. x: the value. names: that are read of a module. depth: of nesting.
        """
        # A list may hold itself.
        if depth > DEEPEST:
            raise Untold(f"{name}, nested too deep")
        if isinstance(x, PLAIN):
            self.words.append((name, type(x).__name__, repr(x)))
        elif isinstance(x, Tensor):
            self.words.append((name, _tensor(x)))
        elif isinstance(x, ModuleType):
            # Of the user's modules what a function reads of them; of numpy the version says it all, which is in the key
            # already.
            if own(x.__name__):
                self._each(name, {n: vars(x)[n] for n in names if n in vars(x)}, names, depth)
        elif isinstance(x, type):
            self._class(x, depth)
        elif isinstance(x, FunctionType | MethodType | partial):
            self._function(name, x, depth)
        elif isinstance(x, Mapping | list | tuple | set | frozenset):
            # Kind and length by themselves: [] and {} have no entries that would tell them apart.
            self.words.append((name, type(x).__qualname__, len(x)))
            self._each(name, _entries(x), (), depth)
        else:
            self._object(name, x, depth)

    def _each(self, name: str, values: Mapping[str, Any], names: Iterable[str], depth: int) -> None:
        for key, value in sorted(values.items()):
            self.value(f"{name}.{key}", value, names, depth + 1)

    def _class(self, kind: type, depth: int) -> None:
        if id(kind) in self._ids or not own(kind.__module__):
            return
        self._ids.add(id(kind))
        self.words.append((kind.__module__, kind.__qualname__))
        for base in kind.__bases__:
            self._class(base, depth)
        plain = {n: _bare(v) for n, v in vars(kind).items() if not n.startswith("__") or n in ("__call__", "__init__")}
        self._each(kind.__qualname__, {n: v for n, v in plain.items() if v is not None}, (), depth)

    def _function(self, name: str, x: Any, depth: int) -> None:
        if isinstance(x, partial):
            self._each(name, {"func": x.func, "args": x.args, "keywords": x.keywords}, (), depth)
            return
        fn = x.__func__ if isinstance(x, MethodType) else x
        if id(fn) in self._ids or not own(fn.__module__):
            return
        self._ids.add(id(fn))
        codes = list(_codes(fn.__code__))
        texts = [(c.co_code, list(map(_constant, c.co_consts))) for c in codes]
        self.words.append((name, fn.__qualname__, texts))
        names = sorted({n for c in codes for n in c.co_names})
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        reach = {n: c.cell_contents for n, c in cells if _filled(c)}
        reach |= {n: fn.__globals__[n] for n in names if n in fn.__globals__}
        reach |= {"__defaults__": fn.__defaults__, "__kwdefaults__": fn.__kwdefaults__}
        self._each(name, reach, names, depth)

    def _object(self, name: str, x: Any, depth: int) -> None:
        kind = type(x)
        if own(kind.__module__) and not isinstance(x, nn.Module):
            if id(x) in self._ids:
                return
            self._ids.add(id(x))
            self._class(kind, depth)
            self._each(name, dict(getattr(x, "__dict__", {})), (), depth)
        elif isinstance(x, np.ndarray):
            self.words.append((name, str(x.dtype), x.shape, hashlib.sha256(x.tobytes()).hexdigest()))
        elif " at 0x" in repr(x):
            raise Untold(f"{name}, a {kind.__name__}, whose equality cannot be told")
        else:
            self.words.append((name, kind.__qualname__, repr(x)))


def _bare(x: Any) -> Any:
    """What a class holds under a name, without what makes it a method; None of what is nothing to read."""
    if isinstance(x, staticmethod | classmethod):
        return x.__func__
    if isinstance(x, property):
        return tuple(f for f in (x.fget, x.fset) if f is not None)
    return x if isinstance(x, (FunctionType, Mapping, list, tuple, Tensor, *PLAIN)) else None


def _entries(x: Any) -> dict[str, Any]:
    if isinstance(x, Mapping):
        return {repr(k): v for k, v in x.items()}
    items = x if isinstance(x, list | tuple) else sorted(x, key=repr)
    return {f"{i:06}": v for i, v in enumerate(items)}


def _constant(x: Any) -> str:
    """A constant of a code; a set's order differs between processes, and inner codes come by themselves."""
    if isinstance(x, frozenset):
        return repr(sorted(map(repr, x)))
    return x.co_name if isinstance(x, CodeType) else repr(x)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _tensor(x: Tensor) -> Any:
    like = tuple(x.shape), x.stride(), str(x.dtype), x.device.type, x.requires_grad
    return like if x.is_meta else (*like, tensor_digest(x))


def tensor_digest(x: Tensor) -> str:
    """A digest of the numbers that a tensor holds."""
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


@cache
def own(name: str) -> bool:
    """Whether a Python module is of the user's own code: neither installed nor autotp's."""
    if name.partition(".")[0] in (*sys.stdlib_module_names, "torch", "autotp") and name != "__main__":
        return False
    file = _file(name)
    return not file.startswith(PLACES)


def _file(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return os.path.realpath(file) if file else ""


def _own_files() -> list[Any]:
    """All files of the user's own code that are loaded, for a registry may lead to any of them."""
    names = sorted(name for name in list(sys.modules) if name and own(name) and _file(name))
    return [(name, _digest(_file(name))) for name in names]


def _digest(file: str) -> str:
    try:
        status = os.stat(file)
        return _content(file, status.st_mtime_ns, status.st_size)
    except OSError:
        return ""


@cache
def _content(file: str, _time: int, _size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def versions() -> tuple[str, ...]:
    """The versions of all that makes captures and plans; of autotp its files too, which change between versions."""
    own_code = hashlib.sha256()
    for path in sorted({path.resolve() for top in (ROOT, *ROOT.glob("*/")) for path in top.resolve().rglob("*.py")}):
        own_code.update(path.read_bytes())
    machine = platform.machine(), platform.python_version(), sys.implementation.cache_tag or ""
    return (__version__, own_code.hexdigest(), str(torch.__version__), *machine, *(_version(x) for x in PACKAGES))


@cache
def _version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} {getattr(sys.modules.get(name), '__version__', '')}"


def _switches() -> Any:
    """What torch and autotp are set to in this process."""
    wishes = sorted((k, v) for k, v in os.environ.items() if k.startswith("AUTOTP_") and k not in IDLE)
    flags = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
    kernels = torch.backends.cuda
    attention = kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return wishes, repr(flags), attention, torch.get_float32_matmul_precision(), capability
