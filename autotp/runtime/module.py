"""`ShardedModule`: one rank's part of a model, with the original's names, tree, state dict and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autotp import compat
from autotp.capture.request import Mode
from autotp.comm.ranks import agree, no_ranks_error
from autotp.comm.turn import Turn
from autotp.errors import StateError
from autotp.inputs import Args, Inputs, Kwargs
from autotp.ir.files import PathLike
from autotp.ir.graph import NamedTensors
from autotp.log import uncollected
from autotp.plans.plan import Plan
from autotp.plans.show.rank_program import render_graph
from autotp.runtime import checkpoint
from autotp.runtime.checkpoint.wholes import named_tensors
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carriers import Carriers
from autotp.runtime.generation.generating import Batching, generate, warmup
from autotp.runtime.interop import methods, ownership
from autotp.runtime.interop.ownership import COMPILE, JIT, LOADED, TRAINER, Refused, know_stages, refuse_transforms
from autotp.runtime.interop.profiled import profile
from autotp.runtime.interop.standalone_program import program
from autotp.runtime.lower.hosted import mean_loss
from autotp.runtime.moving.replan import replan
from autotp.runtime.stages import weights

from . import data_parallel, optimizer_steps, program_search, state
from .calls import Calls
from .changes import Changes
from .module_hooks import hooked
from .part import Part, watch, whole_class
from .programs import CallKind, Program, Programs, Source
from .storage import Storage

PROBES = (torch.float32, torch.bfloat16)  # by two types a conversion to one of them is told from one to a device alone


class ShardedModule(Batching, Part):
    """A model sharded over the tp ranks; made by `autotp.compile` or `autotp.parallelize`.

    Call it like the original: every rank passes the same inputs and gets the same full outputs, in the original's own
    output class. `parameters()` are DTensors on one mesh; `full_state_dict()` and `full_grad_dict()` speak the
    original's names and shapes. The original's modules can be hooked, checkpointed and wrapped one by one. It is an
    instance of the original's class too, whose other methods and properties are as they are there.

    Attributes:
        config: the original's `config`, where it has one.
    """

    __jit_ignored_attributes__ = Refused(JIT)
    _initialize_hook = Refused(COMPILE)
    generate, warmup, named_tensors, replan, mean_loss = generate, warmup, named_tensors, replan, mean_loss
    profile, program, by_itself = profile, program, program_search.by_itself
    snapshot, save_pretrained = checkpoint.snapshot, checkpoint.save_pretrained
    is_distributed_loading_by_transformers = Refused(TRAINER)
    _generation: set[str] | None = None  # under way: names of what `generate` takes for itself, and forwards do not get

    def __new__(cls, *args: Any) -> Any:
        """Make an instance of this class and the original's; without arguments, as a copy begins, of this one alone."""
        return object.__new__(whole_class(args[0], cls) if args else cls)

    @uncollected()
    def __init__(self, model: nn.Module, plan: Plan, source: Source) -> None:
        super().__init__(model)
        shards = source.shards
        if shards.tp * shards.axis.size == 1:
            self.__dict__[LOADED] = False
        self._plan, self._source, self._shards, self._programs_made = plan, source, shards, Programs()
        self.__dict__["config"] = getattr(shards.bare, "config", None)  # which may be a property of the class
        place, layouts = shards.places()["tp"], plan.states
        self._carriers = Carriers.of(shards.bare, place.rank, place.size, source.want.states, shards.hosts, layouts)
        state.populate(shards, self, model, plan.placements)
        methods.load_by_original(shards)
        self._order = list(dict.fromkeys(shards.parts.values()))  # as the original's `modules()`
        self._changes = watch(shards.parts, shards.bare, Changes())
        kind, compares = type(shards.bare).__name__, source.sample and not source.check
        self._calls = Calls(shards, kind, self._order, self._changes, compares)
        self._begin_stages()
        optimizer_steps.watch(self._calls)
        for captured, sharded in source.ready:
            program_search.install(self, captured, sharded)
        source.ready.clear()
        self._calls.settle()  # not before: with dp others stand for the parameters now

    def _begin_stages(self) -> None:
        """Make what stages sum and compare of the weights that this module holds; nothing where there are none."""
        pipeline = self._source.pipeline
        self._calls.tied = pipeline.tied(self._shards) if pipeline is not None else None
        if pipeline is not None and pipeline.grid.size > 1:
            know_stages(self)

    # ---- running ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` with its hooks; ranks meet before those of `fully_shard`, which gather weights."""
        if self._generation is not None and not hooked(self._forward_pre_hooks, self._forward_hooks):
            return self.by_itself("", args, kwargs)
        ownership.forget_steps()
        gathering = self._calls.gathering() if isinstance(self, FSDPModule) else nullcontext()
        own_after = data_parallel.own_after(self._shards)
        with data_parallel.recovering(self._shards), self._calls.turn(), own_after, gathering:
            return nn.Module.__call__(self, *args, **kwargs)

    @torch.compiler.disable  # a function that is compiled around it goes on after it
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the model; same inputs on every tp rank, full outputs on every tp rank.

        With dp each dp rank passes its slice of the batch, and gets the outputs of its slice. With cp all ranks pass
        the same whole sequences (or each its `autotp.Inputs.part` of them); outputs along them are the rank's part.
        """
        with self._calls.turn():
            return self._call("", args, kwargs)

    def _call(self, entry: str, args: Args, kwargs: Kwargs) -> Any:
        """Run the model, or the module of it at this path by itself, such as an encoder.

        Args:
            entry: the path. args, kwargs: of the call.
        """
        if self._generation is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in self._generation}
        if self._shards.ranks.mesh is None and self._shards.tp * self._shards.axis.size > 1:
            raise no_ranks_error(self._shards.tp, self._shards.axis.degrees)
        refuse_transforms([*args, *kwargs.values()])
        call = self._arguments(args, kwargs, entry)
        program, outputs, inputs = self._ran(call, program_search.kind_of(self, call))
        return call.settle(self._finish(program, outputs, inputs), program.returns)

    def _ran(self, call: Arguments, kind: CallKind) -> tuple[Program, Any, list[Tensor]]:
        """Run a call of a kind; return its program, what that gave, and what it was given."""
        match = kind.program(call.shapes)
        new, seed = self._calls.begin(kind, call, match and match[0])
        searched = new or match is None or self._source.check or call.wrong
        if searched or match is None:
            with compat.without_saved_hooks():  # checkpointing counts what a capture saves, which is made once
                match = program_search.find(self, call)
        (program, order), run = match, self._first if searched else self._run
        inputs = [call.flat[i] for i in order]
        self._calls.refuse_lengths(program)
        outputs = run(program, inputs, self._calls.seed(program) if seed is None else seed)
        if searched:
            program_search.kind_of(self, call).learn(program, order)  # which may be read otherwise now
        return program, outputs, inputs

    def _arguments(self, args: Args, kwargs: Kwargs, entry: str) -> Arguments:
        """Read the arguments of a call; with cp this rank's part of the sequences, but where a cache goes with them."""
        call = Arguments(self._carriers, args, kwargs, entry)
        cp = self._shards.axis.cp > 1
        call.undealt = cp and (self._generation is not None or bool(call.states))
        if not cp or call.undealt:
            return call
        inputs, whole = state.dealt(self._shards, Inputs(*args, **kwargs))
        call = Arguments(self._carriers, inputs.args, inputs.kwargs, entry)
        call.sequences = compat.tree_leaves((args, kwargs)) if whole else None
        return call

    def _run(self, program: Program, inputs: list[Tensor], seed: int) -> Any:
        inputs = [*inputs, *program.random(self._shards, seed)] if program.seeds else inputs
        self._programs_made.run(program)
        try:
            with self._calls.running(), self.plain(program):
                return self._programs[program.key](*inputs)
        except RuntimeError as error:
            self._calls.lost(error)
            raise

    def plain(self, program: Program) -> AbstractContextManager[Any]:
        """Return the context in which a program runs: a capture under autocast holds its casts already."""
        cast = program.capture.state[-1] is not None
        return torch.autocast(self._shards.device.type, enabled=False) if cast else nullcontext()

    def _first(self, program: Program, inputs: list[Tensor], seed: int) -> Any:
        """Run it; where an operator draws that does not say so make sure that all ranks drew the same."""
        if self._shards.tp == 1 or program.draws:
            return self._run(program, inputs, seed)
        before = state.random_state(self._shards.device)
        outputs = self._run(program, inputs, seed)
        if state.random_state(self._shards.device) != before:
            agree(self._shards.ranks, "the state of the random numbers", {"random numbers": before})
            program.draws = True
        return outputs

    def _mode(self) -> Mode:
        training, dtypes, grad, trained, autocast = self._calls.inventory.mode(self._shards.device)
        # A stage knows of its own weights alone: their types stay what they were, and all were captured with gradients.
        if self._source.pipeline is not None:
            dtypes = trained = None
        return training, dtypes, grad, trained, autocast

    def _finish(self, program: Program, outputs: Any, inputs: list[Tensor]) -> list[Any]:
        """Write what the original writes to its buffers and inputs; return the other results."""
        captured, results = program.capture, []
        as_sharded = self._source.want_of(program.entry).outputs == "sharded"
        for i, value in enumerate(outputs if program.flat else compat.tree_leaves(outputs)):
            taker = captured.mutations.get(i)
            if isinstance(taker, str):
                if taker not in self._shards.elsewhere:
                    state.write(self._shards, taker, value)
            elif taker is not None:
                if value is not inputs[taker]:
                    with torch.no_grad():
                        inputs[taker].copy_(value)
            else:
                if as_sharded and captured.becomes(i) is None:  # states are local
                    value = program.left_sharded(i, value, inputs, self._shards.ranks)
                results.append(value)
        data_parallel.begin_backward(self._shards, results)
        self._calls.end(results, inputs)
        return results

    # ---- state -----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unsummed over dp in this context, as backwards add to them; the next one outside sums all.

        For gradient accumulation. Until then a parameter's gradient may be NaN, and whole ones are refused.
        """
        if self._shards.staged:
            raise StateError(
                "no_sync() with stages: a step, or a backward, ends with its sums. Take more micro-batches."
            )
        return data_parallel.no_sync(self._shards)

    @Turn("zero_grad()")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients as torch does, those of backwards in `no_sync` too, and not amid another thread's call."""
        super().zero_grad(set_to_none)

    @Turn("clip_grad_norm_()")
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most this; return the norm before. A collective call."""
        data_parallel.refuse_unsummed(self._shards, "clip_grad_norm_()")
        return state.clip(self._shards, max_norm)

    def full_state_dict(self, live: bool = False) -> NamedTensors:
        """Return every parameter and persistent buffer, whole, under the original's names, as copies (collective).

        With `live` what is whole on this rank is the module's own tensor, which costs no memory and changes with it.
        """
        with self._calls.together("full_state_dict", reads=True):
            return state.full_state(self._shards, live)

    def full_grad_dict(self, live: bool = False) -> NamedTensors:
        """Return every gradient that is there, whole, by the original's names; copies, but for `live` (collective)."""
        with self._calls.together("full_grad_dict"):
            data_parallel.refuse_unsummed(self._shards, "full_grad_dict()")
            return state.full_gradients(self._shards, live)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert as `to`, `float`, `bfloat16` do: on all ranks to the same, for what follows is compared by type."""
        before = self._shards.device
        examples = [fn(torch.empty(0, dtype=kind, device=before)) for kind in PROBES]
        kinds = ", ".join(str(example.dtype) for example in examples)
        with self._calls.conversion(f"{kinds} on {examples[0].device.type}"):
            if self._shards.staged:
                weights.refuse_types(self, fn)
            super()._apply(fn, recurse)
            if self._shards.device != before:
                self._programs_made.forget(self._order)
            return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Apply as on the whole model, so that what is drawn is the same at any number of ranks and stages."""
        return weights.applied(self, fn) if self._shards.staged else super().apply(fn)

    def share_memory(self) -> ShardedModule:
        """Move what this rank holds to memory that its other processes share: DTensors themselves cannot."""
        for tensor in (*self.parameters(), *self.buffers()):
            compat.part_of(tensor).share_memory_()
        return self

    @Turn("state_dict()")
    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return DTensors by the original's names; of fused weights, held in pieces, whole tensors (collective)."""
        tensors = state.sharded_state(self._shards, args[1] if len(args) > 1 else prefix)
        into = args[0] if args else destination
        return tensors if into is None else (into.update(tensors), into)[1]

    @Turn("load_state_dict()")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the original's full state dict (or DTensors); each rank keeps its part.

        Raises:
            StateError: tensors are missing, unknown, or of another shape; all are listed and nothing was loaded.
        """
        result = checkpoint.load(self._shards, state_dict, strict=strict, cast=True, renamed=False)
        return compat.IncompatibleKeys(result.missing_keys, result.unexpected_keys)

    @Turn("load_checkpoint()")
    def load_checkpoint(
        self, source: PathLike | Mapping[str, Any], *, optimizer: Optimizer | None = None,
        strict: bool = True, cast: bool = False, check_finite: bool = False, trusted: bool = False,
    ) -> checkpoint.Loaded:  # fmt: skip
        """Load a checkpoint; each rank reads only its own slices. A collective call.

        A model built on the meta device gets its memory here, a slice at a time: at most the rank's shard and the
        largest slice are held. Names may be stored with or without the model's base prefix, tied weights under any of
        their names.

        Args:
            source: a Hugging Face folder, a safetensors file, a DCP folder, or a full state dict by original names.
            optimizer: loaded too, from a folder that `save_checkpoint` wrote with one; made from these parameters.
            strict: refuse missing and unknown tensors.
            cast: allow tensors of another dtype than the model's, and change them to the model's.
            check_finite: refuse infinities and NaN; everything is then read twice.
            trusted: allow pickled files (.bin, .pt), which torch opens with `weights_only=True`.

        Returns: the names that were missing or unknown where `strict=False` allows them, and what was saved as `extra`.

        Raises:
            StateError: the files are damaged or do not fit; all that is wrong is listed, and nothing was loaded. Only
                where bytes are not what was saved a part may have been, which the error then says.
            RankError: that is so on another rank, or the ranks see different files.
        """
        return checkpoint.load(
            self._shards, source, optimizer=optimizer, strict=strict, cast=cast, check_finite=check_finite,
            trusted=trusted,
        )  # fmt: skip

    @Turn("save_checkpoint()")
    def save_checkpoint(
        self, path: PathLike, *, format: str = "dcp", optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None, background: bool = False, max_file: int = 5 * 10**9,
    ) -> checkpoint.Pending | None:  # fmt: skip
        """Save a checkpoint as the folder `path`, for any number of ranks. A collective call.

        The folder appears in one step when all is on disk. A save that is cut off anywhere leaves the previous one
        whole, and files of it that hold no weights, such as a tokenizer's, are carried over. Digests are saved beside.

        Args:
            path: the folder; with several nodes on a file system that all of them see.
            format: "dcp" (torch.distributed.checkpoint): each rank writes what it holds, under "model.<name>".
                "huggingface": whole tensors in safetensors files as transformers writes them, by one rank.
            optimizer: saved too (DCP only), under the original parameters' names.
            extra: anything that JSON can say, such as the step; `load_checkpoint` gives it back (DCP only).
            background: copy to the CPU, return, and write in a thread while training goes on (DCP only).
            max_file: largest size of one safetensors file in bytes; with more, files have an index.

        Returns: None; with `background` a handle, whose `result()` all ranks call before the next save: it ends this.

        Raises:
            InputError: an argument that cannot be used.
            StateError: `path` cannot be written, or the optimizer's state cannot be said in the original's names.
            RankError: that is so on another rank.
        """
        return checkpoint.save(
            self._shards, path, format=format, optimizer=optimizer, extra=extra, background=background,
            max_file=max_file,
        )  # fmt: skip

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Iterate over the original's parameters: name, and how it is held."""
        return iter(self._shards.storages.items())

    # ---- other ways to run -----------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: see `autotp.compile`'s `backend`."""
        raise StateError(COMPILE)

    # ---- looking at it ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan it runs; printed, it says what became of every optimisation in the latest program, as of now."""
        if not self._programs_made:
            return self._plan
        latest = self._programs_made[-1]
        texts = dict(latest.fired)
        if latest.compiler is not None:
            name, text = self._source.lowering.name, latest.compiler.summary
            measured = texts.get(name, "").partition("; ")[2]
            texts[name] = f"{text}; {measured}" if measured else text
        return self._plan.running(tuple(f"{name}: {what}" for name, what in texts.items()))

    @property
    def graph(self) -> str:
        """The latest program of this rank as readable text; every collective is named by its kind (f, f*, g, g*)."""
        if not self._programs_made:
            raise StateError("there is no graph yet: the module is captured at its first call.")
        latest = self._programs_made[-1]
        return "\n".join(map(render_graph, [stage.graph for stage in latest.stages.values()] or [latest.graph]))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        memo |= {id(shared): shared for shared in (self._plan, self._source, self.config)}
        # Made again, on the copied parts.
        memo |= {id(self._programs_made): Programs(), id(self._changes): Changes()}
        for part in self._order:
            if isinstance(part, Part):
                memo |= {id(table): {} for table in (part._programs, part._boundaries, part._calls_made)}
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        watch(new._shards.parts, self._shards.bare, new._changes).stale = True
        new._begin_stages()
        for old in self._programs_made:
            program_search.install(new, old.capture, old.sharded, old.changes, old.entry)
        new._calls.settle()
        optimizer_steps.watch(new._calls)
        return new

    def __getstate__(self) -> Any:
        raise StateError(
            "a sharded module is bound to its process group and cannot be pickled; save full_state_dict() instead, or "
            "state_dict() with torch.distributed.checkpoint."
        )


