"""Bytes that are not what was saved are noticed on every rank, and only what a rank reads is looked at."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp
from autotp.errors import AutoTPError, StateError
from autotp.runtime.checkpoint import digests
from autotp.runtime.checkpoint.boxes import Box
from autotp.runtime.checkpoint.checked import Digests, Entry, position
from autotp.runtime.checkpoint.digests import BYTES, Grid, Region, as_bytes, differing, grids, measured
from tests.helpers.compare import mesh_of
from tests.helpers.states import same

DIGESTS = "autotp.digests.json"


def changed(before: Tensor, after: Tensor, ways: list[Grid]) -> list[list[int]]:
    """The blocks of each grid that differ."""
    out = []
    for grid in ways:
        whole = Region(grid, range(math.ceil(len(before) / grid.row)), range(grid.strips))
        (text,) = measured([grid], len(before), lambda start, stop: before[start:stop]).values()
        windows = grid.windows(whole.rows, len(after))
        out.append(differing(whole, text, [grid.sums(after[start:stop]) for start, stop in windows]))
    return out


def test_damage_is_noticed_for_certain_or_nearly():
    torch.manual_seed(0)
    ways, drawn = [BYTES, Grid(1024, 4), Grid(1024, 2)], random.Random(0)
    values = as_bytes(torch.randn(9, 1024))
    assert changed(values, values, ways) == [[], [], []]
    for _ in range(100):
        flipped = values.clone()
        flipped[drawn.randrange(len(values))] ^= 1 << drawn.randrange(8)
        assert changed(values, flipped, ways) == [[0]] * 3
    pages = values.view(9, 4096)
    zeroed, copied = pages.clone(), pages.clone()
    zeroed[3], copied[4] = 0, pages[5]
    for other in (zeroed, copied, pages[[0, 2, 1, *range(3, 9)]]):
        assert changed(values, other.reshape(-1), ways) == [[0]] * 3
    words = values.view(torch.int64)
    swapped = words.clone()
    swapped[[0, 1]] = words[[1, 0]]  # what the sum of a row does not see
    assert changed(values, swapped.view(torch.uint8), ways) == [[], [], []]


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with patch.multiple(digests, BLOCK=4096, PAGE=256, NARROWEST=16, BYTES=Grid(256, 1)):
        yield


class Source:
    """A stored tensor whose reads are noted."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self.tensor, self.bytes, self.read = tensor, as_bytes(tensor).clone(), 0
        self.entry = Entry(tuple(tensor.shape), tensor.dtype, Path("file"), 100, 100 + len(self.bytes))
        self.digests = Digests(folder)
        ways = grids(tensor.shape, tensor.dtype.itemsize)
        own = measured(ways, len(self.bytes), lambda start, stop: self.bytes[start:stop])
        self.digests.tables, self.digests.tensors = {"t": ""}, {"x": {position((0,) * tensor.ndim): own}}

    def fill(self, box: Box) -> str:
        """The error."""
        try:
            self.digests.fill("t", "x", self.entry, box, lambda start, stop: self.bytes[start:stop])
        except StateError as error:
            return str(error)
        assert torch.equal(box.tensor, self.tensor[box.slices])
        return ""


SHAPES = [(3000,), (70, 96), (129, 33), (6, 32, 48), (2, 9000), (3, 2, 7, 64), ()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_flipped_byte_of_any_box_is_noticed(shape, dtype, small_blocks, tmp_path):
    drawn = random.Random(0)
    source = Source(torch.randint(-99, 99, shape).to(dtype), tmp_path)
    for _ in range(20):
        cuts = [sorted(drawn.sample(range(n + 1), 2)) for n in shape]
        box = Box(tuple(a for a, _ in cuts), torch.empty([b - a for a, b in cuts], dtype=dtype))
        assert source.fill(box) == ""
        within = [drawn.randrange(a, b) for a, b in cuts]
        at = sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(within)) * dtype.itemsize
        source.bytes[at] ^= 4
        told = re.search(r"bytes (\d+) to (\d+), of x", source.fill(box))
        assert told and int(told[1]) <= 100 + at < int(told[2]) <= source.entry.stop
        source.bytes[at] ^= 4
        elsewhere = drawn.randrange(len(source.bytes))
        source.bytes[elsewhere] ^= 4
        source.fill(box)  # noticed, or the box is what it should be
        source.bytes[elsewhere] ^= 4


