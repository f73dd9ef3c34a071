"""`Plan.transfer` and the schedule below it, for random pairs of layouts: fewest bytes, shared evenly, and right."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import autotp
from autotp.errors import InputError
from autotp.ir.layouts import I, Partition, Segment, Shard
from autotp.plans.pieces import Block, Pieces
from autotp.plans.transfers import Spread, Transfer, transfer

BUCKET = 4096
PAIRS = 200


# ---- random layouts -------------------------------------------------------------------------------------------------


def _plain(draw: random.Random) -> Any:
    """A matrix, split on either side, whose sizes need not divide."""
    shape = draw.choice([(24, 40), (25, 17), (64, 33), (7, 96)])
    return shape, 4, lambda tp: Shard(d := draw.randrange(2), Partition.plain(shape[d], tp))


def _heads(draw: random.Random) -> Any:
    """Whole heads, as many as there are, on ranks that need not divide them: some have none."""
    heads = draw.choice([2, 3, 6, 8])
    return (heads * 4, 32), 2, lambda tp: Shard(0, Partition.of([Segment(heads, 4)], 1, tp))


def _fused(draw: random.Random) -> Any:
    """q beside fewer k and v heads, in one weight."""
    segments = [Segment(8, 4), Segment(draw.choice([2, 4]), 4), Segment(2, 4)]
    return (sum(int(s.length) for s in segments), 24), 4, lambda tp: Shard(0, Partition.of(segments, 1, tp))


def _repeated(draw: random.Random) -> Any:
    """Three runs of heads, and more runs than a parameter has pieces."""
    times = draw.choice([3, 20])
    return (times * 16, 12), 4, lambda tp: Shard(0, Partition.of([Segment(4, 4)], times, tp))


def _experts(draw: random.Random) -> Any:
    """Experts in one tensor, by expert or within each."""
    shape = (6, 16, 20)
    return shape, 2, lambda tp: Shard(d := draw.randrange(3), Partition.plain(shape[d], tp))


def _small(draw: random.Random) -> Any:
    """A scalar, a bias, a norm: whole on every rank."""
    return draw.choice([(), (13,), (64,)]), 8, lambda tp: I


KINDS = (_plain, _heads, _fused, _repeated, _experts, _small)


def _held(draw: random.Random, shape: Any, layout: Any, ranks: list[int], tp: int, spread: bool) -> dict[int, Any]:
    """Rank -> its blocks, on some ranks as dp x tp."""
    pieces, beside = Pieces(shape, layout(tp), tp), len(ranks) // tp
    own = {}
    for i, rank in enumerate(ranks):
        own[rank] = pieces.blocks(i % tp, (i // tp, beside) if spread else (0, 1))
    return own


def _mesh(draw: random.Random, first: int) -> tuple[list[int], int, bool]:
    beside, tp = draw.choice([(1, 1), (1, 2), (1, 4), (2, 2), (1, 3), (2, 1), (3, 2), (1, 8), (4, 2)])
    return list(range(first, first + beside * tp)), tp, draw.random() < 0.3


def _case(seed: int) -> dict[str, Spread]:
    """Tensors of a model before and after: the same ranks, overlapping or disjoint ones, with stages or without."""
    draw = random.Random(seed)
    sides = [_mesh(draw, 0), _mesh(draw, draw.choice([0, 0, 1, 2, 8]))]
    stages = [draw.choice([1, 1, 2]) if len(ranks) % (2 * tp) == 0 else 1 for ranks, tp, _ in sides]
    tensors = {}
    for i in range(8):
        shape, itemsize, layout = draw.choice(KINDS)(draw)
        held = []
        for (ranks, tp, spread), pp in zip(sides, stages, strict=True):
            place = draw.randrange(pp)  # the stage that holds it
            own = ranks[place * len(ranks) // pp : (place + 1) * len(ranks) // pp]
            held.append(_held(draw, shape, layout, own, tp, spread))
        tensors[f"w{i}"] = Spread(shape, itemsize, *held)
        if i % 3 == 0 and shape:  # of a quantised weight: a scale for each row, whole, or dealt as these are
            scale = (shape[0],)
            scales = [{r: [Block.whole(scale)] for r in own} for own in held]
            tensors[f"w{i}.scale"] = Spread(scale, 4, *scales)
    kv = {r: [Block((r % 2 * 8, 0), (8, 16))] for r in sides[0][0]}  # a kv head on several ranks
    kv |= {sides[0][0][-1]: [Block.whole((16, 16))]}
    tensors["kv"] = Spread((16, 16), 2, kv, {r: [Block.whole((16, 16))] for r in sides[1][0]})
    return tensors


# ---- the judge ------------------------------------------------------------------------------------------------------


def _mask(shape: Any, blocks: Any) -> np.ndarray:
    mask = np.zeros(shape, dtype=int)
    for offset, size in blocks:
        mask[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    return mask


def lower_bounds(tensors: dict[str, Spread]) -> tuple[int, float]:
    """Bytes that ranks lack, and the least that the busiest has to send: element by element."""
    lacking, classes = 0, {}
    for x in tensors.values():
        have = {r: _mask(x.shape, blocks) > 0 for r, blocks in x.have.items()}
        bits = sum((m.astype(np.int64) << r for r, m in have.items()), start=np.zeros(x.shape, np.int64))
        for r, blocks in x.need.items():
            lacks = (_mask(x.shape, blocks) > 0) & ~have.get(r, np.zeros(x.shape, bool))
            lacking += int(lacks.sum()) * x.itemsize
            for bit, n in zip(*np.unique(bits[lacks], return_counts=True), strict=True):
                classes[int(bit)] = classes.get(int(bit), 0) + int(n) * x.itemsize
    return lacking, _least(classes)


def _least(classes: dict[int, int]) -> float:
    """What only some ranks have these have to send: the most a rank, over all sets of ranks (max-flow's min-cut)."""
    unions = {0}
    for bits in classes:
        unions |= {bits | other for other in unions}
    return max(sum(n for bits, n in classes.items() if bits & ~own == 0) / max(own.bit_count(), 1) for own in unions)


def faults(tensors: dict[str, Spread], way: Transfer, bucket: int) -> list[str]:
    """What is wrong with a way: too many bytes, uneven, too full a round, or tensors that are not what they were."""
    lacking, least = lower_bounds(tensors)
    out = [] if way.bytes <= 1.01 * lacking else [f"{way.bytes} bytes, needed are {lacking}"]
    busiest = max(way.outgoing.values(), default=0)
    out += [] if busiest <= 1.2 * least + 1e-6 else [f"the busiest sends {busiest}, possible is {least}"]
    for sends in way.rounds:
        for rank in way.ranks:
            used = sum(x.nbytes for x in sends if rank in (x.source, x.target))
            out += [f"a round of {used} bytes on rank {rank}"] if used > bucket else []
    return out + _moved(tensors, way)


def _moved(tensors: dict[str, Spread], way: Transfer) -> list[str]:
    wholes = {name: torch.arange(math.prod(x.shape)).reshape(x.shape) for name, x in tensors.items()}
    held, after = {}, {}
    for name, x in tensors.items():
        for r, blocks in x.have.items():  # what a rank does not hold is no value
            held[name, r] = torch.where(torch.from_numpy(_mask(x.shape, blocks)) > 0, wholes[name], -1)
        after |= {(name, r): torch.full(x.shape, -1) for r in x.need}
    for send in (*way.local, *way.sends):
        at = tuple(slice(o, o + n) for o, n in zip(*send.block, strict=True))
        if (after[send.name, send.target][at] != -1).any():
            return [f"{send.name} comes twice to rank {send.target}"]
        after[send.name, send.target][at] = held[send.name, send.source][at]
    out = []
    for (name, r), value in after.items():
        wanted = torch.where(torch.from_numpy(_mask(tensors[name].shape, tensors[name].need[r])) > 0, wholes[name], -1)
        out += [] if torch.equal(value, wanted) else [f"{name} on rank {r}"]
    return out


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decade", range(10))
def test_random_layouts(decade):
    for seed in range(decade * PAIRS // 10, (decade + 1) * PAIRS // 10):
        tensors = _case(seed)
        assert faults(tensors, transfer(tensors, BUCKET), BUCKET) == [], seed


def test_the_judge_sees_what_is_wrong():
    tensors = _case(3)
    way = transfer(tensors, BUCKET)
    sends = [*way.sends]
    assert sends and way.local

    def judged(sends: Any, local: Any = way.local) -> str:
        return "; ".join(faults(tensors, Transfer((tuple(sends),), local, 0, BUCKET, ranks=way.ranks), 10**9))

    assert "bytes" in judged(sends * 2) and "twice" in judged(sends * 2)
    assert " on rank " in judged(sends[1:]) and " on rank " in judged(sends, way.local[1:])
    holders = {"w": Spread((64,), 4, {r: [Block.whole((64,))] for r in range(4)}, {9: [Block.whole((64,))]})}
    one = transfer({"w": holders["w"]._replace(have={0: [Block.whole((64,))]})}, BUCKET)
    assert "the busiest" in "; ".join(faults(holders, one, BUCKET))
    assert "a round of" in "; ".join(faults(tensors, way, BUCKET // 64))


def test_what_is_there_is_not_sent():
    way = transfer({"w": Spread((8, 8), 4, *[{r: [Block.whole((8, 8))] for r in range(2)}] * 2)})
    assert (way.bytes, way.rounds, way.present) == (0, (), {0: 256, 1: 256})


def test_what_nobody_has():
    half, whole = Block((0, 0), (4, 8)), Block.whole((8, 8))
    with pytest.raises(InputError, match="no rank has w"):
        transfer({"w": Spread((8, 8), 4, {0: [half]}, {1: [whole]})})
    with pytest.raises(InputError, match="at least 16 bytes"):
        transfer({}, 8)


# ---- plans ----------------------------------------------------------------------------------------------------------


def _model(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, 256), torch.nn.GELU(), torch.nn.Linear(256, width))


def _plan(tp: int, width: int = 64, **keywords: Any) -> autotp.Plan:
    return autotp.plan(_model(width), tp, example_inputs=torch.randn(8, width), check_capture=False, **keywords)


def test_between_plans(tmp_path):
    before, after = _plan(4), _plan(2, dp=2)
    way = before.transfer(after)
    assert "tp=4 on ranks 0-3 to dp=2 x tp=2 on ranks 0-3" in str(way) and "0.weight" in str(way)
    data = json.loads(way.to_json())
    assert sum(x[-1] for sends in data["rounds"] for x in sends) == data["bytes"] == way.bytes < data["gather_all"]
    way.to_svg(tmp_path / "way.svg")
    assert "rank 3" in (tmp_path / "way.svg").read_text()
    apart = before.transfer(after, first=4)
    assert set(apart.outgoing) == set(range(8)) and not sum(apart.present.values())
    with pytest.raises(InputError, match=r"0\.bias is|0\.weight is"):
        before.transfer(_plan(2, width=32))


def test_fully_sharded():
    """To ranks that have nothing goes all that these hold: a part of every weight, of two tensors of each."""
    before = _plan(2, dp=2, fully_shard=True)
    whole = sum(math.prod(p.shape) * 4 for p in before.parameters)
    replicated = sum(math.prod(p.shape) * 4 for p in before.parameters if p.layout == I)
    assert replicated and before.transfer(before, first=4).bytes == whole + replicated
    assert before.transfer(_plan(4)).present[0]
