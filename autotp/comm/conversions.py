"""Conversions between layouts on one mesh axis, and their backwards.

A conversion says how every rank turns what it holds of a value under layout `src` into what it holds under `dst`. Its
backward is the conversion dual(dst) -> dual(src), found in the same table: that sentence is the whole of Megatron's
f, f*, g, g* (Shoeybi et al. 2019; Korthikanti et al. 2022). Layouts are those of `autotp.ir.specs` here, which can be
literal arguments in a torch.fx graph; the functions named in `KINDS` are that graph's call targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autotp.errors import PlanError
from autotp.ir.layouts import Layout
from autotp.ir.program import packed, unpacked
from autotp.ir.specs import INVARIANT, REPLICATED, Runs, Spec, rows_by_rank

from . import collectives
from .collectives import Exchange, Primitive
from .virtual import AllHosts, Host, of_groups

LocalFunction = Callable[[Tensor, Any, Any, int, int], Tensor]  # (x, src, dst, rank, tp), with the methods of the kinds


def nothing(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Return what the rank holds already."""
    return x.view_as(x)


def take(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Take the rank's own part of a whole value: a slice, rows, a summand."""
    return dst.take(x, rank, tp)


def place(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Place the rank's part in the whole, with zeros around it."""
    return src.place(x, rank, tp)


def pad(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Pad the rank's slice to the size of the largest."""
    return src.pad(x, rank, tp)


def collect(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Join the padded slices of all ranks to the whole."""
    return src.collect(x, tp)


def deal(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Cut the whole into the padded slices of all ranks."""
    return dst.deal(x, tp)


def trim(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Remove the padding of the rank's slice."""
    return dst.trim(x, rank, tp)


def gather_parts(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Join the padded parts of a group's ranks to the group's slice."""
    return dst.trim(dst.parts.collect(x, dst.copies), rank, tp)


def deal_parts(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Cut the group's slice into the parts of its ranks."""
    return src.parts.deal(src.pad(x, rank, tp), src.copies)


def take_part(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Take the rank's own part of its group's slice."""
    return dst.trim(src.parts.take(src.pad(x, rank, tp), rank % src.copies, src.copies), rank, tp)


def place_part(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Place the rank's part in its group's slice, with zeros around it."""
    return dst.trim(dst.parts.place(src.pad(x, rank, tp), rank % dst.copies, dst.copies), rank, tp)


def then(first: LocalFunction, second: LocalFunction) -> LocalFunction:
    """Compose two local functions, the first one first."""

    def both(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
        return second(first(x, src, dst, rank, tp), src, dst, rank, tp)

    return both


@dataclass(frozen=True)
class ConversionKind:
    """One entry of the table: its name, and `post(primitive(pre(x)))`, the forward of a conversion.

    Attributes:
        name: of the public function, and of the collective in graphs and plans.
        pre: what each rank does before it communicates.
        primitive: the communication; None where there is none.
        post: what each rank does after.
        grouped: whether ranks communicate within groups that have copies of one slice. uneven: whether the data says
            how many rows each sends to each.
    """

    name: str
    pre: LocalFunction = nothing
    primitive: Primitive | None = None
    post: LocalFunction = nothing
    grouped: bool = False
    uneven: bool = False


# "C" is `layouts.Copied`, "D" its gradient; "C'" and "D'" are of slices whose parts S has, side by side in the group.
# "G" is `layouts.Grouped`: every rank has all rows in place, and masks those that it does not own; "T" `Travelled`.
# "S'" is S on the same dimension by another partition: no all-to-all can say that without index lists, and it is rare.
KINDS: dict[tuple[str, str], ConversionKind] = {
    ("I", "R"): ConversionKind("f"),
    ("P", "I"): ConversionKind("f_star", nothing, "all_reduce"),
    ("S", "R"): ConversionKind("g", pad, "all_gather", collect),
    ("P", "S"): ConversionKind("g_star", deal, "reduce_scatter", trim),
    ("S", "I"): ConversionKind("gather", pad, "all_gather", collect),
    ("I", "S"): ConversionKind("shard", take),
    ("S", "S"): ConversionKind("reshard", then(pad, deal), "all_to_all", then(collect, trim)),
    ("S", "S'"): ConversionKind("repartition", pad, "all_gather", then(collect, take)),
    ("P", "R"): ConversionKind("all_reduce", nothing, "all_reduce"),
    ("R", "I"): ConversionKind("as_invariant"),
    ("I", "P"): ConversionKind("keep_first_i", take),
    ("R", "P"): ConversionKind("keep_first_r", take),
    ("R", "S"): ConversionKind("shard_r", take),
    ("S", "P"): ConversionKind("zero_pad", place),
    ("I", "G"): ConversionKind("group_i", take),
    ("R", "G"): ConversionKind("group_r", take),
    ("P", "G"): ConversionKind("group_p", nothing, "all_reduce", take),
    ("S", "G"): ConversionKind("group_s", pad, "all_gather", then(collect, take)),
    ("G", "S"): ConversionKind("ungroup_s", then(place, deal), "reduce_scatter", trim),
    ("G", "I"): ConversionKind("ungroup_i", place, "all_reduce"),
    ("G", "R"): ConversionKind("ungroup_r", place, "all_reduce"),
    ("G", "P"): ConversionKind("ungroup_p", place),
    ("S", "T"): ConversionKind("travel", nothing, "all_to_all", trim, uneven=True),
    ("T", "S"): ConversionKind("travel_back", place, "all_to_all", uneven=True),
    ("I", "C"): ConversionKind("copy_i", take),
    ("R", "C"): ConversionKind("copy_r", take),
    ("P", "C"): ConversionKind("copy_p", nothing, "all_reduce", take),
    ("S", "C"): ConversionKind("copy_s", pad, "all_gather", then(collect, take)),
    ("S", "C'"): ConversionKind("copy_parts", pad, "all_gather", gather_parts, True),
    ("C", "I"): ConversionKind("uncopy_i", pad, "all_gather", collect),
    ("C", "R"): ConversionKind("uncopy_r", pad, "all_gather", collect),
    ("C", "S"): ConversionKind("uncopy_s", pad, "all_gather", then(collect, take)),
    ("C", "S'"): ConversionKind("part_of_copy", take_part),
    ("D", "I"): ConversionKind("add_i", place, "all_reduce"),
    ("D", "R"): ConversionKind("add_r", place, "all_reduce"),
    ("D", "P"): ConversionKind("add_p", place),
    ("D", "S"): ConversionKind("add_s", then(place, deal), "reduce_scatter", trim),
    ("D", "S'"): ConversionKind("add_parts", deal_parts, "reduce_scatter", trim, True),
    ("I", "D"): ConversionKind("summand_i", take),
    ("P", "D"): ConversionKind("summand_p", nothing, "all_reduce", take),
    ("S", "D"): ConversionKind("summand_s", pad, "all_gather", then(collect, take)),
    ("S", "D'"): ConversionKind("summand_of_part", place_part),
}
SPREAD = frozenset([("S", "C"), ("C", "S"), ("S", "D"), ("D", "S")])


def key(src: Spec | Layout, dst: Spec | Layout) -> tuple[str, str]:
    """Return the key of a conversion in `KINDS`."""
    a, b = src.mark, dst.mark
    near = src.sharded_dim == dst.sharded_dim if a == b else (a, b) in SPREAD and _holds(src, dst)
    return (a, b + "'") if near else (a, b)


def _holds(src: Any, dst: Any) -> bool:
    """Say whether a shard and a slice for a group of ranks have the same elements in that group."""
    fine, coarse = (src, dst) if src.mark == "S" else (dst, src)
    return _layout_holds(fine, coarse) if isinstance(fine, Layout) else coarse.holds(fine)


@cache
def _layout_holds(fine: Layout, coarse: Any) -> bool:
    return coarse.to_runtime().holds(fine.to_runtime())


def copies_of(src: Any, dst: Any) -> int:
    """Return the number of ranks of a group that has copies of one slice, within which a conversion communicates."""
    return max(getattr(x, "copies", 1) for x in (src, dst))


def kind_of(src: Spec | Layout, dst: Spec | Layout) -> ConversionKind:
    """Look up the table's entry for `src` -> `dst`.

    Raises:
        PlanError: there is none: equal layouts need no conversion, and nothing becomes a Partial maximum.
    """
    marks = src.mark, dst.mark
    differ = marks[0] != marks[1] and marks not in SPREAD  # asked at every call: most do
    kind = KINDS.get(marks if differ else key(src, dst))
    if kind is None or dst.reduction != "sum":
        raise PlanError(
            f"There is no conversion from {src} to {dst}. Equal layouts need none, and a Partial maximum is only made "
            "by an operator's rule; ask for I, R, S or a Partial sum."
        )
    return kind


def simulate(
    xs: Sequence[Tensor], src: Spec, dst: Spec, wire: torch.dtype | None = None, local: int = 1
) -> list[Tensor]:
    """Run the conversion on all ranks at once, in one process, differentiable (twice too).

    Args:
        xs: what each rank holds under `src`, in rank order; their number is tp.
        src, dst: run-time layouts. wire: see the functions of the table.
        local: number of ranks of one process, as of a `virtual.Host`.

    Returns:
        What each rank holds under `dst`.
    """
    return on_hosts(xs, src, dst, AllHosts(len(xs), local), wire)


def on_hosts(
    xs: Sequence[Tensor], src: Spec, dst: Spec, hosts: Host | AllHosts, wire: torch.dtype | None = None,
    reduces: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run the conversion for all virtual ranks of one process, or of all, differentiable (twice too).

    Args:
        xs: what each virtual rank here holds under `src`; of an invariant value those of a process hold one tensor.
        src, dst, wire, reduces: see the functions of the table. hosts: who runs which.

    Returns:
        What each virtual rank here holds under `dst`, likewise.
    """
    operands = xs[:: hosts.local] if src.mark == INVARIANT.mark else xs
    if torch.is_grad_enabled():
        results = _OnHosts.apply(src, dst, hosts, wire, reduces, *operands)
    else:
        results = _at_hosts(operands, src, dst, hosts, wire)
    return _of_each(results, dst, hosts.local)  # type: ignore[arg-type]


def _of_each(xs: Sequence[Tensor], spec: Spec, local: int) -> list[Tensor]:
    """List the values of all virtual ranks: of an invariant value those of a process have one tensor."""
    if spec.mark != INVARIANT.mark:
        return list(xs)
    return [x for x in xs for _ in range(local)]


def _at_hosts(
    xs: Sequence[Tensor], src: Spec, dst: Spec, hosts: Host | AllHosts, wire: torch.dtype | None
) -> list[Tensor]:
    everyone = _of_each(xs, src, hosts.local)
    ys = _run(everyone, src, dst, hosts.here, hosts.size, hosts.exchange, wire)
    return ys[:: hosts.local] if dst.mark == INVARIANT.mark else ys


def function_for(src: Spec, dst: Spec) -> Callable[..., Tensor]:
    """Return the public function (one of the names in `KINDS`) that does `src` -> `dst` between processes."""
    return FUNCTIONS[kind_of(src, dst).name]


def _alone(x: Tensor, src: Spec, dst: Spec, rank: int, tp: int, group: str, wire: torch.dtype | None = None) -> Tensor:
    """Run the algorithm on one rank, between processes."""
    kind = kind_of(src, dst)
    if kind.pre is not nothing:
        x = kind.pre(x, src, dst, rank, tp)
    if kind.primitive is not None:
        n = copies_of(src, dst) if kind.grouped else 0
        peers = range(rank // n * n, rank // n * n + n) if n else ()
        rows = rows_by_rank(src, dst, rank, tp) if kind.uneven else None
        y = collectives.real(kind.primitive, packed(x, wire), src.reduction, tp=tp, group=group, peers=peers, rows=rows)
        x = unpacked(y, wire, x.dtype)
    return x if kind.post is nothing else kind.post(x, src, dst, rank, tp)


def _run(
    xs: list[Tensor], src: Spec, dst: Spec, ranks: Sequence[int], tp: int, exchange: Exchange, wire: torch.dtype | None
) -> list[Tensor]:
    """Run the algorithm for the ranks that are present, in one process."""
    kind = kind_of(src, dst)
    ys = [kind.pre(x, src, dst, rank, tp) for x, rank in zip(xs, ranks, strict=True)]
    if kind.uneven:
        ys = collectives.travelled(ys, [rows_by_rank(src, dst, rank, tp)[0] for rank in ranks])
    elif kind.primitive is not None:
        wires = [packed(y, wire) for y in ys]
        if kind.grouped:
            whole = exchange("all_gather", wires, src.reduction)
            results = of_groups(kind.primitive, whole, ranks, copies_of(src, dst))
        else:
            results = exchange(kind.primitive, wires, src.reduction)
        ys = [unpacked(y, wire, xs[0].dtype) for y in results]
    if kind.primitive is not None and dst.whole:  # what all ranks make alike
        return [kind.post(ys[0], src, dst, ranks[0], tp)] * len(ys)
    return [kind.post(y, src, dst, rank, tp) for y, rank in zip(ys, ranks, strict=True)]


class _OnHosts(torch.autograd.Function):
    # What virtual ranks of a process make of one value is added up here, along the tree, and not by autograd.
    @staticmethod
    def forward(
        ctx: Any, src: Spec, dst: Spec, hosts: Host | AllHosts, wire: torch.dtype | None, reduces: torch.dtype | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.conversion, ctx.reduces = (src, dst, hosts), reduces
        return tuple([y.detach() for y in _at_hosts(xs, src, dst, hosts, wire)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (src, dst, hosts), reduces = ctx.conversion, ctx.reduces
        wide = grads
        if reduces is not None:
            wide = tuple([grad.to(reduces) for grad in grads])
        back = dst.dual, src.dual, hosts, None
        gradients: Any = _OnHosts.apply(*back, None, *wide) if torch.is_grad_enabled() else _at_hosts(wide, *back)
        return None, None, None, None, None, *[x.to(grads[0].dtype) for x in gradients]


class _Real(torch.autograd.Function):
    # Fixed arity: Dynamo does not trace a forward that takes *args.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, src: Spec, dst: Spec, rank: int, tp: int, group: str, wire: torch.dtype | None,
        reduces: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        ctx.conversion, ctx.reduces = (src, dst, rank, tp, group), reduces
        # Detached, it is no view in autograd's eyes: users may change what a model returns in place.
        return _alone(x, src, dst, rank, tp, group, wire).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        src, dst, rank, tp, group = ctx.conversion
        wide = grad if ctx.reduces is None else grad.to(ctx.reduces)
        back = dst.dual, src.dual, rank, tp, group
        # Recorded where a graph is asked for.
        gradient: Any = _Real.apply(wide, *back, None, None) if torch.is_grad_enabled() else _alone(wide, *back)
        return gradient.to(grad.dtype), None, None, None, None, None, None, None


def _function(src: str, dst: str) -> Callable[..., Tensor]:
    name = KINDS[src, dst].name

    def convert(
        x: Tensor, src: Spec, dst: Spec, *, rank: int, tp: int, group: str, wire: torch.dtype | None = None,
        reduces: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        if kind_of(src, dst).name != name:
            raise PlanError(f"{name} does not convert {src} to {dst}; {kind_of(src, dst).name} does.")
        if tp == 1:
            return x
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return _Real.apply(x, src, dst, rank, tp, group, wire, reduces)  # type: ignore[return-value]
        y = _alone(x, src, dst, rank, tp, group, wire)  # in inference a step has no time for what records nothing
        return y.detach() if y._is_view() else y

    convert.__name__ = convert.__qualname__ = name
    convert.__doc__ = f"""Convert {src} -> {dst}.

    Args:
        x: what this rank holds under `src`.
        src, dst: run-time layouts (`autotp.ir.specs`).
        rank: of this process on the axis, 0 to tp-1.
        tp: number of ranks on the axis; with one rank `x` itself is returned.
        group: name of the functional process group, `ProcessGroup.group_name`.
        wire: type in which the numbers of `x` are sent forward, where they are numbers of that; None for its own.
        reduces: type in which the gradient is sent and added up; None for its own.

    Returns:
        What this rank holds under `dst`.
    """
    return convert


FUNCTIONS: dict[str, Callable[..., Tensor]] = {kind.name: _function(*marks) for marks, kind in KINDS.items()}


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Look up a conversion by its name as an attribute of the module, as generated graph code and pickles import it."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return FUNCTIONS[name]


def f_bucket(
    tensors: Sequence[Tensor], *, rank: int, tp: int, group: str, reduces: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Apply f to several small tensors: nothing is sent forward; backward one all-reduce for each dtype.

    They are copied into one flat tensor, which f converts; a function over any number of tensors is nothing that Dynamo
    traces (torch 2.13).

    Args:
        tensors: what this rank holds, the same on every rank.
        rank, tp, group: this process on the axis, and the group's name. reduces: see `f`.

    Returns:
        The same tensors; each rank's gradient of one is a summand. Those that need no gradient pass.
    """
    out = list(tensors)
    graded = torch.is_grad_enabled()
    for dtype in dict.fromkeys([t.dtype for t in tensors if graded and t.requires_grad]):
        at = [i for i, t in enumerate(tensors) if t.requires_grad and t.dtype == dtype]
        flat = torch.cat([tensors[i].flatten() for i in at])
        flat = FUNCTIONS["f"](flat, INVARIANT, REPLICATED, rank=rank, tp=tp, group=group, reduces=reduces)
        for i, part in zip(at, flat.split([tensors[i].numel() for i in at]), strict=True):
            out[i] = part.view(tensors[i].shape)
    return tuple(out)


def _bare(primitive: Primitive | None) -> frozenset[Callable[..., Tensor]]:
    """Return the functions that do nothing beside this primitive."""
    kinds = [k for k in KINDS.values() if (k.pre, k.primitive, k.post) == (nothing, primitive, nothing)]
    return frozenset(FUNCTIONS[k.name] for k in kinds)


KEEPS = _bare(None)  # change the gradient's layout alone: without gradients a value is what it was
SUMS = _bare("all_reduce")  # add up over the ranks and do nothing else


def local_size(runs: Runs, *, rank: int, tp: int) -> int:
    """Count the elements of a sharded dimension that `rank` owns."""
    return runs.local(rank, tp)


def register(src: str, dst: str, kind: ConversionKind) -> Callable[..., Tensor]:
    """Enter the conversion between two kinds of layout, at least one of which is not built in, into the table.

    Args:
        src, dst: marks of the kinds; a further `'` on `dst` means another distribution of the same dimension.
        kind: what it does; its name is that of no other.

    Returns:
        The public function.

    Raises:
        ValueError: the table has an entry for these marks, or one with this name.
    """
    if (src, dst) in KINDS or kind.name in FUNCTIONS:
        raise ValueError(f"there is a conversion {src} -> {dst} already, or one that is called {kind.name}")
    KINDS[src, dst] = kind
    FUNCTIONS[kind.name] = _function(src, dst)
    return FUNCTIONS[kind.name]


def sending(src: Layout, dst: Layout, nbytes: float, tp: int) -> tuple[str, float, int]:
    """Describe the communication of a conversion: its primitive ("none" where no bytes are sent), bytes, and ranks.

    Args:
        src, dst: layouts. nbytes: of the whole value. tp: ranks of the axis.
    """
    collective = primitive(src, dst) or "none"
    if among_few(src, dst):
        ranks = copies_of(src, dst)
        return collective, nbytes * ranks / tp, ranks
    # Among all, every rank gives its slice, which others of its group give too; unlike ones as long as the longest.
    sides = {"all_gather": (src,), "reduce_scatter": (dst,), "all_to_all": (src, dst)}.get(collective, ())
    return collective, nbytes * math.prod([side.padding(tp) for side in sides]), tp


def among_few(src: Layout, dst: Layout) -> bool:
    """Say whether a conversion stays within a group of ranks that has one slice, a part of which each has or gets."""
    return (src.mark, dst.mark) in SPREAD and key(src, dst)[1][-1] == "'"


def primitive(src: Layout, dst: Layout) -> str | None:
    """Return the primitive of a conversion; None where no bytes are sent."""
    return None if src == dst else KINDS[key(src, dst)].primitive
