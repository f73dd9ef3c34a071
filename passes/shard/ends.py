"""The ends of groups by which rows are sharded: a number in a layout, a value in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autotp.errors import PlanError
from autotp.ir.graph import Alike, Value, resolve
from autotp.ir.op import Ops, Rule
from autotp.ir.program import EndsTable, Planned


def ends_table(
    calls: Iterable[fx.Node],
    ops: Ops,
    rules: Mapping[fx.Node, Rule | None],
    same: Alike,
) -> EndsTable:
    """Number the values that say where groups end, in the order in which the program's operators read them.

    Args:
        calls: the operators, in graph order; `ops`, `rules`: of each.
        same: the node whose decision each node shares; the values of equal blocks have one number.
    """
    rows: dict[Value, dict[Value, None]] = {}
    for node in calls:
        for slot in ends_slots(rules[node]):
            value = resolve(ops[node].slots[slot])
            rows.setdefault((same[value[0]], value[1]), {})[value] = None
    return tuple(tuple(row) for row in rows.values())


def ends_slots(rule: Rule | None, factor: int | None = None) -> list[int]:
    """List the operand slots that say where groups end, by any factor of the rule or by this one."""
    if rule is None:
        return []
    factors = rule.factors if factor is None else (rule.factors[factor],)
    carries = [c for f in factors for c in f.carries if c is not None]
    return list(dict.fromkeys(c.groups for c in carries if c.groups is not None))


def ends_of(planned: Planned, number: int, node: fx.Node) -> Value:
    """Find the value with this number in the block of a node, of those that share the number.

    Args:
        planned: the graph with its decisions. number: as a layout names the ends. node: an operator on rows by group.

    Raises:
        PlanError: the program has no such value, or not one for each node that is decided as `node` is.
    """
    row = planned.ends[number] if 0 <= number < len(planned.ends) else ()
    # Equal blocks stand in the graph in one order, so the third of equal nodes belongs to the third of the ends.
    peers = [n for n in planned.program.graph.nodes if planned.same.get(n) is planned.same[node]]
    if len(row) != len(peers):
        raise PlanError(
            f"it is not known where the groups end by which the rows of {node.name} are sharded: the program "
            f"has {len(row)} values for {len(peers)} operators that are decided alike. Plan again."
        )
    return row[peers.index(node)]
