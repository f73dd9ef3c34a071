"""The paged cache of transformers' continuous batching, as an object that a sharded module's calls carry.

The engine's cache stays what it is for its scheduler: pages of one memory, and for every batch the places that are
written and read. Its memory is on the meta device. What is kept is this rank's, in one pool of keys and one of values
for each layer, [1, own heads, places, size]; the model is given an ordinary cache whose layers write and read there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator
from transformers.generation.continuous_batching.distributed import DistributedHelper

from autotp.errors import InputError, StateError

# Arguments that the engine passes to a forward: what is handed on, and what says the same in other words.
HANDED_ON = ("input_ids", "position_ids", "logits_to_keep")
READ = {"attention_mask", "read_index", "write_index", "block_table", "cache"}
SAID_OTHERWISE = {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_indices", "logits_processor_args",
    "use_cache", "is_causal",
}  # fmt: skip
UNKNOWN = (
    "a batch of transformers' continuous batching brings {names}, which a sharded module does not know: this version "
    "of transformers passes more than the one that this was written for."
)
FLASH = (
    "a batch without {name} is one for flash attention's own paged kernels. A sharded module computes attention as it "
    "was captured: pass auto_switch_to_flash=False, and max_blocks_per_request=0."
)
UNUSED = (
    "{model} does not keep {names} in the cache that it is given as past_key_values, so continuous batching would lose "
    "what earlier tokens left. Take sharded.generate(...)."
)
ALL_MEMORY = 10**6  # as a share of it: sizes were agreed on before
EXAMPLE_LENGTHS = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)  # unlike sizes are unlike symbols
EXAMPLE_REQUESTS = 3


class PagedLayer(CacheLayerMixin):
    """The pools of one layer.

    Attributes:
        keys, values: [1, heads, places, size]. group: of layers that are read at the same places.
        windowed: whether new tokens may be written over what they read.
    """

    is_compileable, is_initialized, is_sliding = False, True, False

    def __init__(self, keys: Tensor, values: Tensor, group: int, windowed: bool) -> None:
        self.keys, self.values, self.group, self.windowed = keys, values, group, windowed

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pools are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: which places are written and read is known to the cache."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of masks that a model would make itself."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are passed."""
        return 0

    def get_max_length(self) -> int:
        """Return -1, for no limit."""
        return -1


