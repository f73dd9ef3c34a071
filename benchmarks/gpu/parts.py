"""The parts, in order, and what of each is known: a JSON file for a part, which says for which device and sources."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers.isolate import Record

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"1": "suite", "2": "fused", "3": "layers", "4": "decoding", "5": "training", "6": "products"}
SOURCES = ("autotp", "passes", "cost")


def module(part: str) -> Any:
    """The module of a part: its `TITLE`, `items` and `section`."""
    return importlib.import_module(f"benchmarks.gpu.{PARTS[part]}")


def key(part: str, device: str) -> dict[str, str]:
    """What the results of a part hold for: the device, versions, and a digest of the sources that are measured.

    Args:
        part: its number. device: "cuda" or "cpu".
    """
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    folders = (*SOURCES, "tests") if PARTS[part] == "suite" else SOURCES
    files = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    own = ROOT / "benchmarks" / "gpu"
    digest = hashlib.sha256()
    for path in (*files, own / f"{PARTS[part]}.py", own / "sizes.py", own / "clock.py"):
        digest.update(path.read_bytes())
    return {"device": name, "torch": torch.__version__, "sources": digest.hexdigest()[:16]}


@dataclass
class State:
    """What is known of a part.

    Attributes:
        key: what it holds for.
        names: of all items. results: of those that ran to their end. faults: why others did not.
        running: the item that runs now, or ran when its process ended; "" for none.
        seconds: that each item took.
    """

    key: dict[str, str]
    names: list[str] = field(default_factory=list)
    results: dict[str, Record] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    running: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Items that were not yet tried."""
        return [name for name in self.names if name not in self.results and name not in self.faults]

    @property
    def complete(self) -> bool:
        return bool(self.names) and not self.left


def load(path: Path, wanted: dict[str, str]) -> State:
    """The state in a file; an empty one where there is none, or it is of another device or other sources."""
    try:
        state = State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return State(wanted)
    return state if state.key == wanted else State(wanted)


def save(path: Path, state: State) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    os.replace(beside, path)


def path_of(folder: Path, part: str) -> Path:
    """The file of a part."""
    return folder / f"{part}-{PARTS[part]}.json"


def about(device: str) -> str:
    """The device and versions, in words."""
    import transformers  # noqa: PLC0415  takes seconds, and only the page needs it

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{name}, CUDA {torch.version.cuda}, {versions}"
