"""Continuous batching: transformers' engine over the calls of a sharded module.

Every rank runs the engine's loop, in a thread as it does; rank 0 has the queue, and the others get its requests in a
turn before each batch, with the requests of all ranks to stop or pause. Options that the engine would silently ignore
are refused.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api as engine
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.generation.logits_process import LogitsProcessorList

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.comm.ranks import broadcast, from_all
from autotp.errors import AutoTPError, InputError, StateError
from autotp.runtime.call_message import short
from autotp.runtime.checkpoint.loading import activate
from autotp.runtime.module_hooks import hooked
from autotp.runtime.program_search import kind_of, program_of
from autotp.runtime.programs import CallKind, Program
from autotp.runtime.state import dtypes

from .arguments import Arguments
from .paged import SIDES, RankPages, example, name_of
from .per_request import CHOSEN, Choices, Fair

AXES = "continuous batching runs over tp alone: this module has {axes}. Compile it without, or take generate()."
OPTION = "{name}={value!r}: continuous batching would not follow it. Leave it out, or take sharded.generate(...)."
COMPILED = (
    "{name}={value!r}: a sharded module is compiled by autotp or not at all, and its pools stay on the device. Leave "
    "it out."
)
PROCESSOR = (
    "{name} looks at more than the last token of a request, or nobody has said that it does not: continuous batching "
    "would leave it out or mix requests. Leave out the option that asks for it, or take sharded.generate(...)."
)
KEYWORD = "generate_batch({name}=...): the engine ignores it. Say it in generation_config, which is read."
ENDLESS = "a request without max_new_tokens would go on until the memory is full. Pass max_new_tokens."
UNKEPT = (
    "{model} keeps keys and values of {count} of its {layers} layers in a cache: continuous batching has pages for "
    "nothing else. Take sharded.generate(...)."
)
SCHEDULERS = SCHEDULER_MAPPING | {"fair": Fair}
UNREAD = 4096  # results on ranks but the first, where nobody may read them
DIMENSIONS = 4  # of a layer's keys
UNUSED = (
    "{model} does not keep {names} in the cache that it is given as past_key_values, so continuous batching would lose "
    "what earlier tokens left. Take sharded.generate(...)."
)
EMPTY = "a request of no tokens: there is nothing to go on from."
FAILED = "continuous batching: {count} of {all} requests failed, first {error}"
STOPPED = "continuous batching has stopped, and takes no more requests: {reason}."
POSITIONS = (
    "{model} takes no {name}: continuous batching packs several requests into one sequence, and cannot tell it where "
    "each begins. Take sharded.generate(...)."
)
# A generation's options that the engine follows, and those that do not concern it.
FOLLOWED = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "num_return_sequences",
    "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
    "continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile", "use_cache",
}  # fmt: skip
# The engine's options of kernels and memory that are not ours: only None, zero or False is followed.
UNSUPPORTED = (
    "use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config", "default_compile_level",
    "cpu_offload_space", "max_blocks_per_request", "q_padding_interval_size", "kv_padding_interval_size",
)  # fmt: skip


class Followers(DistributedHelper):
    """The engine's exchanges between ranks, each a turn of the module's."""

    def __init__(self, module: Any, manager: Manager) -> None:
        super().__init__(None, None)  # heads are not the engine's to split
        self.calls, self.manager = Repeated(module), manager
        self.ranks = module._shards.ranks
        self.tp_local_rank = self.ranks.rank
        self.is_tp_driver, self.dp_rank = self.tp_local_rank == 0, 0

    @torch.no_grad()  # as in the batches, in which calls are made that those after them are held against
    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Return the largest of each number on any rank.

        Args:
            payload_size: requests that rank 0 has. stop_status, pause_requested: wishes, as the engine has them.
        """
        mine = payload_size, stop_status, pause_requested
        last: Any = self.manager.batch_processor.inputs_and_outputs  # type: ignore[union-attr]
        words = self.calls.words(last.output_ids[0, : last.num_request_in_batch])
        every = from_all(self.ranks, (mine, words), "next batch of requests")
        # What is changed in a pause is held against the other ranks in full.
        self.calls.agreed = bool(words) and every.count((mine, words)) == len(every) and not pause_requested
        return tuple(map(max, zip(*[state for state, _ in every], strict=True)))  # type: ignore[return-value]

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return rank 0's requests, or its seed, on every rank."""
        return broadcast(self.ranks, obj)

    tp_broadcast_from_rank_0: Any = tp_broadcast_object_from_rank_0


