"""Run a per-rank program for all ranks in one process, in lockstep: no launcher, no devices, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autotp import compat
from autotp.comm import conversions
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture, draws
from autotp.ir.leaves import SEEDS
from autotp.ir.marks import mark
from autotp.ir.op import aten
from autotp.ir.program import Sharded

Ranks = list[Any]  # one value per rank
Observer = Callable[[fx.Node, Ranks], None]


def run(
    sharded: Sharded, tp: int, inputs: Mapping[fx.Node, Ranks], observe: Observer | None = None, outer: int = 1
) -> list[Any]:
    """Execute the program on `tp` simulated ranks, or on a mesh of `outer` x `tp`.

    Args:
        sharded: the program, before the rank is known.
        tp: number of ranks.
        inputs: for every placeholder the value on each rank.
        observe: called with every node and its value on each rank, as they are made.
        outer: ranks of the axis beside tp; those of one place on it follow each other.

    Returns:
        For each rank the program's output.

    Raises:
        StepError: an operator failed on some rank; it names the node.
    """
    env: dict[fx.Node, Ranks] = {}
    for node in sharded.graph.nodes:
        if node.op == "placeholder":
            env[node] = list(inputs[node])
        elif node.op == "output":
            return [_at(node.args[0], env, r) for r in range(outer * tp)]
        else:
            try:
                env[node] = _step(node, env, tp, outer)
            except Exception as e:
                raise StepError(node, e) from e
        if observe is not None:
            observe(node, env[node])
    return []


class StepError(RuntimeError):
    """An operator of a simulated program failed; `node` is where."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{node.format_node()}: {error}")
        self.node = node


def _step(node: fx.Node, env: dict[fx.Node, Ranks], tp: int, outer: int) -> Ranks:
    target: Any = node.target
    own = mark(node)
    if own.conversion is not None or own.batch is not None:
        src, dst = (_at(spec, env, 0) for spec in node.args[1:3])
        before, after = list(env[node.args[0]]), list(env[node.args[0]])  # type: ignore[index]
        groups = [slice(c * tp, c * tp + tp) for c in range(outer)]
        if own.conversion is None:
            groups = [slice(t, None, tp) for t in range(tp)]
        for group in groups:
            after[group] = conversions.simulate(before[group], src, dst, node.kwargs.get("wire"))  # type: ignore[arg-type]
        return after
    results = []
    random_state = torch.get_rng_state() if draws(node) else None
    for r in range(outer * tp):
        if random_state is not None:  # the generators of all ranks are in the same state
            torch.set_rng_state(random_state)
        place = {} if own.axis is None else {"rank": r // tp, "tp": outer}
        place = {"rank": r % tp, "tp": tp} if own.axis == "tp" else place
        kwargs = {**_at(node.kwargs, env, r), **place}
        results.append(_call(target, _at(node.args, env, r), kwargs))
    return results


def _at(args: Any, env: dict[fx.Node, Ranks], rank: Any) -> Any:
    if isinstance(args, fx.Node):
        return env[args][rank]
    if isinstance(args, tuple) and hasattr(args, "_fields"):  # a layout at run time
        return type(args)(*(_at(a, env, rank) for a in args))
    if isinstance(args, tuple | list):
        return type(args)(_at(a, env, rank) for a in args)
    if isinstance(args, dict):
        return {k: _at(v, env, rank) for k, v in args.items()}
    return args


# What torch itself has no derivative for; the rules of these operators write the same into the program of the ranks.
DERIVABLE: dict[Any, Callable[..., Tensor]] = {
    aten.copy.default: lambda like, value, non_blocking=False: value.to(like.dtype).expand_as(like),
}
UNINITIALISED = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_permuted, aten.empty_strided)


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result, comparable: memory that it left as it was is zero, and an operand that it returns is an
    alias, so that every value has a gradient of its own."""
    function: Any = DERIVABLE.get(target, target)
    result = function(*args, **kwargs)
    if getattr(target, "overloadpacket", None) in UNINITIALISED:
        return torch.zeros_like(result)
    if isinstance(result, Tensor) and any(result is a for a in args):
        return result.view_as(result)
    return result


def reference(graph: fx.Graph, inputs: Mapping[fx.Node, Any], observe: Callable[[fx.Node, Any], None]) -> Any:
    """Run the captured graph itself.

    Args:
        graph: of whole values, or of one rank. inputs: a value for each placeholder.
        observe: is shown every node with its value, as soon as it has one.

    Returns: the graph's outputs.
    """
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "placeholder":
            env[node] = inputs[node]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = _call(node.target, args, kwargs)
        observe(node, env[node])
    return None


@dataclass
class Values:
    """Real values for the leaves of a captured graph.

    Attributes:
        leaves: placeholder -> its value; `inputs`: the model's arguments among them.
    """

    leaves: dict[fx.Node, Any]
    inputs: Inputs

    @classmethod
    def of(cls, program: Capture, model: nn.Module, inputs: Inputs) -> Values:
        """The model's own parameters and buffers, and these inputs.

        Args:
            program: the capture. model: whose values they are; random ones where it is on the meta device.
            inputs: of one call.
        """
        state = {**program.constants, **weights_of(model)}
        inputs = without_cache(model, inputs)[0]
        flat = iter(compat.tree_leaves((tuple(inputs.args), dict(inputs.kwargs))))
        seeds = {x.node: torch.arange(len(x.node.meta["val"])) for x in program.leaves if x.kind is SEEDS}
        leaves = {
            x.node: next(flat) if x.kind.passed else real(state[x.name]) for x in program.leaves if x.kind is not SEEDS
        }
        return cls({**leaves, **seeds}, inputs)

    def doubled(self) -> dict[fx.Node, Any]:
        """The values in float64 (and complex128)."""
        return {n: double(v) for n, v in self.leaves.items()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and parameters under every name."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return buffers | dict(model.named_parameters(remove_duplicate=False))


def double(value: Any) -> Any:
    """A tensor in float64 (and complex128), cut off from autograd; anything else as it is."""
    return value.detach().to(_wide(value.dtype)) if isinstance(value, Tensor) else value


def real(value: Any) -> Any:
    """A tensor with random values where it has none; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_meta:
        return value.detach()
    draw = torch.Generator().manual_seed(value.numel())
    return (torch.randn(value.shape, generator=draw, dtype=torch.float64) * 0.1).to(value.dtype)


WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def _wide(x: Any) -> Any:
    """The dtype in double precision; anything else as it is."""
    if not isinstance(x, torch.dtype):
        return x
    if x.itemsize == 1:  # as numbers are stored, and not computed with
        return x
    return torch.float64 if x.is_floating_point else WIDE.get(x, x)


def _has_dtype(x: Any) -> bool:
    """Whether a dtype stands in a node's arguments, at any depth."""
    if isinstance(x, list | tuple):
        return any(map(_has_dtype, x))
    return any(map(_has_dtype, x.values())) if isinstance(x, dict) else isinstance(x, torch.dtype)


def _grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Products by group: of rows, of columns, of what is summed over, or of matrices; rows of no group are zero."""
    if offs is None:
        return torch.bmm(x, weight)
    starts = [0, *offs.tolist()]
    spans = [slice(a, b) for a, b in pairwise(starts)]
    if x.ndim == weight.ndim == 2:
        return torch.stack([x[:, s] @ weight[s] for s in spans])
    if x.ndim == 3:
        parts = [a @ weight[:, s] for a, s in zip(x, spans, strict=True)]
        return torch.cat([*parts, x.new_zeros(x.shape[1], weight.shape[1] - starts[-1])], 1)
    parts = [x[s] @ w for s, w in zip(spans, weight, strict=True)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - starts[-1], weight.shape[2])])


def _scaled_mm(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """The product of what the bytes stand for, which has no derivative; scales are of all, or of rows and columns."""
    product = (x.double() @ weight.double()) * scale_x * scale_weight
    return (product if bias is None else product + bias).detach()


# What torch computes in narrower dtypes only.
NARROW: dict[Any, Callable[..., Tensor]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._scaled_mm.default: _scaled_mm,
}


class _InFloat64(TorchFunctionMode):
    """Within this mode those operators compute in float64, wherever they are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = func in NARROW and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
        return (NARROW[func] if wide else func)(*args, **(kwargs or {}))


@contextmanager
def promoted(*graphs: fx.Graph) -> Iterator[None]:
    """Within this context the graphs compute in float64: every floating dtype among their literals is float64."""
    nodes = [n for g in graphs for n in g.nodes]
    narrow = {str(target) for target in NARROW}
    operators = {x for n in nodes for x in (n.target, *n.args) if callable(x) or isinstance(x, str)}
    saved = [(n, n.args, n.kwargs) for n in nodes if _has_dtype(n.args) or _has_dtype(n.kwargs)]
    default = torch.get_default_dtype()
    for node, args, kwargs in saved:
        node.args, node.kwargs = compat.tree_map(_wide, args), compat.tree_map(_wide, kwargs)
    torch.set_default_dtype(torch.float64)
    try:
        with nullcontext() if narrow.isdisjoint(map(str, operators)) else _InFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for node, args, kwargs in saved:
            node.args, node.kwargs = args, kwargs
