"""The programs that a sharded module runs, and what a further capture is made into one by."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.capture.model_key import Untold, model_key
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest, Mode, serves
from autotp.comm.ranks import Ranks
from autotp.errors import StateError
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.leaves import SEEDS
from autotp.ir.precision import LATEST
from autotp.ir.program import MeshPlace, Sharded
from autotp.passes.base import Pass
from autotp.passes.decompose.counter_random import seeds
from autotp.passes.optimise import Fired
from autotp.runtime.generation.arguments import Returns
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.lower.regional import Compiler

from .call_key import Form
from .deferred import Columns
from .shard_state import ShardState
from .storage import wrap
from .weight_reads import Read

MOST_KNOWN = 4096  # signatures of calls
MOST_PROGRAMS = 64  # of one module: attributes may be set to ever other values


@dataclass(eq=False)
class Program:
    """One captured graph made runnable on this rank: for one mode, dtype and autocast state.

    Attributes:
        form: of the call that it was captured with.
        seeds: how many operators draw by counters.
        draws: whether others draw as torch does.
        fired: what became of each optimisation; `compiler`: what compiles it.
        changes: what was set on the module's parts when it was captured (`autotp.runtime.changes`).
        entry: path of the module that it is the forward of.
        columns: which part this rank has of each output that is gathered after the program, by position.
    """

    capture: Capture
    sharded: Sharded
    graph: fx.Graph
    key: int
    form: Form
    seeds: int = 0
    draws: bool = False
    fired: Fired = ()
    compiler: Compiler | None = None
    changes: Hashable = ()
    entry: str = ""
    columns: Mapping[int, Columns] = field(default_factory=dict)
    last_run: int = 0  # when it last ran, counted in runs of all
    runs: bool = True  # until it is let go

    @cached_property
    def returns(self) -> Returns:
        """What its results are."""
        return Returns(self.capture.out_spec)

    @cached_property
    def delayed(self) -> bool:
        """Whether it has scales of earlier calls, and leaves its own largest values to later ones."""
        names = (x.rpartition(".")[2] for x in self.capture.mutations.values() if isinstance(x, str))
        return LATEST in names

    @cached_property
    def flat(self) -> bool:
        """Whether it gives its results without further containers in them."""
        result: Any = self.graph.output_node().args[0]
        return not any(isinstance(x, list | tuple | dict) for x in result)

    def order(self, call_form: Form, flat: Sequence[Any], mode: Mode) -> list[int] | None:
        """The order in which it takes the leaves of a call; None where it was not captured for it or its sizes.

        Args:
            call_form: of the call. flat: its leaves, whole. mode: that the module is called in.
        """
        if self.form.key != call_form.key or not serves(self.capture.state, mode):
            return None
        at = dict(zip(self.form.order, call_form.order, strict=True))
        values = []
        for i, leaf in enumerate(self.capture.inputs):
            values.append(flat[at[i]] if i in at else leaf.node.meta.get("val"))
        if self.capture.accepts(values) is not None:
            return None
        return [at[i] for i in sorted(at)]

    def random(self, shards: ShardState, base: int) -> list[Tensor]:
        """What a forward's random numbers come from: one number of torch's default generator, the same on tp ranks."""
        if not self.seeds:
            return []
        batch = shards.ranks.batch if shards.ranks is not None else None
        return [seeds(self.seeds, batch.rank if batch is not None else 0, base).to(shards.device)]

    def left_sharded(self, position: int, value: Any, inputs: list[Tensor], ranks: Ranks | None) -> Any:
        """An output of this rank as a DTensor."""
        if ranks is None or not isinstance(value, Tensor):
            return value
        layout, whole = self.sharded.result(position)
        return wrap(value, layout, self.capture.shape(whole, inputs), ranks.mesh)


AGAIN = (
    "this module is called in a backward, as torch.utils.checkpoint around it does to compute it again. With delayed "
    "scaling it would be computed by other scales than in its forward, which has left its largest values to the next. "
    "Put checkpoint around its layers, as docs/training.md shows, or take the recipe 'tensorwise'."
)
TABLES = ("_programs", "_turns", "_boundaries")  # of a part, by program


class Programs(list[Program]):
    """A module's programs, as they were made: the `MOST_PROGRAMS` that ran last.

    One that was let go is captured again when a call wants it, on all ranks at the same call: they make the same calls.
    """

    total = runs = 0

    def key(self) -> int:
        """A name for another program."""
        self.total += 1
        return self.total - 1

    def run(self, program: Program) -> None:
        """Note that this one runs now.

        Raises:
            StateError: it is to run again in a backward, and its scales have moved on since the forward.
        """
        if program.delayed and compat.graph_task() >= 0:
            raise StateError(AGAIN)
        self.runs += 1
        program.last_run = self.runs

    def add(self, program: Program, parts: Iterable[nn.Module], by_call: ProgramsByCall) -> None:
        """Add one that the parts have; where that is one too many they lose the one that has not run for longest.

        Args:
            program: the new one. parts: modules that hold what programs call. by_call: calls by what runs them.
        """
        self.append(program)
        self.run(program)
        while len(self) > MOST_PROGRAMS:
            oldest = min(self, key=lambda each: each.last_run)
            oldest.runs = False
            self.remove(oldest)
            for part, table in itertools.product(parts, TABLES):
                entries = vars(part).get(table, {})
                for name in list(entries):
                    if oldest.key == (name[0] if isinstance(name, tuple) else name):
                        del entries[name]
            for call in [call for call, (program, _) in by_call.items() if program is oldest]:
                del by_call[call]


class ProgramsByCall(OrderedDict[Any, tuple[Program, list[int]]]):
    """A call's signature -> what runs it: the latest `MOST_KNOWN`, for lengths may go on changing for ever.

    What is forgotten is found among the programs again, on all ranks at the same call: they make the same calls.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        """What runs such a call; it counts as used now."""
        match = super().get(key)
        if match is not None:
            self.move_to_end(key)
        return default if match is None else match

    def __setitem__(self, key: Any, value: tuple[Program, list[int]]) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST_KNOWN:
            self.popitem(last=False)