class Manager(engine.ContinuousBatchingManager):
    """The engine's manager over the ranks of a sharded module."""

    def __init__(
        self, module: Any, generation: Any, options: Any, hints: Any, choices: bool, adapters: Sequence[str]
    ) -> None:
        super().__init__(module, generation, options, hints)
        self.adapter, self.adapters = "", adapters
        self._supports_logits_to_keep = module._supports_logits_to_keep
        if choices:
            self.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Choices()]))
            self.logit_processor.tensors_required = 1
        self.distributed_helper: Any = Followers(module, self)
        self.is_tp_driver = self.distributed_helper.is_tp_driver
        if not self.is_tp_driver:
            self.output_router.output_queue.queue = deque(maxlen=UNREAD)
        self.batch_processor = self._create_batch_processor()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave attention as it was captured."""

    def _generation_step(self) -> None:
        self.batch_processor._generation_step(self)  # type: ignore[union-attr, arg-type]

    def __call__(self, **batch: Any) -> Any:
        """Return the outputs of a batch, as the engine asks a model for them."""
        processor: Any = self.batch_processor
        adapter = getattr(processor.scheduler, "adapter", self.adapter)
        if adapter != self.adapter:
            activate(self.model, adapter)  # type: ignore[arg-type]
            self.adapter, self.distributed_helper.calls.agreed = adapter, False
        return SimpleNamespace(logits=self.distributed_helper.calls(*processor.cache.arguments(batch)))

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        module = self.model
        options = self.continuous_batching_config
        config = copy.copy(module.config.get_text_config())
        config._attn_implementation = "sdpa"  # for which the engine makes masks
        pages = pages_for(module, config, options, self.adapters)
        self._use_prefix_sharing = pages.use_prefix_sharing
        update_cb_config_after_cache_creation(options, pages.num_blocks, pages.max_batch_tokens)
        scheduler = SCHEDULERS[options.scheduler_type](
            cache=pages,
            safety_margin=options.safety_margin,
            max_requests_per_batch=options.max_requests_per_batch,  # type: ignore[arg-type]
        )
        return engine.ContinuousBatchProcessor(
            pages, config, self.generation_config, options, self.logit_processor, self.input_queue,
            self.cancel_queue, self.output_router,
            self.background_thread_status, module.device, module.dtype, scheduler, self.distributed_helper,
        )  # fmt: skip

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, max_new_tokens: int | None = None,
        *args: Any, **kwargs: Any,
    ) -> str | None:  # fmt: skip
        """Add a request; see the engine's own. On ranks but the first it does nothing.

        Args:
            input_ids: tokens of the prompt. request_id: its name. max_new_tokens: at most.
            args, kwargs: as the engine has them.

        Raises:
            InputError: it has no end, or no tokens. StateError: the manager has stopped.
        """
        refuse_request(input_ids, self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens)
        if (reason := self.background_thread_status.can_accept_new_requests()) is not None:
            raise self._stopped(reason)
        return super().add_request(input_ids, request_id, max_new_tokens, *args, **kwargs)

    def _stopped(self, reason: str = "") -> StateError:
        error = StateError(STOPPED.format(reason=self.background_thread_status.fatal_error or reason))
        error.__cause__ = self.background_thread_status.fatal_error
        return error

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """Return a result; see the engine's own.

        Raises:
            StateError: there will be none, for the loop ended by an error.
        """
        result = super().get_result(request_id, timeout)
        if result is None and self.background_thread_status.fatal_error and self.output_router.output_queue.empty():
            raise self._stopped()
        return result

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        status: Any = self.background_thread_status
        module: Any = self.model
        status.request_stop(status.HARD_STOP, self.distributed_helper.global_rank)
        status.record_fatal_error(error)
        self._fail_all_remaining_requests(error, batch_processor)
        with contextlib.suppress(type(error)), module._calls.turn("continuous batching"):
            raise error  # so that ranks that go on hear of it


def pages_for(module: Any, config: Any, options: Any, adapters: Sequence[str]) -> RankPages:
    """Make the engine's cache with this rank's pools, and the program of any batch: its layouts say what a rank holds.

    Args:
        module: the sharded module. config: of its text model. options: the engine's, resolved; not changed.
        adapters: with each of which there is a program too.

    Raises:
        StateError: the model does not keep all that it needs in the cache that it is given.
    """
    keeps, device, states = module._supports_logits_to_keep(), module._shards.device, _states(module, config)

    def pages(tokens: int | None, blocks: int | None) -> RankPages:
        sizes = copy.copy(options)
        sizes.max_batch_tokens, sizes.num_blocks = tokens, blocks
        return RankPages(config, sizes, module.dtype, keeps)

    def pool(name: str, places: int, memory: bool = False) -> torch.Tensor:
        shape, cut = [*states[name]], module._carriers.cut(name)
        shape[2] = places
        if cut is not None:
            shape[cut.dim] = max(cut.mine, 1)
        real = memory and (cut is None or cut.mine)  # `Carriers` has an empty part as one number
        return torch.zeros(shape if real else (), dtype=module.dtype, device=device).expand(shape)

    one = pages(options.max_requests_per_batch, 1)
    program: Any = None
    for adapter in (*adapters, ""):
        one.fill(pool)
        if adapters:
            activate(module, adapter)
        with torch.no_grad():
            program, _ = program_of(module, module._arguments((), example(one, keeps, device), ""))
    if unused := states.keys() - set(map(program.capture.becomes, program.capture.mutations)):
        raise StateError(UNUSED.format(model=module._calls.name, names=", ".join(sorted(unused)[:4])))
    # Whole heads of the engine's size, so many as make up what the rank with most has: pages are of the same bytes on
    # all ranks, and so are schedules.
    mine = sum(pool(name, 1).numel() for name in states) / (len(states) * find_head_dim(config))
    config = copy.copy(config)
    config.num_key_value_heads = max(from_all(module._shards.ranks, math.ceil(mine), "heads of the pools"))
    most = pages(options.max_batch_tokens, options.num_blocks)
    every = from_all(module._shards.ranks, (most.max_batch_tokens, most.num_blocks), "sizes of the pools")
    shared = pages(*map(min, zip(*every, strict=True)))
    shared.fill(partial(pool, memory=True))
    return shared


def _states(module: Any, config: Any) -> dict[str, torch.Size]:
    """Return the shapes of each layer's keys and values, as the model itself puts them into a cache."""
    bare = skeleton(module._shards.bare, module._shards.device, dtypes(module._shards))
    ids = torch.ones(1, 2, dtype=torch.int64, device=module._shards.device)
    with compat.mode_of([*bare.parameters()]), torch.no_grad():
        cache: Any = bare(input_ids=ids, use_cache=True).past_key_values
    every = {
        name_of(i, side): getattr(x, side, None) for i, x in enumerate(getattr(cache, "layers", ())) for side in SIDES
    }
    shapes = {name: x.shape for name, x in every.items() if isinstance(x, torch.Tensor) and x.ndim == DIMENSIONS}
    if len(shapes) != len(SIDES) * config.num_hidden_layers:
        count = len(shapes) // len(SIDES)
        raise StateError(UNKEPT.format(model=module._calls.name, count=count, layers=config.num_hidden_layers))
    return shapes


