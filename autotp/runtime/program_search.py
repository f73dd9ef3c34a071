"""The program that runs a call of a sharded module: a known one, or one that all ranks capture now and install."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from autotp import compat
from autotp.capture.rank0 import capture_once
from autotp.comm.ranks import agree, from_all, together
from autotp.comm.turn import holding
from autotp.errors import CaptureError, InputError, StateError
from autotp.ir.graph import CONSTANT, Capture, draws
from autotp.ir.program import Sharded
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.in_place import write_in_place
from autotp.runtime.lower.lower import accumulate_in

from . import data_parallel, state
from .programs import CallKey, CallKind, Form, Program, form, readings
from .tree import Assembler

WITHIN = (
    "{entry} is called within a call of {name}, by a hook: where not all ranks did so they would wait for each other. "
    "Keep what the hook sees, and call {entry} after that call."
)


def by_itself(module: Any, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module at this path as a call of its own, which begins with a turn; no hooks of the whole are called.

    Args:
        module: the sharded module. entry: the path. args, kwargs: of the call.

    Raises:
        StateError: collectives of a call are under way, in which a hook calls it.
    """
    if holding():
        raise StateError(WITHIN.format(entry=entry or "the module", name=module._calls.name))
    with module._calls.turn():
        if not issubclass(type(module), FSDPModule):
            return module._call(entry, args, kwargs)
        grad = torch.is_grad_enabled()
        if not grad and not module._shards.axis.fully_shard:  # weights are whole over the axis
            compat.outermost(module)
            return module._call(entry, args, kwargs)
        with data_parallel.recovering(module._shards), module._calls.gathering():
            outputs = compat.gathered(module, partial(_run_at, module, entry), args, kwargs)
        if not grad:
            data_parallel.show_gradients(module._shards)
        return outputs


def _run_at(module: Any, entry: str, *args: Any, **kwargs: Any) -> Any:
    return module._call(entry, args, kwargs)


def find(module: Any, call: Arguments) -> tuple[Program, list[int]]:
    """Return the program for a call of a new kind or size, and the order in which it takes the leaves. Collective."""
    source = module._source
    data_parallel.refuse_others(module._shards)
    if call.sequences is not None:
        module._calls.compare_sequences(call.sequences)
    # Where a program holds for some values alone, ranks with other values would choose other programs.
    values = source.check or any(p.capture.conditions is not None for p in module._programs_made)
    facts = {**state.input_text(call.whole, call.spec, values), **module._changes.facts()}
    agree(source.ranks, "the inputs of this call", facts)
    match = together(source.ranks, "reading the inputs", lambda: match_of(module, call))
    # What a rank knows is its own: an attribute that was set to an equal object is another value to it.
    ranks, anew = source.ranks, match is None
    if anew if ranks is None else any(from_all(ranks, anew, "a program for the call")):
        captured = _capture_once(module, call)
        # Graphs that differ would hang in their collectives, so they are compared before the program exists.
        agree(source.ranks, "the model for this call", {"graph": captured.digest()})
        layouts, outputs = module._carriers.layouts, source.want_of(call.entry).outputs
        sharded = together(source.ranks, "rewriting the graph", lambda: source.make(captured, layouts, outputs))
        module._install(captured, sharded, module._changes.key(), call.entry)
        match = match_of(module, call)
    if match is None:
        raise StateError("a program was captured for these inputs and does not accept them; please report this.")
    return match


