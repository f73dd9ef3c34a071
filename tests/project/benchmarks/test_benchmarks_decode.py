"""The benchmarks of decoding: docs/performance.md holds what they print."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from benchmarks import decode
from benchmarks.helpers.interleaved import Times
from benchmarks.helpers.llama import soak
from benchmarks.helpers.llama.cached_llama import CachedLlama
from benchmarks.helpers.llama.decode_legs import HAND
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.storages import Storages, as_planned, planned_bytes
from benchmarks.helpers.performance import table
from benchmarks.predicted import decode_limit
from tests.helpers.modules.carried import CARRIED, Attention, past, tokens

MADE = dict.fromkeys(["command", "machine", "torch", "transformers", "python", "date"], "x")
ONE = "h100"


def test_the_page_has_the_limits_that_the_command_prints(monkeypatch):
    monkeypatch.setattr(decode_limit, "DEGREES", (2, 8))
    printed = list(decode_limit.rows("Llama-8B", (ONE,)))
    page = decode_limit.PAGE.read_text()
    part = page.split("Llama-8B:")[1].split("Llama-70B:")[0]
    for cells in printed:
        line = table(cells, [cells]).splitlines()[0]
        assert line in part, f"docs/performance.md lacks {line}: python -m benchmarks.predicted.decode_limit --write"
        assert line.replace("| 7.77 |", "| 7.78 |").replace("| 1.94 |", "| 1.95 |") not in part
    assert [cells[1] for cells in printed] == ["2", "8"] and decode_limit.HEADING in page


def test_the_columns_are_the_formula():
    """tp=8 of 8B on an H100 by hand: 66 collectives, 1.94 GB at 3.35 TB/s."""
    line = next(x for x in decode_limit.PAGE.read_text().splitlines() if x.startswith("| h100 | 8 |"))
    read, alone, one_shot, nccl = (float(x) for x in line.split("|")[3:7])
    heads, layers, hidden, wide, words = 8, 32, 4096, 14336, 128256
    weights = layers * hidden * (2 * hidden + 2 * heads * 128 + 3 * wide) + words * hidden
    cache = 2 * layers * heads * 128 * 4096
    nbytes = 2 * (weights + cache) / 8
    assert read == round(nbytes / 1e9, 2) and abs(alone - 3.35e12 / nbytes) < 1
    for rate, seconds in ((one_shot, 6.3e-6), (nccl, 23e-6)):
        assert abs(rate - 1 / (nbytes / 3.35e12 + (2 * layers + 2) * seconds)) < 1


SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, wide=48, vocabulary=64)
IDS = torch.arange(12).view(2, 6) * 7 % 64


def decoded(module: CachedLlama, first: int, late: int = 0) -> Tensor:
    """Logits after a prompt of so many ids and then one id at a time, at positions that may be wrong."""
    positions = torch.arange(IDS.shape[1])
    out = module(IDS[:, :first], positions[:first])
    for i in range(first, IDS.shape[1]):
        out = module(IDS[:, i : i + 1], positions[i : i + 1] + late)
    return out


@torch.no_grad()
def test_the_hand_written_cache_gives_the_logits_of_the_whole_forward():
    model = untouched(SMALL)
    wanted = model(IDS)[:, -1:]
    assert torch.allclose(decoded(CachedLlama(model, 2, 8), 4), wanted, atol=1e-5)
    assert not torch.allclose(decoded(CachedLlama(model, 2, 8), 4, late=1), wanted, atol=1e-3)


@torch.no_grad()
def test_a_decoded_token_reads_each_weight_and_the_cache_once():
    module = CachedLlama(untouched(SMALL), 2, 8)
    decoded(module, 5)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in module.parameters()}
    held |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in module.buffers()}
    token, position = IDS[:, 5:], torch.tensor([5])
    with Storages() as storages:
        module(token, position)
    others = sum(x.untyped_storage().nbytes() for x in (token, position))
    assert storages.nbytes == sum(held.values()) + others and len(storages.read) == len(held) + 2
    another = torch.ones(3)
    with Storages() as more:
        module(token, position)
        torch.ones(5).add(torch.zeros(5))  # what is made within the context does not count
        another.add(1)
    assert more.nbytes - storages.nbytes == 12


@torch.no_grad()
def test_a_sharded_step_reads_the_weights_and_the_cache_that_its_plan_says():
    model, given, new = Attention(), (tokens(1), *past(40)), tokens(1).shape[0]
    sharded: Any = autotp.compile(model, 1, example_inputs=given, carried=CARRIED, objective="decode")
    wanted = model(*given)
    with Storages() as storages:
        found = sharded(*given)
    assert all(map(torch.allclose, found, wanted))
    memory = sharded.plan.memory
    planned = planned_bytes(sharded.plan) - new * memory.cache_token  # the new token's is written, not read
    read = storages.nbytes - given[0].untyped_storage().nbytes()
    assert read == planned == memory.parameters + sum(x.untyped_storage().nbytes() for x in given[1:])
    assert as_planned(read, planned)
    assert not as_planned(read + past(40)[0].untyped_storage().nbytes(), planned)  # the keys once more
    assert not as_planned(read, planned_bytes(sharded.plan, tokens=2.0))


def test_rows_of_decoded_tokens_are_of_all_ranks():
    times = {HAND: Times([1.0, 1.0], [1.0, 2.0]), "autotp, static cache": Times([2.0, 2.0], [1.0, 1.0])}
    one = {"first": dict.fromkeys(times, 1.0), "off": dict.fromkeys(times, 0.0), "read": dict.fromkeys(times, (3, 8))}
    one |= {"times": {k: t._asdict() for k, t in times.items()}}
    found = decode.rows([one, one])
    assert found["autotp, static cache"]["cpu_ratio"] == 2.0 and found[HAND]["storages"] == 3
    decode.check({"rows": found})
    with pytest.raises(RuntimeError, match="something else"):
        decode.check({"rows": {HAND: found[HAND] | {"off": 0.1}}})
    with pytest.raises(RuntimeError, match="its plan says"):
        decode.check({"rows": {HAND: found[HAND] | {"planned": 4.0}}})
    text = decode.page({**MADE, "cores": 2, "rounds": 1, "load_before": 0.1, "rows": found, "refused": {"x": "why"}})
    assert "| autotp, static cache | 4000.0 | 2.000 |" in text and "Not measured: x: why." in text


def test_a_process_that_grows_beyond_its_cache_is_refused():
    soak.check({"tokens": 9, "cache": 10**6, "process": 9 * 10**6})
    with pytest.raises(RuntimeError, match="grew by"):
        soak.check({"tokens": 9, "cache": 10**6, "process": 11 * 10**6})