def manager_of(
    module: Any, generation: Any, options: Any, hints: Any, choices: bool = False, adapters: Sequence[str] = ()
) -> Manager:
    """Make a manager. Collective.

    Args:
        module: the sharded module. generation, options, hints: as transformers has them; None for defaults.
        choices: let each request be added with a `Choice` of its own, `choice=`, in place of what `generation` says.
        adapters: of PEFT in the module, of which each request may have one, `adapter=`; others have none.

    Raises:
        StateError: an option that the engine would not follow, a model that it cannot serve, or axes beside tp.
        RankError: the ranks pass other options.
    """
    generation = copy.deepcopy(generation if generation is not None else module.generation_config)
    options = copy.deepcopy(options) if options is not None else ContinuousBatchingConfig()
    texts = {"generation_config": generation.to_dict(), "continuous_batching_config": options}
    module._calls.agree("init_continuous_batching()", texts)
    for name in CHOSEN if choices else ():
        setattr(generation, name, None)
    refuse(module, generation, options)
    options.auto_switch_to_flash, options.max_blocks_per_request = False, 0  # attention is as it was captured
    if adapters:  # a page of one model is no page of another
        options.allow_block_sharing = False
    if generation.eos_token_id is None:
        generation.eos_token_id = -1
    try:
        return Manager(module, generation, options, hints, choices, adapters)
    except AutoTPError:
        raise
    except (ValueError, AttributeError, KeyError, MemoryError) as error:  # as of a kind of layer that it does not know
        raise StateError(f"continuous batching of {module._calls.name}: {error}") from error


