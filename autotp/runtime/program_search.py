"""The program that runs a call of a sharded module: a known one, or one that all ranks capture now and install."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.capture.rank0 import capture_once
from autotp.capture.request import CaptureRequest, Mode
from autotp.capture.state_objects import entering, on_fakes, sizes_of_states
from autotp.comm.conversions import KINDS
from autotp.comm.ranks import agree, from_all, of_first, together
from autotp.comm.turn import holding
from autotp.cost.collective_costs import collective_bytes
from autotp.errors import CaptureError, InputError, StateError
from autotp.inputs import Args, Inputs, Kwargs
from autotp.ir.carried import classes
from autotp.ir.graph import CONSTANT, Capture, draws
from autotp.ir.program import Sharded
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.lower.eager import write_in_place
from autotp.runtime.lower.hosted import host_batch, host_program, host_states
from autotp.runtime.lower.lower import accumulate_in
from autotp.text import amount

from . import data_parallel, state
from .programs import CallKey, CallKind, Form, Match, Program, form, readings, train_as
from .tree import Assembler

WITHIN = (
    "{entry} is called within a call of {name}, by a hook: where not all ranks did so they would wait for each other. "
    "Keep what the hook sees, and call {entry} after that call."
)
UNDEALT = "undealt"
GROUPED = {kind.name for kind in KINDS.values() if kind.grouped}  # collectives among groups of ranks
TREE = "every sum along one tree, {0}; no rewrite for speed"


def by_itself(self: Any, entry: str, args: Args, kwargs: Kwargs) -> Any:
    """Run the module at this path as a call of its own, which begins with a turn; no hooks of the whole are called.

    Args:
        self: the sharded module. entry: the path. args, kwargs: of the call.

    Raises:
        StateError: collectives of a call are under way, in which a hook calls it.
    """
    if holding():
        raise StateError(WITHIN.format(entry=entry or "the module", name=self._calls.name))
    with self._calls.turn(), data_parallel.own_after(self._shards):
        if not issubclass(type(self), FSDPModule):
            return self._call(entry, args, kwargs)
        if not torch.is_grad_enabled() and not self._shards.axis.fully_shard:  # weights are whole over the axis
            compat.outermost(self)
            return self._call(entry, args, kwargs)
        with data_parallel.recovering(self._shards), self._calls.gathering():
            return compat.gathered(self, lambda *a, **k: self._call(entry, a, k), args, kwargs)


def find(module: Any, call: Arguments) -> Match:
    """Return the program for a call of a new kind or size, and the order in which it takes the leaves. Collective."""
    source = module._source
    if call.sequences is not None:
        module._calls.compare_sequences(call.sequences)
    # Where a program holds for some values alone, ranks with other values would choose other programs.
    values = source.check or any(p.capture.conditions is not None for p in module._programs_made)
    facts = {**state.input_text(call.whole, call.spec, values), **module._changes.facts()}
    ranks = module._shards.ranks.joint
    agree(ranks, "the inputs of this call", facts)
    match = together(ranks, "reading the inputs", lambda: match_of(module, call))
    # What a rank knows is its own: an attribute that was set to an equal object is another value to it.
    anew = match is None
    if any(from_all(ranks, anew, "a program for the call")):
        captured = _capture_once(module, call)
        # Graphs that differ would hang in their collectives, so they are compared before the program exists.
        agree(ranks, "the model for this call", {"graph": captured.digest()})
        layouts, outputs = module._carriers.layouts, request_of(module, call).outputs
        decided = of_first(ranks, "planning this call", lambda: source.decide(captured, layouts))
        sharded = together(ranks, "rewriting the graph", lambda: source.make(captured, layouts, outputs, decided))
        install(module, captured, sharded, _changes(module, call), call.entry)
        match = match_of(module, call)
    if match is None:
        raise StateError("a program was captured for these inputs and does not accept them; please report this.")
    return match


def program_of(module: Any, call: Arguments) -> Match:
    """Return the program, as `find`, for a call that is not run now. Collective where no program is known for it."""
    kind = kind_of(module, call)
    match = kind.program(call.shapes)
    if match is None:
        match = find(module, call)
        kind.learn(*match)
    return match


def _capture_once(module: Any, call: Arguments) -> Capture:
    """Capture the graph for a call, the same on every rank, with what it teaches of states. Collective."""
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

    return capture_once(module._shards.ranks.joint, source.agreed, key, make, take)[0]


def match_of(module: Any, call: Arguments) -> Match | None:
    """Return a program that was captured for such a call in this mode and accepts these sizes."""
    state.refuse_meta(module._shards)
    call.check()
    call_form, _ = form(module._shards.bare.get_submodule(call.entry), call.whole, call.spec)
    return module._programs_made.find(call_form, call.whole, module._mode(), call.entry, _changes(module, call))


def install(module: Any, captured: Capture, sharded: Sharded, changes: Hashable = (), entry: str = "") -> None:
    """Make a program runnable on this rank.

    Args:
        module: the sharded module. captured, sharded: the program of one process, and that of the ranks.
        changes, entry: as of a program.
    """
    key = module._programs_made.key()
    values = [x.node.meta.get("val") for x in captured.inputs]
    call_form = form(module._shards.bare.get_submodule(entry), values, captured.in_spec)[0]
    if sharded.pieces:
        program = module._source.pipeline.program(module, captured, sharded, key, call_form)
    else:
        program = built(module, captured, sharded, key, call_form)
    _spread(module, program)
    program.changes, program.entry = changes, entry
    module._carriers.learn_layouts(sharded.states)
    module._programs_made.add(program, module._order)


def built(module: Any, captured: Capture, sharded: Sharded, key: Any, call_form: Form) -> Program:
    """Lower a program, or the piece of one stage, for this rank, and put it on the module's parts under a key.

    Args:
        module, captured, sharded: see `install`. call_form: that it is called in.
    """
    source, shards = module._source, module._shards
    # What a stage measures is its own.
    ranks = replace(shards.ranks, every=None) if source.pipeline else shards.ranks
    judges = source.lowering.judges(ranks, shards.tp, shards.device)
    peak = module._plan.memory.peak
    graph, fired = source.lowering.program(sharded, shards.places(), shards.device, peak, judges)
    inputs, reads, count = readings(captured, graph, shards)
    constants = {x.name: captured.constants[x.name] for x in captured.leaves if x.kind is CONSTANT}
    compiler = source.lowering.compiler()
    write_in_place(captured, graph)
    steps = any(leaf.kind.carried for leaf in captured.leaves)  # it goes on with a state, such as a cache
    random = any(map(draws, graph.nodes))
    if shards.hosts:
        *over, host = shards.hosts
        host_program(graph, shards.hosts)
        host_states(graph, captured, sharded.states, host)
        for batch in over:
            host_batch(graph, captured, batch)
        fired = (("tp_invariant", TREE.format("; ".join(_along(module)))), *fired)
    assembler = Assembler(shards.parts, graph, reads, key, constants, compiler, shards.ranks, shards.hosts)
    assembler.build(inputs, one=steps)
    return Program(captured, sharded, graph, key, call_form, count, random, fired, compiler, reads)


def _along(module: Any) -> Iterator[str]:
    """Say of each axis how many of the plan's ranks this process runs, and what it sends in a step."""
    shards, plan = module._shards, module._plan
    for host in shards.hosts:
        calls = []
        if host.axis == "tp":
            ways = [(collective, *way) for collective in plan.collectives for way in collective.ways]
            for collective, at, name, local in ways:
                if name and (plan.objective == "training" or at == "forward"):
                    # A group of ranks sums for itself what all gather.
                    alone = name == "reduce_scatter" and collective.name in GROUPED
                    size = collective.bytes + local * host.size if alone else collective.bytes
                    calls.append(("all_gather" if alone else name, size))
        else:  # gradients of the slices that there are of each weight
            trained = {name for name, piece, _ in shards.pieces() if piece.requires_grad}
            for p in plan.parameters:
                size = float(math.prod(p.local) * getattr(torch, p.dtype).itemsize)
                slices = 1 if p.layout.sharded_dim is None else shards.hosts[-1].local
                calls += [("all_reduce", size)] * slices if p.name in trained else []
        processes = host.size // host.local
        along = sum(host.traffic(name, size) for name, size in calls)
        ring = sum(collective_bytes(name, size, processes) for name, size in calls)
        yield (
            f"{host.local} of the plan's {host.size} {host.axis} ranks in each of {processes} processes, which sends "
            f"{amount(along)} in a step of the example inputs, where rings send {amount(ring)}"
        )


