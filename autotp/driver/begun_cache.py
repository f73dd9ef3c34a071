"""The cache that a model makes when it generates, for plans of calls without one.

A call that begins a cache is captured besides, and solved with every parameter where the plan has it, as the first call
of `generate()` is: a rank holds the cache that it leaves. The capture is of the model with as few blocks of each stack
as hold every kind; the cache of such a block counts for all that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autotp import compat
from autotp.capture.repeated_blocks import kinds, path_of, place_in
from autotp.capture.request import Mode, recording_mode
from autotp.capture.small_model import cut, cuts
from autotp.errors import CaptureError
from autotp.inputs import Inputs, is_transformers, with_cache
from autotp.ir.carried import Returned
from autotp.ir.graph import Capture, placed_outputs, resolve
from autotp.ir.scopes import module_path
from autotp.log import log, stage

Capturer = Callable[[nn.Module, Inputs, torch.device, Mode], Capture]
Stacks = Mapping[str, list[Hashable | None]]  # by name, the kinds of their blocks


@dataclass(frozen=True)
class BegunCache:
    """A call that begins a cache.

    Attributes:
        program: its capture. times: position of an output -> for how many of the whole model's it stands.
        like: path of a block that it leaves out -> that of the one that stands for it.
        plain: positions of outputs that only such a call gives: a cache that is no object, of which ranks hold all.
    """

    program: Capture
    times: Mapping[int, int]
    like: Mapping[str, str]
    plain: tuple[int, ...] = ()


def begun_cache(captured: Capture, capture: Capturer) -> BegunCache | str | None:
    """Return the call that begins a cache, captured once.

    Args:
        captured: the call without one. capture: of a skeleton, for inputs on a device, in a mode.

    Returns: the call; the reason where there is none; None where the model cannot be asked.
    """
    if captured.begun is None:
        captured.begun = (_begun(captured, capture),)
    return captured.begun[0]


def _begun(captured: Capture, capture: Capturer) -> BegunCache | str | None:
    if captured.origin is None:
        return None
    bare, asking = captured.origin[0], with_cache(*captured.origin)
    if asking is None:  # a model of transformers whose forward knows no cache has none
        return BegunCache(captured, {}, {}) if is_transformers(bare) else None
    few, reason = cuts(bare), ""
    # A forward that counts its blocks by a number of the config does not run with few of them.
    for lengths in (few, {}) if few else ({},):
        try:
            with stage("capture of the cache"):
                return _with_few_blocks(captured, asking, lengths, capture)
        except Exception as error:  # whatever a forward and torch's tracer may raise
            reason = str(error).partition("\n")[0]
            log.debug("a cache cannot be captured with %s: %s", lengths or "all blocks", reason)
    return reason


def _with_few_blocks(
    captured: Capture, inputs: Inputs, lengths: Mapping[str, int], capture: Capturer
) -> BegunCache:  # fmt: skip
    """Capture the call with stacks of these lengths.

    Raises:
        CaptureError: the model generates, and has no cache to show.
    """
    bare: nn.Module = captured.origin[0]  # type: ignore[index]
    device = next((p.device for p in bare.parameters()), torch.device("cpu"))
    mode = recording_mode(bare, device)
    stacks = {name: kinds(bare.get_submodule(name)) for name in lengths}  # type: ignore[arg-type]
    with cut(bare, lengths):
        program = capture(bare, inputs, device, mode)
    before = _outputs(captured)
    plain = tuple(i for name, i in _outputs(program).items() if name not in before and program.becomes(i) is None)
    if not plain and not program.has_states and callable(getattr(bare, "generate", None)):
        raise CaptureError(f"{type(bare).__name__} gives none for use_cache=True")
    like = {}
    for name, of in stacks.items():
        left_out = range(lengths[name], len(of))
        like |= {path_of(name, i): path_of(name, of.index(of[i])) for i in left_out}
    return BegunCache(program, _times(program, stacks, lengths), like, plain)


def _times(program: Capture, stacks: Stacks, lengths: Mapping[str, int]) -> dict[int, int]:
    """Count the whole model's outputs that each stands for: the first block of a kind also for those left out."""
    times = {}
    for position, node in placed_outputs(program):
        path = module_path(resolve(node)[0])
        blocks = [_blocks(of, place_in(name, path[-1]), lengths[name]) for name, of in stacks.items() if path]
        times[position] = math.prod(blocks)
    return times


def _blocks(of: list[Hashable | None], place: int | None, length: int) -> int:
    """Count the blocks that the one at this place stands for."""
    first = place is not None and of.index(of[place]) == place
    return 1 + of[length:].count(of[place]) if first else 1  # type: ignore[index]


def _outputs(program: Capture) -> dict[str, int]:
    """Map the names of a call's outputs in its results to their positions among the outputs of the graph."""
    positions = [i for i, _ in enumerate(program.results) if i not in program.mutations]
    results = compat.tree_unflatten(positions, program.out_spec)
    leaves = compat.named_leaves(results.outputs if isinstance(results, Returned) else results)
    if "0" in leaves:  # one alone is the first
        leaves["[0]"] = leaves.pop("0")
    return leaves
