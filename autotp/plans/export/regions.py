"""Module boundaries at which a plan's program is computed by code that runs as it was written.

Other tools shard a model by its modules: a style says how a module's parameters, input and output are placed, and all
code between modules runs as it was written, on what it gets. So a value may be split between two
modules only where every operator on the way can run on a part by itself. The values that hang together in this way
are a region. It begins where column-parallel layers leave their outputs split, and ends where row-parallel ones take
their inputs split. Where modules cannot express something in a region, its values are whole instead: the modules around
it gather their output or split their input, and weights stay split. A partial sum is reduced by the module that makes
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from networkx.utils import UnionFind
from torch import fx

from autotp.ir.decisions import Decision
from autotp.ir.graph import Leaf, Value, outputs_of, resolve, where
from autotp.ir.layouts import Layout
from autotp.ir.op import Op, Rule, aten, several
from autotp.ir.scopes import generic, module_name, module_path
from autotp.passes.shard.planner import Builder
from autotp.rules.views import local_shape

LINEAR, EMBEDDING = "torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"
SITES: dict[Any, tuple[str, int, int]] = {
    aten.linear.default: (LINEAR, 1, 0),
    aten.embedding.default: (EMBEDDING, 0, 1),
}  # class, weight, input
SEQUENCE = "no style splits batch or sequence between modules"
SHARED = "it is tied, or read more than once, and a style is for the own weight of one module"


@dataclass(frozen=True)
class Boundary:
    """The layouts of a module's parameters, input and output.

    Attributes:
        module: its path.
        kind: "column" or "row", as the weight is split.
        lookup: whether it is an embedding.
        split: whether the output of "column" leaves, and the input of "row" comes, split along the last dimension.
    """

    module: str
    kind: str
    lookup: bool = False
    split: bool = False


@dataclass
class Boundaries:
    """A reader of the boundaries of a plan's modules off its graph.

    Attributes:
        builder: with the graph; `decisions`: the plan's, by node name.
        refused: by path with `*` for numbers, modules within which nothing may be split, and the reason.
        without_style: parameter -> the reason why no module says its split.
        gathered: row-parallel layer -> the reason why its output, which the plan splits, is whole.
        sites: operator that is all of a linear layer or embedding with a split weight -> its module and kind.
        sets: of operators whose values are split together, or whole together: of a column-parallel layer its output, of
            a row-parallel one its input. split: those at which something is.
        reasons: operator -> the reason why the values of its set are whole; "" where they are in the plan too.
    """

    builder: Builder
    decisions: Mapping[str, Decision]
    refused: Mapping[str, str] = field(default_factory=dict)
    without_style: dict[str, str] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends = outputs_of(self.builder.program)
        self.sites = {n: site for n, op in self.builder.ops.items() if (site := self._site(n, op)) is not None}
        self.sets, self.reasons = UnionFind(), dict[fx.Node, str]()
        self.split: dict[fx.Node, None] = {}
        # Equal layers do the same: a style has one name for layers.*.q_proj, so one that cannot stops the others.
        first = {}
        for node, (module, _) in self.sites.items():
            self.sets.union(first.setdefault(generic(module), node), node)

    @property
    def whole(self) -> dict[fx.Node, str]:
        """The operator that stands for a set whose values are whole -> the reason."""
        out = {}
        for node, reason in self.reasons.items():
            out[self.sets[node]] = out.get(self.sets[node]) or reason
        return out

    def read(self) -> list[Boundary]:
        """Read the boundaries of all modules that have a style; where a region must be whole, its ends are whole."""
        for node, op in self.builder.ops.items():
            self._operands(node, op)
        # Between the last operator and the caller stands no module: a linear layer's style may gather its output, of an
        # addition nobody does.
        for value in map(resolve, self.ends):
            if self._layout(value) is not None:
                self._refuse(value[0], "" if value[0] in self.sites else "the model's output is whole")
        # A part that the code of a module was seen not to run on.
        for node in self.split:
            for path in map(generic, ("", *module_path(node))):
                if path in self.refused:
                    self._refuse(node, self.refused[path])
        # Only now are all joined: what makes one end of a region whole makes the other one so.
        whole, sites = self.whole, []
        for node, (module, kind) in self.sites.items():
            split = node in self.split and self.sets[node] not in whole
            sites.append(Boundary(module, kind, node.target is aten.embedding.default, split))
        return sites

    def _site(self, node: fx.Node, op: Op) -> tuple[str, str] | None:
        """Return the module and kind of an operator that is all of a linear layer or embedding with a split weight."""
        kind, weight, _ = SITES.get(node.target, ("", 0, 0))
        path, made_by = innermost(node)
        leaf = self.builder.leaves.get(op.slots[weight]) if kind else None
        if leaf is None or made_by != kind:
            return None
        # What a style's module gives is split, or a sum over ranks that it takes: a weight that gives neither has none.
        layout, out = self.decisions[leaf.node.name].outs[0], self.decisions[node.name].outs[0]
        if layout.sharded_dim is None or (out.sharded_dim is None and not out.partial):
            return None
        # A style deals out the parameter of one module: of a tied one the other module would read a part.
        tied = any(first == leaf.name and name != leaf.name for name, first in self.builder.program.aliases.items())
        shared = SHARED if tied or leaf.name != f"{path}.weight" or len(leaf.node.users) != 1 else None
        if reason := shared or self.refused.get(generic(leaf.name)):
            self.without_style[leaf.name] = reason
            return None
        return path, "row" if out.partial else "column"

    def _layout(self, value: Value) -> Layout | None:
        """Return the layout of a value where it is made; None for whole, as a sum is once its module has reduced it."""
        return _split(self.decisions[value[0].name].outs[value[1]])

    def _refuse(self, node: fx.Node, reason: str) -> None:
        """Have the values of an operator's region whole."""
        self.reasons[node] = self.reasons.get(node) or reason

    def _note(self, node: fx.Node, layout: Layout, shape: tuple[Any, ...]) -> None:
        """Note that a value is split there; code between modules knows even parts in one piece only."""
        dim, p, tp = layout.sharded_dim, layout.distribution, self.builder.tp
        if dim is None or p is None:
            return self._refuse(node, "rows are sharded by group")
        if p.pieces != 1:
            self._refuse(node, "a part is several pieces, and a style cuts one")
        elif p.static and not (p.even(tp) and p.is_plain(tp)):
            self._refuse(node, f"{p.length} are not split evenly")
        elif not isinstance(shape[dim], int) or (node in self.sites and dim != len(shape) - 1):
            self._refuse(node, SEQUENCE)
        self.split[node] = None

    def _operands(self, node: fx.Node, op: Op) -> None:
        """Join the operands and results of an operator to a region, and refuse regions that modules cannot express."""
        ins = [_split(layout) for layout in self.decisions[node.name].ins]
        outs = [self._layout((node, i)) for i in range(len(op.outs))]
        # What is split begins a region, or goes on with one, where parts are such as code can have.
        for i, x in enumerate(outs):
            if x is not None:
                self._note(node, x, op.outs[i])
        if node in self.sites:
            return self._module(node, op)
        # Between modules code runs as it was written: it needs parts that fit, and arguments that hold for a part.
        beside = any(x is not None for x in (*ins, *outs))
        for i, slot in enumerate(op.slots):
            self._operand(node, resolve(slot), ins[i], beside)
        if any(x is not None for x in outs):
            self._alone(node, op, ins, outs[0])
        # With its keys split, scores times values leaves a sum over the ranks, and no module is there to take it.
        decision = self.decisions[node.name]
        if decision.outs and decision.outs[0].partial and not any(x.partial for x in decision.ins):
            for value in ((node, 0), *map(resolve, op.slots)):
                self._refuse(value[0], f"{where(node)} leaves a sum over ranks")

    def _module(self, node: fx.Node, op: Op) -> None:
        """Join a row-parallel layer to the region that its input comes from; a column-parallel one reads a whole."""
        _, kind = self.sites[node]
        slot = SITES[node.target][2]
        maker, _ = value = resolve(op.slots[slot])
        # A style gathers what an embedding that is split by columns gives.
        if kind == "column" and node.target is aten.embedding.default:
            self._refuse(node, "an embedding gives whole vectors")
        if (have := self._layout(value)) is None:
            return
        if kind == "column":
            self._refuse(maker, f"{where(node)} reads a whole value")
            return
        self._note(node, have, op.ins[slot])
        self.sets.union(maker, node)

    def _alone(self, node: fx.Node, op: Op, ins: list[Layout | None], out: Layout | None) -> None:
        """Refuse an operator with split results whose arguments would not compute its part."""
        if all(x is None for x in ins):
            # As arange: nothing that it reads says that it should make a part.
            self._refuse(node, f"{where(node)} makes a whole value, and the plan's is split")
        elif not _runs_on_part(op, self.builder.rules[node], ins[0], out):
            self._refuse(node, f"{where(node)} has a size as a number that is another on a rank")

    def _operand(self, node: fx.Node, value: Value, want: Layout | None, beside: bool) -> None:
        """Read one operand of an operator between modules; `beside`: whether anything of the operator is split."""
        have, leaf = self._layout(value), self.builder.leaves.get(value[0])
        if leaf is not None and leaf.kind.trained:
            self._parameter(node, leaf, have, beside)
        elif have != want:
            # The plan converts here, and a style converts only where a module begins or ends.
            reason = f"{where(node)} reads a value as {_words(want)} that comes {_words(have)}"
            for x in (node, *([value[0]] if have is not None else [])):
                self._refuse(x, reason)
            if value[0] in self.sites and have is None:
                self.gathered[self.sites[value[0]][0]] = SEQUENCE
        elif have is not None:
            self.sets.union(value[0], node)
        elif beside and value[0] in self.builder.grads:
            # x + part(y) with a whole x: every rank has the gradient of x from its part alone.
            self._refuse(node, f"the gradient of what {where(node)} reads must be summed there")

    def _parameter(self, node: fx.Node, leaf: Leaf, have: Layout | None, beside: bool) -> None:
        """Read a parameter that is used outside of linear layers and embeddings."""
        if have is not None:
            # No style splits it, so it comes whole: what is computed with it would not fit a part.
            self.without_style.setdefault(leaf.name, f"{where(node)} reads it, and no style is for that")
            self._refuse(node, f"no style splits {leaf.name}")
        elif beside:
            # A whole weight beside a part, as that of a norm of single heads: its gradient is a sum over the ranks.
            self._refuse(node, f"the gradient of {leaf.name} is a sum over parts")


