"""Every conversion against mathematics, with its backward taken away as the control; then real against simulated."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotp.comm import conversions as cv
from autotp.comm.conversions import KINDS, ConversionKind, kind_of, local_size, simulate
from autotp.compat import FakeTensorMode
from autotp.errors import PlanError
from autotp.ir.layouts import Copied, Copies, I, P, Partial, Partition, R, Segment, Shard
from autotp.ir.specs import (
    INVARIANT,
    REPLICATED,
    SUMMANDS,
    CopiedSpec,
    GroupedSpec,
    PartialSpec,
    Runs,
    ShardSpec,
    Spec,
    SummedSpec,
)
from tests.helpers.processes.pool import Pool

TABLE = [key for key in KINDS if "T" not in key]  # what travels has rows by counts: `tests/proof/test_travel.py`
MAXIMA = PartialSpec("max")
TPS = (2, 3, 4)


def partitions(tp: int) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """(repeat, segments) by name; uneven counts leave ranks short, and empty where tp > 2."""
    return {
        "even": (1, ((2 * tp, 1),)),
        "uneven": (1, ((tp + 1, 2),)),
        "one unit": (1, ((1, 3),)),
        "fused": (1, ((tp, 2), (tp, 1), (2 * tp, 1))),
        "fused uneven": (1, ((tp + 1, 2), (1, 1), (tp, 1))),
        "repeat": (3, ((tp, 2),)),
        "repeat uneven": (2, ((tp + 1, 1), (tp, 2))),
    }


def length(spec: ShardSpec) -> int:
    return spec.repeat * sum(count * unit for count, unit in spec.segments)


def cases(key: tuple[str, str], tp: int) -> list[tuple[str, Spec, Spec, tuple[int, ...]]]:
    """(name, src, dst, shape of the whole) of one table entry over partitions and dimensions."""
    if {"C", "D"} & {key[0], key[1][0]}:
        return copied(key, tp)
    out = []
    for name, (repeat, segments) in partitions(tp).items():
        for dim in (0, 1):
            s = ShardSpec(dim, repeat, segments)
            n = length(s)
            other = ShardSpec(1 - dim, 1, ((tp + 2, 1),))
            shape = (n, tp + 2, 2) if dim == 0 else (tp + 2, n, 2)
            ends = torch.tensor([0, *range(2, tp + 1), tp + 2])  # the first group has no rows, the last one two
            g = GroupedSpec(1 - dim, ends, ((tp + 1, 1),))
            letters: dict[str, Spec] = {"I": INVARIANT, "R": REPLICATED, "P": SUMMANDS, "S": s, "G": g}
            dst = {"S": other if key[0] == "S" else s, "S'": ShardSpec(dim, 1, ((2, 1), (n - 2, 1)))}.get(key[1])
            out.append((f"{name} dim {dim}", letters[key[0]], dst or letters[key[1]], shape))
    return out if {"S", "G"} & set(key) else out[:1]


def copied(key: tuple[str, str], tp: int) -> list[tuple[str, Spec, Spec, tuple[int, ...]]]:
    """Those between slices that groups of ranks have alike and others: of one slice for all, fused, and by pairs."""
    groups = {"one group": ((1, tp),), "fused": ((1, 2 * tp), (1, tp))}
    if tp % 2 == 0:
        groups |= {"pairs": ((tp // 2, 4),)} | ({"a pair with nothing": ((tp // 2 - 1, 6),)} if tp > 2 else {})
    out = []
    for name, segments in groups.items():
        n = 2 if "pair" in name else tp
        for dim, repeat in ((0, 1), (1, 1), (1, 2)):
            whole = repeat * sum(count * unit for count, unit in segments)
            fine = ShardSpec(dim, repeat, tuple((count * n, unit // n) for count, unit in segments))
            letters: dict[str, Spec] = {
                "I": INVARIANT, "R": REPLICATED, "P": SUMMANDS, "S'": fine, "S": ShardSpec(1 - dim, 1, ((tp + 1, 1),)),
                "C": CopiedSpec(dim, repeat, segments, n), "D": SummedSpec(dim, repeat, segments, n),
            }  # fmt: skip
            near = key[0] == "S" and key[1][-1] == "'"
            src = letters["S'"] if near else letters[key[0]]
            dst = letters[key[1]] if key[1] in letters else letters[key[1][0]]
            shape = (whole, tp + 1, 2) if dim == 0 else (tp + 1, whole, 2)
            out.append((f"{name} dim {dim} repeat {repeat}", src, dst, shape))
    return out


def elements(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """A rank's slice by index lists, from the definition in `layouts`."""
    if isinstance(spec, CopiedSpec | SummedSpec):
        rank, tp, spec = rank // spec.copies, tp // spec.copies, ShardSpec(spec.dim, spec.repeat, spec.segments)
    assert isinstance(spec, ShardSpec)
    segments = [Segment(n, unit, bool(reverse[0]) if reverse else False) for n, unit, *reverse in spec.segments]
    partition = Partition(tuple(segments), spec.repeat)
    index = [i for start, n in partition.spans(rank, tp) for i in range(start, start + n)]
    return x.index_select(spec.dim, torch.tensor(index, dtype=torch.long))