def _spread(module: Any, program: Program) -> None:
    """Hand a program's weights to torch's data parallelism, or have their gradients added up in a type of their own."""
    reduces, shards = module._source.lowering.reduces, module._shards
    if shards.by_torch.size > 1 and shards.ranks.mesh is not None:
        data_parallel.spread(shards, program.reads, reduces)
    elif reduces is not None:
        for _, piece, _ in shards.pieces():
            accumulate_in(piece, reduces)


def request_of(module: Any, call: Arguments) -> CaptureRequest:
    """Return the request for a capture of a call."""
    want = module._source.want_of(call.entry, module._generation is not None)
    return replace(want, cp=1) if call.undealt else want


def _changes(module: Any, call: Arguments) -> Hashable:
    """Return changes of the module's parts, with a mark where a call is not sharded over cp: a key of programs."""
    return (module._changes.key(), UNDEALT) if call.undealt else module._changes.key()


def kind_of(module: Any, call: Arguments) -> CallKind:
    """Return the kind of a call, by which its programs are known."""
    of = _changes(module, call), call.entry, call.wrong
    # Of a state nobody asks for a gradient.
    leaves = call.whole if call.states and torch.is_grad_enabled() else call.flat
    return module._programs_made.kind(CallKey.of_call(module._mode(), of, leaves, call.spec))


