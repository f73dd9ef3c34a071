"""Continuous batching: transformers' engine over the calls of a sharded module.

Every rank runs the engine's loop, in a thread as it does; rank 0 has the queue, and what it takes from it the others
hear in a turn before each batch, with the wishes to stop or pause of all. Whatever the engine would leave out without a
word is refused.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api as engine
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.comm.ranks import broadcast, from_all
from autotp.errors import AutoTPError, InputError, StateError
from autotp.runtime.program_search import program_of
from autotp.runtime.state import dtypes

from .paged import RankPages, blocks_of, example, refuse_unused, sized, with_size

SEED_BITS = 32
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
SIDES, DIMENSIONS = ("keys", "values"), 4  # of a layer's part of a cache
EMPTY = "a request of no tokens: there is nothing to go on from."
FAILED = "continuous batching: {count} of {all} requests failed, the first ({name}) by: {error}"
STOPPED = "continuous batching has stopped, and takes no more requests: {reason}."
POSITIONS = (
    "{model} takes no {name}: continuous batching packs several requests into one sequence, and cannot tell it where "
    "each begins. Take sharded.generate(...)."
)
# Of a generation's options those that the engine follows, and those that say nothing to it.
FOLLOWED = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "num_return_sequences",
    "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
    "continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile",
}  # fmt: skip
OF_REQUESTS = {"request_id", "max_new_tokens", "streaming", "record_timestamps", "eos_token_id"}
# Of the engine's options those of kernels and memory that are not ours, with what they are where nobody asks.
UNSUPPORTED = {
    "use_cuda_graph": (None, False, (False, False)), "use_async_batching": (None, False),
    "varlen_compile_config": (None,), "decode_compile_config": (None,), "default_compile_level": (0,),
    "cpu_offload_space": (0, 0.0), "q_padding_interval_size": (0,), "kv_padding_interval_size": (0,),
}  # fmt: skip


class Followers(DistributedHelper):
    """The engine's exchanges between ranks, each a turn of the module's."""

    def __init__(self, module: Any) -> None:
        super().__init__(None, None)  # heads are not the engine's to split
        self.ranks, self.device = module._source.ranks, module._shards.device
        self.tp_local_rank = self.ranks.rank if self.ranks is not None else 0
        self.is_tp_driver, self.dp_rank = self.tp_local_rank == 0, 0

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Return the largest of each number on any rank."""
        every = from_all(self.ranks, (payload_size, stop_status, int(pause_requested)), "next batch of requests")
        return tuple(map(max, zip(*every, strict=True)))  # type: ignore[return-value]

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return rank 0's requests on every rank."""
        return broadcast(self.ranks, obj)

    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        """Let all ranks draw the same numbers, rank 0's where no seed is given."""
        own = int(torch.randint(0, 2**SEED_BITS - 1, (1,))) if seed is None else seed
        torch.manual_seed(broadcast(self.ranks, own))


