"""`ShardedModule`: one rank's part of a model, with the original's names, tree, state dict and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.comm.rank_order import in_one_order
from autotp.comm.ranks import Ranks, agree, no_ranks_error, together
from autotp.driver.options import DEFAULT_CAPTURE, CaptureRequest
from autotp.driver.pipeline import Mode, mode_of, prepare
from autotp.errors import StateError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture
from autotp.outputs import wrap
from autotp.passes.decompose.counter_random import SEEDS, seeds
from autotp.passes.optimise import Fired
from autotp.passes.shard.rewrite import Place, Sharded, specialise
from autotp.plans.plan import Plan
from autotp.plans.show.report import render_graph
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.lower.regional import Compiler

from . import checkpoint, data_parallel, state
from .call_key import Form, form, signature
from .storage import Storage
from .tree import Assembler, Part, Read


@dataclass
class Program:
    """One captured graph made runnable on this rank: for one mode, dtype and autocast state.

    Attributes:
        form: of the call that it was captured with.
        seeds: how many operators draw by counters.
        fired: what became of each optimisation; `compiler`: what compiles it.
    """

    capture: Capture
    sharded: Sharded
    graph: fx.Graph
    key: int
    form: Form
    seeds: int = 0
    fired: Fired = ()
    compiler: Compiler | None = None


@dataclass
class Source:
    """What a sharded module keeps of the original: its skeleton, and how a further capture becomes a program.

    Attributes:
        bare: the original with fake tensors; it holds no weights.
        make: the program of a capture, under the module's plan.
        ranks: None in one plain process.
        aliases: every name of a parameter or buffer -> the first name of the same tensor.
        want: what captures are to be.
        lowering: how programs run.
        check: compare input values between the ranks at every call.
        ready: captures that exist already.
    """

    bare: nn.Module
    make: Callable[[Capture], Sharded]
    ranks: Ranks | None
    tp: int
    aliases: dict[str, str]
    want: CaptureRequest = DEFAULT_CAPTURE
    lowering: Lowering = field(default_factory=Lowering)
    check: bool = False
    ready: list[tuple[Capture, Sharded]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.ranks.device if self.ranks is not None else torch.device("cpu")


class ShardedModule(Part):
    """A model sharded over the tp ranks; made by `autotp.compile` or `autotp.parallelize`.

    Call it like the original: every rank passes the same inputs and gets the same full outputs, in the original's own
    output class. `parameters()` are DTensors on one mesh; `full_state_dict()` and `full_grad_dict()` speak the
    original's names and shapes. The original's modules can be hooked, checkpointed and wrapped one by one.

    Attributes:
        config: the original's `config`, where it has one.
    """

    def __init__(self, model: nn.Module, plan: Plan, source: Source) -> None:
        super().__init__(model)
        self._plan = plan
        self.config = getattr(source.bare, "config", None)
        self._source = source
        self._parts: dict[str, nn.Module] = {}  # by the original's path; every module of the original has one
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}  # buffer -> all modules that hold it, and as what
        self._storages: dict[str, Storage] = {}
        self._programs_made: list[Program] = []
        self._known: dict[Any, tuple[Program, list[int]]] = {}  # a call's signature -> what runs it
        self._units: dict[str, str] = {}  # with dp: parameter -> the module in whose group it is
        self._summing = True  # over dp, in this backward
        state.populate(self, model, plan.placements, source)
        self._order = list(dict.fromkeys(self._parts.values()))  # as the original's `modules()`
        for captured, sharded in source.ready:
            self._install(captured, sharded)
        source.ready.clear()

    # ---- running ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the model; same inputs on every tp rank, full outputs on every tp rank.

        With dp each dp rank passes its slice of the batch, and gets the outputs of its slice.
        """
        if self._source.ranks is None and self._source.tp * self._plan.batch.size > 1:
            raise no_ranks_error(self._source.tp, self._plan.batch.size)
        flat, spec = compat.tree_flatten((args, kwargs))
        key = (self._mode(), *signature(flat, spec))
        known = self._known.get(key)
        if known is None or self._source.check:
            program, order = self._find(flat, spec)
            outputs = self._first(program, [flat[i] for i in order])
            if program.capture.conditions is None:  # else every call is asked whether it meets them
                self._known[key] = program, order
        else:
            program, order = known
            outputs = self._run(program, [flat[i] for i in order])
        return self._finish(program, outputs, [flat[i] for i in order])

    def _run(self, program: Program, inputs: list[Tensor]) -> Any:
        # A capture under autocast holds its casts already.
        autocast = program.capture.state[-1] is not None
        with torch.autocast(self._source.device.type, enabled=False) if autocast else nullcontext():
            return self._programs[program.key](*inputs, *self._seeds(program))

    def _seeds(self, program: Program) -> list[Tensor]:
        """What a forward's random numbers come from: one number of torch's default generator, the same on tp ranks."""
        if not program.seeds:
            return []
        batch = self._source.ranks.batch if self._source.ranks is not None else None
        return [seeds(program.seeds, batch.rank if batch is not None else 0).to(self._source.device)]

    def _first(self, program: Program, inputs: list[Tensor]) -> Any:
        """Run it, and where it draws random numbers make sure that all ranks draw the same."""
        if self._source.tp == 1:
            return self._run(program, inputs)
        before = state.random_state(self._source.device)
        outputs = self._run(program, inputs)
        if state.random_state(self._source.device) != before:
            agree(self._source.ranks, "the state of the random numbers", {"random numbers": before})
        return outputs

    def _mode(self) -> Mode:
        return mode_of(self._order, self._source.device)

    def _find(self, flat: list[Any], spec: Any) -> tuple[Program, list[int]]:
        """The program for a call of a new signature, and the order in which it takes the tensors. Collective."""
        source = self._source
        data_parallel.refuse_others(self)
        values = source.check or any(p.capture.conditions is not None for p in self._programs_made)
        agree(source.ranks, "the inputs of this call", state.input_text(flat, spec, values))
        found = together(source.ranks, "reading the inputs", lambda: self._match(flat, spec))
        if found is None:
            made = together(source.ranks, "capturing the model", lambda: self._capture(flat, spec))
            captured = in_one_order(source.ranks, made)
            agree(source.ranks, "the model for this call", {"graph": captured.digest()})
            self._install(captured, together(source.ranks, "rewriting the graph", lambda: source.make(captured)))
            found = self._match(flat, spec)
            if found is None:
                raise StateError(
                    "a program was captured for these inputs and does not accept them; please report this."
                )
        return found

    def _match(self, flat: list[Any], spec: Any) -> tuple[Program, list[int]] | None:
        """A program that was captured for such a call in this mode and accepts these sizes."""
        state.refuse_meta(self)
        args, kwargs = compat.tree_unflatten(flat, spec)
        without_cache(self._source.bare, Inputs(*args, **kwargs))
        called, _ = form(self._source.bare, flat, spec)
        mode = self._mode()
        for program in self._programs_made:
            if program.form.key != called.key or program.capture.state != mode:
                continue
            at = dict(zip(program.form.order, called.order, strict=True))
            values = [flat[at[i]] if i in at else x.node.meta.get("val") for i, x in enumerate(program.capture.inputs)]
            if program.capture.accepts(values) is None:
                return program, [at[i] for i in sorted(at)]
        return None

    @torch.inference_mode(False)
    def _capture(self, flat: list[Any], spec: Any) -> Capture:
        source = self._source
        bare = skeleton(source.bare, source.device, state.dtypes(self))
        for module, part in zip(bare.modules(), self._order, strict=True):
            module.training = part.training
        inputs = form(source.bare, flat, spec)[1]
        return prepare(bare, inputs, source.device, self._mode(), request=source.want)

    def _install(self, captured: Capture, sharded: Sharded) -> None:
        source, key = self._source, len(self._programs_made)
        places = _places(source)
        graph = specialise(sharded, places)
        fired = source.lowering.optimised(graph, places["tp"], source.device, self._plan.memory.peak)
        reads, inputs, count = [], [], 0
        for leaf, node in zip(captured.leaves, [n for n in graph.nodes if n.op == "placeholder"], strict=True):
            if leaf.kind == "input":
                inputs += [node] if isinstance(leaf.node.meta.get("val"), Tensor) else []
            elif leaf.kind == SEEDS:
                inputs, count = [*inputs, node], leaf.node.meta["val"].shape[0]
            elif node.users:
                name = source.aliases.get(leaf.name, leaf.name)
                reads.append(Read(node, name, self._storages.get(name) if leaf.kind == "parameter" else None))
        if self._plan.batch.size > 1 and source.ranks is not None:
            data_parallel.spread(self, reads)
        constants = {x.name: captured.constants[x.name] for x in captured.leaves if x.kind == "constant"}
        compiler = source.lowering.compiler(graph)
        Assembler(self._parts, graph, reads, key, constants, compiler).build(inputs)
        called, _ = form(source.bare, [x.node.meta.get("val") for x in captured.inputs], captured.in_spec)
        self._programs_made.append(Program(captured, sharded, graph, key, called, count, fired, compiler))

    def _finish(self, program: Program, outputs: Any, inputs: list[Tensor]) -> Any:
        """Write what the original writes to its buffers and inputs, and give the rest in its own output class."""
        captured, kept = program.capture, []
        for i, value in enumerate(compat.tree_leaves(outputs)):
            taker = captured.mutations.get(i)
            if isinstance(taker, str):
                state.write(self, taker, value)
            elif taker is not None:
                with torch.no_grad():
                    inputs[taker].copy_(value)
            else:
                split = self._source.want.outputs == "sharded"
                kept.append(self._left_sharded(program, i, value, inputs) if split else value)
        data_parallel.refuse_twice(self, kept)
        return compat.tree_unflatten(kept, captured.out_spec)

    def _left_sharded(self, program: Program, position: int, value: Any, inputs: list[Tensor]) -> Any:
        ranks = self._source.ranks
        if ranks is None or not isinstance(value, Tensor):
            return value
        layout, whole = program.sharded.result(position)
        return wrap(value, layout, program.capture.shape(whole, inputs), ranks.mesh)

    # ---- state -----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """With dp: backwards in this context add to gradients without the sum over dp; the next one outside sums all.

        For gradient accumulation. The gradients of parameters may be absent until then.
        """
        return data_parallel.no_sync(self)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer, whole, under the original's names (collective)."""
        return state.full_state(self)

    def full_grad_dict(self) -> dict[str, Tensor]:
        """Every gradient, whole, under the original's names; parameters without one are absent (collective)."""
        return state.full_gradients(self)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The original's names; DTensors, but for fused weights held in pieces: those come whole (collective)."""
        found = state.sharded_state(self, args[1] if len(args) > 1 else prefix)
        into = args[0] if args else destination
        return found if into is None else (into.update(found), into)[1]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the original's full state dict (or DTensors); each rank keeps its part.

        Raises:
            StateError: tensors are missing, unknown, or of another shape; all are listed and nothing was loaded.
        """
        return state.load(self, state_dict, strict)

    load_checkpoint = checkpoint.load
    save_checkpoint = checkpoint.save

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Original parameter name -> how it is held."""
        yield from self._storages.items()

    # ---- looking at it ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan it runs; printed, it says what became of every optimisation in the latest program, as of now."""
        if not self._programs_made:
            return self._plan
        latest = self._programs_made[-1]
        told = dict(latest.fired)
        if latest.compiler is not None:
            told.update(latest.compiler.told(self._source.lowering.name))
        return self._plan.running(tuple(f"{name}: {what}" for name, what in told.items()))

    @property
    def graph(self) -> str:
        """The latest program of this rank as readable text; every collective is named by its kind (f, f*, g, g*)."""
        if not self._programs_made:
            raise StateError("there is no graph yet: the module is captured at its first call.")
        return render_graph(self._programs_made[-1].graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for part in self._parts.values():
            if isinstance(part, Part):
                memo[id(part._programs)] = {}
        shared = {"_plan", "_source", "_storages", "config"}
        for k, v in self.__dict__.items():
            new.__dict__[k] = v if k in shared else [] if k == "_programs_made" else {} if k == "_known" else None
        for k in self.__dict__.keys() - shared - {"_programs_made", "_known"}:
            new.__dict__[k] = copy.deepcopy(self.__dict__[k], memo)
        for program in self._programs_made:
            new._install(program.capture, program.sharded)
        return new

    def __getstate__(self) -> Any:
        raise StateError(
            "a sharded module is bound to its process group and cannot be pickled; save full_state_dict() instead, or "
            "state_dict() with torch.distributed.checkpoint."
        )


def _places(source: Source) -> dict[str, Place]:
    """This rank's place on each mesh axis; rank 0's in one plain process, which does not run."""
    ranks = source.ranks
    if ranks is None:
        return {"tp": Place(0, source.tp, ""), "dp": Place(0, 1, "")}
    axes = {"tp": ranks, "dp": ranks.batch}
    return {name: Place(x.rank, x.tp, x.group_name) for name, x in axes.items() if x is not None}
