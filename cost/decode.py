"""Bytes that a step of decoding reads: weights, of tables the rows looked up, of experts those that rows need."""

from __future__ import annotations

from torch import fx

from autotp.errors import PlanError
from autotp.ir.graph import Capture, tensors
from autotp.ir.layouts import Hint, Layout
from autotp.ir.op import EXPERTS, Op, factors_of, packet_of
from autotp.ir.program import Planned

from .objective import Objective
from .prices import LOOKUPS, is_free, lengths, nbytes


def check_lengths(program: Capture, objective: Objective) -> None:
    """Refuse to plan for decoding where no input has a length: there is no one token to price."""
    past = any(x.kind.carried for x in program.leaves)
    if objective.name == "decode" and not past and not lengths(program):
        raise PlanError(
            "objective='decode' prices one new token a sequence, but no input has a second dimension of any length "
            "(the plan's notes say whether sizes had to be fixed). Use objective='prefill'."
        )


def weights_read(planned: Planned, hint: Hint) -> float:
    """Bytes of parameters, buffers and constants that the fullest rank reads in a forward.

    A table of which rows are looked up counts by those rows, weights of experts by at most one expert for each row.

    Args:
        planned: the graph with its decisions. hint: the sizes to count with.
    """
    reads = _Reads(planned, hint)
    return sum(reads.of_leaf(leaf.node) for leaf in planned.program.leaves if leaf.kind.steady)


class _Reads:
    """Parts of leaves that operators read, directly or through views."""

    def __init__(self, planned: Planned, hint: Hint) -> None:
        self.planned, self.hint = planned, hint

    def of_leaf(self, leaf: fx.Node) -> float:
        """Bytes of a leaf that a rank reads: those of the reader that needs most of it."""
        if not tensors(leaf):
            return 0.0
        return self._bytes(leaf, self.planned.decisions[leaf].outs[0]) * self._most(leaf)

    def _bytes(self, node: fx.Node, layout: Layout) -> float:
        return nbytes(tensors(node)[0], self.hint) * layout.share(self.planned.tp, self.hint)

    def _most(self, node: fx.Node) -> float:
        return max((self._by(user, node) for user in node.users), default=0.0)

    def _by(self, user: fx.Node, node: fx.Node) -> float:
        """The part of a value that one of its users reads."""
        op = self.planned.ops.get(user)
        if op is None:
            return 0.0
        if is_free(op):
            return self._most(user)
        slot = op.slots.index(node) if node in op.slots else 0
        if slot == 0 and packet_of(op.target) in LOOKUPS:
            return self._rows(op)
        # Weights [experts, in, out] are read for as many experts as there are rows, at most.
        grouped = slot == 1 and len(op.ins[1]) == 3 and op.ins[0]
        if not grouped or all(f.label != EXPERTS for f in factors_of(self.planned.rules[user])):
            return 1.0
        return min(1.0, self.hint(op.ins[0][0]) / max(self.hint(op.ins[1][0]), 1))

    def _rows(self, op: Op) -> float:
        """The part of a table that a lookup reads: its result, of which a rank may have all that it holds rows for."""
        decision = self.planned.decisions[op.node]
        table_bytes = self._bytes(op.slots[0], decision.ins[0])
        return min(1.0, self._bytes(op.node, decision.outs[0]) / table_bytes) if table_bytes else 0.0