class PagedCache(Cache):
    """Cache that a model is given in a batch: pools by layer, and the places of this batch by group of layers.

    Attributes:
        layers: the pools. reads, writes: places that are read, in the order of the mask's keys, and written, in that of
            the new tokens. news: of a windowed group where among what is read the new tokens are; else None.
    """

    layer_class_to_replicate, offloading = None, False

    def __init__(self, layers: list[PagedLayer]) -> None:
        self.layers: list[Any] = layers
        self.reads: list[Tensor] = []
        self.writes: list[Tensor] = []
        self.news: list[Tensor | None] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values, and return all that the batch reads, [1, heads, read, size]."""
        layer = self.layers[layer_idx]
        places = self.reads[layer.group], self.writes[layer.group], self.news[layer.group]
        return _update(layer.keys, key_states, *places), _update(layer.values, value_states, *places)


def _update(pool: Tensor, states: Tensor, read: Tensor, write: Tensor, new: Tensor | None) -> Tensor:
    if new is None:
        pool.index_copy_(2, write, states)
        return pool.index_select(2, read)
    # In a ring a new token lies where one lay that this batch still reads.
    every = pool.index_select(2, read).index_copy(2, new, states)
    pool.index_copy_(2, write, states)
    return every


class RankPages(PagedAttentionCache):
    """The engine's cache with pools of one rank in the place of its memory.

    Attributes:
        carrier: what a model is given. places: how many each group of layers has.
    """

    def __init__(self, config: Any, options: Any, dtype: torch.dtype, keeps: bool) -> None:
        whole = DistributedHelper(None, None)  # all heads, as without ranks: schedules are then the same
        super().__init__(config, options, "meta", whole, dtype=dtype, model_supports_logits_to_keep=keeps)
        self.places: list[int] = []
        for allocator in self.cache_allocators.values():
            blocks = allocator.num_blocks + 2 * allocator.blocks_per_sector
            self.places.append(blocks * allocator.tokens_per_page)

    def fill(self, config: Any, make: Any) -> None:
        """Make the pools.

        Args:
            config: of the model. make: gives a pool by layer, "keys" or "values", and how many places it has.
        """
        layers = []
        for i in range(config.num_hidden_layers):
            allocator: Any = self.layer_to_allocator[i]
            places = self.places[allocator.index]
            keys, values = make(i, "keys", places), make(i, "values", places)
            layers.append(PagedLayer(keys, values, allocator.index, _windowed(allocator)))
        self.carrier = PagedCache(layers)

    def perform_cache_copy(self, copy_src_and_dst: Mapping[str, tuple[list[int], list[int]]]) -> None:
        """Copy blocks of a request for another that goes on from it."""
        for name, (source, target) in copy_src_and_dst.items():
            allocator: Any = self.cache_allocators[name]
            for i in allocator.layer_indices if source else ():
                for pool in (self.carrier.layers[i].keys, self.carrier.layers[i].values):
                    if pool.stride(1) or pool.stride(2):  # else it stands for the part of a rank that has no head
                        pages = pool.unflatten(2, (-1, allocator.tokens_per_page))
                        pages[:, :, target] = pages[:, :, source]

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a forward for those of one batch.

        Args:
            batch: what the engine passes.

        Raises:
            InputError: it passes something that would be ignored, or that is for other kernels.
        """
        unknown = sorted(batch.keys() - {*HANDED_ON} - READ - SAID_OTHERWISE)
        if unknown:
            raise InputError(UNKNOWN.format(names=", ".join(unknown)))
        if batch["attention_mask"] is None or batch["block_table"] is not None:
            raise InputError(FLASH.format(name="a mask" if batch["attention_mask"] is None else "places to read"))
        keywords = {name: batch[name] for name in HANDED_ON if name in batch}
        # A forward may do something else for one token: a second one, which nobody reads, spares that program.
        one = batch["input_ids"].shape[1] == 1
        if one:
            keywords |= {n: batch[n].repeat(1, 2) for n in ("input_ids", "position_ids")}
        all_masks, masks = batch["attention_mask"], {}
        carrier = self.carrier
        carrier.reads, carrier.writes, carrier.news = [], [], []
        for i, (kind, allocator) in enumerate(self.cache_allocators.items()):
            own = all_masks[kind] if isinstance(all_masks, Mapping) else all_masks
            read, write, new, masks[kind] = _places(
                allocator, batch["read_index"][i], batch["write_index"][i], own, one
            )
            carrier.reads.append(read)
            carrier.writes.append(write)
            carrier.news.append(new)
        return _call(keywords, masks, carrier)


