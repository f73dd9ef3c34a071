"""The program of the tp ranks cut into one for each stage, at places of its order.

What needs no weights, such as masks and tables of positions, is made on each stage that reads it, from the model's own
inputs. Any other value that a later stage reads flows through all boundaries in between. A conversion stands on the
side where what crosses is Invariant or Shard; where there is none, one is put in on each side.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from autotp import compat
from autotp.errors import PlanError
from autotp.ir.graph import BUFFER, CONSTANT, INPUT, SEEDS, Capture, Env, Leaf, Mutations, copy_node, draws
from autotp.ir.layouts import I, Layout
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import expression
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import innermost, module_of, scope_path
from autotp.rules.local import Sizes

MADE_AGAIN = (BUFFER, CONSTANT, INPUT, SEEDS)  # kinds of leaves of which each stage makes for itself what it reads


@dataclass(frozen=True)
class Wire:
    """A value that a stage sends to the next one, each tp rank what it holds of it.

    Attributes:
        name: of the value in the program. value: its fake whole.
        layout: its placement over the tp ranks. graded: whether a gradient comes back.
    """

    name: str
    value: Tensor = field(compare=False)  # of tensors Python 3.13 asks whether they are equal, number by number
    layout: Layout
    graded: bool

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Give its sizes in the program's symbols."""
        return tuple(map(expression, self.value.shape))


@dataclass
class Piece:
    """The program of one stage.

    Attributes:
        capture: what its placeholders and outputs mean; a received value counts as an input.
        sharded: the program of all tp ranks.
        wires_in, wires_out: what flows in and out, in order.
        names: of the parameters, buffers and constants that it reads or writes.
        inputs: names of the model's own inputs that it takes.
        positions: of its outputs before `wires_out`, among the results of the whole program; of these `shared` are for
            the ranks of all stages.
    """

    capture: Capture
    sharded: Sharded
    wires_in: tuple[Wire, ...]
    wires_out: tuple[Wire, ...]
    names: set[str] = field(default_factory=set)
    inputs: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


def cut(planned: Planned, sharded: Sharded, starts: Sequence[int]) -> list[Piece]:
    """Cut a program into those of the stages.

    Args:
        planned: the decisions; `sharded`: the program that was made by them, which stays as it is.
        starts: for each stage the position of its first node in the graph; 0 for the first.

    Raises:
        PlanError: a value flows between stages that cannot.
    """
    return _Cutter(planned, sharded, list(starts)).run()


def joined(planned: Planned, sharded: Sharded, pieces: Sequence[Piece]) -> Sharded:
    """Write one program that runs the stages in turn, for proofs: what flows from one to the next is one value.

    Args:
        planned, sharded: the program that was cut, for its inputs. pieces: of it, in order.
    """
    graph, leaves, results = fx.Graph(), dict[str, fx.Node](), dict[int, Any]()
    out = replace(sharded, graph=graph, layouts={}, origin={}, ends={}, pieces=())

    def copied(node: fx.Node, of: Sharded, env: Env) -> fx.Node:
        new = copy_node(node, graph, env.__getitem__)
        for mine, theirs in ((out.layouts, of.layouts), (out.origin, of.origin)):
            mine |= {new: theirs[node]} if node in theirs else {}  # type: ignore[operator]
        return new

    for leaf, node in zip(planned.program.leaves, sharded.graph.find_nodes(op="placeholder"), strict=True):
        leaves[leaf.name] = copied(node, sharded, {})
    flow: tuple[Any, ...] = ()
    for piece in pieces:
        nodes: Any = [*piece.sharded.graph.nodes]
        heads = [*flow, *(leaves[leaf.name] for leaf in piece.capture.leaves[len(flow) :])]
        env: Env = dict(zip(nodes, heads, strict=False))
        for node in nodes[len(heads) : -1]:
            env[node] = copied(node, piece.sharded, env)
        outputs = fx.map_arg(nodes[-1].args[0], env.__getitem__)
        results.update(zip(piece.positions, outputs, strict=False))
        flow = outputs[len(piece.positions) :]
    graph.output(tuple(results[i] for i in sorted(results)))
    return out