def refuse(module: Any, generation: Any, options: Any) -> None:
    """Refuse options that the engine would silently ignore, or cannot follow.

    Args:
        module: the sharded module. generation, options: what is asked.

    Raises:
        StateError: it names the option.
    """
    # Ranks of these axes run other calls, or parts of one.
    shards = module._shards
    axis = shards.axis
    axes = {"dp": axis.size > 1, "cp": axis.cp > 1, "stages": shards.staged, "tp_invariant": shards.hosts}
    if beside := [name for name, present in axes.items() if present]:
        raise StateError(AXES.format(axes=", ".join(beside)))
    # A forward that takes them among `**kwargs` may not read them.
    for name in ("position_ids", "past_key_values"):
        if name not in module._carriers.names:
            raise StateError(POSITIONS.format(model=module._calls.name, name=name))
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in generation.to_dict().items():
        # The engine reads few options, and says nothing of the others.
        if name not in FOLLOWED and not name.startswith("_") and value not in (None, False, defaults.get(name)):
            raise StateError(OPTION.format(name=name, value=value))
    for name in UNSUPPORTED:
        if (value := getattr(options, name, None)) not in (None, False, (False, False)):
            raise StateError(COMPILED.format(name=name, value=value))
    if options.scheduler_type not in SCHEDULERS:
        raise StateError(OPTION.format(name="scheduler_type", value=options.scheduler_type))
    # One that looks at a whole prompt sees the tokens of all requests.
    for processor in module._get_logits_processor(generation):
        if getattr(processor, "supports_continuous_batching", None) is not True:
            raise StateError(PROCESSOR.format(name=type(processor).__name__))


