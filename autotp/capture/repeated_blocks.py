"""Stacks of equal modules, whose blocks are grouped by kind, so that capture traces one of each kind.

Two blocks are alike where everything that their forward may read is the same: classes, flags, plain attributes, and the
shapes of what they hold. Their place in the stack, which many keep as a number (`layer_idx`), is replaced while tracing
by a number that must not be read; a forward that reads it all the same is traced in full. Blocks that change their
attributes are traced one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.ir.graph import copy_graph, replace_results, tensors
from autotp.ir.op import expression
from autotp.passes.canonicalise.functionalise import memory

from .autograd_functions import PLAIN_TYPES, writes_to
from .copies import tensors_of

MIN_BLOCKS = 4  # blocks in a stack for which one trace is worth while
Stack = nn.ModuleList | nn.Sequential
HOOKS = tuple(n for n in vars(nn.Module()) if "_hooks" in n)
OWN = {"_parameters", "_buffers", "_modules", *HOOKS}  # attributes of nn.Module that are looked at by themselves
AttributePlace = tuple[str, str]  # module within the block, attribute


class IndexRead(RuntimeError):
    """Error: a block's forward reads its place in the stack."""


def _refuse(self: Any, *_: Any) -> Any:
    raise IndexRead("the forward of a block reads its place in the stack")


class Unread(int):
    """A number that may be passed on, but not be read."""


READING = """
    add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow neg pos abs invert
    lshift rlshift rshift rrshift and rand or ror xor rxor eq ne lt le gt ge bool index int float hash str repr format
    round trunc floor ceil
"""
for _name in READING.split():
    setattr(Unread, f"__{_name}__", _refuse)


def stacks(model: nn.Module) -> dict[str, Stack]:
    """Find the outermost lists of at least `MIN_BLOCKS` modules; the model itself may be one, and hides no others."""
    lists: dict[str, Stack] = {}
    for name, module in model.named_modules():
        inner = any(outer and name.startswith(f"{outer}.") for outer in lists)
        if (
            isinstance(module, Stack)
            and len(module) >= MIN_BLOCKS
            and not inner
            and all(isinstance(block, nn.Module) for block in module)  # some leave places empty
        ):
            lists[name] = module
    return lists


def path_of(stack: str, index: int) -> str:
    """Return the name of a block, by that of its stack, which is "" where that is the model."""
    return f"{stack}.{index}".removeprefix(".")


def place_in(stack: str, name: str) -> int | None:
    """Find the block of a stack that contains a module or parameter, by their names; None where it is in none."""
    inside = name.removeprefix(f"{stack}.") if stack else name
    place = re.split("[.@#]", inside)[0]
    return int(place) if place.isdigit() and name.startswith(stack) and (not stack or inside != name) else None


def kinds(stack: Stack) -> list[Hashable | None]:
    """Return a key for every block, equal for blocks that are alike; None for one that must be traced by itself."""
    places, objects = _places(list(stack)), dict[int, Hashable]()
    return [_kind(block, places, objects) for block in stack]


def _places(blocks: list[nn.Module]) -> set[AttributePlace]:
    """Find the attributes that hold the block's place in the stack, counted from any number."""
    offsets: dict[AttributePlace, list[int]] = {}
    for i, block in enumerate(blocks):
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    offsets.setdefault((path, name), []).append(value - i)
    return {place for place, numbers in offsets.items() if len(numbers) > 1 and len(set(numbers)) == 1}


def _kind(block: nn.Module, places: set[AttributePlace], objects: dict[int, Hashable]) -> Hashable | None:
    if any(vars(module)[name] for module in block.modules() for name in HOOKS):
        return None
    classes = [(path, type(module)) for path, module in block.named_modules()]
    shapes = [(name, _shape(tensor)) for name, tensor in tensors_of(block).items()]
    return *classes, *shapes, *_attributes(block, places, objects)


def _attributes(block: nn.Module, places: Set[AttributePlace], objects: dict[int, Hashable]) -> list[Hashable]:
    """List the attributes of the modules of a block beside modules, parameters and buffers."""
    every = [((path, n), v) for path, module in block.named_modules() for n, v in vars(module).items()]
    try:
        return [(place, _value(v, objects)) for place, v in every if place not in places and place[1] not in OWN]
    except RecursionError:  # a collection that holds itself
        return [object()]  # as no other block