def own_rows(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """The rows of a rank's groups in their places, zeros elsewhere: row by row, from the definition in `layouts`."""
    assert isinstance(spec, GroupedSpec)
    dim, ends, ((count, _),), _ = spec
    group = [sum(int(end) <= row for end in ends) for row in range(x.shape[dim])]
    mine = torch.tensor([g // -(-count // tp) == rank for g in group])
    return x * mine.view(-1, *[1] * (x.ndim - dim - 1))


def whole_of(xs: list[Tensor], spec: Spec, reference: Tensor) -> bool:
    """Whether the ranks hold `reference` under `spec`."""
    if isinstance(spec, SummedSpec):
        n, own = spec.copies, []
        for first in range(0, len(xs), n):
            own += [torch.stack(xs[first : first + n]).sum(0)] * n
        return whole_of(own, spec.dual, reference)
    if spec.mark in ("S", "C"):
        want = [elements(reference, spec, rank, len(xs)) for rank in range(len(xs))]
        return all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(xs, want, strict=True))
    if spec.mark == "G":
        return all(torch.allclose(x, own_rows(reference, spec, r, len(xs))) for r, x in enumerate(xs))
    if spec.mark == "P":
        return torch.allclose(torch.stack(xs).sum(0), reference)
    return all(torch.allclose(x, reference) for x in xs)


def loss_of(ys: list[Tensor], spec: Spec, weight: Tensor) -> Tensor:
    """What the ranks' programs compute from a value under `spec`, added over the ranks.

    The whole program is sum(weight * y**2) / 2, or sum(weight * y) where y is Partial, as only linear operators may
    see that. On I every rank computes all of it (its own copy), on R its own share, on S its slice, on P its summand.
    """
    tp = len(ys)
    if spec.mark == "P":
        return sum((weight * y).sum() for y in ys)  # type: ignore[return-value]
    if spec.mark in ("S", "D"):  # of summands the loss is linear
        weights = [elements(weight, spec, rank, tp) for rank in range(tp)]
        if spec.mark == "D":
            return sum((w * y).sum() for w, y in zip(weights, ys, strict=True))  # type: ignore[return-value]
    elif isinstance(spec, CopiedSpec):  # each rank of a group its own share
        share = torch.rand(tp, *weight.shape, dtype=weight.dtype) + 0.1
        sums = share.unflatten(0, (-1, spec.copies)).sum(1).repeat_interleave(spec.copies, 0)
        weights = [elements(w, spec, rank, tp) for rank, w in enumerate(weight * share / sums)]
    elif spec.mark == "G":
        weights = [own_rows(weight, spec, rank, tp) for rank in range(tp)]
    else:
        share = torch.rand(tp, *weight.shape, dtype=weight.dtype) + 0.1
        weights = [weight] * tp if spec.mark == "I" else list(weight * share / share.sum(0))
    return sum((w * y**2).sum() / 2 for w, y in zip(weights, ys, strict=True))  # type: ignore[return-value]


def right(src: Spec, dst: Spec, shape: tuple[int, ...], tp: int, spoil: Callable[[], None] = lambda: None) -> bool:
    """Whether forward and gradients are those of the whole program; `spoil` runs between forward and backward."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, *shape, dtype=torch.float64)
    xs = [t.detach().clone().requires_grad_() for t in src.split(x, tp)]
    assert whole_of(xs, src, x)
    if src.mark == "G":  # what stands in the other rows does not count
        xs = [(t + 1 - own_rows(torch.ones_like(x), src, r, tp)).detach().requires_grad_() for r, t in enumerate(xs)]
    ys = simulate(xs, src, dst)
    assert whole_of(ys, dst, x), "forward"
    loss = loss_of(ys, dst, weight)
    spoil()
    grads = torch.autograd.grad(loss, xs)
    return whole_of(list(grads), src.dual, weight if dst.mark in ("P", "D") else weight * x)


# For every backward, one that gives the same shapes but forgets to communicate, or does what another entry does.
WRONG = {
    ("P", "I"): ConversionKind("no all-reduce"),
    ("P", "R"): ConversionKind("no all-reduce"),
    ("P", "S"): ConversionKind("own summand only", cv.take),
    ("S", "R"): ConversionKind("own slice only", cv.place),
    ("S", "I"): ConversionKind("own slice only", cv.place),
    ("S", "S"): ConversionKind("own part only", cv.place, None, lambda x, src, dst, r, tp: cv.take(x, src, dst, r, tp)),
    ("S", "S'"): ConversionKind(
        "own part only", cv.place, None, lambda x, src, dst, r, tp: cv.take(x, src, dst, r, tp)
    ),
    ("S", "P"): ConversionKind("gathered on every rank", cv.pad, "all_gather", cv.collect),
    ("I", "P"): ConversionKind("kept on every rank"),
    ("R", "P"): ConversionKind("kept on every rank"),
    ("I", "R"): ConversionKind("summed", cv.nothing, "all_reduce"),
    ("R", "I"): ConversionKind("summed", cv.nothing, "all_reduce"),
    ("I", "S"): ConversionKind("none", lambda *args: torch.zeros_like(cv.take(*args))),
    ("G", "I"): ConversionKind("no all-reduce", cv.place),
    ("G", "R"): ConversionKind("no all-reduce", cv.place),
    ("P", "G"): ConversionKind("no all-reduce", cv.take),
    ("G", "P"): ConversionKind("none", lambda x, *_: torch.zeros_like(x)),
    ("I", "G"): ConversionKind("all rows"),
    ("R", "G"): ConversionKind("all rows"),
    ("S", "G"): ConversionKind("own slice only", cv.place),
    ("G", "S"): ConversionKind("own rows only", cv.place, None, cv.take),
    ("R", "S"): ConversionKind("none", lambda *args: torch.zeros_like(cv.take(*args))),
    ("I", "C"): ConversionKind("none", lambda *args: torch.zeros_like(cv.take(*args))),
    ("R", "C"): ConversionKind("none", lambda *args: torch.zeros_like(cv.take(*args))),
    ("P", "C"): ConversionKind("no all-reduce", cv.take),
    ("S", "C"): ConversionKind("own part only", cv.place, None, cv.take),
    ("S", "C'"): ConversionKind("own part only", cv.place_part),
    ("C", "I"): ConversionKind("none", lambda *args: torch.zeros_like(cv.place(*args))),
    ("C", "R"): ConversionKind("none", lambda *args: torch.zeros_like(cv.place(*args))),
    ("C", "S"): ConversionKind("none", cv.place, None, lambda *args: torch.zeros_like(cv.take(*args))),
    ("C", "S'"): ConversionKind("none", lambda *args: torch.zeros_like(cv.take_part(*args))),
    ("D", "I"): ConversionKind("no all-reduce", cv.place),
    ("D", "R"): ConversionKind("no all-reduce", cv.place),
    ("D", "P"): ConversionKind("none", lambda x, src, dst, r, tp: torch.zeros_like(src.place(x, r, tp))),
    ("D", "S"): ConversionKind("own summand only", cv.place, None, cv.take),
    ("D", "S'"): ConversionKind("own summand only", cv.take_part),
    ("I", "D"): ConversionKind("on every rank", lambda x, src, dst, r, tp: dst.dual.take(x, r, tp)),
    ("P", "D"): ConversionKind("no all-reduce", cv.take),
    ("S", "D"): ConversionKind("own slice only", cv.place, None, cv.take),
    ("S", "D'"): ConversionKind("none", lambda *args: torch.zeros_like(cv.place_part(*args))),
}


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("key", TABLE, ids="->".join)
def test_forward_and_backward(key: tuple[str, str], tp: int) -> None:
    for name, src, dst, shape in cases(key, tp):
        assert cv.key(src, dst) == key
        assert right(src, dst, shape, tp), name


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("key", TABLE, ids="->".join)
def test_a_wrong_backward_is_noticed(key: tuple[str, str], tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, src, dst, shape in cases(key, tp):
        if name.startswith("one unit"):  # all of it is on rank 0: nothing to communicate for some entries
            continue
        back = cv.key(dst.dual, src.dual)
        with monkeypatch.context() as patch:
            assert not right(src, dst, shape, tp, lambda: patch.setitem(KINDS, back, WRONG[back])), name  # noqa: B023


def test_the_table_is_closed_under_duality() -> None:
    for key in TABLE:
        for _, src, dst, _ in cases(key, 2):
            back = cv.key(dst.dual, src.dual)
            assert back in KINDS
            assert cv.key(src.dual.dual, dst.dual.dual) == key
    assert {k.name for k in KINDS.values()} == set(cv.FUNCTIONS) and len(cv.FUNCTIONS) == len(KINDS)


def test_partial_maximum_has_no_backward() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    for dst in (INVARIANT, REPLICATED, ShardSpec(1, 1, ((3, 1),))):
        xs = [t.requires_grad_() for t in MAXIMA.split(x, 2)]
        ys = simulate(xs, MAXIMA, dst)
        assert whole_of(ys, dst, x)
        with pytest.raises(PlanError, match="max"):
            ys[0].sum().backward()
    with pytest.raises(PlanError, match="no conversion"):
        kind_of(REPLICATED, MAXIMA)
    with pytest.raises(PlanError, match="no conversion"):
        simulate([x, x], INVARIANT, INVARIANT)


def test_second_derivative() -> None:
    src, dst, share = ShardSpec(0, 1, ((3, 1),)), REPLICATED, (0.25, 0.75)
    x = torch.randn(3, dtype=torch.float64)
    xs = [t.clone().requires_grad_() for t in src.split(x, 2)]
    loss = sum((w * y**3).sum() for w, y in zip(share, simulate(xs, src, dst), strict=True))
    grads = torch.autograd.grad(loss, xs, create_graph=True)  # type: ignore[arg-type]
    second = torch.autograd.grad(sum((g**2).sum() for g in grads), xs)  # type: ignore[arg-type]
    assert torch.allclose(src.recombine(second), 36 * x**3)


@pytest.mark.parametrize("tp", TPS)
def test_split_and_local_size(tp: int) -> None:
    for repeat, segments in partitions(tp).values():
        spec: Spec = ShardSpec(1, repeat, segments)
        x = torch.randn(2, length(ShardSpec(1, repeat, segments)), 2)
        xs = spec.split(x, tp)
        assert whole_of(xs, spec, x) and torch.equal(spec.recombine(xs), x)
        assert [t.shape[1] for t in xs] == [local_size(Runs(repeat, segments), rank=r, tp=tp) for r in range(tp)]
        layout = Shard(1, Partition(tuple(Segment(*s) for s in segments), repeat))
        assert layout.to_runtime() == spec and kind_of(layout, R) is kind_of(spec, REPLICATED)
    x = torch.randn(2, 3, dtype=torch.float64)
    for layout, spec in ((I, INVARIANT), (R, REPLICATED), (P, SUMMANDS), (Partial("max"), MAXIMA)):
        xs = spec.split(x, tp)
        assert torch.allclose(spec.recombine(xs), x)
        assert layout.to_runtime() == spec
        assert all(torch.equal(each, xs[0]) for each in xs) == (spec.mark != "P")


def test_a_wrong_size_is_an_error() -> None:
    with pytest.raises(PlanError, match="shape"):
        ShardSpec(0, 1, ((4, 1),)).split(torch.zeros(5), 2)


def test_functions_are_graph_targets() -> None:
    for name, fn in cv.FUNCTIONS.items():
        assert fn.__name__ == name and getattr(cv, name) is fn and pickle.loads(pickle.dumps(fn)) is fn
    x, s = torch.randn(4), ShardSpec(0, 1, ((4, 1),))
    assert cv.function_for(s, REPLICATED) is cv.g
    assert cv.g(x, s, REPLICATED, rank=0, tp=1, group="none") is x
    with pytest.raises(PlanError, match="g_star"):
        cv.g_star(x, s, REPLICATED, rank=0, tp=1, group="none")
    graph = torch.fx.Graph()
    count: Any = graph.placeholder("n")
    local = graph.call_function(local_size, (Runs(1, ((count, 2),)),), {"rank": 1, "tp": 2})
    arguments: list[Any] = [local, INVARIANT, REPLICATED]
    graph.output(graph.call_function(cv.f, tuple(arguments), {"rank": 0, "tp": 1, "group": "none"}))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert module(5) == 4 and "autotp_comm_conversions_f(" in module.code


def test_shapes_of_fake_tensors() -> None:
    with FakeTensorMode():
        for tp in TPS[:2]:
            for key in TABLE:
                for _, src, dst, shape in cases(key, tp)[::3]:
                    for rank in range(tp):
                        x = torch.empty(local_shape(shape, src, rank, tp), dtype=torch.bfloat16)
                        y = cv.function_for(src, dst)(x, src, dst, rank=rank, tp=tp, group="0")
                        assert y.shape == local_shape(shape, dst, rank, tp) and y.dtype == x.dtype


def local_shape(shape: tuple[int, ...], spec: Spec, rank: int, tp: int) -> tuple[int, ...]:
    if isinstance(spec, CopiedSpec | SummedSpec):
        return local_shape(shape, ShardSpec(*spec[:3]), rank // spec.copies, tp // spec.copies)
    if not isinstance(spec, ShardSpec):
        return shape
    own = local_size(Runs(spec.repeat, spec.segments), rank=rank, tp=tp)
    return tuple(own if d == spec.dim else n for d, n in enumerate(shape))


DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int16, torch.bool)


def values(src: Spec, dst: Spec, shape: tuple[int, ...], dtype: torch.dtype, tp: int) -> tuple[list[Tensor], ...]:
    """What ranks hold, and gradients of their results: small whole numbers, exact in every type; odd strides."""
    draw = torch.Generator().manual_seed(1)

    def numbers(spec: Spec, rank: int) -> Tensor:
        sizes = local_shape(shape, spec, rank, tp)
        t = torch.randint(-4, 5, sizes, generator=draw).to(dtype)
        t = t * (1 + 2j) if dtype.is_complex else t
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    return [numbers(src, r) for r in range(tp)], [numbers(dst, r) for r in range(tp)]


def work_list(tp: int) -> list[tuple[Spec, Spec, tuple[int, ...], torch.dtype]]:
    out = [(s, d, shape, t) for key in TABLE for _, s, d, shape in cases(key, tp)[::3] for t in DTYPES]
    return out + [(MAXIMA, REPLICATED, (3, 2), t) for t in (torch.float32, torch.int64, torch.bool)]


def real(rank: int, world: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor | None]]:
    out: list[tuple[Tensor, Tensor | None]] = []
    for src, dst, shape, dtype in work_list(world):
        xs, gs = values(src, dst, shape, dtype, world)
        x = xs[rank].requires_grad_(differentiable(src, dtype))
        y = cv.function_for(src, dst)(x, src, dst, rank=rank, tp=world, group=group.group_name)
        grad = torch.autograd.grad(y, x, gs[rank])[0] if x.requires_grad else None
        out.append((y.detach(), grad))
    return out


def differentiable(src: Spec, dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and src != MAXIMA


@pytest.mark.parametrize("tp", (2, 3))
def test_real_is_simulated(tp: int, pool: Pool) -> None:
    answers = pool.run(real, world=tp)
    for i, (src, dst, shape, dtype) in enumerate(work_list(tp)):
        xs, gs = values(src, dst, shape, dtype, tp)
        xs = [x.requires_grad_(differentiable(src, dtype)) for x in xs]
        ys = simulate(xs, src, dst)
        grads = torch.autograd.grad(ys, xs, gs) if xs[0].requires_grad else [None] * tp
        for rank in range(tp):
            y, grad = answers[rank][i]
            assert torch.equal(y, ys[rank]) and y.dtype == dtype, (src, dst, dtype, rank)
            want = grads[rank]
            if grad is None or want is None:
                assert grad is want
            else:
                assert torch.equal(grad, want), (src, dst, dtype, rank)


def compiled(rank: int, world: int, group: dist.ProcessGroup, backend: str) -> bool:
    """Whether `torch.compile(fullgraph=True)` of a Megatron block with sequence parallelism changes nothing."""
    same_everywhere = {"rank": rank, "tp": world, "group": group.group_name}
    torch.manual_seed(0)
    weights = [torch.randn(6, 4), torch.randn(4, 6)]
    good = True
    for count in (4, 5):  # even and uneven sequence
        seq: Spec = ShardSpec(0, 1, ((count, 1),))
        up, down = (ShardSpec(d, 1, ((6, 1),)).split(w, world)[rank] for d, w in enumerate(weights))

        def block(x: Tensor, seq: Spec = seq, up: Tensor = up, down: Tensor = down) -> Tensor:
            h = torch.relu(cv.g(x, seq, REPLICATED, **same_everywhere) @ up.T)
            return cv.g_star(h @ down.T, SUMMANDS, seq, **same_everywhere)

        x = seq.split(torch.randn(count, 4), world)[rank].requires_grad_()
        fast = torch.compile(block, fullgraph=True, backend=backend, dynamic=False)
        a, b = block(x), fast(x)
        good &= torch.allclose(a, b)
        before, after = (torch.autograd.grad(t.square().sum(), x)[0] for t in (a, b))
        good &= torch.allclose(before, after)
    return good


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiles_without_a_break(backend: str, pool: Pool) -> None:
    assert pool.run(compiled, backend, world=2) == [True, True]


def test_what_is_sent_of_copies():
    """Among the ranks of a group the parts of its slice; among all of them every copy of each."""
    (pairs,) = Copies.of_units(8, 16)
    heads, parts = Copied(0, pairs.lift(1, 4, 16)), Shard(0, Partition.plain(32, 16))
    assert cv.sending(parts, heads, 320.0, 16) == ("all_gather", 40.0, 2)
    assert cv.sending(heads, R, 320.0, 16) == ("all_gather", 640.0, 16)
    assert cv.sending(heads.dual, R, 320.0, 16) == ("all_reduce", 320.0, 16)