def results_of(module: Any, prompts: list[list[int]], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Run the engine's `generate_batch`. A collective call.

    Args:
        module: the sharded module. prompts: tokens of each request. kwargs: of the engine's own.

    Raises:
        InputError: an argument that the engine would ignore, or a request without tokens or without an end.
        StateError: a request failed.
    """
    function = engine.ContinuousMixin.generate_batch
    for name in kwargs.keys() - {*inspect.signature(function).parameters, "max_new_tokens"}:
        raise InputError(KEYWORD.format(name=name))
    generation = kwargs.get("generation_config") or module.generation_config
    refuse_request(min(prompts, key=len, default=[0]), kwargs.get("max_new_tokens") or generation.max_new_tokens)
    results = function(module, prompts, **kwargs)
    total = len(prompts) * (generation.num_return_sequences or 1)
    errors = [f"{name}: {x.error}" for name, x in results.items() if x.error is not None]
    if count := len(errors) + total - len(results):
        raise StateError(FAILED.format(count=count, all=total, error=[*errors, "the loop ended"][0]))
    return results


def refuse_request(tokens: Any, limit: int | None) -> None:
    """Refuse a request that has no tokens, or no end.

    Raises:
        InputError: it says which.
    """
    if limit is None:
        raise InputError(ENDLESS)
    if not len(tokens):
        raise InputError(EMPTY)


# ---- calls that differ in a few tensors ------------------------------------------------------------------------------


MAX_KINDS = 64


class Repetition(NamedTuple):
    """Knowledge of calls of one kind: the last one, its program, and the places of new tensors and logits."""

    call: Arguments
    kind: CallKind
    program: Program
    places: Sequence[int]
    logits: int


class Repeated:
    """Forwards of one module whose sizes follow from an agreement of the ranks before them.

    The first of a kind is a call like any other. In those that follow nothing is read again but the tensors that are
    new, and nothing is compared but `words`, which the engine's turn takes along. Where these differ on a rank, or a
    rank has none, all make the next call in full, which says what differs.

    Attributes:
        agreed: whether the ranks' words were the same, and the next call is short. last: of the kind that it is of.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.agreed, self.kinds = module, False, dict[Any, Repetition]()
        self.last: Repetition | None = None

    def _now(self) -> Any:
        return self.module._mode(), self.module._changes.key()

    def words(self, tokens: Tensor) -> bytes:
        """Return a digest of all that the ranks must agree on before a short call; empty where this one makes none.

        Args:
            tokens: that the last call gave, from which all sizes follow.
        """
        module, inventory = self.module, self.module._calls.inventory
        hooks = hooked(module._forward_pre_hooks, module._forward_hooks) or any(inventory.hooked)
        self.last = last = self.kinds.get(self._now())
        if last is None or hooks or module._calls.writes():
            return b""
        return short((inventory.trained(), tokens.tolist(), last.kind.digest))

    def __call__(self, kwargs: dict[str, Any], new: Sequence[Tensor]) -> Tensor:
        """Return the logits of a forward.

        Args:
            kwargs: its arguments. new: those of their tensors that are others in each call, always in one order.
        """
        module = self.module
        with module._calls.turn():
            last = self.last
            if self.agreed and last is not None:
                call = last.call.again(dict(zip(last.places, new, strict=True)))
                match = last.kind.program(call.shapes)
                if match is not None and match[0] is last.program:
                    outputs = module._run(last.program, inputs := [call.flat[i] for i in match[1]], 0)
                    taker: Any  # the place of an input: a state that is passed
                    for at, taker in last.program.capture.mutations.items():
                        if outputs[at] is not inputs[taker]:  # a state that is not written in place
                            inputs[taker].copy_(outputs[at])
                    module._calls.end((), inputs)
                    return outputs[last.logits]
            return self._in_full(kwargs, new)

    def _in_full(self, kwargs: dict[str, Any], new: Sequence[Tensor]) -> Tensor:
        """Make a call in full, and note what holds for those that follow."""
        module, before = self.module, self.module._arguments((), kwargs, "")
        logits, call = module(**kwargs).logits, module._arguments((), kwargs, "")
        kind, flat = kind_of(module, call), [id(x) for x in call.flat]
        match = kind.program(call.shapes)
        # States that the caller's object has otherwise afterwards, and buffers that are written, take more than this.
        if match is None or type(logits) is not Tensor or module._source.check or flat != [id(x) for x in before.flat]:
            return logits
        program = match[0]
        writes, returns = program.capture.mutations, program.returns
        place = getattr(compat.tree_unflatten(returns.leaves, returns.outputs), "logits", None)
        buffers = any(isinstance(taker, str) for taker in writes.values())
        if isinstance(place, int) and not (buffers or program.seeds or program.draws) and program.flat:
            at = [i for i in range(len(writes) + len(returns.leaves)) if i not in writes][place]
            if len(self.kinds) >= MAX_KINDS:
                self.kinds.clear()
            self.kinds[self._now()] = Repetition(call, kind, program, [flat.index(id(x)) for x in new], at)
        return logits
