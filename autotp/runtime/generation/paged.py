"""The paged cache of transformers' continuous batching, as an object that a sharded module's calls carry.

The engine's cache stays for its scheduler: pages of one memory, and for every batch the places that are written and
read. Its memory is on the meta device. The values are this rank's, in one pool of keys and one of values for each
layer, [1, local heads, places, size]; the model is given an ordinary cache whose layers write and read there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator
from transformers.generation.continuous_batching.distributed import DistributedHelper

from autotp.errors import InputError

# Arguments that the engine passes to a forward: those that are handed on, and those that say the same in other words.
HANDED_ON = ("input_ids", "position_ids", "logits_to_keep")
SAID_OTHERWISE = {
    "attention_mask", "read_index", "write_index", "block_table", "cache", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "logits_indices", "logits_processor_args", "use_cache", "is_causal",
}  # fmt: skip
UNKNOWN = (
    "a batch of transformers' continuous batching brings {names}, which a sharded module does not know: this version "
    "of transformers passes more than the one that this was written for."
)
EXAMPLE_LENGTHS = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)  # unlike sizes are unlike symbols
EXAMPLE_REQUESTS = 3
SIDES = ("keys", "values")  # of a layer's part of a cache


def name_of(layer: int, side: str) -> str:
    """Return the name of a pool's state, as that of an ordinary cache: both have one layout."""
    return f"past_key_values.layers.{layer}.{side}"


class PagedLayer(DynamicLayer):
    """The pools of one layer.

    Attributes:
        keys, values: [1, heads, places, size]. group: of layers that are read at the same places.
        windowed: whether new tokens may be written over what they read.
    """

    is_initialized = True

    def __init__(self, keys: Tensor, values: Tensor, group: int, windowed: bool) -> None:
        self.keys, self.values, self.group, self.windowed = keys, values, group, windowed

    def get_seq_length(self) -> int:
        """Return 0: positions are passed, and which places are written and read is known to the cache."""
        return 0


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
    # In a ring a new token is written over one that this batch still reads.
    every = pool.index_select(2, read).index_copy(2, new, states)
    pool.index_copy_(2, write, states)
    return every


class RankPages(PagedAttentionCache):
    """The engine's cache with pools of one rank in the place of its memory.

    Attributes:
        carrier: the cache that a model is given. places: how many each group of layers has.
    """

    carrier: PagedCache

    def __init__(self, config: Any, options: Any, dtype: torch.dtype, keeps: bool) -> None:
        super().__init__(config, options, "meta", DistributedHelper(None, None), dtype, keeps)
        allocators: Any = self.cache_allocators.values()
        self.places = [(x.num_blocks + 2 * x.blocks_per_sector) * x.tokens_per_page for x in allocators]

    def fill(self, pool: Callable[[str, int], Tensor]) -> None:
        """Make the pools: `pool` gives one by the name of its state and how many places it has."""
        layers = []
        for i, x in sorted(self.layer_to_allocator.items()):
            keys, values = (pool(name_of(i, side), self.places[x.index]) for side in SIDES)
            layers.append(PagedLayer(keys, values, x.index, _windowed(x)))
        self.carrier = PagedCache(layers)

    def perform_cache_copy(self, copy_src_and_dst: Mapping[str, tuple[list[int], list[int]]]) -> None:
        """Copy blocks of a request for another that goes on from it."""
        for name, (source, target) in copy_src_and_dst.items():
            allocator: Any = self.cache_allocators[name]
            for i in allocator.layer_indices:
                for pool in (self.carrier.layers[i].keys, self.carrier.layers[i].values):
                    if pool.stride(2):  # else it stands for the part of a rank that has no head
                        pages = pool.unflatten(2, (-1, allocator.tokens_per_page))
                        pages[:, :, target] = pages[:, :, source]

    def arguments(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the keyword arguments of a forward for those of one batch, and their tensors without the pools.

        Args:
            batch: arguments of the engine.

        Raises:
            InputError: it passes something that would be ignored.
        """
        unknown = sorted(batch.keys() - {*HANDED_ON} - SAID_OTHERWISE)
        if unknown:
            raise InputError(UNKNOWN.format(names=", ".join(unknown)))
        keywords = {name: batch[name] for name in HANDED_ON if name in batch}
        # A forward may do something else for one token: a second one, which nobody reads, spares that program.
        one = batch["input_ids"].shape[1] == 1
        if one:
            keywords |= {n: batch[n].repeat(1, 2) for n in ("input_ids", "position_ids")}
        masks = batch["attention_mask"]
        masks = masks if isinstance(masks, Mapping) else {next(iter(self.cache_allocators)): masks}
        indices = zip(self.cache_allocators.values(), batch["read_index"], batch["write_index"], strict=True)
        places = [_places(x, read, write, masks[x.layer_type], one) for x, read, write in indices]
        carrier = self.carrier
        carrier.reads, carrier.writes, carrier.news, group_masks = map(list, zip(*places, strict=True))
        # Always in one order; a mask by kind of layer where there are several.
        mask = dict(zip(self.cache_allocators, group_masks, strict=True)) if len(group_masks) > 1 else group_masks[0]
        news = [x for x in carrier.news if x is not None]
        tensors = [*keywords.values(), *group_masks, *carrier.reads, *carrier.writes, *news]
        return {**keywords, "attention_mask": mask, "past_key_values": carrier, "use_cache": True}, tensors


def _places(
    allocator: Any, read: Tensor, write: Tensor, mask: Tensor, one: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the places of one group of layers in its pools, and its mask; with a second token after `one` alone."""
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
    """Return the places in a pool of one layer for rows of the engine's memory, which holds a block of all layers one
    after another."""
    stride = allocator.block_physical_stride
    blocks = torch.div(index, stride, rounding_mode="floor")
    return torch.sub(index, blocks, alpha=stride - allocator.tokens_per_page)


def example(pages: RankPages, keeps: bool, device: torch.device) -> dict[str, Any]:
    """Return arguments of a forward by which any batch is captured: all of its sizes differ.

    Args:
        pages: with pools of whole shapes. keeps: whether logits are asked for some tokens alone.
        device: of the tensors.
    """
    lengths = iter(n for n in EXAMPLE_LENGTHS if n not in pages.places)
    tokens = torch.arange(next(lengths), dtype=torch.int32, device=device)
    masks, reads = {}, []
    for kind, allocator in pages.cache_allocators.items():
        read = torch.arange(next(lengths), device=device)
        masks[kind] = torch.zeros(1, 1, len(tokens), len(read), dtype=pages.dtype, device=device)
        reads.append(read.masked_fill(read < len(tokens), allocator.sentinel_index) if _windowed(allocator) else read)
    batch: dict[str, Any] = {"input_ids": tokens[None], "position_ids": tokens[None].clone(), "attention_mask": masks}
    batch |= {"read_index": reads, "write_index": [tokens.long()] * len(reads), "block_table": None}
    return pages.arguments(batch | ({"logits_to_keep": tokens[:EXAMPLE_REQUESTS].clone()} if keeps else {}))[0]
