"""Operators of libraries that are written as others of torch's become these, which have rules.

So an affine quantisation, which torchao has as one operator, is views, sums, products and maxima, and where its groups
may be split is read off the views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autotp import compat
from autotp.ir.graph import Capture, copy_graph, differentiable, replace_results
from autotp.ir.marks import inherit, mark
from autotp.ir.op import is_tensor
from autotp.kernels.functions import apply, functions_as
from autotp.log import log
from autotp.passes.base import Changes, Pass
from autotp.rules.core import function_of


class Composites(Pass[Capture]):
    """A composite operator without a rule becomes what it is made of.

    One whose gradient is wanted stays where somebody wrote a backward for a part of it, which a trace would lose.
    """

    name = "composites"

    def idle(self, program: Capture) -> str:
        """Only where there are some."""
        return "" if _composites(program.graph) else "every operator is torch's own, or has a rule"

    def run(self, program: Capture) -> Changes:
        graded, count = _graded(program), 0
        for node in _composites(program.graph):
            try:
                body, functions = _traced(node)
            except Exception as error:  # whatever a library's operator may ask of its operands
                log.debug("%s stays: %s", node.target, error)
                continue
            if node not in graded or not functions:
                _replace(node, body)
                count += 1
        return Changes(count, "composite operators are the operators that they are made of")


def _graded(program: Capture) -> set[fx.Node]:
    """Values that carry a gradient to what is trained now: the parts of a quantised weight never are."""
    carries = differentiable(program)
    trained_nodes = {x.node for x in program.leaves if getattr(x.node.meta.get("val"), "requires_grad", False)}
    for node in program.graph.nodes:
        if node in carries and trained_nodes & set(node.all_input_nodes):
            trained_nodes.add(node)
    return trained_nodes


def _composites(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if compat.is_composite(n.target) and function_of(n.target) is None]


def _replace(node: fx.Node, body: fx.Graph) -> None:
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    env: dict[fx.Node, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), operands, strict=True))
    calls = [n for n in body.nodes if n.op == "call_function"]
    with node.graph.inserting_before(node):
        copy_graph(calls, env, node.graph)
    for each in calls:
        value, new = each.meta["val"], env[each]
        inherit(new, node, no_grad=mark(node).no_grad)
        new.meta["val"] = value
    results = fx.map_arg(body.output_node().args[0], lambda n: env[n])
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(results)  # type: ignore[arg-type]
        node.graph.erase_node(node)
    else:
        replace_results(node, results)  # type: ignore[arg-type]


def _traced(node: fx.Node) -> tuple[fx.Graph, list[Any]]:
    """Trace what the operator is made of, as a graph of its tensors, and the functions with a backward of their own
    in it."""
    target: Any = node.target
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    functions: list[Any] = []

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(function)
        return apply(function, *args, **kwargs)

    def call(*values: Tensor) -> Any:
        value_of = dict(zip(operands, values, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: value_of.get(n, n.meta["val"]))
        return target(*args, **kwargs)

    values = [n.meta["val"].detach() for n in operands]
    mode = compat.mode_of(values)
    with mode, torch.no_grad(), functions_as(note):
        return make_fx(call)(*values).graph, functions