class _Cutter:
    def __init__(self, planned: Planned, sharded: Sharded, starts: list[int]) -> None:
        self.planned, self.sharded, self.program = planned, sharded, planned.program
        self.stages = len(starts)
        self.order = {n: i for i, n in enumerate(sharded.graph.nodes)}
        heads = sharded.graph.find_nodes(op="placeholder")
        self.leaf: dict[fx.Node, Leaf] = dict(zip(heads, self.program.leaves, strict=True))
        self.at = {n: bisect_right(starts, i) - 1 for n, i in self.order.items() if n.op == "call_function"}
        self.mutated = {x for x in self.program.mutations.values() if isinstance(x, str)}
        self.result: Any = sharded.graph.output_node().args[0]
        self.early: set[fx.Node] = set()  # sums that are taken before the stage of their first reader
        self.free = self._free()
        self._sink()
        self._settle()
        self.nodes: list[set[fx.Node]] = [set() for _ in starts]  # what each stage computes, and its leaves
        self.read: dict[fx.Node, set[int]] = {}  # value -> later stages that receive it

    def run(self) -> list[Piece]:
        self._refuse_writes()
        for stage in range(self.stages):
            for node in [n for n, at in self.at.items() if at == stage and n not in self.free]:
                self._take(node, stage)
        for position, value in enumerate(self.result):
            if isinstance(value, fx.Node):
                self._need(value, self._giver(position))
        boundaries = [self._boundary(k) for k in range(self.stages - 1)]
        return [self._piece(stage, boundaries) for stage in range(self.stages)]

    def _refuse_writes(self) -> None:
        tensors = self.program.tensor_inputs
        if any(isinstance(x, int) and not tensors[x].kind.carried for x in self.program.mutations.values()):
            raise PlanError("the model writes to its inputs, which stages receive as copies: it cannot be cut.")
        for node, leaf in self.leaf.items():
            homes = {self.at[n] for n in node.users if n in self.at}
            if leaf.name in self.mutated and len(homes) > 1:
                raise PlanError(
                    f"the buffer {leaf.name} is written by the forward, and stages {sorted(homes)} read it."
                )

    # ---- where each node runs --------------------------------------------------------------------------------------

    def _free(self) -> set[fx.Node]:
        """Return what needs no weights and does not draw: each stage makes what it reads of it."""
        free = set()
        for node in self.order:
            if node.op == "placeholder":
                leaf, value = self.leaf[node], node.meta.get("val")
                # A counter of tokens is on every rank; a state that weights have made is where these are.
                counter = leaf.kind.carried and isinstance(value, Tensor) and not value.is_floating_point()
                if counter or (leaf.kind in MADE_AGAIN and leaf.name not in self.mutated):
                    free.add(node)
            elif node.op == "call_function" and not draws(node):
                free |= {node} if free.issuperset(node.all_input_nodes) or _is_size(node) else set()
        return free

    def _sink(self) -> None:
        """Move what is made of weights, buffers or states alone, as scales of earlier calls are, to its first reader.

        A state is on the ranks that read it in its block alone, though the model may have put it in a cache before.
        """
        alone = {node for node, leaf in self.leaf.items() if not leaf.kind.passed and leaf.kind is not SEEDS}
        states = {node for node, leaf in self.leaf.items() if leaf.kind.carried} - self.free
        for node in self.at:
            reads = {*node.all_input_nodes}
            made_of = states if reads & states else alone
            rest = reads - made_of - (self.free if made_of is states else set())
            if reads and not rest and not draws(node):
                made_of.add(node)
        for node in reversed(list(self.at)):
            if node in alone or node in states:
                self.at[node] = min((self.at[n] for n in node.users if n in self.at), default=self.at[node])

    def _settle(self) -> None:
        """Take sums in the stage that makes the summands, though their first reader is in a later one."""
        for node in self.order:
            conversion = mark(node).conversion
            source: Any = node.args[0] if conversion is not None else None
            if (
                conversion is not None
                and conversion[0].mark == "P"
                and self.at.get(source, self.at[node]) != self.at[node]
            ):
                self.at[node] = self.at[source]
                self.early.add(node)

    def _giver(self, position: int) -> int:
        """Find the stage that gives a result: the last one, but of what one rank keeps its maker."""
        value = self.result[position]
        return self.stages - 1 if self._shared(position) or not isinstance(value, fx.Node) else self._home(value)

    def _shared(self, position: int) -> bool:
        """Return whether a result is for the ranks of all stages: what is not kept, and counters of what is."""
        taker = self.program.mutations.get(position)
        stays = taker is not None or position in self.program.carried
        return not stays or (not isinstance(taker, str) and self.result[position] in self.free)

    def _home(self, node: fx.Node) -> int:
        """Find the stage that makes a value which a buffer or state becomes: the one that reads what it is made of."""
        if node in self.at and node not in self.free:
            return self.at[node]
        return max((self._home(n) for n in node.all_input_nodes), default=0)

    def _graded(self, node: fx.Node) -> bool:
        return node in self.sharded.origin and self.sharded.origin[node][0] in self.planned.grads

    def _layout(self, node: fx.Node) -> Layout:
        layout = self.sharded.layouts.get(node)
        if layout is None:
            raise PlanError(f"{node.name} flows between stages, and its layout is not known. Please report the model.")
        return layout

    # ---- what each stage needs -------------------------------------------------------------------------------------

    def _take(self, node: fx.Node, stage: int) -> None:
        """Run a node in this stage, with all that it reads."""
        work = [node]
        while work:
            at = work.pop()
            if at not in self.nodes[stage]:
                self.nodes[stage].add(at)
                work += [n for n in at.all_input_nodes if self._need(n, stage, deep=False)]

    def _need(self, node: fx.Node, stage: int, deep: bool = True) -> bool:
        """Let a stage have a value; gives whether it is made there, so that its operands are needed too."""
        here = node.op == "placeholder" or node in self.free or self.at[node] == stage or self._moves(node)
        if not here:
            tensor_of(node)
            self.read.setdefault(node, set()).add(stage)
        elif deep:
            self._take(node, stage)
        return here

    def _moves(self, node: fx.Node) -> bool:
        """Return whether each stage that reads this conversion makes it: its operand may cross, or is there."""
        if mark(node).conversion is None or may_flow(self._layout(node), self._graded(node)):
            return False
        source: Any = node.args[0]
        present = source in self.free or source.op == "placeholder"
        return present or may_flow(self._layout(source), self._graded(source))

    def _boundary(self, k: int) -> list[fx.Node]:
        """Return what flows from stage k to the next, in the order of the program."""
        return sorted(n for n, stages in self.read.items() if self.at[n] <= k < max(stages))

    def _wires(self, nodes: Sequence[fx.Node], stage: int) -> tuple[Wire, ...]:
        wires = []
        for node in nodes:
            layout, graded = self._layout(node), self._graded(node)
            # Invariant stands for a value that is whole, or a sum, where that may not flow.
            convertible = layout.mark in ("R", "P") and layout.to_runtime().reduction == "sum"
            crosses = layout if may_flow(layout, graded) or not convertible else I
            wires.append(Wire(node.name, tensor_of(node), crosses, graded))
        check_wires(wires, stage)
        return tuple(wires)

    # ---- writing the pieces ----------------------------------------------------------------------------------------

    def _piece(self, stage: int, boundaries: Sequence[Sequence[fx.Node]]) -> Piece:
        before = boundaries[stage - 1] if stage else []
        after = boundaries[stage] if stage + 1 < self.stages else []
        writer = _Writer(self, stage)
        wires_in, wires_out = self._wires(before, stage - 1), self._wires(after, stage)
        leaves = writer.begin(zip(before, wires_in, strict=True))
        # What is written or kept comes first, each by the stage that holds it; then the model's results from the last
        # stage, and from any other what crosses to the next.
        positions = tuple(i for i in range(len(self.result)) if self._giver(i) == stage)
        outputs = [writer.leave(self.result[i], None) for i in positions]
        outputs += [writer.leave(x, wire) for x, wire in zip(after, wires_out, strict=True)]
        writer.graph.output(tuple(outputs))
        # A stage is called with the sizes that the whole was called with.
        capture = replace(
            self.program, graph=writer.graph, leaves=leaves, mutations=self._mutations(positions, leaves), symbols={},
            carried={}, out_spec=compat.tree_flatten(tuple(range(len(outputs))))[1],
        )  # fmt: skip
        # The names of weights and buffers that this stage's rank must hold, also those that it only writes.
        names = {x.name for x in leaves if not x.kind.passed and x.kind is not SEEDS}
        names |= {str(x) for x in capture.mutations.values() if isinstance(x, str)}
        # The leaves after those that arrive from the stage before: what the caller passes to this stage itself.
        inputs = tuple(x.name for x in leaves[len(before) :] if x.kind.passed and x.is_tensor)
        shared = tuple(filter(self._shared, positions))
        return Piece(capture, writer.out, wires_in, wires_out, names, inputs, positions, shared)

    def _mutations(self, positions: Sequence[int], leaves: Sequence[Leaf]) -> Mutations:
        """Map a stage's outputs, by place, to their takers: a tensor of the inputs by its place among the stage's."""
        whole, here = _tensors(self.program.leaves), _tensors(leaves)
        out = {}
        for k, position in enumerate(positions):
            taker = self.program.mutations.get(position)
            if isinstance(taker, int):  # a state that the stage only writes is no input of it: whoever called writes it
                taker = here.index(whole[taker]) if whole[taker] in here else None
            if taker is not None:
                out[k] = taker
        return out


