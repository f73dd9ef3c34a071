"""`ShardedModule`: one rank's part of a model, with the original's names, tree, state dict and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.passes.base import run_passes
from autotp.passes.canonicalise import CANONICAL

from . import compat, state
from .capture import capture, skeleton
from .errors import StateError
from .graph import Capture
from .inputs import Inputs, bind, without_cache
from .plan import Plan
from .ranks import Ranks, agree, no_ranks_error, together
from .report import render_graph
from .rewrite import Sharded, specialise
from .storage import Storage
from .tree import Assembler, Part, Read


@dataclass
class Program:
    """One captured graph made runnable on this rank: for one mode, dtype and autocast state."""

    capture: Capture
    sharded: Sharded
    graph: fx.Graph
    key: int


Maker = Callable[[Capture], Sharded]


@dataclass
class Source:
    """What a sharded module keeps of the original: its skeleton, and how a further capture becomes a program."""

    bare: nn.Module
    make: Maker
    ranks: Ranks | None
    tp: int
    aliases: dict[str, str]
    outputs: str = "full"
    check: bool | None = None
    name: str = "model"
    ready: list[tuple[Capture, Sharded]] = field(default_factory=list)


class ShardedModule(Part):
    """A model sharded over the tp ranks; made by `autotp.compile` or `autotp.parallelize`.

    Call it like the original: every rank passes the same inputs and gets the same full outputs, in the original's own
    output class. `parameters()` are DTensors on one mesh; `full_state_dict()` and `full_grad_dict()` speak the
    original's names and shapes.

    Attributes:
        plan: the `Plan` it runs.
        config: the original's `config`, where it has one.
    """

    def __init__(self, model: nn.Module, plan: Plan, source: Source) -> None:
        super().__init__(type(model).__name__)
        self.plan = plan
        self._source = source
        self._ranks = source.ranks
        self._storages: dict[str, Storage] = {}
        self._runnable: dict[Any, Program] = {}
        self._all: list[Program] = []
        self.config = getattr(source.bare, "config", None)
        self.training = model.training
        state.populate(self, model, plan.placements, source)

    # ---- running ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the model; same inputs on every rank, full outputs on every rank."""
        if self._ranks is None and self._source.tp > 1:
            raise no_ranks_error(self._source.tp)
        inputs, _ = without_cache(self._source.bare, Inputs(*args, **kwargs))
        program, flat = self._program(inputs)
        outputs = self._programs[program.key](*flat)
        leaves, _ = compat.tree_flatten(outputs)
        kept = []
        for i, value in enumerate(leaves):
            if i in program.capture.mutations:
                self._write(program.capture.mutations[i], value)
            else:
                kept.append(value)
        return compat.tree_unflatten(kept, program.capture.out_spec)

    def _program(self, inputs: Inputs) -> tuple[Program, list[Any]]:
        flat, spec = compat.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
        key = (spec, self._state_key(), tuple(_describe(v) for v in flat))
        program = self._runnable.get(key)
        if program is None:
            program = self._find(inputs, flat, spec)
            self._runnable[key] = program
        return program, flat

    def _state_key(self) -> tuple[Any, ...]:
        dtype = next((p.dtype for p in self.parameters()), None)
        device = self._source.ranks.device.type if self._source.ranks is not None else "cpu"
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return self.training, dtype, autocast

    def _find(self, inputs: Inputs, flat: list[Any], spec: Any) -> Program:
        """A program that accepts these inputs, or a new one; the ranks compare what they were given first."""
        text = {f"input {i}": _text(v) for i, v in enumerate(flat)}
        if self._source.check:
            text |= {f"values of input {i}": state.fingerprint(v) for i, v in enumerate(flat) if isinstance(v, Tensor)}
        agree(self._ranks, "the inputs of this call", text)
        state.refuse_meta(self)
        for program in self._all:
            fits = program.capture.in_spec == spec and program.capture.state == self._state_key()
            if fits and program.capture.accepts(flat) is None:
                return program
        return self._install(*together(self._ranks, "capturing the model", lambda: self._make(inputs)))

    def _make(self, inputs: Inputs) -> tuple[Capture, Sharded]:
        bind(self._source.bare.forward, inputs)
        for captured, sharded in self._source.ready:
            flat, spec = compat.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
            if captured.in_spec == spec and captured.state == self._state_key() and captured.accepts(flat) is None:
                return captured, sharded
        bare = skeleton(self._source.bare, self._device(), state.dtypes(self)).train(self.training)
        captured = prepare(bare, inputs, self._device(), self._state_key())
        return captured, self._source.make(captured)

    def _device(self) -> torch.device:
        return self._ranks.device if self._ranks is not None else torch.device("cpu")

    def _install(self, captured: Capture, sharded: Sharded) -> Program:
        key = len(self._all)
        rank, group = (self._ranks.rank, self._ranks.group_name) if self._ranks is not None else (0, "")
        graph = specialise(sharded, rank, self._source.tp, group)
        placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
        reads, inputs = [], []
        for leaf in captured.leaves:
            node = placeholders[leaf.node.name]
            if leaf.kind == "input":
                inputs.append(node)
            elif node.users:
                name = self._source.aliases.get(leaf.name, leaf.name)
                reads.append(Read(node, name, self._storages.get(name) if leaf.kind == "parameter" else None))
        constants = {x.name: captured.constants[x.name] for x in captured.leaves if x.kind == "constant"}
        Assembler(self, graph, reads, key, constants).build(inputs)
        program = Program(captured, sharded, graph, key)
        self._all.append(program)
        return program

    def _write(self, name: str, value: Tensor) -> None:
        owner, _, leaf = self._source.aliases.get(name, name).rpartition(".")
        with torch.no_grad():
            getattr(self.get_submodule(owner), leaf).copy_(value)

    # ---- state -----------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer, whole, under the original's names (collective)."""
        return state.full_state(self, lambda p: p.detach())

    def full_grad_dict(self) -> dict[str, Tensor]:
        """Every parameter's gradient, whole, under the original's names; parameters without one are absent."""
        return state.full_gradients(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's names; DTensors, but for fused weights held in pieces: those come whole (collective)."""
        return state.sharded_state(self, kwargs.get("prefix", ""))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the original's full state dict (or DTensors); each rank keeps its part.

        Raises:
            StateError: tensors are missing, unknown, or of another shape; all are listed and nothing was loaded.
        """
        return state.load(self, state_dict, strict)

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Original parameter name -> how it is held."""
        yield from self._storages.items()

    # ---- looking at it ---------------------------------------------------------------------------------------------

    @property
    def graph(self) -> str:
        """The program of this rank as readable text; every collective is named by its kind (f, f*, g, g*)."""
        if not self._all and self._source.ready:
            self._install(*self._source.ready[0])
        if not self._all:
            raise StateError("there is no graph yet: the module is captured at its first call.")
        return render_graph(self._all[-1].graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for part in self.modules():
            if isinstance(part, Part):
                memo[id(part._programs)] = {}
        shared = ("plan", "_source", "_ranks", "_storages", "config")
        for k, v in self.__dict__.items():
            new.__dict__[k] = (
                v if k in shared else copy.deepcopy(v, memo) if k not in ("_all", "_runnable") else type(v)()
            )
        for program in self._all:
            new._install(program.capture, program.sharded)
        return new

    def __getstate__(self) -> Any:
        raise StateError("a sharded module is bound to its process group and cannot be pickled; save its state dict.")


class LazyModule(nn.Module):
    """A module that is captured at its first call; until then it has no parameters to give."""

    def __init__(self, build: Callable[[Inputs], ShardedModule]) -> None:
        super().__init__()
        self._build = build

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Capture and shard for these inputs, then be that sharded module."""
        built = self._build(Inputs(*args, **kwargs))
        self.__dict__.clear()
        self.__class__ = built.__class__  # type: ignore[assignment]
        self.__dict__.update(built.__dict__)
        return self(*args, **kwargs)

    def _early(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            "this module is sharded at its first call, because autotp.compile was given no example_inputs; before that it "
            "has no parameters or state (an optimizer built on them would be stale). Call it once, or pass example_inputs."
        )

    parameters = named_parameters = state_dict = load_state_dict = full_state_dict = full_grad_dict = _early  # type: ignore[assignment]
    plan = graph = property(_early)


def prepare(bare: nn.Module, inputs: Inputs, device: Any, key: tuple[Any, ...]) -> Capture:
    """Capture and canonicalise a skeleton."""
    program = capture(bare, inputs, device)
    program.state = key
    run_passes(program, CANONICAL)
    return program


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, int | float | str | bool | type(None)) else id(value)


def _text(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