def _shape(tensor: Tensor) -> Hashable:
    traits = isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.dtype, tensor.device
    return tuple(tensor.shape), tensor.stride(), traits


def _value(value: Any, objects: dict[int, Hashable] | None) -> Hashable:
    """Make a key of an attribute's value, equal for two values only where a forward cannot distinguish them.

    Args:
        value: of an attribute. objects: id of an object that was met -> its key; updated. None within an object:
            further objects, which may lead anywhere, are equal to themselves alone.
    """
    if type(value) in PLAIN_TYPES:
        return type(value), value
    if (parts := _parts(value)) is not None:
        return type(value), *(_value(x, objects) for x in parts)
    if objects is None or not _attributes_alone(value):
        return MethodType(id, value)  # equal for the same object alone, and keeps it, as its number would not
    if id(value) not in objects:
        objects[id(value)] = type(value), _value(vars(value), None)
    return objects[id(value)]


def _parts(value: Any) -> Iterable[Any] | None:
    """List the items of a collection; None where the value is none."""
    if type(value) in (list, tuple, torch.Size):
        return value
    if type(value) in (set, frozenset):
        return sorted(value, key=repr)
    mapping = isinstance(value, Mapping) and type(value).__name__ in ("dict", "OrderedDict")
    return (*value, *value.values()) if mapping else None


def _attributes_alone(value: Any) -> bool:
    """Say whether an object holds nothing but attributes, as a block's processor of attention: no function, tensor or
    module, none of a class that keeps values in slots or in C."""
    slots = any(vars(base).get("__slots__") for base in type(value).__mro__)
    plain = type(value).__new__ is object.__new__ and not isinstance(value, nn.Module) and hasattr(value, "__dict__")
    return plain and not slots


@contextmanager
def unread(stack: Stack) -> Iterator[None]:
    """Context in which no block of the stack can tell its place."""
    blocks = list(stack)
    places = _places(blocks) if len(set(blocks)) == len(blocks) else set()
    places_of = [(vars(m), n) for b in blocks for path, m in b.named_modules() for n in vars(m) if (path, n) in places]
    values = [(state, name, state[name]) for state, name in places_of]
    for state, name, value in values:
        state[name] = Unread(value)
    try:
        yield
    finally:
        for state, name, value in values:
            state[name] = value


# ---- blocks traced once ----------------------------------------------------------------------------------------------

# A stack of equal blocks is traced once: the first call of a kind as it is, each later one as a single operator,
# which then becomes a copy of the first one's nodes.
#
# The forward around the blocks runs in full, for every block. Calls are of one kind where the blocks are alike
# (`kinds`) and get tensors of the same shapes, strides and types and otherwise equal arguments.

_library = torch.library.Library("autotp_blocks", "DEF")
_library.define("enter(Tensor[] xs, int kind) -> Tensor[]")
_library.define("leave(Tensor[] xs, int kind) -> Tensor[]")
_library.define("repeat(Tensor[] xs, int kind, int block) -> Tensor[]")
OPS: Any = torch.ops.autotp_blocks
ENTER, LEAVE, REPEAT = OPS.enter.default, OPS.leave.default, OPS.repeat.default
_results: dict[int, list[Tensor]] = {}  # the outputs of calls of a kind, while a model is traced


