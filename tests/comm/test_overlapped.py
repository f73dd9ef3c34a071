"""The functions that run communication beside products compute what they stand for, in the order that hides it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from autotp.comm import collectives, overlapped
from autotp.comm import conversions as convert
from autotp.ir.specs import INVARIANT, REPLICATED, SUMMANDS, ShardSpec
from benchmarks.overlap import Link
from tests.helpers.compare import difference

EXACT = 1e-12
S, R, I, P = ShardSpec(1, 1, ((16, 1),)), REPLICATED, INVARIANT, SUMMANDS  # noqa: E741  the field's letters


def operands(rank: int, world: int, first: Any) -> tuple[Tensor, list[Tensor], Tensor]:
    """A value that is the same on every rank or a slice of one, and two weights and a bias of the rank's own."""
    whole = torch.randn(2, 16, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1 + rank)
    weights = [torch.randn(*s, dtype=torch.double, generator=own) for s in ((5, 6), (6, 4), (5,))]
    return whole.chunk(world, 1)[rank].clone() if first == S else whole, weights[:2], weights[2]


def gradients(make: Callable[..., list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """What is made, its gradients, and gradients of those."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    outs = make(*leaves)
    loss = torch.stack([(y**3).sum() for y in outs]).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), leaves)
    return [x.detach() for x in (*outs, *first, *second)]


def functions(rank: int, world: int, group: Any) -> dict[Any, tuple[float, bool]]:
    """Largest difference from the calls that a function stands for; whether first gradients are bitwise equal."""
    named = {"rank": rank, "tp": world, "group": group.group_name}
    found: dict[Any, tuple[float, bool]] = {}

    def compare(key: Any, leaves: list[Tensor], plain: Any, fused: Any) -> None:
        a, b = gradients(plain, leaves), gradients(fused, leaves)
        first = len(a) - len(leaves)
        same = all(torch.equal(x, y) for x, y in zip(a[:first], b[:first], strict=True))
        found[key] = max(difference(y, x) for x, y in zip(a, b, strict=True)), same
        with torch.no_grad():
            found[key, "no_grad"] = max(map(difference, fused(*leaves), plain(*leaves))), True

    for src in (I, S):
        x, (v, w), b = operands(rank, world, src)

        def plain(x: Tensor, v: Tensor, w: Tensor, b: Tensor, src: Any = src) -> list[Tensor]:
            y = convert.function_for(src, R)(x, src, R, **named)
            return [linear(y, v, b), torch.matmul(y, w)]

        for chunks, regather in ((1, False), (1, True), (2, False), (2, True), (3, False)):

            def fused(x: Tensor, v: Tensor, w: Tensor, b: Tensor, how: Any = (src, chunks, regather)) -> list[Tensor]:
                kinds = ["linear", "matmul"]
                return [*overlapped.grouped(x, how[0], R, kinds, [v, w], [b, None], how[1], how[2], **named)]

            compare((src.mark, chunks, regather), [x, v, w, b], plain, fused)
    for chunks in (1, 2):
        for kind in ("linear", "addmm"):
            x, (v, _), b = operands(rank, world, I)
            leaves = [x, v, b] if kind == "linear" else [x.flatten(0, 1), v.t().contiguous(), b]

            def summed(x: Tensor, v: Tensor, b: Tensor, kind: Any = kind) -> list[Tensor]:
                y = linear(x, v, b) if kind == "linear" else torch.addmm(b, x, v)
                return [convert.g_star(y.reshape(2, 16, 5), P, S, **named)]

            def scattered(x: Tensor, v: Tensor, b: Tensor, how: Any = (kind, chunks)) -> list[Tensor]:
                view = None if how[0] == "linear" else [2, -1]
                return [overlapped.scattered(x, P, S, how[0], v, b, view, how[1], **named)]

            compare(("g*", chunks, kind), leaves, summed, scattered)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_functions_compute_what_they_stand_for(pool, world):
    for found in pool.run(functions, world=world):
        assert max(x for x, _ in found.values()) < EXACT, found
        assert all(same for key, (_, same) in found.items() if key[1] == 1), found  # in one chunk: bitwise


def uneven(rank: int, world: int, group: Any) -> tuple[float, int]:
    """Thirteen rows on two ranks: seven and six, in one piece whatever is asked for."""
    spec, named = ShardSpec(1, 1, ((13, 1),)), {"rank": rank, "tp": world, "group": group.group_name}
    x = torch.randn(2, 13, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    w = torch.randn(5, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(world, 1)[rank].contiguous()
    with patch.object(collectives, "_start", wraps=collectives._start) as start:
        (y,) = overlapped.grouped(mine, spec, R, ["linear"], [w], [None], 2, **named)
        z = overlapped.scattered(x, P, spec, "linear", w / world, None, None, 2, **named)
    wanted = linear(x, w)
    return max(difference(y, wanted), difference(z, wanted.chunk(world, 1)[rank])), start.call_count


def test_uneven_rows_go_in_one_piece(pool):
    for error, collectives_ in pool.run(uneven, world=2):
        assert error < EXACT and collectives_ == 2


def few(rank: int, world: int, group: Any) -> list[int]:
    """Collectives for sixteen rows of a rank, in two chunks of which each must have so many."""
    named, counts = {"rank": rank, "tp": world, "group": group.group_name}, []
    x, (v, _), _ = operands(rank, world, S)
    for least in (8, 9):
        with patch.object(collectives, "_start", wraps=collectives._start) as start:
            (y,) = overlapped.grouped(x, S, R, ["linear"], [v], [None], 2, False, least, **named)
            overlapped.scattered(y, P, S, "matmul", v, None, None, 2, least, **named)
        counts.append(start.call_count)
    return counts


def test_a_call_of_few_rows_goes_in_one_piece(pool):
    assert pool.run(few, world=2) == [[4, 2]] * 2


def order(rank: int, world: int, group: Any) -> dict[str, list[str]]:
    """What happens in which order: collectives that begin and end, and products."""
    named, events = {"rank": rank, "tp": world, "group": group.group_name}, []
    found: dict[str, list[str]] = {}
    start, finish, product, weights = (
        collectives.start, collectives.finish, overlapped._product, overlapped._weight_gradients,
    )  # fmt: skip

    def told(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{name} {args[0]}" if name in ("start", "finish") else name)
            return function(*args, **kwargs)

        return run

    with (
        patch.object(collectives, "start", told("start", start)),
        patch.object(collectives, "finish", told("finish", finish)),
        patch.object(overlapped, "_product", told("product", product)),
        patch.object(overlapped, "_weight_gradients", told("weights", weights)),
    ):
        for name, src, chunks, regather in (("f", I, 1, False), ("g", S, 2, False), ("regather", S, 1, True)):
            x, (v, w), _ = operands(rank, world, src)
            leaves = [t.requires_grad_() for t in (x, v, w)]
            kinds = ["linear", "matmul"]
            y, z = overlapped.grouped(leaves[0], src, R, kinds, leaves[1:], [None] * 2, chunks, regather, **named)
            found[f"{name} forward"] = events.copy()
            events.clear()
            (y.sum() + z.sum()).backward()
            found[f"{name} backward"] = events.copy()
            events.clear()
    return found


def test_communication_is_under_way_while_products_run(pool):
    (found, _) = pool.run(order, world=2)
    reduce = ["start all_reduce", "weights", "weights", "finish all_reduce"]
    scatter = ["start reduce_scatter", "weights", "weights", "finish reduce_scatter"]
    chunk = ["finish all_gather", "product", "product"]
    assert found["f forward"] == ["product"] * 2
    assert found["f backward"] == ["product"] * 2 + reduce
    # The next chunk's gather begins before the products of this one's, and no earlier: of a CPU's one is on its way.
    assert found["g forward"] == ["start all_gather", "finish all_gather", "start all_gather", *chunk[1:], *chunk]
    assert found["g backward"] == ["product"] * 2 + scatter
    again = ["start all_gather", "product", "product", "finish all_gather"]
    assert found["regather backward"] == again + scatter


@pytest.mark.parametrize("device, order", [("cpu", "start finish " * 3), ("meta", "start " * 3 + "finish " * 3)])
def test_of_a_device_all_chunks_are_on_their_way_at_once_and_of_a_cpu_one(device, order):
    values, events = [torch.empty(1, device=device) for _ in range(3)], []
    with (
        patch.object(collectives, "start", lambda primitive, value, *_, **__: events.append("start") or value),
        patch.object(collectives, "finish", lambda primitive, value, *_: events.append("finish") or value),
    ):
        found = list(overlapped._along("all_gather", values, torch.float32, (0, 2, "group")))
    assert events == order.split() and [id(x) for x in found] == [id(x) for x in values]


def compiling(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Compiled whole: the difference, and the collectives that the compiler saw."""
    # Slow to import, and wanted here alone.
    from functorch.compile import make_boxed_func  # noqa: PLC0415  # pyright: ignore[reportPrivateImportUsage]
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415

    named, found = {"rank": rank, "tp": world, "group": group.group_name}, {}
    for src, chunks, regather in ((I, 1, False), (S, 2, False), (S, 1, True)):
        seen: list[str] = []

        def show(module: Any, _: Any, seen: list[str] = seen) -> Any:
            seen += [str(n.target).split(".")[1] for n in module.graph.nodes if "c10d" in str(n.target)]
            return make_boxed_func(module)

        def step(x: Tensor, v: Tensor, w: Tensor, how: Any = (src, chunks, regather)) -> Tensor:
            y, z = overlapped.grouped(x, how[0], R, ["linear", "matmul"], [v, w], [None] * 2, how[1], how[2], **named)
            if how[0] == I:
                return y.sum() + (z**2).sum()
            u = overlapped.scattered(z, P, S, "matmul", w.t(), None, None, 2, **named)
            return y.sum() + (u**2).sum()

        x, (v, w), _ = operands(rank, world, src)
        results, backend = [], aot_autograd(fw_compiler=show, bw_compiler=show)
        for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
            leaves = [t.clone().requires_grad_() for t in (x, v, w)]
            results.append(torch.autograd.grad(run(*leaves), leaves))
        found[src.mark, regather] = max(map(difference, *results)), seen

        def alone(x: Tensor, v: Tensor, how: Any = (src, chunks, regather)) -> Tensor:
            return overlapped.grouped(x, how[0], R, ["linear"], [v], [None], how[1], how[2], **named)[0]

        # Nothing is graded, with gradients on and off: Dynamo takes other ways then.
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                own = torch.compile(alone, fullgraph=True, backend="aot_eager")(x, v)
                found[src.mark, regather, grad] = difference(own, alone(x, v)), []
    return found


def test_functions_compile_whole_with_their_collectives_in_sight(pool):
    for found in pool.run(compiling, world=2):
        assert max(error for error, _ in found.values()) < EXACT
        assert found["I", False][1].count("all_reduce") == 1
        assert found["S", False][1].count("all_gather_into_tensor") == 4  # two forward, two of g*'s gradient
        assert found["S", False][1].count("reduce_scatter_tensor") == 3
        assert found["S", True][1].count("all_gather_into_tensor") == 4


def slowed(rank: int, world: int, group: Any) -> dict[str, float]:
    """A sum that a slow link brings, with and without arithmetic before it is waited for."""
    x, place, found = torch.ones(4), (rank, world, group.group_name), {}
    for name, busy in (("exposed", 0.0), ("hidden", 0.3)):
        link = Link(latency=0.2, bandwidth=1e12)
        with link.between(), torch.no_grad():
            flight = overlapped.begin(x, P, I, place)
            time.sleep(busy)
            assert torch.equal(overlapped.end(flight), x * world)
        found[name] = link.taken("waiting") / link.taken("communication")
    return found


def test_the_benchmarks_link_shows_what_is_exposed(pool):
    for found in pool.run(slowed, world=2):
        assert found["exposed"] > 0.9 and found["hidden"] == 0.0, found
