"""Run a per-rank program for all ranks in one process, in lockstep: no launcher, no devices, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from . import conversions
from .rewrite import Sharded

Ranks = list[Any]  # one value per rank
Observer = Callable[[fx.Node, Ranks], None]


def run(sharded: Sharded, tp: int, inputs: Mapping[fx.Node, Ranks], observe: Observer | None = None) -> list[Any]:
    """Execute the program on `tp` simulated ranks.

    Args:
        sharded: the program, before the rank is known.
        tp: number of ranks.
        inputs: for every placeholder the value on each rank.
        observe: called with every node and its value on each rank, as they are made.

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
            return [_at(node.args[0], env, r) for r in range(tp)]
        else:
            try:
                env[node] = _step(node, env, tp)
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


def _step(node: fx.Node, env: dict[fx.Node, Ranks], tp: int) -> Ranks:
    target: Any = node.target
    if "conversion" in node.meta and target is conversions.function_for(node.args[1], node.args[2]):  # type: ignore[arg-type]
        src, dst = (_at(spec, env, 0) for spec in node.args[1:3])
        return conversions.simulate(env[node.args[0]], src, dst)  # type: ignore[index]
    results = []
    for r in range(tp):
        kwargs = {**_at(node.kwargs, env, r), **({"rank": r, "tp": tp} if node.meta.get("ranked") else {})}
        results.append(target(*_at(node.args, env, r), **kwargs))
    return results


def _at(args: Any, env: dict[fx.Node, Ranks], rank: int) -> Any:
    if isinstance(args, fx.Node):
        return env[args][rank]
    if isinstance(args, tuple | list):
        return type(args)(_at(a, env, rank) for a in args)
    if isinstance(args, dict):
        return {k: _at(v, env, rank) for k, v in args.items()}
    return args


def reference(graph: fx.Graph, inputs: Mapping[fx.Node, Any], observe: Callable[[fx.Node, Any], None]) -> Any:
    """Run the captured graph itself, showing every value as it is made; returns its outputs."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "placeholder":
            env[node] = inputs[node]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        observe(node, env[node])
    return None
