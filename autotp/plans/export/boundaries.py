"""What modules must do at their boundaries so that the code between them computes a plan's program as it stands.

Other tools shard a model by its modules: a style says how a module's parameters lie and how its input comes and its
output leaves, and all code between modules runs as it was written, on what it gets. So a value may be split between two
modules only where every operator on the way can run on a part by itself. The values that hang together in this way
are a region. Where something in a region cannot be said by modules, its values are whole instead: the modules around it
gather their output or split their input, and weights stay split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autotp.ir.graph import Leaf, Value, outputs_of, resolve, where
from autotp.ir.layouts import Layout
from autotp.ir.op import Op, aten
from autotp.ir.program import Decision
from autotp.ir.scopes import generic, module_path
from autotp.passes.shard.planner import Builder

from .own_sizes import runs_on_part
from .regions import Port, Regions, Sums

LINEAR, EMBEDDING = "torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"
SITES: dict[Any, tuple[str, int, int]] = {
    aten.linear.default: (LINEAR, 1, 0),
    aten.embedding.default: (EMBEDDING, 0, 1),
}  # class, weight, input
SHARED = "it is tied, or read more than once, and a style is for the own weight of one module"


@dataclass
class Boundaries:
    """Reads the boundaries of a plan's modules off its graph.

    Attributes:
        builder: with the graph; `decisions`: the plan's, by node name.
        data: whether a value may be split along batch or sequence between modules; `slices`: whether an embedding may
            leave its output split.
        alike: name of a module -> the name that it shares with those that must be treated like it.
        refused: by path with `*` for numbers, modules within which nothing may be split, and why.
        without_style: parameter -> why no module says its split.
    """

    builder: Builder
    decisions: Mapping[str, Decision]
    data: bool = True
    slices: bool = True
    alike: Callable[[str], str] = lambda name: name
    refused: Mapping[str, str] = field(default_factory=dict)
    without_style: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ops, self.regions = self.builder.ops, Regions(self.builder.tp)
        self.ends = outputs_of(self.builder.program)
        self.sites = {n: site for n, op in ops.items() if (site := self._site(n, op)) is not None}
        self.sums = Sums(ops, self.decisions, self.sites, self.ends)
        self.owners: dict[str, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)  # module -> operator, parameter
        self.readers: dict[Value, list[str]] = defaultdict(list)  # value -> column-parallel modules that read it
        self.mixed: list[tuple[Port, str]] = []

    def read(self) -> list[Boundary]:
        """The boundaries of all modules that have a style; where a region must be whole, its ends are whole."""
        for node, op in self.builder.ops.items():
            self._operands(node, op)
        # Between the last operator and the caller stands no module: a linear layer's style may gather its output, of an
        # addition nobody does.
        for value in map(resolve, self.ends):
            layout = self.made_layout(value)
            if layout is not None and layout.sharded_dim is not None:
                self.regions.refuse(self.port(value), "" if value[0] in self.sites else "the model's output is whole")
        # With its keys split, scores times values leaves a sum over the ranks, and no module is there to take it.
        for node in self.sums.loose:
            for value in ((node, 0), *map(resolve, self.builder.ops[node].slots)):
                self.regions.refuse(self.port(value), f"{where(node)} leaves a sum over ranks")
        # From here on regions are whole: which of them are split along batch or sequence is known once all are joined.
        of_data = self.regions.of_data()
        wholes = list(self._wholes(of_data))
        # A mask beside scores that are split by heads fits them, and by sequence it is too long.
        for port, reason in self.mixed:
            if self.regions.root(port) in of_data:
                self.regions.refuse(port, reason)
        for port in () if self.data else of_data:
            self.regions.refuse(port, "no style splits batch or sequence between modules")
        for port in [*self.regions.dims]:
            for path in map(generic, ("", *module_path(port[1]))):
                if path in self.refused:
                    self.regions.refuse(port, self.refused[path])
        # Last, for it carries each refusal to the equal layers: a style has one name for layers.*.q_proj.
        self._level()
        why = self.regions.why
        return [*self._of_styles(why), *(b for port, b in wholes if self.regions.root(port) not in why)]

    def _of_styles(self, why: Mapping[Port, str]) -> Iterator[Boundary]:
        for node, (module, kind) in self.sites.items():
            sides = []
            for port in (("in", node), ("out", node)):
                lies = () if self.regions.root(port) in why else self.regions.dims.get(port, ())
                sides.append(next(iter(lies), (None, False)))
            (in_dim, along), (out_dim, off) = sides
            yield Boundary(module, kind, node.target is aten.embedding.default, in_dim, out_dim, (along, off))

    def _site(self, node: fx.Node, op: Op) -> tuple[str, str] | None:
        """The module and kind of an operator that is all of a linear layer or embedding with a split weight."""
        kind, weight, _ = SITES.get(node.target, ("", 0, 0))
        path, made_by = innermost(node)
        leaf = self.builder.leaves.get(op.slots[weight]) if kind else None
        if leaf is None or made_by != kind:
            return None
        layout, out = self.decisions[leaf.node.name].outs[0], self.decisions[node.name].outs[0]
        if layout.sharded_dim is None or (out.sharded_dim is None and not out.partial):
            return None
        tied = any(first == leaf.name and name != leaf.name for name, first in self.builder.program.aliases.items())
        if tied or leaf.name != f"{path}.weight" or len(leaf.node.users) != 1:
            self.without_style[leaf.name] = SHARED
            return None
        if generic(leaf.name) in self.refused:
            self.without_style[leaf.name] = self.refused[generic(leaf.name)]
            return None
        return path, "row" if out.partial else "column"

    def made_layout(self, value: Value) -> Layout | None:
        """How a value lies where it is made, sums taken; None for whole."""
        return self._lies(value[0], self.decisions[value[0].name].outs[value[1]])

    def read_layout(self, node: fx.Node, slot: int) -> Layout | None:
        """How an operand is read; None for whole."""
        return self._lies(node, self.decisions[node.name].ins[slot])

    def _lies(self, node: fx.Node, layout: Layout) -> Layout | None:
        layout = self.sums.goals.get(node, layout) if layout.partial else layout
        return layout if layout is not None and layout.split else None

    def port(self, value: Value) -> Port:
        """Where a value leaves what made it."""
        return ("out" if value[0] in self.sites else "op", value[0])

    def _operands(self, node: fx.Node, op: Op) -> None:
        """Join what an operator reads and makes to a region, and refuse regions that modules cannot say."""
        outs = [self.made_layout((node, i)) for i in range(len(op.outs))]
        for i, x in enumerate(outs):
            if x is not None:
                self.regions.lies(self.port((node, i)), x, op.outs[i])
        # Between modules code runs as it was written: it needs parts that fit, and arguments that hold for a part.
        if node not in self.sites:
            for i, slot in enumerate(op.slots):
                self._read(node, i, resolve(slot))
            if any(x is not None for x in outs):
                self._alone(node, op)
            return
        slot = SITES[node.target][2]
        value, kind = resolve(op.slots[slot]), self.sites[node][1]
        # The styles of some tools gather what an embedding that is split by columns gives.
        if not self.slices and kind == "column" and node.target is aten.embedding.default:
            self.regions.refuse(("out", node), "an embedding gives whole vectors")
        # q, k and v read one x: as modules each gathers it and sums its gradient by itself, which is a difference from
        # the plan.
        if kind == "column" and value[0] in self.builder.grads:
            self.readers[value].append(self.sites[node][0])
        if (have := self.made_layout(value)) is not None:
            self.regions.lies(("in", node), have, op.ins[slot])
            self.regions.join(self.port(value), ("in", node))

    def _read(self, node: fx.Node, slot: int, value: Value) -> None:
        """One operand of an operator between modules."""
        have, want = self.made_layout(value), self.read_layout(node, slot)
        leaf = self.builder.leaves.get(value[0])
        if leaf is not None and leaf.kind.trained:
            self._read_parameter(node, leaf, have)
        elif have == want:
            self._read_as_it_lies(node, slot, value, have)
        else:
            # The plan converts here, and a style converts only where a module begins or ends.
            reason = f"{where(node)} reads a value as {_words(want)} that comes {_words(have)}"
            self.regions.refuse(("op", node), reason)
            if have is not None:
                self.regions.refuse(self.port(value), reason)

    def _read_parameter(self, node: fx.Node, leaf: Leaf, have: Layout | None) -> None:
        """A parameter that is read outside of linear layers and embeddings."""
        if have is not None:
            # No style splits it, so it comes whole: what is computed with it would not fit a part.
            self.without_style.setdefault(leaf.name, f"{where(node)} reads it, and no style is for that")
            self.regions.refuse(("op", node), f"no style splits {leaf.name}")
        elif self._split(node):
            # A whole weight beside a part, as a norm's: its gradient is a sum over the ranks, which a module can say.
            self.owners[innermost(node)[0]].append((node, leaf.node))

    def _read_as_it_lies(self, node: fx.Node, slot: int, value: Value, layout: Layout | None) -> None:
        """An operand that no conversion is for."""
        port = ("op", node)
        if layout is not None:
            self.regions.join(self.port(value), port)
        elif not self._split(node):
            return
        elif value[0] in self.builder.grads:
            # x + part(y) with a whole x: every rank has the gradient of x from its part alone.
            self.regions.refuse(port, f"the gradient of what {where(node)} reads must be summed there")
        elif self.builder.ops[node].ins[slot]:
            # A mask or positions, that have a dimension: too long where that is the one that is split.
            self.mixed.append((port, f"{where(node)} reads a whole value beside a split one"))

    def _split(self, node: fx.Node) -> bool:
        decision = self.decisions[node.name]
        return any(self._lies(node, x) is not None for x in (*decision.ins, *decision.outs))

    def _alone(self, node: fx.Node, op: Op) -> None:
        """Refuse an operator with split results that would not compute its part by the arguments that it has."""
        ins = [self.read_layout(node, i) for i in range(len(op.slots))]
        if all(x is None for x in ins):
            # As arange: nothing that it reads says that it should make a part.
            self.regions.refuse(("op", node), f"{where(node)} makes a whole value, and the plan's is split")
        first = ins[0] if ins else None
        if not runs_on_part(op, self.builder.rules[node], first, self.made_layout((node, 0))):
            self.regions.refuse(("op", node), f"{where(node)} has a size as a number that is another on a rank")

    def _wholes(self, of_data: set[Port]) -> Iterator[tuple[Port, Boundary]]:
        """Modules whose parameters are whole and whose activations are split; refuses what is not of that form."""
        within = self._within()
        for path, reads in self.owners.items():
            port = ("op", reads[0][0])
            names = {self.builder.leaves[p].name for _, p in reads}
            dim = self._one_dim(within[path])
            # A parameter of another module, read here, would get its gradient from that module's style.
            if dim is not None and all(name.rpartition(".")[0] == path for name in names):
                along = self.regions.root(port) in of_data
                yield port, Boundary(path, "whole", False, dim, dim, (along, along))
            else:
                parameters = ", ".join(sorted(names))
                self.regions.refuse(port, f"the gradient of {parameters} is a sum over parts, and no style is for that")

    def _within(self) -> Mapping[str, dict[fx.Node, None]]:
        """Module -> the operators of its calls, in order."""
        within: dict[str, dict[fx.Node, None]] = defaultdict(dict)
        for node in self.builder.ops if self.owners else ():
            for path in module_path(node):
                within[path][node] = None
        return within

    def _one_dim(self, inside: Mapping[fx.Node, None]) -> int | None:
        """The dimension along which all that a module reads and gives is split; None where there is no such one.

        A style says one dimension for the input and one for the output, and the parameters' gradients are summed over
        the ranks only where both are the same.
        """
        ops, leaves = self.builder.ops, self.builder.leaves
        ins: set[Layout | None] = set()
        outs: set[Layout | None] = set()
        for node in inside:
            for i, slot in enumerate(ops[node].slots):
                source = resolve(slot)[0]
                if source not in inside and source not in leaves:
                    ins.add(self.read_layout(node, i))
            if any(user in ops and user not in inside for user in node.users):
                outs.add(self.made_layout((node, 0)))
        if len(ins) != 1 or len(outs) != 1:
            return None
        dims = set()
        for x in ins | outs:
            dims.add(None if x is None else x.sharded_dim)
        return dims.pop() if len(dims) == 1 else None

    def _level(self) -> None:
        """Modules that share a name do the same at their boundaries, so one that cannot stops the others."""
        groups: dict[tuple[str, str], list[Port]] = defaultdict(list)
        for node, (module, _) in self.sites.items():
            for side in ("in", "out"):
                groups[side, self.alike(module)].append((side, node))
        before = -1
        while len(self.regions.reasons) != before:
            before, why = len(self.regions.reasons), self.regions.why
            for ports in groups.values():
                bad = [why[r] for p in ports if (r := self.regions.root(p)) in why]
                for port in ports if bad else ():
                    if self.regions.root(port) not in why:
                        self.regions.refuse(port, bad[0])


def innermost(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module that ran an operator."""
    path, stack = module_path(node), node.meta.get("nn_module_stack") or {}
    kind = next((kind for name, kind in reversed(list(stack.values())) if path and name == path[-1]), "")
    if not isinstance(kind, str):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    return (path[-1] if path else ""), kind


def _words(layout: Layout | None) -> str:
    if layout is None:
        return "whole"
    return "grouped" if layout.sharded_dim is None else f"split along dim {layout.sharded_dim}"


@dataclass(frozen=True)
class Boundary:
    """What a module does with its parameters, its input and its output.

    Attributes:
        module: its path.
        kind: "column" or "row": the weight is split so; "whole": parameters are whole, activations split; "input": what
            modules within read is made whole once.
        lookup: whether it is an embedding.
        in_dim, out_dim: dimension along which the input comes, and the output leaves, split; None for whole.
        spread: whether those are dimensions of the batch or sequence, so that code reads sizes off them.
        place: of an "input", its name, or its number and that of all positional arguments.
    """

    module: str
    kind: str
    lookup: bool = False
    in_dim: int | None = None
    out_dim: int | None = None
    spread: tuple[bool, bool] = (False, False)
    place: str | tuple[int, int] = ""