def _tensors(leaves: Sequence[Leaf]) -> list[str]:
    """List the names of the tensors that a call passes."""
    return [x.name for x in leaves if x.kind.passed and x.is_tensor]


def _is_size(node: fx.Node) -> bool:
    """Return whether it is a size of what a call passes: states that another stage holds are passed as their shapes."""
    return node.target is compat.sym_size and all(n.op == "placeholder" for n in node.all_input_nodes)


class _Writer:
    """Writes the graph of one stage."""

    def __init__(self, cutter: _Cutter, stage: int) -> None:
        self.cutter, self.stage = cutter, stage
        self.graph = fx.Graph()
        self.out = Sharded(self.graph)
        self.env: Env = {}

    def begin(self, pairs: Any) -> list[Leaf]:
        """Write all but the output; gives the leaves that it takes, in order."""
        cutter, leaves, arrived = self.cutter, [], []
        for node, wire in pairs:
            new = self.graph.placeholder(f"from_{node.name}")
            new.meta["val"] = tensor_of(node).detach().requires_grad_(wire.graded)
            self._note(new, node, wire.layout)
            leaves.append(Leaf(new, INPUT, new.name))
            arrived.append((node, new, wire))
        order = sorted(cutter.nodes[self.stage])
        for node in order:
            if node.op == "placeholder":
                self._copy(node)
                leaves.append(replace(cutter.leaf[node], node=self.env[node]))
        for node, new, wire in arrived:
            here = self.stage in cutter.read[node]
            self.env[node] = self._convert(new, wire.layout, cutter._layout(node), node) if here else new
        for node in order:
            if node.op != "placeholder":
                self._copy(node)
        return leaves

    def leave(self, node: Any, wire: Wire | None) -> Any:
        """Return what the stage gives for this value; over a wire in the layout that this has."""
        if wire is None or not isinstance(node, fx.Node):
            return self.env[node] if isinstance(node, fx.Node) else node
        new = self.env[node]
        if self.out.layouts.get(new) == wire.layout:
            return new
        if mark(new).conversion is not None and mark(new).conversion[0] == wire.layout:  # type: ignore[index]
            return new.args[0]  # it only passes through
        return self._convert(new, self.cutter._layout(node), wire.layout, node)

    def _copy(self, node: fx.Node) -> None:
        new = copy_node(node, self.graph, self.env.__getitem__)
        self.env[node] = new
        cutter = self.cutter
        if node in cutter.sharded.layouts:
            self._note(new, node, cutter.sharded.layouts[node])
        if node in cutter.sharded.ends:
            pattern = re.sub(r"\b\d+\b", "*", ".".join([*map(module_of, scope_path(node)[-1:]), "*"]))
            raise PlanError(
                f"{node.name} is rows that are sharded by expert, which cannot be cut into stages yet. Pin the "
                f"experts whole: pins={{'{pattern}': Replicate()}}."
            )
        if node in cutter.early:
            write(new, scope=scope_path(node.args[0]))  # type: ignore[arg-type]
        elif cutter.at.get(node, self.stage) != self.stage and scope_path(node):
            users = [scope_path(u) for u in node.users if u in cutter.nodes[self.stage]]
            write(new, scope=innermost(users))

    def _note(self, new: fx.Node, node: fx.Node, layout: Layout) -> None:
        write(new, layout=layout)
        self.out.layouts[new] = layout
        if node in self.cutter.sharded.origin:
            self.out.origin[new] = self.cutter.sharded.origin[node]

    def _convert(self, value: fx.Node, source: Layout, target: Layout, node: fx.Node) -> fx.Node:
        if source == target:
            return value
        new = Sizes(self.graph, {}).convert(value, source, target)
        no_grad = mark(node).no_grad or False
        inherit(new, value, conversion=(source, target), scope=(), axis="tp", batch=None, no_grad=no_grad)
        self._note(new, node, target)
        return new