def _alike(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


torch.library.register_fake("autotp_blocks::enter", lambda xs, kind: _alike(xs), lib=_library)
torch.library.register_fake("autotp_blocks::leave", lambda xs, kind: _alike(xs), lib=_library)
torch.library.register_fake("autotp_blocks::repeat", lambda xs, kind, block: _alike(_results[kind]), lib=_library)


class CannotRepeat(RuntimeError):
    """Error: the trace of one block cannot stand for the others."""


@dataclass
class FirstCall:
    """The first call of a kind: its block, and its outputs besides tensors."""

    block: int
    leaves: list[Any]
    spec: compat.TreeSpec


@dataclass
class Repeats:
    """The blocks of a model, while it is traced.

    Attributes:
        blocks: name and module of every block that has its like in a stack. first: the first call of each kind, by its
            number. apart: kinds of which every call is traced.
    """

    bare: nn.Module
    blocks: list[tuple[str, nn.Module]] = field(default_factory=list)
    first: dict[int, FirstCall] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the first block of each kind is traced and the later ones are single operators."""
        numbers: dict[Hashable, int] = {}
        with ExitStack() as stack:
            for name, modules in stacks(self.bare).items():
                block_kinds = kinds(modules)
                if len(set(map(id, modules))) < len(modules):
                    continue  # a block that is called several times
                if len(set(block_kinds) - {None}) == len([x for x in block_kinds if x is not None]):
                    continue  # no two are alike
                stack.enter_context(unread(modules))
                for i, (block, kind) in enumerate(zip(modules, block_kinds, strict=True)):
                    if kind is not None and block_kinds.count(kind) > 1:
                        self.blocks.append((path_of(name, i), block))
                        stack.enter_context(self._wrap(block, len(self.blocks) - 1, kind, numbers))
            try:
                yield
            finally:
                _results.clear()

    @contextmanager
    def _wrap(self, block: nn.Module, index: int, kind: Hashable, numbers: dict[Hashable, int]) -> Iterator[None]:
        original, calls = block.forward, 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            leaves, spec = compat.tree_flatten((args, kwargs))
            with compat.without_torch_functions():
                signature = _called_with(leaves)
            if signature is None or calls > 1:
                return original(*args, **kwargs)
            number = numbers.setdefault((kind, signature, spec), len(numbers))
            if number in self.apart:
                return original(*args, **kwargs)
            return self._call(original, index, number, leaves, spec)

        with mock.patch.object(block, "forward", forward):  # which puts back a forward that the block has of its own
            yield

    def _call(self, forward: Callable[..., Any], block: int, kind: int, leaves: list[Any], spec: Any) -> Any:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if kind in _results:
            first = self.first[kind]
            return _rebuilt(first.leaves, REPEAT(tensors, kind, block), first.spec)
        args, kwargs = _rebuilt(leaves, ENTER(tensors, kind), spec)
        before = _attributes(self.blocks[block][1], set(), {})
        out = forward(*args, **kwargs)
        outputs, out_spec = compat.tree_flatten(out)
        same = before == _attributes(self.blocks[block][1], set(), {})
        if not same or not all(isinstance(x, Tensor) or type(x) in PLAIN_TYPES for x in outputs):
            self.apart.add(kind)
            return out  # ENTER without LEAVE: later calls are traced too
        results = LEAVE([x for x in outputs if isinstance(x, Tensor)], kind)
        _results[kind], self.first[kind] = results, FirstCall(block, outputs, out_spec)
        return _rebuilt(outputs, results, out_spec)


def _called_with(leaves: list[Any]) -> Hashable | None:
    """Make the key of arguments that calls of one kind share; None where one is neither a tensor nor plain."""
    signature: list[Hashable] = [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))]
    ids: list[int] = []
    for x in leaves:
        if isinstance(x, Tensor):
            ids.append(id(x))
            shape = tuple(map(expression, x.shape)), tuple(map(expression, x.stride()))
            signature.append((*shape, x.dtype, x.device, x.requires_grad, ids.index(id(x))))
        elif isinstance(x, torch.SymInt):
            signature.append(expression(x))
        elif type(x) in PLAIN_TYPES:
            signature.append((type(x), x))
        else:
            return None
    return tuple(signature)


def _rebuilt(leaves: list[Any], values: list[Tensor], spec: Any) -> Any:
    tensors, out = iter(values), []
    for x in leaves:
        out.append(next(tensors) if isinstance(x, Tensor) else x)
    return compat.tree_unflatten(out, spec)


# ---- after the export ------------------------------------------------------------------------------------------------


def refuse_writes(graph: fx.Graph) -> None:
    """Refuse a block that writes to its arguments or weights: its copies would not.

    Raises:
        CannotRepeat: it does.
    """
    if any(writes_to(n) for n in graph.nodes):
        places_of = memory(graph)
        for body in _bodies(graph).values():
            body.refuse_writes(places_of)


def expand(graph: fx.Graph, repeats: Repeats, holders: Mapping[int, fx.Node], constants: Set[fx.Node]) -> int:
    """Put a copy of the first call's nodes in place of every short call.

    Args:
        graph: of an export within `repeats.tracing()`.
        holders: id of a parameter or buffer of the skeleton -> its placeholder.
        constants: placeholders of constants, which all blocks share.

    Returns:
        The number of short calls.

    Raises:
        CannotRepeat: a block reads a value that is not its own.
    """
    bodies, short = _bodies(graph), [n for n in graph.nodes if n.target is REPEAT]
    for kind in dict.fromkeys(n.args[1] for n in short):
        tensors = tensors_of(repeats.blocks[repeats.first[kind].block][1]).values()
        bodies[kind].refuse_foreign({*constants, *(holders[id(t)] for t in tensors if id(t) in holders)})
    for node in short:
        _, kind, block = node.args
        (path, first), other = repeats.blocks[repeats.first[kind].block], repeats.blocks[block][1]
        pairs = zip(tensors_of(first).values(), tensors_of(other).values(), strict=True)
        bodies[kind].copy(node, {holders[id(a)]: holders[id(b)] for a, b in pairs if id(a) in holders}, path)
    for body in bodies.values():
        body.dissolve()
    return len(short)


def _bodies(graph: fx.Graph) -> dict[int, _Body]:
    """Collect the nodes of every first call: all between its two marks."""
    nodes = list(graph.nodes)
    leaves = {n.args[1]: n for n in nodes if n.target is LEAVE}
    bodies = {}
    for enter in [n for n in nodes if n.target is ENTER]:
        leave = leaves.get(enter.args[1])
        between = [n for n in nodes if leave is not None and enter < n < leave]
        bodies[enter.args[1]] = _Body(enter, leave, between)
    if len(bodies) != len({n.args[1] for n in nodes if n.target in (ENTER, LEAVE, REPEAT)}):
        raise CannotRepeat("a region of the graph separates a block's marks")
    return bodies


@dataclass
class _Body:
    """The nodes that were traced for the first call of a kind."""

    enter: fx.Node
    leave: fx.Node | None
    nodes: list[fx.Node]

    def refuse_writes(self, places_of: Mapping[fx.Node, Set[int]]) -> None:
        inside = {*self.nodes} - self.enter.users.keys()
        outside = set().union(*(places for n, places in places_of.items() if n not in inside))
        for node in self.nodes:
            if any(places_of[x] & outside for x in writes_to(node)):
                raise CannotRepeat(f"a block writes to what it is given: {node.format_node()}")

    def refuse_foreign(self, placeholders: Set[fx.Node]) -> None:
        inside = {self.enter, *self.nodes, *placeholders}
        for node in self.nodes:
            outside = [i for i in node.all_input_nodes if i not in inside and tensors(i)]
            if outside:
                raise CannotRepeat(f"a block reads {outside[0].name}, which is not its own")
            if compat.told_by_data(node.meta.get("val")):
                raise CannotRepeat(f"a block makes sizes that the data tell: {node.format_node()}")

    def copy(self, node: fx.Node, weights: Mapping[fx.Node, fx.Node], path: str) -> None:
        """Put a copy of the nodes in place of a short call.

        Args:
            node: the call. weights: of this block's placeholders those of the call's block.
            path: of the module that the call's block is.
        """
        assert self.leave is not None
        env: dict[Any, Any] = dict(weights)
        env |= {user: node.args[0][user.args[1]] for user in self.enter.users}  # type: ignore[index]
        fresh = [n for n in self.nodes if n not in env]
        with node.graph.inserting_before(node):
            copy_graph(fresh, env, node.graph)
        for n in fresh:
            env[n].meta["nn_module_stack"] = _stack_of_copy(n.meta, node.meta, path)
        replace_results(node, [env.get(n, n) for n in self.leave.args[0]])  # type: ignore[union-attr]

    def dissolve(self) -> None:
        """Take the marks away."""
        for mark in (self.leave, self.enter):
            if mark is not None:
                marked: Any = mark.args[0]
                replace_results(mark, marked)


def _stack_of_copy(meta: Mapping[str, Any], short: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Make the module stack of a copy: the short call's, and within its block the first one's."""
    stack = dict(short["nn_module_stack"])
    block = list(stack.values())[-1][0]
    for key, (name, kind) in meta["nn_module_stack"].items():
        if name.startswith((f"{path}.", f"{path}#")):
            inner = f"{block}{name.removeprefix(path)}"
            stack[f"{key} of {block}"] = inner, kind
    return stack