class Served:
    """A sharded module as the engine's manager has it: what the manager notes on it changes no program."""

    def __init__(self, module: Any) -> None:
        vars(self)["module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self.module)[name] = value

    def __call__(self, **batch: Any) -> Any:
        """Run one batch."""
        return self.module(**batch)

    def eval(self) -> Served:
        """Put the module into evaluation mode."""
        self.module.eval()
        return self


class Manager(engine.ContinuousBatchingManager):
    """The engine's manager over the ranks of a sharded module."""

    module: Any

    def __init__(self, module: Any, generation: Any, options: Any, hints: Any) -> None:
        served: Any = Served(module)
        super().__init__(served, generation, options, hints)
        self.module = module
        self.distributed_helper = Followers(module)
        self.is_tp_driver = self.distributed_helper.is_tp_driver
        self.batch_processor = self._create_batch_processor()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave attention as it was captured."""

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        module, options = self.module, self.continuous_batching_config
        config = copy.copy(module.config.get_text_config())
        config._attn_implementation = "sdpa"  # for which the engine makes masks
        pages = pages_for(module, config, options)
        self._use_prefix_sharing = pages.use_prefix_sharing
        update_cb_config_after_cache_creation(options, pages.num_blocks, pages.max_batch_tokens)
        if SLIDING_ATTENTION in pages.cache_allocators:
            options.max_blocks_per_request = 0
        scheduler = SCHEDULER_MAPPING[options.scheduler_type](
            cache=pages, safety_margin=options.safety_margin, max_requests_per_batch=options.max_requests_per_batch
        )
        queues = (self.input_queue, self.cancel_queue) if self.is_tp_driver else (None, None)
        return engine.ContinuousBatchProcessor(
            pages, config, self.generation_config, options, self.logit_processor, *queues, self.output_router,
            self.background_thread_status, module.device, module.dtype, scheduler, self.distributed_helper,
        )  # fmt: skip

    def add_request(self, input_ids: list[int], *args: Any, **kwargs: Any) -> str | None:
        """Add a request; see the engine's own. On ranks but the first it does nothing.

        Raises:
            InputError: it has no end, no tokens, or an option that no logits processor of this manager reads.
            StateError: the manager has stopped.
        """
        limit = kwargs.get("max_new_tokens", args[1] if len(args) > 1 else None)
        refuse_request(input_ids, self.generation_config.max_new_tokens if limit is None else limit)
        for name in kwargs.keys() - OF_REQUESTS - self.logit_processor.supported_keys.keys():
            raise InputError(OPTION.format(name=name, value=kwargs[name]))
        self._refuse_stopped()
        return super().add_request(input_ids, *args, **kwargs)

    def _refuse_stopped(self) -> None:
        status = self.background_thread_status
        if status.fatal_error is not None:
            raise StateError(STOPPED.format(reason=status.fatal_error)) from status.fatal_error
        if (reason := status.can_accept_new_requests()) is not None:
            raise StateError(STOPPED.format(reason=reason))

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """Return a result; see the engine's own.

        Raises:
            StateError: there will be none, for the loop ended by an error.
        """
        result = super().get_result(request_id, timeout)
        status = self.background_thread_status
        if result is None and status.fatal_error is not None and self.output_router.output_queue.empty():
            raise StateError(STOPPED.format(reason=status.fatal_error)) from status.fatal_error
        return result

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        status = self.background_thread_status
        status.request_stop(status.HARD_STOP, self.distributed_helper.global_rank)
        status.record_fatal_error(error)
        self._fail_all_remaining_requests(error, batch_processor)
        with contextlib.suppress(type(error)), self.module._calls.turn("continuous batching"):
            raise error  # so that ranks that go on hear of it


def pages_for(module: Any, config: Any, options: Any) -> RankPages:
    """The engine's cache with this rank's pools, and the program of any batch made: its layouts say what a rank holds.

    Args:
        module: the sharded module. config: of its text model. options: the engine's, resolved; not changed.
    """
    keeps, dtype, ranks = module._supports_logits_to_keep(), module.dtype, module._source.ranks
    one = RankPages(config, with_size(copy.copy(options), options.max_requests_per_batch, 1), dtype, keeps)
    own = sized(config, options, one, _begin(module, config, one, keeps), keeps)
    tokens, sectors = (min(each) for each in zip(*from_all(ranks, own, "sizes of the pools"), strict=True))
    blocks = blocks_of(config, one, sectors)
    pages = RankPages(config, with_size(copy.copy(options), tokens, blocks), dtype, keeps)
    _fill(module, config, pages, memory=True)
    return pages


def _begin(module: Any, config: Any, pages: RankPages, keeps: bool) -> float:
    """Make the program of any batch; bytes of this rank's pools, as a part of those that the engine counts. Collective.

    Raises:
        StateError: the model does not keep all that it needs in the cache that it is given.
    """
    _fill(module, config, pages, memory=False)
    with torch.no_grad():
        batch = example(pages, keeps, module._shards.device)
        program, _ = program_of(module, module._arguments((), batch, ""))
    names = [_state(i, side) for i in range(config.num_hidden_layers) for side in SIDES]
    results = {program.capture.becomes(position) for position in program.capture.mutations}
    refuse_unused(module._calls.name, {*names} - results)
    _fill(module, config, pages, memory=False)
    pools = [getattr(layer, side) for layer in pages.carrier.layers for side in SIDES]
    one: Any = next(iter(pages.cache_allocators.values()))
    return sum(x.shape[1] * x.shape[3] for x in pools) / (len(pools) * one.num_key_value_heads * one.head_dim)


def _state(layer: int, side: str) -> str:
    """The name of the state that a pool is, as that of an ordinary cache: both lie in one layout."""
    return f"past_key_values.layers.{layer}.{side}"


def _fill(module: Any, config: Any, pages: RankPages, memory: bool) -> None:
    """Make this rank's pools, whole ones where nothing is known of how they lie; without `memory` of one number."""
    sizes = _cached_sizes(module)
    if len(sizes) != config.num_hidden_layers:
        raise StateError(UNKEPT.format(model=module._calls.name, count=len(sizes), layers=config.num_hidden_layers))

    def pool(layer: int, side: str, places: int) -> torch.Tensor:
        heads, size = sizes[layer][side]
        shape, cut = [1, heads, places, size], module._carriers.cut(_state(layer, side))
        if cut is not None:
            shape[cut.dim] = max(cut.mine, 1)
        if not memory or (cut is not None and not cut.mine):  # as `Carriers` has an empty part
            return torch.zeros((), dtype=module.dtype, device=module._shards.device).expand(shape)
        return torch.zeros(shape, dtype=module.dtype, device=module._shards.device)

    pages.fill(config, pool)


def _cached_sizes(module: Any) -> list[dict[str, tuple[int, int]]]:
    """Heads of each layer's keys and values, and their sizes: what the model itself puts into a cache."""
    bare = skeleton(module._source.bare, module._shards.device, dtypes(module._shards))
    ids = torch.ones(1, 2, dtype=torch.int64, device=module._shards.device)
    with compat.mode_of([*bare.parameters()]), torch.no_grad():
        cache: Any = bare(input_ids=ids, use_cache=True).past_key_values
    sizes = []
    for layer in getattr(cache, "layers", ()):
        pair = {side: getattr(layer, side, None) for side in SIDES}
        if all(isinstance(x, torch.Tensor) and x.ndim == DIMENSIONS for x in pair.values()):
            sizes.append({side: (x.shape[1], x.shape[3]) for side, x in pair.items()})  # type: ignore[union-attr]
    return sizes


def manager_of(module: Any, generation: Any, options: Any, hints: Any) -> Manager:
    """Make a manager. Collective.

    Args:
        module: the sharded module. generation, options, hints: as transformers has them; None for defaults.

    Raises:
        StateError: an option that the engine would not follow, a model that it cannot serve, or axes beside tp.
        RankError: the ranks pass other options.
    """
    generation = copy.deepcopy(generation if generation is not None else module.generation_config)
    options = copy.deepcopy(options) if options is not None else ContinuousBatchingConfig()
    texts = {"generation_config": str(generation.to_dict()), "continuous_batching_config": str(options)}
    module._calls.agree("init_continuous_batching()", texts)
    refuse(module, generation, options)
    options.auto_switch_to_flash = False
    if generation.eos_token_id is None:
        generation.eos_token_id = -1
    try:
        return Manager(module, generation, options, hints)
    except AutoTPError:
        raise
    except (ValueError, AttributeError, KeyError) as error:  # as of a kind of layer that the engine does not know
        raise StateError(f"continuous batching of {module._calls.name}: {error}") from error


def refuse(module: Any, generation: Any, options: Any) -> None:
    """Refuse what the engine would do without saying so, or cannot do.

    Args:
        module: the sharded module. generation, options: what is asked.

    Raises:
        StateError: it names the option.
    """
    # Ranks of these axes run other calls, or parts of one.
    axis, source = module._shards.axis, module._source
    axes = {"dp": axis.size > 1, "cp": axis.cp > 1, "stages": source.pipeline, "tp_invariant": source.hosts}
    if beside := [name for name, there in axes.items() if there]:
        raise StateError(AXES.format(axes=", ".join(beside)))
    # A forward that takes them among `**kwargs` may not read them.
    for name in ("position_ids", "past_key_values"):
        if name not in module._carriers.names:
            raise StateError(POSITIONS.format(model=module._calls.name, name=name))
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in generation.to_dict().items():
        neutral = (None, True) if name == "use_cache" else (None, False, defaults.get(name))
        # The engine reads few options, and says nothing of the others.
        if name not in FOLLOWED and not name.startswith("_") and value not in neutral:
            raise StateError(OPTION.format(name=name, value=value))
    for name, neutral in UNSUPPORTED.items():
        if (value := getattr(options, name, neutral[0])) not in neutral:
            raise StateError(COMPILED.format(name=name, value=value))
    if options.scheduler_type not in SCHEDULER_MAPPING:
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
    errors = [(name, x.error) for name, x in results.items() if x.error is not None]
    if count := len(errors) + total - len(results):
        name, error = errors[0] if errors else ("without a result", "the loop ended")
        raise StateError(FAILED.format(count=count, all=total, name=name, error=error))
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