def _captured(module: Any, call: Arguments) -> Capture:
    """Capture the graph for a call, and again while it shows more of what changes from call to call.

    Raises:
        InputError: it fails, and a state holds another number of sequences than the inputs.
    """
    _foresee(module, call)
    try:
        captured = _capture(module, call, module._mode())
    except CaptureError as error:
        if reason := call.other_batch():
            raise InputError(reason) from error
        raise
    while module._carriers.learn(captured):
        call.read()
        captured = _capture(module, call, module._mode())
    return captured


def _foresee(module: Any, call: Arguments) -> None:
    """Learn which numbers of objects of new classes change from call to call, before these are captured as they are."""
    carriers, objects = module._carriers, [carried for _, carried in call.state_objects]
    kinds = set().union(*(classes(carried.shape.tree) for carried in objects))
    if kinds <= carriers.kinds:
        return
    carriers.kinds |= kinds
    bare, inputs = _copy_for(module, call)
    with torch.inference_mode(False), entering(bare, call.entry):
        after = on_fakes(bare, inputs, module._shards.device)
    shapes = [x.shape for x in call.inputs if isinstance(x, Tensor)]
    if after is not None and carriers.foresee(objects, after, {n for shape in shapes for n in shape[:2]}):
        call.read()


def _copy_for(module: Any, call: Arguments) -> tuple[nn.Module, Inputs]:
    """Return the original's skeleton, as the module's parts are now, and the inputs of a call as it takes them."""
    shards = module._shards
    bare = skeleton(shards.bare, shards.device, state.dtypes(shards))
    for original, part in zip(bare.modules(), module._order, strict=True):
        original.training = part.training
    module._changes.apply(zip(bare.modules(), module._order, strict=True))
    return bare, form(shards.bare.get_submodule(call.entry), call.whole, call.spec)[1]


@torch.inference_mode(False)
def _capture(module: Any, call: Arguments, mode: Mode) -> Capture:
    """Capture the original's skeleton for a call."""
    source, (bare, inputs) = module._source, _copy_for(module, call)
    capture = partial(source.capture, bare, inputs, module._shards.device, mode, request_of(module, call))
    with entering(bare, call.entry), sizes_of_states(module._carriers.sizes):
        captured = capture()
        # Else one program is for all that is trained.
        again = captured.asks_gradients and source.pipeline is None and train_as(bare, module._order)
        return capture() if again else captured
