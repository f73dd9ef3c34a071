"""Small models of the same classes: with a few blocks of each stack, and with narrower layers where the constructor
takes other sizes.

They are on the meta device or have the original's own tensors; nothing of the original changes.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.ir.graph import CONSTANT, Capture, short_name, tensors, where
from autotp.ir.marks import mark
from autotp.ir.op import aten, expression, symbols_of
from autotp.ir.scopes import module_path

from .copies import copied, tensors_of
from .repeated_blocks import MIN_BLOCKS, Stack, kinds, path_of, place_in

FEWEST_KEPT = 2  # blocks of a stack: one that follows the layers before the stack, and one that follows a block
RATIOS = (128, 64, 32, 16, 8, 4, 2)  # by which layers are made narrower: the first that leaves `NARROW_WIDTH`
NARROW_WIDTH = 128  # of the widest of the common widths, at least
MIN_WIDTH = 32  # and where such a model is too large or does not run


def cuts(model: nn.Module) -> dict[str, int]:
    """Map stacks of blocks to how many from the first on hold every kind of block after every kind that it follows.

    The last that is kept is of the kind of the stack's last. Stacks within blocks that are kept are cut too.
    """
    lengths: dict[str, int] = {}
    for name, module in model.named_modules():
        inside_cut = any((place_in(stack, name) or 0) >= length for stack, length in lengths.items())
        if (
            not inside_cut
            and isinstance(module, Stack)
            and len(module) >= MIN_BLOCKS
            and len(set(module)) == len(module)
        ):
            least = _shortest(kinds(module))
            if least < len(module):
                lengths[name] = least
    return lengths


def _shortest(kinds: list[Hashable | None]) -> int:
    """Find the length of the shortest prefix with all pairs of neighbours, and the last kind at its end."""
    if None in kinds:
        return len(kinds)
    pairs = set(zip(kinds, kinds[1:], strict=False))
    for n in range(FEWEST_KEPT, len(kinds)):
        if kinds[n - 1] == kinds[-1] and set(zip(kinds[:n], kinds[1:n], strict=False)) == pairs:
            return n
    return len(kinds)


@contextmanager
def cut(model: nn.Module, lengths: Mapping[str, int]) -> Iterator[None]:
    """Context in which the stacks of the model have these lengths."""
    modules = model.named_modules()
    stacks = [(module, dict(module._modules), lengths[name]) for name, module in modules if name in lengths]
    try:
        for module, blocks, length in stacks:
            module._modules = dict(list(blocks.items())[:length])
        yield
    finally:
        for module, blocks, _ in stacks:
            module._modules = blocks


# ---- narrower --------------------------------------------------------------------------------------------------------


def narrowed(model: nn.Module) -> Iterator[tuple[nn.Module, dict[int, int]]]:
    """Yield models of the same classes on the meta device, made by the same constructor with smaller widths, and these
    widths, all smaller by one ratio. The ratio that suits most comes first, then greater ones, then smaller ones.

    A width is a number among the constructor's arguments that is a dimension of a layer, but for how many rows the
    embeddings have and how many modules or experts there are. There are none where the constructor's arguments are not
    kept, or it does not take others.
    """
    arguments, common = _constructor_arguments(model), _widths(model)
    if arguments is None or not common:
        return
    widest = max(n for n, count in common.items() if 4 * count >= max(common.values()))
    at = next((i for i, r in enumerate(RATIOS) if widest % r == 0 and widest // r >= NARROW_WIDTH), len(RATIOS))
    for ratio in (*RATIOS[at : at + 1], *reversed(RATIOS[:at]), *RATIOS[at + 1 :]):
        widths = {n: n // ratio for n in common if n % ratio == 0 and n > ratio}
        thin = _with_widths(model, arguments, widths) if widths.get(widest, 0) >= MIN_WIDTH else None
        if thin is not None:
            yield thin, widths


def _widths(model: nn.Module) -> Counter[int]:
    """Count the dimensions of layers."""
    counts: Counter[int] = Counter()
    rows, numbers = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}, _numbers(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            shape = list(parameter.shape)
            if isinstance(module, nn.Embedding) or _experts(module, parameter):
                shape = shape[1:]
            elif "Conv" in type(module).__name__:
                shape = shape[:2]
            counts.update(shape)
    return Counter({n: count for n, count in counts.items() if n not in numbers and (n not in rows or count > 2)})


def _numbers(model: nn.Module) -> set[int]:
    """Collect the numbers of modules in its lists, and of experts."""
    lists = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList)}
    return lists | {len(p) for m in model.modules() for p in m.parameters(recurse=False) if _experts(m, p)}


def _experts(module: nn.Module, parameter: Tensor) -> bool:
    return parameter.ndim > 2 and "Conv" not in type(module).__name__


def _with_widths(model: nn.Module, arguments: Mapping[str, Any], widths: Mapping[int, int]) -> nn.Module | None:
    """Make the model with these widths; None where it does not have the same modules then."""
    dtypes = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), _default(dtypes.most_common(1)[0][0]):
            narrow = type(model)(**{name: _narrow(value, widths, {}) for name, value in arguments.items()})
    except Exception:  # whatever a constructor thinks of these sizes
        return None
    want, have = dict(model.named_modules()), dict(narrow.named_modules())
    tensors, names = tensors_of(model), {id(t): n for n, t in tensors_of(narrow).items()}
    if want.keys() != have.keys() or any(type(m) is not type(have[n]) for n, m in want.items()):
        return None
    if tensors.keys() != set(names.values()):
        return None
    for name, module in want.items():
        have[name].training = module.training

    def like(tensor: Tensor) -> Tensor:
        other = tensors[names[id(tensor)]]
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=other.dtype, device="meta")
        return nn.Parameter(empty, other.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    return copied(narrow, like)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _constructor_arguments(model: nn.Module) -> dict[str, Any] | None:
    """Find the arguments of the model's constructor, as far as the model keeps them under the same names, itself or in
    its `config`; None where one that it needs is not kept."""
    config = getattr(model, "config", None)
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(type(model).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if isinstance(config, Mapping) and name in config:
            arguments[name] = config[name]
        elif name in vars(model):
            arguments[name] = vars(model)[name]
        elif hasattr(config, name):
            arguments[name] = getattr(config, name)
        elif parameter.default is parameter.empty:
            return None
    return arguments


def _narrow(value: Any, widths: Mapping[int, int], copies: dict[int, Any]) -> Any:
    """Copy arguments with other widths."""
    # No flag: True is an int, and equal to 1.
    if type(value) is int:
        return widths.get(value, value)
    # No named tuple, whose constructor takes its fields one by one.
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_narrow(v, widths, copies) for v in value)
    if isinstance(value, dict):
        narrow = copy.copy(value)
        for key, v in value.items():
            # The copy of a frozen configuration is frozen as well, so not by its own `__setitem__`.
            dict.__setitem__(narrow, key, _narrow(v, widths, copies))
        return narrow
    if not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
        return value
    # A configuration that is reached twice is copied once, so that two parts still share it, and one that holds itself
    # ends.
    if id(value) not in copies:
        copies[id(value)] = narrow = copy.copy(value)
        for key, v in list(vars(value).items()):
            vars(narrow)[key] = _narrow(v, widths, copies)
    return copies[id(value)]


# ---- the same graph --------------------------------------------------------------------------------------------------

# Comparison of the captures of a large model and of a small one of its classes, with fewer and narrower layers.
#
# Each operator has a kind: its computation within its block, from the block's own weights, and from values of
# elsewhere, which are identified by their own kind and by the number of their like in between. Both captures must have
# the same kinds.

COPIES = (aten.contiguous.default, aten.clone.default)  # which there are depends on how equal blocks were traced
LITERAL_TOLERANCE = 1e-6  # of two literals' logarithms
Place = tuple[str, int] | None  # a block of a stack; None for what is in none


@dataclass
class _Operator:
    """One operator of a graph.

    Attributes:
        place: its block. kind: a digest of its computation within the block.
        outside: values that it reads of elsewhere; `numbers`: literals, which may differ between graphs as widths do.
    """

    node: fx.Node
    place: Place
    kind: str = ""
    outside: list[fx.Node] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)


def differs(large: Capture, small: Capture, stacks: Mapping[str, int], ratio: int = 1) -> str:
    """Return the first difference of the graphs; "" where they are the same.

    Args:
        stacks: names of the stacks of which the small model has fewer blocks.
        ratio: by which its layers are narrower.
    """
    theirs: dict[Hashable, list[_Operator]] = defaultdict(list)
    for key, operator in _Reader(small, stacks).operators():
        theirs[key].append(operator)
    ours: set[Hashable] = set()
    for key, operator in _Reader(large, stacks).operators():
        ours.add(key)
        if key not in theirs:
            return f"no operators of it are those from {where(operator.node)} on"
        if not any(_numbers_fit(operator.numbers, like.numbers, ratio) for like in theirs[key]):
            return f"numbers among the operators from {where(operator.node)} on are others"
    missing = next((like[0] for key, like in theirs.items() if key not in ours), None)
    return "" if missing is None else f"it has operators more, from {where(missing.node)} on"


class _Reader:
    def __init__(self, program: Capture, stacks: Mapping[str, int]) -> None:
        self.program, self.stacks = program, stacks
        self.leaves = {leaf.node: leaf for leaf in program.leaves}
        self.read: dict[fx.Node, _Operator] = {}
        self.takers: dict[Any, list[str | int]] = defaultdict(list)  # value -> the buffers and inputs that take it
        results = program.results
        for i, taker in program.mutations.items():
            self.takers[results[i]].append(taker)

    def operators(self) -> Iterator[tuple[Hashable, _Operator]]:
        """Yield the operators in order, each with its kind and the kinds of its operands of elsewhere."""
        for node in self.program.graph.nodes:
            if node.op != "placeholder" and not _is_size(node) and node.target not in COPIES:
                self.read[node] = self._operator(node)
        counts: Counter[str] = Counter()
        numbers: dict[fx.Node, int] = {}  # of an operator among those of its kind
        for node, operator in self.read.items():
            kinds = [(x, self.read[x].kind) for x in operator.outside]
            links = [(kind, counts[kind] - numbers[x]) for x, kind in kinds]
            numbers[node] = counts[operator.kind]
            counts[operator.kind] += 1
            yield (operator.kind, *links), operator

    def _operator(self, node: fx.Node) -> _Operator:
        places = (self._block(path) for path in module_path(node))
        operator = _Operator(node, next((p for p in places if p is not None), None))
        operands = compat.tree_leaves((node.args, node.kwargs))
        if node.op == "output":  # what it writes stands with each value
            operands = [x for i, x in enumerate(operands) if i not in self.program.mutations]
        takers: list[Any] = []
        for taker in self.takers.get(node, ()):
            takers.append(self._name(taker, operator.place) if isinstance(taker, str) else taker)
        target = short_name(node.target) if node.op == "call_function" else node.op
        words = [operator.place and operator.place[0], target, _shape(node), takers]
        words += [self._operand(x, operator) for x in operands]
        operator.kind = hashlib.sha256(repr(words).encode()).hexdigest()
        return operator

    def _operand(self, x: Any, operator: _Operator) -> Hashable:
        """Describe an operand, the same in another graph; a block's own weight by its name in the block."""
        # Widths are literals and differ from graph to graph: compared as numbers, after all else.
        if type(x) in (int, float):
            operator.numbers.append(x)
            return type(x)
        if not isinstance(x, fx.Node):
            return repr(x)
        # Which copies there are depends on how equal blocks were traced.
        while x.target in COPIES:
            x = x.all_input_nodes[0]
        # Of batch times heads a stand-in has another number: compared is which sizes it depends on.
        if _is_size(x):
            return self._size(x)
        if x in self.leaves:
            return self._leaf(x, operator.place)
        producer = self.read[x]
        # Within a block by its computation there; of another block's, any that is of its kind would do.
        if producer.place == operator.place:
            operator.outside += [y for y in producer.outside if y not in operator.outside]
            return producer.kind, tuple(map(operator.outside.index, producer.outside))
        if x not in operator.outside:
            operator.outside.append(x)
        return "outside", operator.outside.index(x), _shape(x)

    def _size(self, node: fx.Node) -> Hashable:
        """Describe a size by the inputs' sizes that it depends on, for blocks share its operators or not."""
        return "size", tuple(sorted(map(self._source, symbols_of(expression(node.meta["val"])))))

    def _source(self, symbol: sympy.Basic) -> str:
        node, dim = self.program.symbols.get(symbol, (None, 0))  # type: ignore[call-overload]
        return f"{self.leaves[node].name}.{dim}" if node in self.leaves else "data"

    def _leaf(self, node: fx.Node, place: Place) -> Hashable:
        leaf = self.leaves[node]
        return leaf.kind.name, self._name(leaf.name, place) if leaf.kind is not CONSTANT else "", _shape(node)

    def _name(self, name: str, place: Place) -> str:
        """Return a name, relative to the block at this place where it is within that."""
        return name.removeprefix(path_of(*place)) if place is not None and self._block(name) == place else name

    def _block(self, name: str) -> Place:
        """Find the block of one of the stacks that a name is of, or is within."""
        places = ((stack, place_in(stack, name)) for stack in self.stacks)
        return next(((stack, i) for stack, i in places if i is not None), None)


def _is_size(node: fx.Node) -> bool:
    """Say whether a node computes a number from sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _shape(node: fx.Node) -> Hashable:
    """Describe the traits of a value that are the same at every width."""
    return mark(node).no_grad, tuple((v.ndim, v.dtype) for v in tensors(node))


def _numbers_fit(ours: list[Any], theirs: list[Any], ratio: int) -> bool:
    return len(ours) == len(theirs) and all(_fits(a, b, ratio) for a, b in zip(ours, theirs, strict=True))


def _fits(a: Any, b: Any, ratio: int) -> bool:
    """Say whether two literals are the same, or differ as sizes, or numbers made of one size, do."""
    if a == b or (a != a and b != b):
        return True
    if ratio == 1 or type(a) not in (int, float) or type(b) is not type(a):
        return False
    if type(a) is int:
        return 0 < b < a
    if a * b <= 0 or not math.isfinite(a) or not math.isfinite(b):
        return False
    halves = 2 * math.log(a / b) / math.log(ratio)
    return abs(halves - round(halves)) < LITERAL_TOLERANCE
