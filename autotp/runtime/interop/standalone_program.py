"""A rank's program for processes that have neither the model nor its sources: `ShardedModule.program`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from autotp import compat
from autotp.comm.ranks import together
from autotp.errors import CaptureError, InputError, StateError
from autotp.inputs import Leaves, normalise
from autotp.ir.graph import CONSTANT, SEEDS, Leaf, NamedTensors, Nodes, copy_node
from autotp.ir.op import aten
from autotp.kernels import operators
from autotp.passes.decompose.counter_random import base_seed, seeds
from autotp.runtime import state
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.program_search import find
from autotp.runtime.programs import Match, Program
from autotp.runtime.storage import ShardState

WORLD = "0"  # what torch calls the group of all processes


def random_seed(like: Tensor, count: int) -> Tensor:
    """Draw a training program's seeds, on a tensor's device: one of torch's default generator."""
    return seeds(count, 0, base_seed()).to(like.device)


def checked_classes(target: Tensor, classes: int, ignored: int) -> Tensor:
    """Compute as the operator does, with an assertion in the graph."""
    good = ((target >= 0) & (target < classes)) | (target == ignored)
    aten._assert_async.msg(good.all(), f"Target out of bounds: classes are 0 to {classes - 1}.")
    return target.clone()


# Operators that torch alone does not have -> what an exported program consists of in their place.
TORCHS: dict[Any, Any] = {
    operators.OPS.class_sums.default: operators.class_sums,
    operators.OPS.counter_uniform.default: operators.counter_uniform,
    operators.OPS.counter_dropout.default: operators.counter_dropout,
    operators.OPS.checked_classes.default: checked_classes,
}


class Reader(fx.Tracer):
    """Tracer of a training program's file, which stores Python code: the functions called there are its operators."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module that torch.fx wrote."""
        functions = tuple(f for f in type(root).forward.__globals__.values() if inspect.isfunction(f))
        super().__init__(autowrap_functions=functions)
        return super().trace(root, concrete_args)


def program(
    self: Any, example_inputs: Any, *, training: bool = False, group: str = WORLD
) -> ExportedProgram | fx.GraphModule:
    """Write this rank's program for a call, with its weights, for a process without the model. A collective call.

    For inference it is an `ExportedProgram` of torch's operators and functional collectives alone:
    `torch.export.save` and `torch.export.load` need no autotp, and `.module()` runs it. For training it is a
    `torch.fx.GraphModule` whose collectives have gradients (`autotp.comm.conversions`): `torch.save` and
    `torch.load(weights_only=False)` need autotp, but not the model. It draws dropout from torch's default
    generator, which must be in the same state on every tp rank.

    A program takes the tensors of the call, whole and the same on every rank: positional arguments by position,
    keywords by name, those of a container one by one (`name_0`, ...); what is no tensor is as in the example. Outputs
    are full: tensors, and tuples, lists and dicts of them. Weights have the original's names and the rank's shapes.

    Args:
        example_inputs: of one call, as for `autotp.compile`. Dimensions that the plan keeps symbolic, such as batch
            and length, stay free where the program allows it: see `range_constraints`.
        training: for training; the module must be in that mode.
        group: name of the process group, in the process that loads it, whose ranks are the tp ranks in their order:
            its `group_name`. "0" is the group of all processes, that `init_process_group` makes.

    Returns: the program; it shares its weights with this module until it is saved.

    Raises:
        InputError: the inputs do not fit `forward`, or hold a cache; the module is in another mode; or with dp.
        CaptureError: torch cannot export the program.
        RankError: that is so on another rank.
    """
    ranks = self._shards.ranks
    if self._shards.hosts:
        raise StateError("program() is of one rank, and with tp_invariant a process runs several. Compile without it.")
    with self._calls.together("program"):
        call = together(ranks, "reading the inputs", lambda: _call_of(self, example_inputs, training, group))
        with torch.set_grad_enabled(training):
            match = find(self, call)
            return together(ranks, "exporting the program", lambda: _write(self, match, call, training, group))


def _call_of(module: Any, example: Any, training: bool, group: str) -> Arguments:
    """Read the call, and refuse it where there can be no program for it."""
    batch = module._plan.batch
    if not isinstance(group, str):
        raise InputError(f"group={group!r} is no name. Give the group's group_name in the process that loads it.")
    if module.training != training:
        now, call = ("training", "eval()") if module.training else ("inference", "train()")
        raise InputError(
            f"program(training={training}) of a module in {now} mode, whose program is another. Call {call} first."
        )
    if batch.size > 1:
        raise InputError(
            f"program() of a module with {batch.name}: its program is for one tp group among several. "
            f"Compile without {batch.name}; data-parallel processes each load the tp ranks' programs."
        )
    inputs = normalise(example)
    call = Arguments(module._carriers, inputs.args, inputs.kwargs)
    if call.state_objects or module._carriers.named_places(call.spec):
        raise InputError("program() of a call with a cache or a named state, which no file can hold. Leave it out.")
    return call


def _write(module: Any, match: Match, call: Arguments, training: bool, group: str) -> ExportedProgram | fx.GraphModule:
    program, order = match
    names = _names(call.spec, module._carriers.names)
    if program.capture.carried:
        raise InputError("program() of a call that returns a cache, which no file can hold. Give use_cache=False.")
    writer = _Writer(module._source, module._shards, program, training)
    flat = writer.module([names[i][0] for i in order], group, module._plan.memory.peak)
    if training:
        return flat
    args = [call.flat[i] for i in sorted(order) if names[i][1]]
    kwargs = {names[i][0]: call.flat[i] for i in sorted(order) if not names[i][1]}
    # Of dimensions whose size is a symbol of the plan's any size is taken.
    free = {}
    for i, leaf in zip(order, program.capture.tensor_inputs, strict=True):
        shape = leaf.node.meta["val"].shape
        free[names[i][0]] = {d: Dim.AUTO for d, n in enumerate(shape) if isinstance(n, torch.SymInt)}
    return _exported(flat, tuple(args), kwargs, free)


