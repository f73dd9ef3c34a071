"""A call run again, operator by operator: on what this rank holds, and on the whole weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotp import compat
from autotp.ir.leaves import CONSTANT, SEEDS
from autotp.passes.decompose.counter_random import base_seed
from autotp.proof.simulate import reference
from autotp.runtime import state
from autotp.runtime.programs import Program
from autotp.runtime.shard_state import ShardState

from .runs import Call, Run, again


class Replay:
    """A call of a sharded module, to be run again.

    Args:
        shards: what the module holds. program: that the call ran.
        order: where the program's tensors lie among the leaves of the call. call: with its inputs and buffers.
    """

    def __init__(self, shards: ShardState, program: Program, order: Sequence[int], call: Call) -> None:
        self.shards, self.program, self.order, self.call = shards, program, order, call
        self.capture, self.sharded = program.capture, program.sharded
        self.here, self.whole = Run(), Run()

    def read_weights(self) -> None:
        """The weights of now: this rank's, and all of them, rank 0's where each rank has them whole."""
        for name, storage in self.shards.storages.items():
            parameters = state.pieces(self.shards, name)
            needs_grad = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            local = storage.local([compat.part_of(p).detach() for p in parameters])
            whole = storage.full([p.detach() for p in parameters])
            whole = whole if storage.split else self._first_ranks(whole)
            self.here.leaves[name] = local.detach().requires_grad_(needs_grad)
            self.whole.leaves[name] = whole.detach().requires_grad_(needs_grad)
        self.buffers = {name: self._first_ranks(b) for name, b in self.call.buffers.items()}

    def _first_ranks(self, value: Tensor) -> Tensor:
        if self.shards.ranks is None:
            return value
        value = value.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(value, group=self.shards.ranks.group, group_src=0)
        return value

    def run(self, graph: fx.Graph, run: Run, observe: Callable[[fx.Node, Any], None]) -> list[Any]:
        """Run a graph as the call ran; gives its flat outputs.

        Args:
            graph: the ranks' program, or the captured one. run: whose weights it takes.
            observe: is given every node and its value.
        """
        self.call.rewind()
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        values = self._placeholder_values(run)
        value_of = dict(zip(placeholders, values, strict=True))
        self.leaf_values = {leaf.node: value for leaf, value in zip(self.capture.leaves, values, strict=True)}
        # The graph holds its casts: under autocast they would be made again.
        cast = self.capture.state[-1] is not None
        quiet = torch.autocast(self.call.device.type, enabled=False) if cast else nullcontext()
        with quiet:
            return compat.tree_leaves(reference(graph, value_of, observe))

    def _placeholder_values(self, run: Run) -> list[Any]:
        """What each placeholder holds, in the order of the leaves, which the ranks' program has too."""
        tensors = iter(again([self.call.flat[i] for i in self.order]))
        seeds = self.program.random(self.shards, base_seed() if self.program.seeds else 0)
        buffers = self.call.buffers if run is self.here else self.buffers
        values: list[Any] = []
        for leaf in self.capture.leaves:
            # A tied parameter is held once, under its first name.
            name, val = self.shards.aliases.get(leaf.name, leaf.name), leaf.node.meta.get("val")
            if leaf.kind.passed:
                values.append(next(tensors) if isinstance(val, Tensor) else val)
            elif leaf.kind is SEEDS:
                values.append(seeds[0])
            elif leaf.kind is CONSTANT:
                values.append(self.capture.constants[leaf.name])
            else:
                values.append(run.leaves[name] if leaf.kind.trained else buffers[name])
        return values
