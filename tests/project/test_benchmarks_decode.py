"""The benchmarks of decoding: docs/decoding.md holds what they print."""

from __future__ import annotations

from benchmarks import decode_limit
from benchmarks.helpers.performance import table

ONE = "h100"


def test_the_page_has_the_limits_that_the_command_prints(monkeypatch):
    monkeypatch.setattr(decode_limit, "DEGREES", (2, 8))
    printed = list(decode_limit.rows("Llama-8B", (ONE,)))
    page = decode_limit.PAGE.read_text()
    part = page.split("Llama-8B:")[1].split("Llama-70B:")[0]
    for cells in printed:
        line = table(cells, [cells]).splitlines()[0]
        assert line in part, f"docs/decoding.md lacks {line}: python -m benchmarks.decode_limit --write"
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
