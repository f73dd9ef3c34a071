"""What a compiled step of decoding does without: a copy of the cache, a function for every block, guards of globals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.runtime.generation.in_place import WRITES
from autotp.runtime.lower.regional import renumbered

aten = torch.ops.aten
SCALE = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def test_blocks_share_a_function_where_their_caches_have_sizes_of_their_own():
    first, other, equal = (
        renumbered([((("1", a, f"{b} + 1"), torch.float32), "S(1)")]) for a, b in (("s6", "s36"), ("s9", "s16"), "ss")
    )
    assert first == other
    both = renumbered([((("1", "s6", "s6 + 1"), torch.float32), "S(1)")])
    assert first != both and first != equal


def test_a_compiled_write_gives_the_very_cache_back():
    write = compat.compile_whole(WRITES[aten.index_copy.default], "aot_eager", None)
    cache, new = torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 1, 4)
    with torch.no_grad():
        given = write(cache, 2, torch.tensor([3]), new)
    assert given is cache
    assert torch.equal(cache, torch.zeros(1, 2, 8, 4).index_copy(2, torch.tensor([3]), new))


def test_globals_are_not_looked_at_before_every_call_but_inputs_are(monkeypatch):
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(len(inputs))
        return gm.forward

    options: dict[str, Any] = {}
    run = compat.compile_whole(scaled, backend, options)
    run(torch.ones(4))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    run(torch.ones(4))
    assert len(seen) == 1 and options == {}
    run(torch.ones(4, dtype=torch.float64))
    assert len(seen) == 2