@dataclass
class Source:
    """What a sharded module keeps of the original: its skeleton, and how a further capture becomes a program.

    Attributes:
        bare: the original with fake tensors; it holds no weights.
        make: the program of a capture, under the module's plan, with states where programs before have them, and with
            such outputs as are wanted.
        capture: the capture of a skeleton for inputs on a device, in a mode, by a request.
        agreed: passes of a capture that every rank has made for itself.
        ranks: None in one plain process.
        aliases: every name of a parameter or buffer -> the first name of the same tensor.
        want: what captures are to be.
        lowering: how programs run.
        check: compare input values between the ranks at every call; `sample`: a few of them.
        ready: captures that exist already.
        whole: of a stage's module the skeleton of the model, of which `bare` is a part.
    """

    bare: nn.Module
    make: Callable[[Capture, Mapping[str, Layout], str], Sharded]
    capture: Callable[[nn.Module, Inputs, torch.device, Mode, CaptureRequest], Capture]
    agreed: Sequence[Pass[Capture]]
    ranks: Ranks | None
    tp: int
    aliases: dict[str, str]
    want: CaptureRequest = DEFAULT_CAPTURE
    lowering: Lowering = field(default_factory=Lowering)
    check: bool = False
    sample: bool = True
    ready: list[tuple[Capture, Sharded]] = field(default_factory=list)
    whole: nn.Module | None = None

    @cached_property
    def key(self) -> str | None:
        """What captures depend on of the model, as `model_key`; None where that cannot be told."""
        try:
            return model_key(self.bare)
        except Untold:
            return None

    def want_of(self, entry: str) -> CaptureRequest:
        """What captures of the module at this path are to be: the user asked for outputs and states of the root's."""
        return replace(self.want, outputs="full", carried=()) if entry else self.want

    def places(self) -> dict[str, MeshPlace]:
        """This rank's place on each mesh axis; rank 0's in one plain process, which does not run."""
        if self.ranks is None:
            return {"tp": MeshPlace(0, self.tp, ""), "dp": MeshPlace(0, 1, ""), "cp": MeshPlace(0, 1, "")}
        beside = self.ranks.batch
        axes = {"tp": self.ranks, beside.axes if beside is not None else "dp": beside}
        return {name: MeshPlace(x.rank, x.tp, x.group_name) for name, x in axes.items() if x is not None}


def readings(captured: Capture, graph: fx.Graph, shards: ShardState) -> tuple[list[fx.Node], list[Read], int]:
    """What a rank's program takes: its inputs, what it reads off the tree, and how many operators draw by counters.

    Args:
        captured: the program of all ranks. graph: of this rank's. shards: where what is read lies.
    """
    inputs: list[fx.Node] = []
    reads, count = [], 0
    for leaf, node in zip(captured.leaves, [n for n in graph.nodes if n.op == "placeholder"], strict=True):
        if leaf.kind.passed:
            inputs += [node] if isinstance(leaf.node.meta.get("val"), Tensor) else []
        elif leaf.kind is SEEDS:
            inputs, count = [*inputs, node], leaf.node.meta["val"].shape[0]
        elif node.users:
            name = shards.aliases.get(leaf.name, leaf.name)
            reads.append(Read(node, name, shards.storages.get(name) if leaf.kind.trained else None))
    return inputs, reads, count


def train_as(bare: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Train the parameters of a skeleton that its parts train; whether those were others before."""
    differed = False
    for module, part in zip(bare.modules(), parts, strict=True):
        for name, p in module._parameters.items():
            parameter = part._parameters.get(name, part._parameters.get(f"{name}_part0"))
            if p is not None and parameter is not None and p.requires_grad != parameter.requires_grad:
                p.requires_grad_(parameter.requires_grad)
                differed = True
    return differed
