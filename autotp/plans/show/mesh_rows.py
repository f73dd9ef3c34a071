"""Meshes in words: what a step is made of, and why one loses against another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.text import amount, seconds

if TYPE_CHECKING:
    from autotp.plans.mesh_choice import MeshRow

TIMES = {
    "compute": "kernels of forward and backward",
    "again": "computed or gathered again",
    "tp": "over tp",
    "cp": "over cp",
    "pp": "between stages",
    "uneven": "stages that wait for the slowest",
    "bubble": "bubble",
    "dp": "waiting for dp",
    "optimizer": "optimizer",
}
AXES = ("tp", "cp", "pp", "dp")


def reason(row: MeshRow, best: MeshRow) -> str:
    """Why a mesh takes longer than the best: the time that grew most.

    Args:
        row: of the mesh. best: of the fastest that fits.
    """
    if not row.fits:
        return f"too much: {amount(row.memory)}"
    name = max(TIMES, key=lambda x: row.times[x] - best.times[x])
    if row is best or row.times[name] - best.times[name] <= 0:
        return ""
    shares = f"{row.share(name):.0%} against {best.share(name):.0%}"
    if name in AXES:
        return _sends(name, row, best, shares)
    if name == "compute":
        more = row.times[name] / best.times[name] - 1
        return f"smaller kernels: {more:.1%} more seconds in them"
    if name == "again":
        what = "computes blocks again" if row.mesh.keep == "inputs" else "gathers again"
        return f"{what} to fit: {shares}"
    if name == "uneven":
        return f"uneven stages: {shares}"
    return f"{name} {shares}"


def _sends(axis: str, row: MeshRow, best: MeshRow, shares: str) -> str:
    """The reason where it is an axis."""
    where = "over the network" if axis in row.network else "in the node"
    before, now = best.sent[axis], row.sent[axis]
    if not before:
        return f"sends {amount(now)} over {axis} {where}: {shares}"
    if axis in row.network and axis not in best.network:
        return f"{axis} over the network, not in the node: {shares}"
    if now > 1.05 * before:
        return f"sends {now / before:.1f}x more over {axis} {where}: {shares}"
    return f"waits longer for {axis} {where}: {shares}"


def chunks(row: MeshRow) -> str:
    """Stages of each rank of the pipeline: with 1 the schedule is 1F1B, with more the interleaved one."""
    return "-" if row.mesh.pp == 1 else str(row.mesh.chunks)


def exposed(row: MeshRow) -> str:
    """The share of communication that nothing hides."""
    return f"{row.share(*AXES):.0%}"


def step(row: MeshRow) -> str:
    """The seconds of a step."""
    return seconds(row.seconds)