# ---- what may flow from one stage to the next ---------------------------------------------------------------------


def may_flow(layout: Layout, graded: bool) -> bool:
    """Return whether a value in this layout may flow between stages: what comes back must not be a pending sum.

    So a value with a gradient is Invariant or Shard, and no value is Partial.
    """
    return layout.mark in ("I", "S") or (not graded and layout.mark == "R")


def check_wires(wires: Iterable[Wire], stage: int) -> None:
    """Refuse a boundary at which a sum is pending.

    Raises:
        PlanError: a value is Partial, or its gradient would be.
    """
    for wire in wires:
        if not may_flow(wire.layout, wire.graded):
            what = "is a summand" if wire.layout.mark == "P" else "has a gradient that is a summand"
            raise PlanError(
                f"between stages {stage} and {stage + 1} the value {wire.name} is {wire.layout}: what a rank holds "
                f"{what}, and sums must be taken before a value leaves its stage. Please report the model."
            )


def tensor_of(node: fx.Node) -> Tensor:
    """Give the tensor that a node makes.

    Raises:
        PlanError: it makes none.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise PlanError(
            f"{node.name}, a number that data decides, is made in one stage and read in another: only tensors flow "
            "between stages. Use fewer stages, or tensor parallelism alone."
        )
    return value
