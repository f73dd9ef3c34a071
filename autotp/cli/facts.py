"""Facts of this machine that autotp could use: devices, links, versions; `doctor` judges them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from autotp import __version__
from autotp.cost.machines.presets import PRESETS
from autotp.cost.machines.this_machine import memory
from autotp.text import processor

PACKAGES = ("torch", "transformers", "triton", "highspy", "networkx", "sympy", "rich", "typer", "numpy")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def gather() -> dict[str, Any]:
    """Return all facts, as plain data."""
    return {
        "versions": versions(), "needs": needs(), "devices": devices(), "links": links(),
        "torchrun": {k: os.environ[k] for k in TORCHRUN if k in os.environ},
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return the versions of autotp and its dependencies; None for one that is not installed."""
    packages: dict[str, str | None] = {"autotp": __version__, "python": platform.python_version()}
    packages |= {name: _version(name) for name in PACKAGES}
    packages["torch"] = str(torch.__version__)  # with the build, which the package's version may lack
    packages["cuda"], packages["hip"] = torch.version.cuda, torch.version.hip
    if torch.cuda.is_available():
        packages["cudnn"] = str(torch.backends.cudnn.version())
        if dist.is_nccl_available():
            packages["nccl"] = ".".join(map(str, nccl.version()))
    return packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs() -> dict[str, str]:
    """Return package -> least version that autotp runs with, from its metadata; empty where it is not installed."""
    try:
        required = importlib.metadata.requires("autotp") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"([\w-]+)(?:[^;]*?>=([\d.]+))?", text) for text in required if "extra ==" not in text]
    return {m[1]: m[2] or "" for m in matches if m}


def devices() -> list[dict[str, Any]]:
    """Return the accelerators, and the processor."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*map(_cuda, range(count)), _processor()]


def _cuda(index: int) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(index)
    return {
        "kind": "cuda", "index": index, "name": device.name, "memory": device.total_memory,
        "capability": f"{device.major}.{device.minor}", "preset": preset(device.name),
    }  # fmt: skip


def _processor() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "kind": "cpu", "index": 0, "name": processor(), "memory": int(memory()),
        "cores": cores, "threads": torch.get_num_threads(), "preset": "local",
    }  # fmt: skip


def preset(device: str) -> str | None:
    """Return the preset of a device: all words of the preset's name are in the device's; of several the longest."""
    words = device.lower()
    fitting = []
    for name in PRESETS:
        # A card is written "RTX 4090"; an "RTX 3060 Ti" is another one than the "RTX 3060".
        if all(part in words for part in name.split("-")) or words.replace(" ", "").endswith(name):
            fitting.append(name)
    return max(fitting, key=len, default=None)


def links() -> dict[str, Any]:
    """Return the ways in which ranks on this machine, and on others, could communicate."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [*permutations(range(count), 2)]
    infiniband = Path("/sys/class/infiniband")
    return {
        "backends": [name for name in BACKENDS if dist.is_available() and dist.is_backend_available(name)],
        "peers": sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs),
        "pairs": len(pairs),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "infiniband": sorted(p.name for p in infiniband.glob("*")),
    }
