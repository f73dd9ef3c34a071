"""Whether the ranks of this machine can read each other's memory."""

from __future__ import annotations

import os

import torch


def unavailable(device: torch.device, tp: int) -> str:
    """Why symmetric memory cannot serve these ranks here; empty where it can.

    Args:
        device: of this rank. tp: how many ranks share memory.
    """
    if device.type != "cuda":
        return f"it is for CUDA devices linked by NVLink, and this is {device.type}"
    if tp > int(os.environ.get("LOCAL_WORLD_SIZE", tp)):
        return "the tp ranks span nodes"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPUs are older than Ampere"
    here, count = device.index or 0, torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return "not every GPU can read every other's memory"
    from autotp import compat  # noqa: PLC0415  only here: it takes longer than torch, and `autotp doctor` asks too

    supported = compat.has_symmetric_memory()
    return "" if supported else f"torch {torch.__version__} has no fused symmetric-memory operators"