# ---- before its inputs are known -------------------------------------------------------------------------------------


EARLY = (
    "this module is sharded at its first call, because autotp.compile was given no example_inputs; before that it has "
    "no parameters, state or submodules (an optimizer built on them would be stale). Call it once, or pass "
    "example_inputs."
)


def _early(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(EARLY)


class LazyModule(ShardedModule):
    """Module that becomes a `ShardedModule` at its first call; it remembers `train` and `eval`, refusing the rest."""

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[Inputs], tuple[nn.Module, Plan, Source]],
        kind: type[ShardedModule] = ShardedModule,
    ) -> None:
        nn.Module.__init__(self)
        self.training = model.training
        self.config = getattr(model, "config", None)
        self._original, self._leaf = type(model).__name__, ""
        self._build, self._kind = build, kind

    @Turn("the first call of a module")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Capture and shard for these inputs, then call that sharded module, which this is then."""
        self._begin(args, kwargs)
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Capture and shard likewise, then call without hooks."""
        self._begin(args, kwargs)
        return self.forward(*args, **kwargs)

    def _begin(self, args: Args, kwargs: Kwargs) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            parts, mode = self._build(Inputs(*args, **kwargs)), self.training
            hooks = {k: v for k, v in self.__dict__.items() if "hook" in k}
            kind = self._kind
            self.__class__ = whole_class(parts[0], kind)
            kind.__init__(self, *parts)
        del self._build, self._kind  # they hold the original, and a process group, which cannot be copied
        self.__dict__.update(hooks)
        if mode != parts[0].training:
            self.train(mode)

    def train(self, mode: bool = True) -> LazyModule:
        """Set the mode that the module will be in."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Say why there is nothing to see yet."""
        return "sharded at its first call"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: {EARLY}") from None

    parameters = named_parameters = buffers = named_buffers = requires_grad_ = zero_grad = _apply = _early
    modules = named_modules = children = named_children = get_submodule = get_parameter = get_buffer = apply = _early
    _shards = _calls = plan = graph = property(_early)  # type: ignore[assignment]
