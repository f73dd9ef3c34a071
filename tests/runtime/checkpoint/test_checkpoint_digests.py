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
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotp.errors import AutoTPError, StateError
from autotp.runtime.checkpoint import digests
from autotp.runtime.checkpoint.digests import Digests, Entry, as_bytes, bytes_view, digest, measured, position
from autotp.runtime.storage import Box
from tests.helpers.states import same, stepped, with_momenta

DIGESTS = "autotp.digests.json"


def test_damage_is_noticed_for_certain_or_nearly():
    torch.manual_seed(0)
    drawn, values = random.Random(0), as_bytes(torch.randn(9, 1024))
    saved = digest(values)
    assert digest(values.clone()) == saved
    for _ in range(100):
        flipped = values.clone()
        flipped[drawn.randrange(len(values))] ^= 1 << drawn.randrange(8)
        assert digest(flipped) != saved
    pages = values.view(9, 4096)
    zeroed, copied = pages.clone(), pages.clone()
    zeroed[3], copied[4] = 0, pages[5]
    for other in (zeroed, copied, pages[[0, 2, 1, *range(3, 9)]]):
        assert digest(other.reshape(-1)) != saved
    words = values.view(torch.int64)
    swapped = words.clone()
    swapped[[0, 1]] = words[[1, 0]]  # what the sum of a page does not see
    assert digest(swapped.view(torch.uint8)) == saved


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with patch.multiple(digests, BLOCK=4096, PAGE=256):
        yield


class Stored:
    """A stored tensor whose reads are noted."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self.tensor, self.bytes, self.read = tensor, as_bytes(tensor).clone(), 0
        self.entry = Entry(tuple(tensor.shape), tensor.dtype, Path("file"), 100, 100 + len(self.bytes))
        self.digests = Digests(folder)
        own = measured(len(self.bytes), bytes_view(self.bytes))
        self.digests.tables, self.digests.tensors = {"t": ""}, {"x": {position((0,) * tensor.ndim): own}}

    def fill(self, box: Box) -> str:
        """The error."""
        try:
            self.digests.fill("t", "x", self.entry, box, bytes_view(self.bytes))
        except StateError as error:
            return str(error)
        assert torch.equal(box.tensor, self.tensor[box.slices].to(box.tensor.dtype))
        return ""


SHAPES = [(3000,), (70, 96), (129, 33), (6, 32, 48), (2, 9000), (3, 2, 7, 64), ()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_flipped_byte_of_any_box_is_noticed(shape, dtype, small_blocks, tmp_path):
    drawn = random.Random(0)
    source = Stored(torch.randint(-99, 99, shape).to(dtype), tmp_path)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # as it is stored; cast while it is read
def test_a_rank_checks_the_blocks_of_its_own_rows(dtype, small_blocks, tmp_path):
    source = Stored(torch.randn(64, 256), tmp_path)  # a block has four rows
    box, checked = Box((30, 64), torch.empty(8, 128, dtype=dtype)), list[int]()
    with patch.object(digests, "digest", lambda block: checked.append(len(block)) or digest(block)):
        assert source.fill(box) == ""
    assert checked == [4096] * 3
    source.bytes[28 * 1024 - 1] ^= 1  # the block before
    assert source.fill(box) == ""
    source.bytes[40 * 1024 - 1] ^= 1  # of another's rows, in the last block that is read
    assert f"bytes {100 + 36 * 1024} to {100 + 40 * 1024}, of x" in source.fill(box)


def test_the_format_stays():
    """What this version records is read by those to come: a tensor of 12 MiB, and its last digest."""
    values = torch.arange(3 << 19).view(3, 512, 1024)
    data = as_bytes(values)
    [(key, text)] = measured(len(data), bytes_view(data)).items()
    assert key == "4096/1" and len(text) == 16 * 3
    total = sum((2 * i + 1) * sum(page) for i, page in enumerate(values[2].view(1024, 512).tolist()))
    assert text[-16:] == (total % 2**64).to_bytes(8, "little").hex()


def flipped(sharded: Any, optimizer: Any, files: list[Path], flips: int) -> tuple[int, int]:
    """Flip bytes of these files one by one: how many are told, and how many load other values without a word."""
    folder, wanted, told, silent = files[0].parent, with_momenta(sharded, optimizer), 0, 0
    given = {"optimizer": optimizer} if (folder / ".metadata").exists() else {}
    for file in files:
        content = file.read_bytes()
        for at in range(0, len(content), max(1, len(content) // flips)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            try:
                sharded.load_checkpoint(folder, strict=False, cast=True, **given)
                same(with_momenta(sharded, optimizer), wanted)
            except AutoTPError:
                told += 1
            except AssertionError:
                silent += 1
        file.write_bytes(content)
        sharded.load_checkpoint(folder, **given)
    return told, silent


@pytest.mark.parametrize("format", ["dcp", "huggingface"])
def test_no_flipped_byte_loads_without_a_word(format, tmp_path):
    sharded, optimizer = stepped(1)
    more = {"optimizer": optimizer} if format == "dcp" else {}
    sharded.save_checkpoint(tmp_path / "saved", format=format, **more)
    files = sorted((tmp_path / "saved").iterdir())
    told, silent = flipped(sharded, optimizer, files, 100)
    assert told > 60 and silent == 0
    (tmp_path / "saved" / DIGESTS).unlink()
    shards = [f for f in files if f.suffix in (".distcp", ".safetensors")]
    assert flipped(sharded, optimizer, shards, 30)[1] > 5  # the negative control


def test_a_file_that_another_program_has_written_anew(tmp_path):
    """It is refused with what to do about it, also beside another file that is as it was."""
    sharded, _ = stepped(1)
    sharded.save_checkpoint(tmp_path / "saved", format="huggingface", max_file=600)
    first, second = sorted((tmp_path / "saved").glob("*.safetensors"))
    values = load_file(second)
    others = {n: t + 1 for n, t in values.items()}
    for tensors, text in ((others, f"{second} is damaged"), ({**others, "more": values["2.bias"]}, "or another one")):
        save_file(tensors, second, {"format": "pt"})
        with pytest.raises(StateError, match=f"(?s){text}.*changed on purpose, delete .*{DIGESTS}"):
            sharded.load_checkpoint(tmp_path / "saved", strict=False)
    (tmp_path / "saved" / DIGESTS).unlink()
    sharded.load_checkpoint(tmp_path / "saved", strict=False)
    stored = load_file(first) | others
    same(sharded.full_state_dict(), {n: stored[n] for n in sharded.full_state_dict()})