def _places(
    allocator: Any, read: Tensor, write: Tensor, mask: Tensor, one: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Places of one group of layers in its pools, and its mask; with a second token after `one` alone."""
    windowed = _windowed(allocator)
    if one:
        write = torch.cat((write, write.new_full((1,), allocator.write_trash_index)))
        mask = mask.expand(-1, -1, 2, -1)
    if not windowed:
        # Nothing was there before: what is read is what is written.
        read = read if read.numel() else write[: mask.shape[3]]
        return _slots(allocator, read), _slots(allocator, write), None, mask
    if not read.numel():
        read = read.new_full((mask.shape[3],), allocator.sentinel_index)
    if one:
        read = torch.cat((read, read.new_full((1,), allocator.sentinel_index)))
        mask = torch.cat((mask, mask.new_full((1, 1, 2, 1), torch.finfo(mask.dtype).min)), 3)
    new = (read == allocator.sentinel_index).nonzero().flatten()
    return _slots(allocator, read), _slots(allocator, write), new, mask


def _windowed(allocator: Any) -> bool:
    return isinstance(allocator, SlidingAttentionCacheAllocator)


def _slots(allocator: Any, index: Tensor) -> Tensor:
    """Places in a pool of one layer's keys or values for rows of the engine's memory, which holds those of a block of
    all layers one after another."""
    stride = allocator.block_physical_stride
    return torch.div(index, stride, rounding_mode="floor") * allocator.tokens_per_page + index % stride


def example(pages: RankPages, keeps: bool, device: torch.device) -> dict[str, Any]:
    """Arguments of a forward by which any batch is captured: all of its sizes differ.

    Args:
        pages: with pools of whole shapes. keeps: whether logits are asked for some tokens alone.
        device: of the tensors.
    """
    lengths = iter(n for n in EXAMPLE_LENGTHS if n not in pages.places)
    new, masks, carrier = next(lengths), {}, pages.carrier
    dtype = carrier.layers[0].keys.dtype
    carrier.reads, carrier.writes, carrier.news = [], [], []
    for kind, allocator in pages.cache_allocators.items():
        length = next(lengths)
        carrier.reads.append(torch.arange(length, device=device))
        carrier.writes.append(torch.arange(new, device=device))
        carrier.news.append(torch.arange(new, device=device) if _windowed(allocator) else None)
        masks[kind] = torch.zeros(1, 1, new, length, dtype=dtype, device=device)
    tokens = torch.arange(new, dtype=torch.int32, device=device)[None]
    some = {"logits_to_keep": tokens[0, :EXAMPLE_REQUESTS].clone()} if keeps else {}
    return _call({"input_ids": tokens, "position_ids": tokens.clone(), **some}, masks, carrier)


def _call(keywords: Mapping[str, Any], masks: Mapping[str, Tensor], carrier: PagedCache) -> dict[str, Any]:
    """The arguments of a forward, always in one order; a mask by kind of layer where there are several."""
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    return {**keywords, "attention_mask": mask, "past_key_values": carrier, "use_cache": True}


def refuse_unused(model: str, unused: Collection[str]) -> None:
    """Refuse a model that does not write to all pools.

    Args:
        model: its name. unused: pools that a batch leaves as they were.

    Raises:
        StateError: with those that it leaves.
    """
    if unused:
        raise StateError(UNUSED.format(model=model, names=", ".join(sorted(unused)[:4])))


def sized(config: Any, options: Any, pages: RankPages, part: float, keeps: bool) -> tuple[int, int]:
    """Tokens in a batch at most, and sectors of the pools, that this rank has memory for.

    Args:
        config: of the text model. options: resolved. pages: of any size, for what is the same in all.
        part: of a layer's heads that a rank has. keeps: whether logits are asked for some tokens alone.

    Raises:
        StateError: there is not enough memory.
    """
    part *= len(pages.cache_allocators)  # each kind of layer has pools of its own
    handler = PagedAttentionMemoryHandler(
        config, options, pages.dtype, int(pages.bytes_per_sector * part), pages.tokens_per_sector,
        _block_bytes(config, pages), list(pages.cache_allocators), keeps,
    )  # fmt: skip
    try:
        if options.num_blocks is None:
            return handler.infer_max_batch_tokens_and_num_sectors()
        tokens = options.max_batch_tokens or handler._default_max_batch_tokens
        blocks = options.num_blocks * _block_bytes(config, pages)
        return handler._check_footprint(tokens, max(1, -(-blocks // pages.bytes_per_sector)))
    except (MemoryError, ValueError) as error:
        raise StateError(f"continuous batching: {error}. Pass a smaller num_blocks or max_batch_tokens.") from None


def _block_bytes(config: Any, pages: RankPages) -> int:
    """Bytes of one page of all layers, with all heads."""
    one: Any = next(iter(pages.cache_allocators.values()))
    return config.num_hidden_layers * one.bytes_per_page


def with_size(options: Any, tokens: int, blocks: Any) -> Any:
    """Set options so that a cache has these sizes, whatever memory there is."""
    options.max_batch_tokens, options.num_blocks, options.max_memory_percent = tokens, blocks, ALL_MEMORY
    return options


def blocks_of(config: Any, pages: RankPages, sectors: int) -> Fraction:
    """Blocks that these sectors are, exactly."""
    return Fraction(sectors * pages.bytes_per_sector, _block_bytes(config, pages))
