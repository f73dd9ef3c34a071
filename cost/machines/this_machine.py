"""This machine, as far as it is known without measuring: its processor, its memory, its devices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autotp.cost import Cluster
from autotp.errors import InputError
from autotp.text import processor

if TYPE_CHECKING:
    from autotp.comm.ranks import Ranks


def described(
    name: str, base: Cluster, ranks: Ranks, device: torch.device, devices_per_node: int | None
) -> dict[str, object]:
    """The fields of this machine's cluster that are known without measuring, and the base's node size otherwise.

    Args:
        name: what plans will call it.
        base: gives what is not known.
        ranks: of this process. device: of this rank.
        devices_per_node: what the user says, or None.
    """
    world = ranks.tp
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    cuda = device.type == "cuda"
    per_node = torch.cuda.device_count() if cuda else base.devices_per_node
    if here < world:  # fewer ranks in this node than there are: it is full
        per_node = here
    if devices_per_node is not None:
        per_node = replace(base, devices_per_node=devices_per_node).devices_per_node  # which checks the number
    if world > per_node and world % per_node:
        raise InputError(
            f"devices_per_node={per_node} does not divide the {world} ranks: every node holds equally many."
        )
    title = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads: {processor()}"
    size = torch.cuda.get_device_properties(device).total_memory if cuda else memory() / min(here, world)
    links = "matmuls, copies, collectives" if world > 1 else f"matmuls, copies; links are those of {base.name!r}"
    source = f"autotp.calibrate, torch {torch.__version__}, {world} rank{'s' * (world > 1)}; {links}"
    return {
        "name": name, "device": title, "memory_size": float(size), "devices_per_node": per_node, "source": source,
    }  # fmt: skip


def memory() -> float:
    """Bytes of this machine's memory; a nominal number where the platform does not tell."""
    countable = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if countable else 16e9


def free_memory() -> int:
    """Bytes of it that a process can still take; 0 where the platform does not tell."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), 0)
