"""What a compiled step of decoding does without: a copy of the cache, a function for every block, guards of globals."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import InputError
from autotp.kernels.attention import attend
from autotp.runtime.lower.eager import WRITES
from autotp.runtime.lower.regional import Compiler, renumbered

aten = torch.ops.aten
elsewhere = types.ModuleType("elsewhere")  # somebody's module, with a number that its function reads
exec("scale = 2.0\ndef scaled(x):\n    return x * scale", vars(elsewhere))


def stretch(target: Any, *shapes: Sequence[int], more: Sequence[Any] = ()) -> tuple[Any, list[Tensor]]:
    """A function of the kind that is compiled: one call in a graph of fx, which keeps its targets as globals."""
    graph = fx.Graph()
    called = graph.call_function(target, (*(graph.placeholder(f"x{i}") for i in range(len(shapes))), *more))
    graph.output(graph.call_function(aten.neg.default, (called,)))
    return fx.GraphModule(nn.Module(), graph).forward, [torch.randn(shape) for shape in shapes]


def counting() -> tuple[list[int], Any]:
    """How many inputs each thing has that was compiled, and a backend that notes it."""
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(len(inputs))
        return gm.forward

    return seen, backend


def test_blocks_share_a_function_where_their_caches_have_sizes_of_their_own():
    first, other, equal = (
        renumbered([((("1", a, f"{b} + 1"), torch.float32), "S(1)")]) for a, b in (("s6", "s36"), ("s9", "s16"), "ss")
    )
    assert first == other
    both = renumbered([((("1", "s6", "s6 + 1"), torch.float32), "S(1)")])
    assert first != both and first != equal


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()  # what other files compiled is no part of this


def test_a_compiled_write_gives_the_very_cache_back():
    write = compat.compile_whole(WRITES[aten.index_copy.default], "aot_eager", None)
    cache, new = torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 1, 4)
    with torch.no_grad():
        given = write(cache, 2, torch.tensor([3]), new)
    assert given is cache
    assert torch.equal(cache, torch.zeros(1, 2, 8, 4).index_copy(2, torch.tensor([3]), new))


def test_a_compiled_write_to_a_full_cache_is_an_error_in_words():
    write: Any = WRITES[aten.index_copy.default]
    graph = fx.Graph()
    cache, at, new = map(graph.placeholder, ("cache", "at", "new"))
    written = graph.call_function(write, (cache, 2, at, new))
    written.meta["val"] = torch.zeros(1, 2, 8, 4)
    graph.output(written)
    compiled = Compiler(lambda f, _: compat.compile_whole(f, "aot_eager", None)).function(graph, "block", [1, 2, 3])
    with torch.no_grad():
        compiled(torch.zeros(1, 2, 8, 4), torch.tensor([7]), torch.ones(1, 2, 1, 4))
        with pytest.raises(InputError, match=r"\(1, 2, 8, 4\).*a static cache is full"):
            compiled(torch.zeros(1, 2, 8, 4), torch.tensor([8]), torch.ones(1, 2, 1, 4))


def test_inputs_modes_and_numbers_of_others_are_looked_at_before_every_call(monkeypatch):
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    function, (x,) = stretch(elsewhere.scaled, (4,))
    (seen, backend), options = counting(), {}
    run = compat.compile_whole(function, backend, options)
    assert torch.equal(run(x), -2 * x) and torch.equal(run(x), -2 * x)
    assert len(seen) == 1 and options == {}
    monkeypatch.setattr(elsewhere, "scale", 3.0)
    assert torch.equal(run(x), -3 * x) and len(seen) == 2
    assert run(x.double()).dtype == torch.float64 and len(seen) == 3
    with torch.no_grad():
        run(x)
    assert len(seen) == 4
    with torch.autocast("cpu"):
        run(x)
    assert len(seen) == 5


def test_what_is_torchs_and_autotps_own_is_not_looked_at():
    function, inputs = stretch(attend, (1, 2, 1, 4), (1, 1, 3, 4), (1, 1, 3, 4), more=(None, None))
    kept: list[tuple[bool, str]] = []
    needed = compat.running._exchangeable

    def noted(guards: Sequence[Any]) -> list[bool]:
        kept.extend((keep, g.name) for keep, g in zip(needed(guards), guards, strict=True) if g.is_global)
        return needed(guards)

    compat.compile_whole(function, counting()[1], {"guard_filter_fn": noted})(*inputs)
    assert len(kept) > 3 and not any(keep for keep, _ in kept), kept
