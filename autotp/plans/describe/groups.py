"""Groups of numbers that share a scale, where they are too few for every rank to have one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from autotp.ir.graph import resolve
from autotp.ir.program import Planned


def few_groups(planned: Planned) -> list[str]:
    """A note for each size of groups that keeps a dimension of a weight from being split over the ranks."""
    weights: dict[tuple[int, int, int], list[str]] = {}
    for leaf in planned.program.leaves:
        value = leaf.node.meta.get("val")
        if leaf.kind.weight and isinstance(value, Tensor) and value.itemsize == 1:
            for place in dict.fromkeys(_groups(planned, leaf.node, list(range(value.ndim)))):
                weights.setdefault(place, []).append(leaf.name)
    return [_note(planned.tp, *place, names) for place, names in weights.items() if place[1] < planned.tp]


def _note(tp: int, dim: int, count: int, size: int, names: list[str]) -> str:
    more = f" (and of {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"dim {dim} of {names[0]}{more} is {count} groups of {size} that share a scale, too few for {tp} ranks: it is "
        "not split there, or leaves ranks without any"
    )


def _groups(planned: Planned, node: fx.Node, dims: list[int | None]) -> Iterator[tuple[int, int, int]]:
    """Where readers cut a dimension into groups: the dimension of the weight, how many they are, and their size.

    Args:
        node: the weight, or a value as large as it, such as a cast. dims: for each dimension of that the weight's.
    """
    for user in node.users:
        rule, op = planned.rules.get(user), planned.ops.get(user)
        if rule is None or op is None or [resolve(s)[0] for s in op.slots] != [node]:
            continue
        after: list[int | None] = [None] * len(op.outs[0])
        for factor in rule.factors:
            before, groups = factor.ins[0], factor.outs[0]
            dim = dims[before.dim] if before is not None else None
            if before is None or groups is None or dim is None:
                continue
            count, size = factor.size, before.unit
            if isinstance(count, int) and isinstance(size, int) and before.repeat == 1 and size > 1 == groups.unit:
                yield dim, count, size
            elif before.unit == 1 and before.repeat == 1:
                after[groups.dim] = dim
        yield from _groups(planned, user, after)
