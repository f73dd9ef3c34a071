"""Attention of a part of a sequence's queries: of new tokens over a cache, and of a rank's queries over all keys.

Python functions, not operators of torch's registry: what they call is torch's attention, an eager step calls them in
every layer, and Dynamo traces them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from autotp.ir import windows
from autotp.ir.specs import Runs


def attention_mask(
    new: int, length: int, position: Tensor | None, padding: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """Make the mask that says which cached tokens new ones attend to.

    Args:
        new: how many tokens are new. length: of the cache with them.
        position: of the first new one, a tensor of one element; None where the new ones are the last of the cache.
        padding: [batch, at least length], zero at tokens that nobody attends to.
        window: how many tokens each attends to, itself one of them.
        device: of the result.

    Returns:
        Booleans [new, length], with `padding` [batch, 1, new, length]; of one for all new tokens where it can be.
    """
    unpadded = None if padding is None else padding[:, None, None, :length] != 0
    if unpadded is not None and position is None and window is None and new == 1:
        return unpadded
    keys = torch.arange(length, device=device)
    queries = (torch.arange(new, device=device) + (length - new if position is None else position))[:, None]
    near = keys <= queries
    if window is not None:
        near = near & (keys > queries - window)
    return near if unpadded is None else unpadded & near


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute attention, every head of keys and values read by its group of the query's heads.

    Args:
        q: [batch, heads, new, size]. keys, values: [batch, heads or a divisor of that, length, size].
        mask: as torch takes it. scale: of the products; None for 1 / sqrt(size).

    Returns:
        [batch, heads, new, size of the values].
    """
    groups = q.shape[1] != keys.shape[1]
    if groups and mask is not None and q.is_cuda:  # no fused kernel there takes both: torch would go through matmuls
        count = q.shape[1] // keys.shape[1]
        keys, values, groups = keys.repeat_interleave(count, 1), values.repeat_interleave(count, 1), False
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=groups)


def cached_attention(
    q: Tensor, past_keys: Tensor, past_values: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute attention over a past and new tokens.

    Args:
        q: [batch, heads, new, size]. past_keys, past_values: [batch, own heads, past, size].
        keys, values: of the new tokens [batch, own heads, new, size]. mask, scale: as `attend` takes them.

    Returns:
        The attention, and all keys and values [batch, own heads, past + new, size].
    """
    keys, values = torch.cat((past_keys, keys), 2), torch.cat((past_values, values), 2)
    return attend(q, keys, values, mask, scale), keys, values


def dealt_attention(
    q: Tensor, keys: Tensor, values: Tensor, runs: Runs, scale: float | None, *, rank: int, tp: int
) -> Tensor:
    """Compute causal attention of a rank's queries, run by run: keys after a run's last query are not read.

    Args:
        q: [batch, heads, own, size], in the order of `runs`.
        keys, values: [batch, heads or a divisor of that, length, size], of the whole sequence.
        runs: distribution of the sequence over the ranks, in shares of equal length.
        scale: of the products; None for 1 / sqrt(size).
        rank: of this process on the axis, of `tp` ranks.

    Returns:
        [batch, heads, own, size of the values].
    """
    lengths = windows.lengths(runs.segments)
    shares = windows.shares(runs.segments, rank, tp)
    parts, at, mine = [], 0, 0
    for _ in range(runs.repeat):
        for whole, (start, length) in zip(lengths, shares, strict=True):
            end = at + start + length
            parts.append(_last(q.narrow(-2, mine, length), keys.narrow(-2, 0, end), values.narrow(-2, 0, end), scale))
            at, mine = at + whole, mine + length
    # In memory heads are contiguous within tokens, as torch's attention leaves them: joining them is no further copy.
    return torch.cat([part.transpose(-2, -3) for part in parts], -3).transpose(-2, -3)


def _last(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Compute attention of the last tokens of a sequence, as decoding does over a cache."""
    new, length = q.shape[-2], keys.shape[-2]
    if q.is_cuda and new != length:  # a fused kernel has the mask in its indices
        grouped = q.shape[1] != keys.shape[1]
        mask = causal_lower_right(new, length)
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=grouped)
    return attend(q, keys, values, attention_mask(new, length, None, None, None, q.device), scale)
