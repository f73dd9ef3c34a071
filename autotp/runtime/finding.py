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
from autotp.errors import StateError
from autotp.ir.graph import Capture, draws
from autotp.ir.leaves import CONSTANT
from autotp.ir.program import Sharded
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.in_place import write_in_place
from autotp.runtime.lower.reduced import accumulate_in

from . import data_parallel, state
from .call_key import form
from .programs import Program, readings
from .tree import Assembler

WITHIN = (
    "{entry} is called within a call of {name}, by a hook: where not all ranks did so they would wait for each other. "
    "Keep what the hook sees, and call {entry} after that call."
)


class Finds:
    """For a sharded module."""

    _source: Any
    _shards: Any
    _plan: Any
    _programs_made: Any
    _carriers: Any
    _changes: Any
    _order: Any
    _mode: Any
    _captured: Any
    _call: Any
    _calls: Any

    def by_itself(self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module at this path as a call of its own, which begins with a turn; no hooks of the whole are called.

        Args:
            entry: the path. args, kwargs: of the call.

        Raises:
            StateError: collectives of a call are under way, in which a hook calls it.
        """
        if holding():
            raise StateError(WITHIN.format(entry=entry or "the module", name=self._calls.name))
        root: Any = self
        with self._calls.turn():
            if not isinstance(root, FSDPModule):
                return self._call(entry, args, kwargs)
            grad = torch.is_grad_enabled()
            if not grad and not self._shards.axis.fully_shard:  # weights are whole over the axis
                compat.outermost(root)
                return self._call(entry, args, kwargs)
            with data_parallel.recovering(self._shards), self._calls.gathering():
                outputs = compat.gathered(root, partial(self._run_at, entry), args, kwargs)
            if not grad:
                data_parallel.show_gradients(self._shards)
            return outputs

    def _run_at(self, entry: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(entry, args, kwargs)

    def _find(self, call: Arguments) -> tuple[Program, list[int]]:
        """The program for a call of a new signature, and the order in which it takes the tensors. Collective."""
        source = self._source
        data_parallel.refuse_others(self._shards)
        if call.sequences is not None:
            self._calls.compare_sequences(call.sequences)
        values = source.check or any(p.capture.conditions is not None for p in self._programs_made)
        facts = {**state.input_text(call.whole, call.spec, values), **self._changes.facts()}
        agree(source.ranks, "the inputs of this call", facts)
        match = together(source.ranks, "reading the inputs", lambda: self._match(call))
        # What a rank knows is its own: an attribute that was set to an equal object is another value to it.
        ranks, anew = source.ranks, match is None
        if anew if ranks is None else any(from_all(ranks, anew, "a program for the call")):
            captured = self._capture_once(call)
            agree(source.ranks, "the model for this call", {"graph": captured.digest()})
            layouts, outputs = self._carriers.layouts, source.want_of(call.entry).outputs
            sharded = together(source.ranks, "rewriting the graph", lambda: source.make(captured, layouts, outputs))
            self._install(captured, sharded, self._changes.key(), call.entry)
            match = self._match(call)
        if match is None:
            raise StateError("a program was captured for these inputs and does not accept them; please report this.")
        return match

    def _capture_once(self, call: Arguments) -> Capture:
        """The graph for a call, the same on every rank, with what it teaches of states. Collective."""
        source, carriers = self._source, self._carriers

        def make() -> tuple[Capture, Any]:
            captured = self._captured(call)
            return captured, (set(carriers.moving), dict(carriers.sizes))

        def take(captured: Capture, learned: Any) -> tuple[Capture, Any]:
            moving, sizes = learned
            again = moving - carriers.moving
            carriers.moving |= moving
            carriers.sizes.update(sizes)
            if again:
                call.read()
            return captured, learned

        def key() -> tuple[str | None, str]:
            changes = self._changes.key()
            if not all(carried.shape.comparable() for _, carried in call.state_objects):
                return None, "an object that holds state is described by what this process knows it by"
            if source.key is None:
                return None, "the model's attributes cannot be compared"
            return repr((source.key, self._mode(), state.dtypes(self._shards), call.entry, changes)), ""

        return capture_once(source.ranks, source.agreed, key, make, take)[0]

    def _match(self, call: Arguments) -> tuple[Program, list[int]] | None:
        """A program that was captured for such a call in this mode and accepts these sizes."""
        state.refuse_meta(self._shards)
        call.check()
        call_form, _ = form(self._source.bare.get_submodule(call.entry), call.whole, call.spec)
        return self._programs_made.find(call_form, call.whole, self._mode(), call.entry, self._changes.key())

    def _install(self, captured: Capture, sharded: Sharded, changes: Hashable = (), entry: str = "") -> None:
        source, key = self._source, self._programs_made.key()
        places = source.places()
        device = self._shards.place
        judges = source.lowering.judges(source.ranks, source.tp, device)
        graph, fired = source.lowering.program(sharded, places, device, self._plan.memory.peak, judges)
        inputs, reads, count = readings(captured, graph, self._shards)
        if self._plan.batch.size > 1 and source.ranks is not None:
            data_parallel.spread(self._shards, reads, source.lowering.reduces)
        elif source.lowering.reduces is not None:
            for piece, _ in self._shards.pieces():
                accumulate_in(piece, source.lowering.reduces)
        constants = {x.name: captured.constants[x.name] for x in captured.leaves if x.kind is CONSTANT}
        compiler = source.lowering.compiler(graph)
        write_in_place(captured, graph)
        steps = any(leaf.kind.carried for leaf in captured.leaves)  # it goes on with a state, such as a cache
        assembler = Assembler(self._shards.parts, graph, reads, key, constants, compiler, source.ranks)
        assembler.build(inputs, one=steps)
        call_form, _ = form(
            source.bare.get_submodule(entry), [x.node.meta.get("val") for x in captured.inputs], captured.in_spec
        )
        random = any(map(draws, graph.nodes))
        self._carriers.learn_layouts(getattr(sharded, "states", {}))
        program = Program(captured, sharded, graph, key, call_form, count, random, fired, compiler, changes, entry)
        self._programs_made.add(program, self._order)
