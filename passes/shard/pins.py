"""Pins: placements that the user decides, for parameters, module outputs, the model's ends, or a logical axis.

A pin is strict. It takes away every choice that does not keep it, and where nothing is left it is an error that names
the operator which forbids it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement

from autotp import compat
from autotp.cost.solver.problem import Choice, Problem
from autotp.errors import InputError, PlanError
from autotp.ir.graph import Alike, Capture, Leaf, floating, outputs_of, read, resolve, tensor_at, tensors, where
from autotp.ir.layouts import I, Layout, Layouts, R
from autotp.ir.op import Op, Ops
from autotp.ir.scopes import module_path
from autotp.passes.analysis.axes import AXES, PortDims
from autotp.text import listed, near

Pins = Mapping[str, Placement]
Dims = Mapping[str, int | None]  # key -> pinned dimension, None for whole
INPUT, OUTPUT = ":input", ":output"
Port = tuple[str, int]  # "in" or "out", and the number of the operand or result


@dataclass(frozen=True)
class Ask:
    """Demand of one pin on one operand, result or parameter.

    Attributes:
        key: the pin's key; `what`: the value in words.
        dims: of which one is to be sharded (`split`), or none. Of an axis, `axis`, the other dimensions stay free.
    """

    key: str
    what: str
    dims: tuple[int, ...]
    split: bool
    axis: bool = False

    @property
    def mark(self) -> tuple[Any, ...]:
        """Give the part of it that equal blocks must have in common."""
        return self.key, self.dims, self.split

    def fits(self, layout: Layout) -> bool:
        sharded = layout.sharded_dim in self.dims
        if self.split:
            return sharded
        return not sharded if self.axis else layout in (I, R)

    def __str__(self) -> str:
        if not self.split:
            return f"the pin {self.key!r}: Replicate()"
        return f"the pin {self.key!r}: Shard({0 if self.axis else self.dims[0]})"


@dataclass
class Pinned:
    """The pins of one captured graph.

    Attributes:
        parameters: name -> what is asked; `outputs`: the same by number among the graph's tensor outputs.
        ports: operator -> operand or result -> what is asked of it.
        sequence: True or False where the sequence is pinned.
    """

    parameters: dict[str, Ask] = field(default_factory=dict)
    outputs: dict[int, Ask] = field(default_factory=dict)
    ports: dict[fx.Node, dict[Port, list[Ask]]] = field(default_factory=lambda: defaultdict(dict))
    sequence: bool | None = None

    def marks(self, leaves: Mapping[fx.Node, Any]) -> dict[fx.Node, str]:
        """Mark pinned nodes, to distinguish them from their equals in other blocks."""
        marks = {}
        for n, ports in self.ports.items():
            pairs = []
            for at, asks in ports.items():
                pairs.append((at, *(a.mark for a in asks)))
            marks[n] = str(sorted(pairs))
        return marks | {n: str(self.parameters[x.name].mark) for n, x in leaves.items() if x.name in self.parameters}

    def keep(self, op: Op, choices: list[Choice]) -> list[Choice]:
        """Select the choices of an operator that keep the pins.

        Raises:
            PlanError: there are none.
        """
        for (side, index), asks in self.ports.get(op.node, {}).items():
            for ask in asks:
                layouts = [(c.ins, c.outs)[side == "out"][index] for c in choices]
                choices = [c for c, x in zip(choices, layouts, strict=True) if ask.fits(x)]
                if not choices:
                    verb = "read" if side == "in" else "make"
                    raise PlanError(
                        f"{ask} cannot be kept: {where(op.node)} cannot {verb} {ask.what} so; it can {verb} it as "
                        f"{listed(layouts)}. Change or drop the pin."
                    )
        return choices


def read_pins(pins: Any) -> dict[str, int | None]:
    """Check pins as the user gives them, and read them: key -> dimension, None for whole."""
    if pins is not None and not isinstance(pins, Mapping):
        raise InputError(f"pins is {type(pins).__name__}; give a mapping, such as {{'*.up_proj.weight': Shard(0)}}.")
    dims = {}
    for key, placement in (pins or {}).items():
        if not isinstance(placement, Split | Whole):
            raise InputError(f"the pin {key!r} is {placement!r}; give torch's Shard(dim) or Replicate().")
        dims[key] = placement.dim if isinstance(placement, Split) else None
        if key in AXES and dims[key] not in (None, 0):
            raise InputError(
                f"the pin {key!r} is {placement!r}: an axis is one dimension; give Shard(0) or Replicate()."
            )
    return dims


def find(program: Capture, pins: Dims, ops: Ops, logical: Callable[[], Mapping[str, list[PortDims]]]) -> Pinned:
    """Find the pins in a captured graph; of several that fit one parameter or module, the first counts.

    Args:
        program: the capture. pins: dimension, or None for whole, by the name or pattern that the user gave.
        ops: of the calls. logical: gives the logical axes of the capture, with their ports.

    Raises:
        InputError: a key fits nothing. PlanError: a value has no such dimension.
    """
    finder = _Finder(program, ops, Pinned())
    for key, dim in pins.items():
        if key in AXES:
            finder.axis(key, dim, logical())
        elif key.startswith(INPUT):
            finder.input(key, dim)
        elif key.startswith(OUTPUT):
            finder.output(key, dim)
        elif key.endswith(OUTPUT):
            finder.module(key, dim)
        else:
            finder.parameter(key, dim)
    return finder.pinned


@dataclass
class _Finder:
    program: Capture
    ops: Ops
    pinned: Pinned

    def parameter(self, key: str, dim: int | None) -> None:
        leaves = {x.name: x.node.meta["val"].ndim for x in self.program.leaves if x.kind.trained}
        names = {alias: first for alias, first in self.program.aliases.items() if first in leaves}
        matches = dict.fromkeys(first for alias, first in names.items() if fnmatch.fnmatchcase(alias, key))
        if not matches:
            raise InputError(f"the pin {key!r} fits no parameter's name. Names are like {near(key, names)}.")
        for name in matches:
            self.pinned.parameters.setdefault(name, ask(key, name, dim, leaves[name]))

    def axis(self, key: str, dim: int | None, axes: Mapping[str, list[Any]]) -> None:
        split = dim is not None
        if key == "sequence":
            self.pinned.sequence = split
            return
        if not axes[key]:
            axis_names = [name for name, ports in axes.items() if ports]
            raise InputError(f"this model has no axis {key!r} that the patterns find; it has {', '.join(axis_names)}.")
        for node, side, index, dims in axes[key]:
            what = f"the axis {key} (dim {', '.join(map(str, dims))})"
            self._ask((node, (side, index)), Ask(key, what, dims, split, axis=True))

    def input(self, key: str, dim: int | None) -> None:
        nodes = {f"{INPUT}.{x.name}": x.node for x in self.program.inputs if tensors(x.node)}
        if key not in nodes:
            raise InputError(f"the pin {key!r} fits no input. The keys are {listed(nodes)}.")
        self._readers(key, dim, [nodes[key]], ())

    def output(self, key: str, dim: int | None) -> None:
        names = self._outputs()
        positions = [i for i, name in names.items() if key in (OUTPUT, f"{OUTPUT}.{name}")]
        if not positions:
            keys = listed(f"{OUTPUT}.{n}" for n in names.values())
            raise InputError(f"the pin {key!r} fits no output. The keys are {keys}.")
        values = outputs_of(self.program)
        for i in positions:
            ndim = tensor_at(resolve(values[i])).ndim
            self.pinned.outputs.setdefault(i, ask(key, f"the output {names[i]}", dim, ndim))

    def module(self, key: str, dim: int | None) -> None:
        inside: dict[str, list[fx.Node]] = defaultdict(list)
        for n in self.ops:
            for path in dict.fromkeys(p.split("@")[0] for p in module_path(n)):
                inside[path].append(n)
        pattern = key.removesuffix(OUTPUT)
        paths = [path for path in inside if fnmatch.fnmatchcase(path, pattern)]
        if not paths:
            raise InputError(f"the pin {key!r} fits no module that runs. Modules are like {near(pattern, inside)}.")
        count = sum(self._readers(key, dim, inside[p], {*inside[p]}) for p in paths)
        if not count:
            raise InputError(f"the pin {key!r}: nothing outside of {paths[0]} reads a floating-point value of it.")

    def _readers(self, key: str, dim: int | None, makers: Iterable[fx.Node], inside: Collection[fx.Node]) -> int:
        """Ask all readers of these values, but those that are `inside`."""
        count, values = 0, {resolve(x): i for i, x in enumerate(outputs_of(self.program))}
        for maker in makers:
            what = where(maker) if maker in self.ops else f"the input {maker.name}"
            for user, slot, value in read(maker, self.ops):
                if user not in inside and (floating(value) or key.startswith(INPUT)):
                    self._ask((user, ("in", slot)), ask(key, f"what {what} gives", dim, value.ndim))
                    count += 1
            for i, value in enumerate(tensors(maker)):
                if (maker, i) in values and floating(value):
                    self.pinned.outputs.setdefault(values[maker, i], ask(key, f"what {what} gives", dim, value.ndim))
                    count += 1
        return count

    def _ask(self, at: tuple[fx.Node, Port], ask: Ask) -> None:
        """Add a demand; of those that are not for axes, the first counts."""
        asks = self.pinned.ports[at[0]].setdefault(at[1], [])
        if ask.axis or not any(not a.axis for a in asks):
            asks.append(ask)

    def _outputs(self) -> dict[int, str]:
        """Map numbers of the graph's tensor outputs -> names, such as `logits`; numbers where the model gives none."""
        spec = self.program.out_spec
        leaf_names = compat.named_leaves(compat.tree_unflatten([str(i) for i in range(spec.num_leaves)], spec))
        by_place = {place: re.sub(r"^\['(.*)'\]$", r"\1", name) for name, place in leaf_names.items()}
        leaves = self.program.results
        theirs = [i for i in range(len(leaves)) if i not in self.program.mutations]
        values = [i for i, x in enumerate(leaves) if isinstance(x, fx.Node) and tensors(x)]
        return {k: by_place[str(theirs.index(i))] for k, i in enumerate(values) if i in theirs}