def _names(spec: Any, positional: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the name of every leaf of a call's arguments, in order, and whether it was given by position."""
    args, kwargs = compat.tree_unflatten(list(range(spec.num_leaves)), spec)
    unnamed = [f"argument_{i}" for i in range(len(positional), len(args))]
    out = []
    for i, (name, value) in enumerate([*zip([*positional, *unnamed], args, strict=False), *kwargs.items()]):
        leaves, by_place = compat.tree_leaves(value), i < len(args)
        if leaves == [value]:
            out.append((name, by_place))
        else:
            out += [(f"{name}_{j}", by_place) for j in range(len(leaves))]
    return out


def _exported(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: NamedTensors, shapes: dict[str, dict[int, Any]]
) -> ExportedProgram:
    """Export the module by torch, for sizes that are free where a mapping says so."""
    try:
        with compat.quiet_export():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot write down this rank's program: {str(error).splitlines()[0]}. Switch off with "
            "optimise={...} what the plan says of its operators, or keep the module."
        ) from error


class _Writer:
    """Writer of a rank's flat program as a module of its own."""

    def __init__(self, source: Any, shards: ShardState, program: Program, training: bool) -> None:
        self.source, self.shards, self.program, self.training = source, shards, program, training
        self.tensors, self.env, self.graph = {}, {}, fx.Graph(tracer_cls=Reader)

    def module(self, names: Sequence[str], group: str, rank_bytes: float) -> fx.GraphModule:
        """Write the module; it takes tensors by these names, in the order of the program's."""
        places = self.shards.places()
        places["tp"] = places["tp"]._replace(group=group)
        flat, _ = self.source.lowering.program(self.program.sharded, places, self.shards.device, rank_bytes)
        self._leaves(flat.find_nodes(op="placeholder"), names)
        for node in flat.nodes:
            if node.op != "output" and node not in self.env:
                new = self.env[node] = copy_node(node, self.graph, self.env.__getitem__)
                new.target = new.target if self.training else TORCHS.get(new.target, new.target)
        self._outputs(compat.tree_leaves(flat.output_node().args[0]))
        return fx.GraphModule(self.tensors, self.graph, "RankProgram")

    def _leaves(self, nodes: Nodes, names: Sequence[str]) -> None:
        """Write what the program takes: the call's tensors as placeholders, weights as attributes."""
        rest = iter(names)
        pairs = list(zip(self.program.capture.leaves, nodes, strict=True))
        inputs = []
        for leaf, node in pairs:
            if leaf.kind.passed and leaf.is_tensor:
                inputs.append(self.graph.placeholder(next(rest)))
                self.env[node] = inputs[-1]
        for leaf, node in pairs:
            if leaf.kind is SEEDS:  # of a value, as what reads none is constant to torch.fx
                self.env[node] = self.graph.call_function(random_seed, (inputs[0], leaf.node.meta["val"].shape[0]))
            elif not leaf.kind.passed and (node.users or leaf.name in self.program.capture.mutations.values()):
                self.env[node] = self._weight(leaf)
            else:
                self.env.setdefault(node, node)  # nothing reads it

    def _weight(self, leaf: Leaf) -> fx.Node:
        """Write an attribute of the original's name, which holds this rank's part."""
        first = self.shards.aliases.get(leaf.name, leaf.name)
        if leaf.kind is CONSTANT:
            tensor = self.program.capture.constants[leaf.name]
        elif leaf.kind.trained:
            parts = state.pieces(self.shards, first)
            local = [compat.part_of(p.detach()) for p in parts]
            weight = self.shards.storages[first].mine(local, self.shards.ranks).detach()
            tensor = nn.Parameter(weight, self.training and parts[0].requires_grad)
        else:
            tensor = compat.part_of(state.pieces(self.shards, first)[0])
        self.tensors[leaf.name] = tensor
        return self.graph.get_attr(leaf.name)

    def _outputs(self, values: Leaves) -> None:
        """Write what it returns, in plain containers; what it writes is written first."""
        captured, results = self.program.capture, []
        tensors = self.graph.find_nodes(op="placeholder")
        buffers = {n.target: n for n in self.graph.nodes if n.op == "get_attr"}
        for i, value in enumerate(values):
            node = self.env[value] if isinstance(value, fx.Node) else value
            taker = captured.mutations.get(i)
            if taker is None:
                results.append(node)
                continue
            into = buffers[taker] if isinstance(taker, str) else tensors[taker]
            self.graph.call_function(aten.copy_.default, (into, self.graph.call_function(aten.detach.default, (node,))))
        stands, nodes = [], {}  # tensors in the place of nodes, for a class may look at what it is given
        for x in results:
            stands.append(torch.empty(0) if isinstance(x, fx.Node) else x)
            nodes[id(stands[-1])] = x
        whole = compat.tree_unflatten(stands, captured.out_spec)
        self.graph.output(_plain(whole, nodes))


def _plain(value: Any, nodes: Mapping[int, Any]) -> Any:
    """Return the same in tuples, lists and dicts, with nodes in place of their stand-ins, by identity of these."""
    if isinstance(value, Mapping):
        return {k: _plain(v, nodes) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(v, nodes) for v in value]
        return items if isinstance(value, list) else tuple(items)
    if compat.is_user_node(value):
        return tuple(_plain(v, nodes) for v in compat.children(value))
    return nodes.get(id(value), value)