def _capture_once(module: Any, call: Arguments) -> Capture:
    """The graph for a call, the same on every rank, with what it teaches of states. Collective."""
    source, carriers = module._source, module._carriers

    def make() -> tuple[Capture, Any]:
        captured = _captured(module, call)
        return captured, (set(carriers.moving), dict(carriers.sizes))

    # A rank that takes rank 0's graph did not see the capture: what it taught of states comes with it.
    def take(captured: Capture, learned: Any) -> tuple[Capture, Any]:
        moving, sizes = learned
        again = moving - carriers.moving  # a counter that the call was read with as a constant
        carriers.moving |= moving
        carriers.sizes.update(sizes)
        if again:
            call.read()
        return captured, learned

    # Rank 0 captures for all only where the ranks can tell that each would capture the same; else each does.
    def key() -> tuple[str | None, str]:
        changes = module._changes.key()
        if not all(carried.shape.comparable() for _, carried in call.state_objects):
            return None, "an object that holds state is described by what this process knows it by"
        if source.key is None:
            return None, "the model's attributes cannot be compared"
        return repr((source.key, module._mode(), state.dtypes(module._shards), call.entry, changes)), ""

    return capture_once(source.ranks, source.agreed, key, make, take)[0]


def match_of(module: Any, call: Arguments) -> tuple[Program, list[int]] | None:
    """A program that was captured for such a call in this mode and accepts these sizes."""
    state.refuse_meta(module._shards)
    call.check()
    call_form, _ = form(module._source.bare.get_submodule(call.entry), call.whole, call.spec)
    return module._programs_made.find(call_form, call.whole, module._mode(), call.entry, module._changes.key())


def install(
    module: Any, captured: Capture, sharded: Sharded, changes: Hashable = (), entry: str = "", called: bool = True
) -> Program:
    """Make a program runnable on this rank.

    Args:
        module: the sharded module. captured, sharded: the program of one process, and that of the ranks.
        changes, entry: as of a program. called: by users; a stage is by its place, and the pipeline sums its gradients.
    """
    source, shards, key = module._source, module._shards, module._programs_made.key()
    judges = source.lowering.judges(source.ranks, source.tp, shards.place)
    peak = module._plan.memory.peak
    graph, fired = source.lowering.program(sharded, source.places(), shards.place, peak, judges)
    inputs, reads, count = readings(captured, graph, shards)
    if called and module._plan.batch.size > 1 and source.ranks is not None:
        data_parallel.spread(shards, reads, source.lowering.reduces)
    elif called and source.lowering.reduces is not None:
        for piece, _ in shards.pieces():
            accumulate_in(piece, source.lowering.reduces)
    constants = {x.name: captured.constants[x.name] for x in captured.leaves if x.kind is CONSTANT}
    compiler = source.lowering.compiler()
    write_in_place(captured, graph)
    steps = any(leaf.kind.carried for leaf in captured.leaves)  # it goes on with a state, such as a cache
    assembler = Assembler(shards.parts, graph, reads, key, constants, compiler, source.ranks)
    assembler.build(inputs, one=steps)
    values, own = [x.node.meta.get("val") for x in captured.inputs], source.bare.get_submodule(entry)
    call_form = form(own, values, captured.in_spec)[0] if called else Form((), ())
    random = any(map(draws, graph.nodes))
    module._carriers.learn_layouts(getattr(sharded, "states", {}))
    program = Program(captured, sharded, graph, key, call_form, count, random, fired, compiler, changes, entry)
    module._programs_made.add(program, module._order)
    return program


def kind_of(module: Any, call: Arguments) -> CallKind:
    """The kind of a call, by which its programs are known."""
    of = module._changes.key(), call.entry, call.wrong
    # Of a state nobody asks for a gradient.
    leaves = call.whole if call.states and torch.is_grad_enabled() else call.flat
    return module._programs_made.kind(CallKey.of_call(module._mode(), of, leaves, call.spec))


def _captured(module: Any, call: Arguments) -> Capture:
    """The graph for a call; captured again while it shows more of what changes from call to call.

    Raises:
        InputError: it fails, and a state holds another number of sequences than the inputs.
    """
    try:
        captured = module._capture(call, module._mode())
    except CaptureError as error:
        if reason := call.other_batch():
            raise InputError(reason) from error
        raise
    while module._carriers.learn(captured):
        call.read()
        captured = module._capture(call, module._mode())
    return captured