def _split(layout: Layout) -> Layout | None:
    return layout if layout.split and not layout.partial else None


def innermost(node: fx.Node) -> tuple[str, str]:
    """Return path and class of the module that ran an operator."""
    path, stack = module_name(node), node.meta.get("nn_module_stack") or {}
    kind = next((kind for name, kind in reversed(list(stack.values())) if path and name == path), "")
    if not isinstance(kind, str):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    return path, kind


def _words(layout: Layout | None) -> str:
    if layout is None:
        return "whole"
    return "grouped" if layout.sharded_dim is None else f"split along dim {layout.sharded_dim}"


def _runs_on_part(op: Op, rule: Rule | None, operand: Layout | None, result: Layout | None) -> bool:
    """Return whether an operator of the model's own code, which nothing rewrites, computes a part with its arguments.

    Args:
        op: the call. rule: of it.
        operand, result: layouts of the first operand and of the first result; None for whole.
    """
    # An operator whose arguments say no sizes has no `localise`.
    if rule is None or rule.localise is None or result is None or result.sharded_dim is None:
        return True
    if rule.localise is local_shape:
        # A view must leave the size of a split dimension open by -1, for as a number it is the whole's. `unflatten`
        # says the sizes of one dimension alone, and so they count from that one.
        start = op.dim() if "sizes" in op.args else 0
        sizes: Any = next((op.args[k] for k in ("size", "shape", "sizes") if k in op.args), ())
        return {start + d for d, n in enumerate(sizes) if isinstance(n, int) and n == -1} <= {result.sharded_dim}
    if (dims := op.args.get("dim")) is None:
        return op.target is aten.expand.default
    # A softmax over the split dimension would be one over a part of it.
    return operand is None or operand.sharded_dim not in {d % len(op.ins[0]) for d in several(dims)}
