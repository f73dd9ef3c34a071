"""A call of the whole model through its stages, and one stage as a module, as torch's `PipelineStage` takes it.

In a call of the whole each rank runs its own stages, receives their inputs and sends their outputs; the last one gives
the results to all. Backward, gradients go the other way. A token orders the sends and receives of a rank in autograd's
graph. `Pipeline` and `Grid` hold the ranks of all stages of a module and their shared weights, and install a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from operator import not_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup

from autotp import compat
from autotp.comm.ranks import Ranks
from autotp.errors import InputError, StateError
from autotp.ir.graph import SEEDS, Capture, Function, NamedTensors
from autotp.ir.layouts import Layout
from autotp.ir.program import Sharded
from autotp.ir.sizes import substitute
from autotp.passes.stages.cut import Piece, Wire
from autotp.runtime import state
from autotp.runtime.module import ShardedModule
from autotp.runtime.program_search import built
from autotp.runtime.programs import Form, Program
from autotp.runtime.storage import ShardState

from .weights import Tied

BASE = "random_base"  # the argument with the number that random numbers of a micro-batch are made from


class Stage(nn.Module):
    """A stage of the pipeline: values of the stage before are passed by position, the model's own inputs by name.

    Attributes:
        module: the sharded module that holds its parameters, with those of the rank's other stages.
        piece: its program before this rank's. index: its place in the pipeline.
        program: of all stages of this rank; `function` and `graph` are this one's.
        draws: whether it takes seeds of random numbers. loss: whether it gives the model's loss.
    """

    module: ShardedModule
    program: Program
    graph: fx.Graph

    def __init__(
        self, module: ShardedModule, piece: Piece, index: int, function: Function, draws: bool, loss: bool
    ) -> None:
        super().__init__()
        self.piece, self.index, self.function, self.draws, self.loss = piece, index, function, draws, loss
        object.__setattr__(self, "module", module)  # no child: a rank's stages share it
        first = module._shards.aliases
        self.names = {first.get(n, n) for n in piece.names}

    def forward(self, *values_in: Tensor, **inputs: Any) -> Any:
        """Return the values for the next stage, or the model's outputs: a tensor, or a tuple of some."""
        # A schedule that a user has made passes what he gave it: it is checked before the program reads it by position.
        names = [n for n in self.piece.inputs if n not in inputs]
        if names or len(values_in) != len(self.piece.wires_in):
            raise InputError(
                f"stage {self.index} takes {len(self.piece.wires_in)} values of the stage before and the inputs "
                f"{', '.join(self.piece.inputs) or 'none'}; it got {len(values_in)}, and lacks {names}. "
                "Pass what pipe.feed(...) gives to the schedule's step."
            )
        self.check_mode()
        seeds = self.program.random(self.module._shards, int(inputs[BASE])) if self.draws else []
        with self.module.plain(self.program):
            results = self.run(map(_contiguous_gradient, values_in), inputs, seeds)
        outputs = []
        for i, value in enumerate(results):
            taker = self.piece.capture.mutations.get(i)
            if isinstance(taker, str):
                state.write(self.module._shards, taker, value)
            else:
                outputs.append(value)
        if self.piece.wires_out:
            return tuple(x.contiguous() for x in outputs)
        if self.loss:
            return outputs[0].reshape(1)  # so that a schedule can join those of its micro-batches
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, values_in: Iterable[Tensor], inputs: NamedTensors, seeds: Sequence[Tensor]) -> list[Any]:
        """Run its program: values for the next stage come after the model's results.

        Args:
            values_in: of the stage before. inputs: of the model. seeds: of random numbers, where it draws any.
        """
        tensors = map(inputs.__getitem__, self.piece.inputs)
        return list(self.function(*values_in, *tensors, *(seeds if self.draws else ())))

    def check_mode(self) -> None:
        """Refuse a mode that the program was not captured in."""
        captured = self.piece.capture
        kind = self.module._shards.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if self.module.training != captured.training or autocast != captured.state[-1]:
            raise StateError(
                f"this schedule was made with training={captured.training} and autocast {captured.state[-1]}, and now "
                f"it is training={self.module.training} and {autocast}. Make one in this mode: pipe.schedule(...); "
                "for autocast, make the stages under it."
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this stage reads, under the original's names."""
        outer, shards = f"{prefix}." if prefix else "", self.module._shards
        for name in shards.storages:
            if name in self.names:
                yield from ((outer + name, p) for p in state.pieces(shards, name))


def _contiguous_gradient(value: Tensor) -> Tensor:
    """Return a value of the stage before, whose gradient is contiguous, so that it can be sent back."""
    if not value.requires_grad:
        return value
    value = value.view_as(value)  # the schedule's own tensor is there for all steps, and would keep a hook of each
    value.register_hook(Tensor.contiguous)
    return value


@dataclass(frozen=True)
class Pipeline:
    """The stages of a sharded module.

    Attributes:
        grid: their ranks. holders: first name of each parameter that several ranks hold -> their places.
        loss: whether the last stage gives the model's loss.
    """

    grid: Grid
    holders: Mapping[str, tuple[int, ...]]
    loss: bool

    def tied(self, shards: ShardState) -> Tied:
        """Return the parameters that several ranks hold."""
        return Tied(shards, self.holders, self.grid.pipeline, self.grid.world.tp // self.grid.size)

    def program(self, module: Any, captured: Capture, sharded: Sharded, key: int, call_form: Form) -> Program:
        """Install the stages of this rank.

        Args:
            module: the sharded module. captured, sharded: the program of one process, and that of the ranks, cut.
            key: of the program. call_form: that it is called in.
        """
        last, stages, parts = len(sharded.pieces) - 1, dict[int, Stage](), []
        for index in (i for i, place in enumerate(self.grid.places) if place == self.grid.rank):
            piece = sharded.pieces[index]
            parts.append(built(module, piece.capture, piece.sharded, (key, index), Form((), ())))
            function = module._programs[key, index]
            stages[index] = Stage(module, piece, index, function, parts[-1].seeds > 0, self.loss and index == last)
        ranks = module._shards.ranks
        module._programs[key] = Relay(captured, sharded, stages, self.grid, ranks, module._calls.tied)
        # Of all stages: ranks whose own draw nothing take part in the choice of the number that others draw from.
        count = max((x.node.meta["val"].shape[0] for x in captured.leaves if x.kind is SEEDS), default=0)
        program = Program(
            captured, sharded, parts[0].graph, key, call_form, count, False,
            parts[0].fired, parts[0].compiler, [read for part in parts for read in part.reads], stages=stages,
        )  # fmt: skip
        for stage, part in zip(stages.values(), parts, strict=True):
            stage.program, stage.graph = program, part.graph
        return program


Sizes = tuple[tuple[Any, int], ...]  # symbols of a program with their sizes


@dataclass(frozen=True)
class Grid:
    """The ranks of a pipeline.

    Attributes:
        world: all of them. pipeline: those of this one's lane, one for each place; `rank` of `size`.
        chunks: stages of each rank. places: the rank of each stage.
    """

    world: Ranks
    pipeline: ProcessGroup
    rank: int
    size: int
    chunks: int
    places: tuple[int, ...]

    @property
    def stages(self) -> int:
        return self.size * self.chunks

    @property
    def last(self) -> int:
        """Place in the pipeline of the rank that has the last stage."""
        return self.places[-1]

    def send(self, values: Sequence[Tensor], place: int) -> None:
        """Send values to the rank at a place."""
        for value in values:
            dist.send(value.contiguous(), group=self.pipeline, group_dst=place)

    def receive(self, values: Sequence[Tensor], place: int) -> None:
        """Receive values from the rank at a place into these."""
        for value in values:
            dist.recv(value, group=self.pipeline, group_src=place)

    def share(self, values: Sequence[Tensor]) -> None:
        """Give values of the last stage's rank to all; others' are written."""
        for value in values:
            if value.numel():
                dist.broadcast(value, group=self.pipeline, group_src=self.last)


@lru_cache(1024)  # in one call there are a few, of many values
def local_shape(shape: tuple[Any, ...], layout: Layout, sizes: Sizes, rank: int, tp: int) -> tuple[int, ...]:
    """Return the local shape of a value of the program on a tp rank.

    Args:
        shape: of the whole, in symbols. layout: of the value. sizes: of the symbols. rank, tp: this rank and how many.
    """

    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(substitute(size, dict(sizes)))

    whole = [*map(number, shape)]
    if layout.mark != "S":
        return tuple(whole)
    spec: Any = layout.to_runtime(number)
    return tuple(spec.take(torch.empty(whole, device="meta"), rank, tp).shape)


@dataclass(frozen=True)
class Relay:
    """The function of a program that is cut into stages: it takes the tensors of a call, and gives its flat results.

    Attributes:
        captured, sharded: the program of one process, and that of the ranks with its pieces.
        stages: of this rank by their index. grid: the ranks; `tp` those of this stage.
        tied: weights that several stages hold.
    """

    captured: Capture
    sharded: Sharded
    stages: Mapping[int, Any]
    grid: Grid
    tp: Ranks
    tied: Tied

    def __call__(self, *inputs: Tensor) -> list[Any]:
        count = len(self.names)  # the seeds come behind
        tensors, seeds = dict(zip(self.names, inputs[:count], strict=True)), inputs[count:]
        sizes = self._sizes(inputs[:count])
        results: dict[int, Any] = {}
        grad, grid = torch.is_grad_enabled(), self.grid
        token = torch.zeros((), device=self.tp.device, requires_grad=grad)
        flow: tuple[Tensor, ...] = ()  # what flows from one stage of this rank to the next
        for index, stage in self.stages.items():
            piece, values_in = stage.piece, flow
            if index and grid.places[index - 1] != grid.rank:
                empty = [self._empty(wire, sizes) for wire in piece.wires_in]
                token, *values_in = _Receive.apply(self, index, token, *empty)  # type: ignore[misc]
            outputs = stage.run(values_in, tensors, seeds)
            results.update(zip(piece.positions, outputs, strict=False))
            flow = tuple(outputs[len(piece.positions) :])
            if flow and grid.places[index + 1] != grid.rank:
                token = _Send.apply(self, index, token, *flow)  # type: ignore[assignment]
        return self._results(results, inputs, token, sizes)

    @cached_property
    def names(self) -> list[str]:
        """Names of the tensors among the program's inputs."""
        return [x.name for x in self.captured.tensor_inputs]

    @cached_property
    def results(self) -> Any:
        """Results of the program of one process: nodes and constants."""
        return self.captured.graph.output_node().args[0]

    @cached_property
    def shared(self) -> list[int]:
        """Positions of the results that the last stage gives to all."""
        return [i for i in self.sharded.pieces[-1].shared if isinstance(self.results[i], fx.Node)]

    @cached_property
    def absent(self) -> dict[int, Wire]:
        """Results of other stages by position, without their writes, as they would be sent."""
        elsewhere = {*range(len(self.results))} - {i for s in self.stages.values() for i in s.piece.positions}
        elsewhere -= self.captured.mutations.keys() - {*self.shared}
        return {i: self._result(i) for i in sorted(elsewhere) if isinstance(self.results[i], fx.Node)}

    def _result(self, position: int) -> Wire:
        layout, whole = self.sharded.result(position)
        return Wire("", whole, layout, False)

    def _sizes(self, tensors: Sequence[Tensor]) -> Sizes:
        """Return the sizes of the program's symbols with these tensors."""
        return tuple(self.captured.sizes_of(tensors).items())

    def examples(self, stage: Stage, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Make examples of a stage's inputs and outputs for the tensors of a call, on the meta device."""
        sizes, piece = self._sizes(tensors), stage.piece
        inputs = tuple(self._empty(wire, sizes, "meta").requires_grad_(wire.graded) for wire in piece.wires_in)
        outputs = tuple(self._empty(wire, sizes, "meta").requires_grad_(wire.graded) for wire in piece.wires_out)
        if outputs:
            return inputs, outputs
        # Of the last stage's outputs their number counts; torch 2.11 compares shapes and types too, on its rank alone.
        values = {i: self._empty(self._result(i), sizes, "meta") for i in self.shared}
        results = tuple(values.get(i, torch.empty(1, device="meta")) for i in piece.shared)
        return inputs, (results[0].reshape(1),) if stage.loss else results

    def _results(self, local: dict[int, Any], inputs: Sequence[Tensor], token: Tensor, sizes: Sizes) -> list[Any]:
        """Return all results: of other stages' states the shapes alone, and None for their writes to buffers."""
        shared = self.shared
        out = []
        for i, node in enumerate(self.results):
            taker = self.captured.mutations.get(i)
            if i in local or not isinstance(node, fx.Node):
                out.append(local.get(i, node))
            elif isinstance(taker, int) and i not in shared:
                out.append(inputs[taker])
            else:
                device = self.tp.device if i in shared else "meta"  # which takes no memory
                out.append(None if isinstance(taker, str) else self._empty(self.absent[i], sizes, device))
        outputs = _Share.apply(self, token, *map(out.__getitem__, shared)) if shared else ()
        for i, value in zip(shared, outputs, strict=True):
            out[i] = value
        return out

    def _empty(self, wire: Wire, sizes: Sizes, device: Any = None) -> Tensor:
        """Return an empty tensor for a value of another stage."""
        shape = local_shape(wire.shape, wire.layout, sizes, self.tp.rank, self.tp.tp)
        return torch.empty(shape, dtype=wire.value.dtype, device=device or self.tp.device)


class _Receive(torch.autograd.Function):
    """A receive from the stage before; backward, a send of the gradients to it."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, index: int, token: Tensor, *empty: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        wires = relay.stages[index].piece.wires_in
        ctx.relay, ctx.place = relay, relay.grid.places[index - 1]
        ctx.graded = [wire.graded for wire in wires]
        relay.grid.receive(empty, ctx.place)
        ctx.mark_dirty(*empty)
        ctx.mark_non_differentiable(*compress(empty, map(not_, ctx.graded)))
        return token.clone(), *empty

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> Any:  # type: ignore[override]
        ctx.relay.grid.send([*compress(grads, ctx.graded)], ctx.place)
        return None, None, grad, *[None] * len(grads)


class _Send(torch.autograd.Function):
    """A send to the stage after; backward, a receive of the gradients."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, index: int, token: Tensor, *values: Tensor) -> Tensor:  # type: ignore[override]
        wires = relay.stages[index].piece.wires_out
        ctx.relay, ctx.place = relay, relay.grid.places[index + 1]
        ctx.graded = [wire.graded for wire in wires]
        ctx.like = [torch.empty_like(x, device="meta", memory_format=torch.contiguous_format) for x in values]
        relay.grid.send(values, ctx.place)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grads: list[Any] = [None] * len(ctx.like)
        for i in compress(range(len(grads)), ctx.graded):
            grads[i] = torch.empty_like(ctx.like[i], device=ctx.relay.tp.device)
        ctx.relay.grid.receive([*compress(grads, ctx.graded)], ctx.place)
        return None, None, grad, *grads


class _Share(torch.autograd.Function):
    """A broadcast of the last stage's results; backward begins there, for every rank has the same gradients."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.relay, ctx.last = relay, relay.grid.rank == relay.grid.last
        out = values
        if ctx.last:
            out = tuple(x.contiguous().clone() for x in values)
        relay.grid.share(out)
        ctx.mark_non_differentiable(*(x for x in out if not x.is_floating_point()))
        if not ctx.last:
            ctx.mark_dirty(*out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        ctx.relay.tied.begin()
        compat.after_backward(ctx.relay.tied.end)
        local = grads if ctx.last else [None] * len(grads)
        return None, torch.zeros((), device=ctx.relay.tp.device), *local
