"""Causal attention of a rank's queries over all keys is that rank's rows of the whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from autotp.ir.layouts import Partition, Shard
from autotp.ir.partitions import Segment
from autotp.kernels.attention import dealt_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]  # "@pytest.mark.cuda" is how `make gpu` finds this file
RANKS = 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [4, 2])
def test_runs_of_queries_are_rows_of_the_whole(device, heads):
    dtype, close = (torch.float64, 1e-12) if device == "cpu" else (torch.bfloat16, 3e-2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 48, 16, device=device, dtype=dtype).requires_grad_() for n in (4, heads, heads))
    whole = attention(q, k, v, is_causal=True, enable_gqa=heads != 4)
    gradients = torch.autograd.grad(whole.square().sum(), (q, k, v))
    for segments in ([Segment(48)], [Segment(24), Segment(24, deal=True)]):
        layout = Shard(2, Partition.of(segments, 1, RANKS))
        spec, runs = layout.to_runtime(), layout.partition.to_runtime(int)
        parts = [dealt_attention(x, k, v, runs, None, rank=r, tp=RANKS) for r, x in enumerate(spec.split(q, RANKS))]
        torch.testing.assert_close(spec.recombine(parts), whole, atol=close, rtol=close)
        found = torch.autograd.grad(sum(part.square().sum() for part in parts), (q, k, v))  # type: ignore[arg-type]
        for one, wanted in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, wanted, atol=4 * close, rtol=close)


def test_two_chunks_are_the_same_work_on_every_rank():
    """Pairs of queries and keys; of one chunk each the last rank has five times the work of the first."""
    for segments, even in (([Segment(48)], False), ([Segment(24), Segment(24, deal=True)], True)):
        dealt = Partition.of(segments, 1, RANKS)
        work = [sum(at + 1 for a, n in dealt.spans(r, RANKS) for at in range(a, a + n)) for r in range(RANKS)]
        assert (max(work) - min(work) == 0) == even, work