def test_a_rank_checks_its_own_columns(small_blocks, tmp_path):
    source = Source(torch.randn(64, 1024), tmp_path)
    box = Box((0, 256), torch.empty(64, 128))
    words, real = list[Any](), Grid.sums
    with patch.object(Grid, "sums", lambda *given: words.append(given) or real(*given)):
        assert source.fill(box) == ""
    assert (
        sum(len(data) // grid.row * (columns.stop - columns.start) for grid, data, _, columns in words) == 64 * 128 // 2
    )
    source.bytes[7 * 4096 + 256 * 4 - 1] ^= 1  # the column before
    assert source.fill(box) == ""
    source.bytes[7 * 4096 + 256 * 4] ^= 1
    assert "bytes 100 to 65636, of x" in source.fill(box)


def module(tp: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Two layers after a step, so that there are momenta."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, tp, example_inputs=torch.randn(2, 8), **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for p in sharded.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return sharded, optimizer


def held(sharded: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    out: dict[str, Any] = sharded.full_state_dict()
    for i, p in enumerate(sharded.parameters()):
        momentum = optimizer.state[p].get("momentum_buffer", torch.zeros(()))
        out[f"momentum {i}"] = (momentum.to_local() if isinstance(momentum, DTensor) else momentum).clone()
    options = [[float(v or 0) for k, v in group.items() if k != "params"] for group in optimizer.param_groups]
    return out | {"options": torch.tensor(options)}


def flipped(sharded: Any, optimizer: Any, files: list[Path], flips: int) -> tuple[int, int]:
    """Flip bytes of these files one by one: how many are told, and how many load other values without a word."""
    folder, wanted, told, silent = files[0].parent, held(sharded, optimizer), 0, 0
    given = {"optimizer": optimizer} if (folder / ".metadata").exists() else {}
    for file in files:
        content = file.read_bytes()
        for at in range(0, len(content), max(1, len(content) // flips)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            try:
                sharded.load_checkpoint(folder, strict=False, cast=True, **given)
                same(held(sharded, optimizer), wanted)
            except AutoTPError:
                told += 1
            except AssertionError:
                silent += 1
        file.write_bytes(content)
        sharded.load_checkpoint(folder, **given)
    return told, silent


@pytest.mark.parametrize("format", ["dcp", "huggingface"])
def test_no_flipped_byte_loads_without_a_word(format, tmp_path):
    sharded, optimizer = module(1)
    more = {"optimizer": optimizer} if format == "dcp" else {}
    sharded.save_checkpoint(tmp_path / "saved", format=format, **more)
    files = sorted((tmp_path / "saved").iterdir())
    told, silent = flipped(sharded, optimizer, files, 100)
    assert told > 60 and silent == 0
    (tmp_path / "saved" / DIGESTS).unlink()
    shards = [f for f in files if f.suffix in (".distcp", ".safetensors")]
    assert flipped(sharded, optimizer, shards, 30)[1] > 5  # the negative control


def flipped_on_ranks(rank: int, world: int, group: Any, folder: str) -> dict[str, tuple[str, str]]:
    """What each rank is told of bytes that rank 1 flips in what the two have saved."""
    sharded, optimizer = module(world, mesh=mesh_of(group))
    dcp, hf = Path(folder) / "dcp", Path(folder) / "huggingface"
    sharded.save_checkpoint(dcp, optimizer=optimizer, background=True).result()
    sharded.save_checkpoint(hf, format="huggingface")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    empty = autotp.compile(empty, world, mesh=mesh_of(group), example_inputs=torch.randn(2, 8))
    weight = sharded[0].weight
    own, momentum = weight.to_local().detach(), optimizer.state[weight]["momentum_buffer"].to_local()
    wanted, told = held(sharded, optimizer), {}

    def attempt(case: str, file: Path, data: Tensor, load: Any) -> None:
        content = file.read_bytes()
        at = content.index(bytes(as_bytes(data).tolist())) + 5
        dist.barrier(group)
        if rank == 1:
            file.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        dist.barrier(group)
        with pytest.raises(AutoTPError) as caught:
            load()
        told[case] = type(caught.value).__name__, str(caught.value)
        dist.barrier(group)
        if rank == 1:
            file.write_bytes(content)
        dist.barrier(group)

    shard = dcp / f"__{rank}_0.distcp"
    attempt("weight", shard, own, lambda: sharded.load_checkpoint(dcp))
    attempt("momentum", shard, momentum, lambda: sharded.load_checkpoint(dcp, optimizer=optimizer))
    attempt("finite", shard, own, lambda: sharded.load_checkpoint(dcp, check_finite=True))
    whole = sharded.full_state_dict()["2.weight"]
    attempt("huggingface", hf / "model.safetensors", whole, lambda: empty.load_checkpoint(hf))
    assert all(p.is_meta for p in empty.parameters())
    sharded.load_checkpoint(dcp, optimizer=optimizer)
    same(held(sharded, optimizer), wanted)
    empty.load_checkpoint(hf)
    same(empty.full_state_dict(), sharded.full_state_dict())
    return told


def test_all_ranks_are_told(pool, tmp_path):
    first, second = pool.run(flipped_on_ranks, str(tmp_path), world=2)
    for case in ("weight", "momentum", "finite"):
        (kind, text), (other, quoted) = second[case], first[case]
        assert (kind, other) == ("StateError", "RankError") and text in quoted  # rank 0 does not read that
        assert "__1_0.distcp is damaged: bytes " in text and f"delete {tmp_path / 'dcp' / DIGESTS}" in text
    assert "of model.0.weight, are not what was saved" in second["weight"][1]
    assert "The module may hold a part of it" in second["weight"][1]
    assert "of optimizer.state.0.weight.momentum_buffer" in second["momentum"][1]
    assert "The optimizer has the state that it had." in second["momentum"][1]
    assert "The module may hold" not in second["finite"][1]
    for kind, text in (first["huggingface"], second["huggingface"]):
        assert kind == "StateError" and "of 2.weight, are not what was saved" in text and "Nothing was loaded." in text
