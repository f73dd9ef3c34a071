"""The second tier: which dimension of every value is split, by the checker's einsum rule and our own rules' strings.

Values are stand-ins with a number of dimensions and a type, S(dim) where they are split, and no sizes: how a dimension
is dealt (uneven, in segments) the checker has no word for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any

from torch import fx

from autotp import compat
from autotp.ir.graph import resolve
from autotp.ir.layouts import Layout, R
from autotp.ir.marks import mark
from autotp.ir.op import Op, Rule
from autotp.ir.program import Planned, Sharded
from autotp.plans.export.annotations import AXIS, spmd_types

from .linear import blank, carries, flavoured, standing
from .local import RefusedError, alike
from .session import checking, words
from .steps import transit


@dataclass
class Stand:
    """A value: the checker's stand-in, and whether a gradient may reach it."""

    value: Any
    graded: bool


@dataclass
class Dimensions:
    """The program with a stand-in for every value that lies somehow.

    Attributes:
        planned, sharded: as for `local.Typing`. Of a decision the split loop is read, which says the einsum string.
        tensors: the typed meta tensors of the first tier, for what carries a gradient.
        checked: operators typed by an einsum string; `unsaid`: those that none says, typed as the plan has them.
    """

    planned: Planned
    sharded: Sharded
    tensors: dict[fx.Node, list[Any]]
    stands: dict[fx.Node, Stand] = field(default_factory=dict)
    checked: int = 0
    unsaid: dict[str, None] = field(default_factory=dict)

    def run(self) -> None:
        """Infer every split dimension.

        Raises:
            RefusedError: at the first node that the checker refuses.
        """
        with checking(self.planned.tp, local=False):
            for node in self.sharded.graph.nodes:
                try:
                    self._step(node)
                except spmd_types("types").SpmdTypeError as error:
                    raise RefusedError("dimensions", node, words(error, self.planned.tp)) from error

    def _step(self, node: fx.Node) -> None:
        if node.op == "output":
            self._outputs(node)
        elif node in self.sharded.origin:
            graded = carries(self.tensors[node][0])
            if mark(node).conversion is not None:
                x = self.stands[node.args[0]]  # type: ignore[index]
                self.stands[node] = Stand(transit(x.value, *node.args[1:3]), graded)  # type: ignore[arg-type]
            else:
                self.stands[node] = Stand(self._result_type(node), graded)

    def _result_type(self, node: fx.Node) -> Any:
        """The type of what an operator makes, or of a leaf."""
        origin, index = self.sharded.origin[node]
        op, layout = self.planned.ops.get(origin), self.sharded.layouts[node]
        if op is None or not op.slots or alike(self.planned, self.sharded, node):
            return self._as_planned(node, layout)
        spmd_type = _Equation(self, node, op, self.planned.rules[origin] or Rule()).type(index)
        if spmd_type is None:
            self.unsaid[str(op.target)] = None
            return self._as_planned(node, layout)
        self.checked += 1
        kind = spmd_types().get_axis_local_type(spmd_type, AXIS)
        if layout.partial and kind is not spmd_types().P:
            raise RefusedError("dimensions", node, f"the value is {kind}, should be a pending sum")
        return spmd_type

    def _as_planned(self, node: fx.Node, layout: Layout) -> Any:
        spmd = spmd_types()
        dim = layout.dim if layout.split else None  # type: ignore[attr-defined]
        kind = {"I": spmd.I, "R": spmd.R, "P": spmd.P}[layout.mark] if dim is None else spmd.S(dim)
        return standing(self.tensors[node][0].ndim, kind)

    def _outputs(self, node: fx.Node) -> None:
        spmd = spmd_types()
        for i, out in enumerate(compat.tree_leaves(node.args[0])):
            if not isinstance(out, fx.Node) or out not in self.stands:
                continue
            state = self.planned.program.becomes(i)
            layout = R if state is None else self.sharded.states.get(state, R)
            partition = spmd.get_partition_spec(self.stands[out].value)
            dims = [d for d, axis in enumerate(partition or ()) if axis is not None]
            goal = [layout.dim] if layout.split else []  # type: ignore[attr-defined]
            if dims != goal:
                raise RefusedError("dimensions", node, f"output {i} is split along {dims}, should be {goal}")


