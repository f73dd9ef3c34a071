"""A collective left out or done twice is noticed, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import fx

from autotp.comm import conversions
from autotp.driver.verify import compare
from autotp.ir.layouts import Layout
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.proof.report import Report
from benchmarks.helpers.lists.mutants import copied, double, drop
from tests.helpers.models import planned, values

Mutation = Callable[[Sharded, fx.Node], None]


def communicating(program: Planned, sharded: Sharded) -> Iterator[fx.Node]:
    """The conversions that move data between the ranks, forward or backward."""
    for node in sharded.graph.nodes:
        if (conversion := mark(node).conversion) is not None:
            src, dst = conversion
            back = sharded.origin[node][0] in program.grads and moves(dst.dual, src.dual)
            if moves(src, dst) or back:
                yield node


def moves(src: Layout, dst: Layout) -> bool:
    kind = conversions.KINDS.get(conversions.key(src, dst))
    return kind is not None and kind.primitive is not None


@pytest.mark.parametrize("sequence_parallel", [None, True])
def test_the_program_itself_passes(sequence_parallel):
    _, program, sharded = planned("llama", 2, sequence_parallel)
    for each in (sharded, copied(sharded)[0]):
        report = compare(program, each, values("llama"))
        assert report.ok, str(report)


@pytest.mark.parametrize("sequence_parallel", [None, True])
@pytest.mark.parametrize("mutate", [drop, double])
def test_every_mutation_is_noticed_and_named(mutate: Mutation, sequence_parallel):
    _, program, sharded = planned("llama", 2, sequence_parallel)
    weights = values("llama")
    found: dict[str, tuple[str, Report]] = {}
    for node in communicating(program, sharded):
        mutated, nodes = copied(sharded)
        mutate(mutated, nodes[node])
        found[node.name] = sharded.origin[node][0].name, compare(program, mutated, weights)
    names = {node.split("_")[0] for node in found}
    assert len(found) >= 10 and ({"f", "g"} if sequence_parallel else {"f", "gather"}) <= names
    assert not [name for name, (_, report) in found.items() if report.ok]
    missed = {n: str(r) for n, (value, r) in found.items() if r.difference is None or r.difference.value != value}
    assert len(missed) <= 0.05 * len(found), missed
