"""Causal attention of queries that are slices of a sequence, over all keys and values.

A Python function, not an operator of torch's registry: what it calls is torch's attention, whose kernels skip what a
causal mask hides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from autotp.ir import windows
from autotp.ir.runs import Runs

from .cached_attention import attend, attention_mask


def dealt_attention(
    q: Tensor, keys: Tensor, values: Tensor, runs: Runs, scale: float | None, *, rank: int, tp: int
) -> Tensor:
    """Causal attention of a rank's queries, run by run: keys after a run's last query are not read.

    Args:
        q: [batch, heads, own, size], in the order of `runs`.
        keys, values: [batch, heads or a divisor of that, length, size], of the whole sequence.
        runs: how the sequence is dealt, as many elements to each rank.
        scale: of the products; None for 1 / sqrt(size).
        rank: of this process on the axis, of `tp` ranks.

    Returns:
        [batch, heads, own, size of the values].
    """
    lengths = windows.lengths(runs.segments)
    own = windows.shares(runs.segments, rank, tp)
    parts, at, mine = [], 0, 0
    for _ in range(runs.repeat):
        for whole, (start, length) in zip(lengths, own, strict=True):
            end = at + start + length
            parts.append(_last(q.narrow(-2, mine, length), keys.narrow(-2, 0, end), values.narrow(-2, 0, end), scale))
            at, mine = at + whole, mine + length
    # In memory heads lie within tokens, as torch's attention leaves them: joining them is no further copy.
    return torch.cat([part.transpose(-2, -3) for part in parts], -3).transpose(-2, -3)


def _last(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attention of the last tokens of a sequence: what decoding computes over a cache."""
    new, length = q.shape[-2], keys.shape[-2]
    if q.is_cuda and new != length:  # a fused kernel has the mask in its indices
        grouped = q.shape[1] != keys.shape[1]
        mask = causal_lower_right(new, length)
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=grouped)
    return attend(q, keys, values, attention_mask(new, length, None, None, None, q.device), scale)