@dataclass
class _Equation:
    """The einsum of one operator, by the loop that its decision splits."""

    tier: Dimensions
    node: fx.Node
    op: Op
    rule: Rule

    def type(self, index: int) -> Any:
        """The type of result number `index`; None where no einsum says it."""
        decision = self.tier.planned.decisions[self.op.node]
        slots = dict(self._operands())
        added = [s for s in slots if s in self.rule.addends and self._contracted(decision.factor, index)]
        terms = {s: self._term(decision.factor, s) for s in slots}
        factors = [s for s in slots if s not in added]
        out = self._term(decision.factor, len(self.op.ins) + index)
        if not factors:
            return None
        operand_terms = [terms[s] for s in factors]
        letters = {"_", *"".join(operand_terms)}
        new = next((d for d, x in enumerate(out) if x not in letters), None)  # a loop that no operand has
        right = out if new is None else f"{out[:new]}_{out[new + 1 :]}"
        spmd_type = self._einsum(operand_terms, right, [slots[s] for s in factors], factors)
        if new is not None and decision.factor is not None and out[new] == ascii_letters[decision.factor]:
            spmd = spmd_types()
            spmd_type = spmd_types("rules").convert(spmd_type, AXIS, src=spmd.R, dst=spmd.S(new))
        for s in added:
            pair = [Stand(spmd_type, True), slots[s]]
            spmd_type = self._together([right, terms[s]], right, pair)
        return spmd_type

    def _operands(self) -> Iterator[tuple[int, Stand]]:
        """Slot -> what arrives there; slots that the rank's call does not read are left out."""
        arrive = list(self._arrivals())
        decision = self.tier.planned.decisions[self.op.node]
        for slot, (operand, layout) in enumerate(zip(self.op.slots, decision.ins, strict=True)):
            here = [n for n in arrive if self.tier.sharded.origin[n] == resolve(operand)]
            exact = [n for n in here if self.tier.sharded.layouts[n] == layout]  # one value may arrive in two layouts
            if here:
                yield slot, self.tier.stands[(exact or here)[0]]

    def _arrivals(self) -> Iterator[fx.Node]:
        """The values that this node is made of, through what its rule wrote in between."""
        todo, visited = list(self.node.all_input_nodes), set()
        while todo:
            n = todo.pop(0)
            if n in visited:
                continue
            visited.add(n)
            if n in self.tier.stands:
                yield n
            else:
                todo += n.all_input_nodes

    def _contracted(self, factor: int | None, index: int) -> bool:
        return factor is not None and self.rule.factors[factor].outs[index] is None

    def _term(self, split: int | None, slot: int) -> str:
        """A letter for each dimension of a slot: the split loop's, or that of the one loop which the dimension is."""
        shape = [*self.op.ins, *self.op.outs][slot]
        return "".join(self._letter(split, slot, d) for d in range(len(shape)))

    def _letter(self, split: int | None, slot: int, dim: int) -> str:
        loops = [i for i, carry in enumerate(self._carries(slot)) if carry is not None and carry.dim == dim]
        if split in loops:
            return ascii_letters[split]  # type: ignore[index]
        plain = len(loops) == 1 and loops[0] < len(ascii_letters) and self._plain(loops[0], split)
        return ascii_letters[loops[0]] if plain else "_"

    def _plain(self, factor: int, split: int | None) -> bool:
        """Whether this loop is the only one of each dimension that carries it, and every slot's."""
        f = self.rule.factors[factor]
        if f.pieces or f.outs.count(None) or None in f.ins and len(f.ins) == 1:
            return False
        for slot, carry in enumerate((*f.ins, *f.outs)):
            others = [c for i, c in enumerate(self._carries(slot)) if i != factor]
            if carry is not None and any(c is not None and c.dim == carry.dim for c in others):
                return False
        return True

    def _carries(self, slot: int) -> Sequence[Any]:
        return [(*f.ins, *f.outs)[slot] for f in self.rule.factors]

    def _einsum(self, terms: list[str], out: str, stands: list[Stand], slots: list[int]) -> Any:
        spmd = spmd_types()
        pending = {s for s, x in zip(slots, stands, strict=True) if spmd.get_axis_local_type(x.value, AXIS) is spmd.P}
        group = next((g for g in self.rule.linear if pending and pending <= g), frozenset())
        linear = tuple(i for i, s in enumerate(slots) if s in group)
        return self._typed(terms, out, stands, (linear,) if linear else ())

    def _together(self, terms: list[str], out: str, stands: list[Stand]) -> Any:
        return self._typed(terms, out, stands, ((0, 1),))

    def _typed(self, terms: list[str], out: str, stands: list[Stand], linear: tuple[tuple[int, ...], ...]) -> Any:
        equation = f"{','.join(x or blank(0) for x in terms)}->{out}"
        graded = [x.graded for x in stands]
        values = flavoured([x.value for x in stands], graded)
        return spmd_types("rules").einsum(equation, *values, linear_in=linear)
