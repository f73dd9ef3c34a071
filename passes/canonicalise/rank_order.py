"""One order of operators, and one name for each, on every rank.

A forward that iterates over a set of strings (transformers makes masks `for kind in set(layer_types)`) runs in another
order in every process, because Python hashes strings by a seed. The graphs are then equal but for the order of
operators that do not depend on each other, so every rank takes the order of rank 0.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autotp.comm.ranks import Ranks, broadcast
from autotp.ir.graph import Capture, copy_node, described, draws
from autotp.passes.base import Changes, Pass

NodeRow = tuple[str, str, tuple[str, ...]]  # a node's signature, its name, and the names of what it reads


@dataclass(frozen=True)
class RankOrder(Pass[Capture]):
    """Puts operators into rank 0's order, where a rank's program is the same but for that. A collective pass."""

    name = "rank-order"
    ranks: Ranks

    def idle(self, program: Capture) -> str:
        """Run only where there are other ranks, which may have another order."""
        return "" if self.ranks.tp > 1 else "one process"

    def run(self, program: Capture) -> Changes:
        """Receive rank 0's order, and take it."""
        ranks = self.ranks
        order = broadcast(ranks, signatures(program) if ranks.rank == 0 else None)
        if order is None or ranks.rank == 0:
            return Changes(0, "this rank's order is the one")
        return Changes(follow(program, order), "nodes in rank 0's order, under its names")


def signatures(program: Capture) -> list[NodeRow]:
    """List every node with a hash of what it computes from which leaves, which is equal in any order of the operators.

    Operators that draw random numbers are distinguished by their place among those, which must be the same.

    Args:
        program: the captured graph.
    """
    leaves = {leaf.node: f"{leaf.kind} {leaf.name}" for leaf in program.leaves}
    hashes: dict[fx.Node, str] = {}
    rows, draw_count = [], 0
    for node in program.graph.nodes:
        draw_count += draws(node)
        operands: list[fx.Node] = []
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n, to=operands: to.append(n) or hashes[n])
        parts = leaves.get(node), described(node, arguments), draw_count if draws(node) else 0
        hashes[node] = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
        rows.append((hashes[node], node.name, tuple(n.name for n in operands)))
    return rows


def follow(program: Capture, order: Sequence[NodeRow]) -> int:
    """Put the program's nodes into this order and give them these names, unless it has other nodes.

    Args:
        program: this rank's graph.
        order: rank 0's rows, as `signatures` gives them.

    Returns:
        How many nodes are new, 0 where the program stays as it is.
    """
    rows = signatures(program)
    hashes = Counter(row[0] for row in rows)
    if rows == list(order) or hashes != Counter(row[0] for row in order):
        return 0
    alike: dict[str, list[fx.Node]] = defaultdict(list)
    for node, (signature, _, _) in zip(program.graph.nodes, rows, strict=True):
        alike[signature].append(node)
    graph, nodes, env = fx.Graph(program.graph.owning_module), {}, {}
    for signature, name, operand_names in order:
        node, operands = alike[signature].pop(), iter(operand_names)
        # By rank 0's names, not by the node's own operands: of several that compute the same it may read another.
        env[node] = nodes[name] = copy_node(node, graph, lambda n, names=operands: nodes[next(names)], name)
    program.move(graph, env)
    return len(env)
