"""A call that `compare=` runs again, and the parts that ranks beside tp have of it, joined for the user's module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autotp import compat
from autotp.comm.ranks import Ranks, agree, broadcast
from autotp.ir.graph import Capture, shape_of
from autotp.ir.layouts import Shard
from autotp.ir.op import Shape
from autotp.passes.shard.batch_axis import BatchRules, has
from autotp.passes.shard.sequence_axis import SequenceRules
from autotp.proof.differences import own_leaf, relative
from autotp.runtime import state
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.module import ShardedModule

PartValues = list[tuple[str, list[Tensor]]]  # what modules gave, by their paths, in order

# Shape -> values, with the modules that made them.
Candidates = Mapping[tuple[int, ...], list[tuple[set[str], Tensor]]]
POLICIES: tuple[type[BatchRules], ...] = (BatchRules, SequenceRules)


@dataclass
class Call:
    """A call to be run again.

    Attributes:
        flat, spec: its inputs, which it may write to, as this rank has them. states: which of them are states, by name.
        buffers: by first name, before it. device: of the module. random: the state of torch's generators.
        part_values: the outputs of each part, in order.
    """

    flat: list[Any]
    spec: compat.TreeSpec
    states: Mapping[int, str]
    buffers: dict[str, Tensor]
    device: torch.device
    random: list[Tensor]
    part_values: PartValues = field(default_factory=list)

    @classmethod
    def of(cls, module: ShardedModule, arguments: Arguments) -> Call:
        """Record the state that a call starts from, the same on every tp rank.

        Args:
            module: that is called. arguments: of the call.
        """
        shards = module._shards
        facts = state.input_text(arguments.whole, arguments.spec, True)
        agree(shards.ranks, "the inputs of this call, with which compare= runs the original", facts)
        random = broadcast(shards.ranks, compat.random_states(shards.device))  # as the call's own are rank 0's
        buffers = {name: getattr(*holder[0]) for name, holder in shards.holders.items()}
        buffers = dict(zip(buffers, again(buffers.values()), strict=True))
        return cls(again(arguments.flat), arguments.spec, arguments.states, buffers, shards.device, random)

    def rewind(self) -> None:
        """Restore the random state, so that the call's random numbers are drawn again."""
        compat.draw_from(self.random, self.device)

    def undisturbed(self) -> Any:
        """Return a context after which random numbers go on as they would have."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


def again(values: Iterable[Any]) -> list[Any]:
    """Copy values as leaves of another autograd graph."""
    return [own_leaf(x, getattr(x, "requires_grad", False)) for x in values]


@contextmanager
def listening(module: ShardedModule) -> Iterator[PartValues]:
    """Record the outputs of each part in a call, in order and after the user's own hooks; none where parts are
    compiled, which a hook would prevent."""
    values: PartValues = []
    parts = {id(part): (path, part) for path, part in reversed(module._shards.parts.items()) if path}
    if module._source.lowering.name != "eager":
        parts = {}
    with ExitStack() as stack:
        for path, part in parts.values():
            stack.enter_context(noting(part, path, values))
        yield values


def noting(module: nn.Module, path: str, values: PartValues) -> RemovableHandle:
    """Register a hook that records the tensors that a module gives, by its path."""
    return module.register_forward_hook(lambda module, args, outputs: values.append((path, tensors_of(outputs))))


def tensors_of(outputs: Any) -> list[Tensor]:
    """List the tensors in a module's outputs, detached."""
    return [t.detach() for t in compat.tree_leaves(outputs) if isinstance(t, Tensor)]


def joined(part: Tensor, shape: Shape, program: Capture, ranks: Ranks) -> tuple[Tensor, int]:
    """All-gather a whole value over the axes beside tp that its shape is sharded over; a collective call on these.

    Args:
        part: this rank's. shape: of it in the program. program: of one rank. ranks: of tp.

    Returns: the value, and the number of its parts.
    """
    shapes, count = [shape_of(leaf.node) for leaf in program.inputs], 1
    for d, policy in reversed([*enumerate(POLICIES)]):
        axis = ranks.along(policy.axis)
        symbol: Any = next((s[d] for s in shapes if len(s) > d), None)
        dim = next((i for i, n in enumerate(shape) if has([n], symbol)), None)
        if axis.tp == 1 or dim is None:
            continue
        pieces = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.tp)]
        dist.all_gather(pieces, part.detach().contiguous(), group=axis.group)
        partition = policy(sympy.Integer(part.shape[dim] * axis.tp)).partition(axis.tp)  # type: ignore[arg-type]
        part, count = Shard(dim, partition).to_runtime(int).recombine(pieces), count * axis.tp
    return part, count


def by_shape(values: Iterable[tuple[set[str], Tensor]]) -> Candidates:
    """Group values, each with the modules that made it, by their shapes."""
    groups: dict[tuple[int, ...], list[tuple[set[str], Tensor]]] = defaultdict(list)
    for modules, value in values:
        groups[tuple(value.shape)].append((modules, value.detach()))
    return groups


def errors_of(value: Tensor, candidates: Candidates, module: str | None) -> Iterator[float]:
    """Yield the relative error to each candidate of a value's shape: to those made in a module, if any were."""
    alike = candidates.get(tuple(value.shape)) or [(set(), value)]
    for _, x in [(modules, x) for modules, x in alike if module in modules] or alike:
        yield relative(x, value)