def placed_apart(leaves: Mapping[fx.Node, Leaf], placed: Layouts, alike: Alike) -> dict[fx.Node, str]:
    """Mark equal blocks that a plan placed differently, such as one that its own program did not read."""
    marks = {n: repr(placed[x.name]) for n, x in leaves.items() if x.name in placed}
    differ = any(marks.get(alike[n]) != layout for n, layout in marks.items())
    return marks if differ else {}


def ask(key: str, what: str, dim: int | None, ndim: int) -> Ask:
    """Make the demand of a pin on a value of `ndim` dimensions."""
    if dim is None:
        return Ask(key, what, (), False)
    if not -ndim <= dim < ndim:
        raise PlanError(
            f"the pin {key!r} asks for Shard({dim}) of {what}, which has {ndim} dimensions. Change the pin."
        )
    return Ask(key, what, (dim % ndim,), True)


def check_neighbours(problem: Problem, nodes: list[fx.Node], asks: Mapping[int, Ask]) -> None:
    """Refuse a pin that no operator beside the pinned one can live with, naming it.

    The solver would find that no plan is legal, and could not say why.

    Args:
        problem: with the pins' choices taken away. nodes: of its items. asks: pinned items.

    Raises:
        PlanError: nothing that the pinned item produces can become anything that the other one reads.
    """
    producers = {value: (i, k) for i, item in enumerate(problem.items) for k, value in enumerate(item.outs)}
    for use in problem.uses:
        i, k = producers[use.value]
        produced = list(dict.fromkeys(c.outs[k] for c in problem.items[i].choices))
        for j, slot in use.consumers:
            pin = asks.get(i) or asks.get(j)
            read_layouts = list(dict.fromkeys(c.ins[slot] for c in problem.items[j].choices))
            pairs = itertools.product(produced, read_layouts)
            # Where neither end is pinned the rules are at odds, which is no fault of the user's.
            if pin is None or any(a == b or problem.convert(use.value, a, b) is not None for a, b in pairs):
                continue
            # The other end is what forbids it: a pinned weight by its reader, a pinned operator by what feeds it.
            forbids, can, how = (j, read_layouts, "reads") if i in asks else (i, produced, "gives")
            name = where(nodes[forbids]) if forbids < len(nodes) else "the model's output"
            raise PlanError(
                f"{pin} cannot be kept: {name} {how} {pin.what} as {listed(can)} only. Change or drop the pin."
            )
