"""A rank's program as that of all virtual ranks of one process (`autotp.comm.virtual`).

Nodes, modules and what flows between them stay as they are: a value that virtual ranks have each for itself flows as a
`Virtual`, and every call runs for all of them. So each virtual rank starts the kernels of a rank by itself, on the same
shapes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autotp.comm.conversions import FUNCTIONS, on_hosts
from autotp.comm.virtual import Host, Virtual, at_rank, each, values_of
from autotp.ir.graph import draws, short_name
from autotp.ir.marks import mark
from autotp.ir.specs import INVARIANT, Spec

from . import eager

PLACE = ("rank", "tp", "group")


def host_program(graph: fx.Graph, host: Host) -> None:
    """Let every call of a rank's program, which is changed in place, run for all virtual ranks of a process."""
    conversions = set(FUNCTIONS.values())
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        ranked, name = mark(node).axis == "tp", short_name(node.target)
        call = _conversion(host) if node.target in conversions else _operator(node, host, ranked)
        call.__name__ = call.__qualname__ = name
        node.target = call
        if ranked:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in PLACE}


def _operator(node: fx.Node, host: Host, ranked: bool) -> Callable[..., Any]:
    call, random = eager.quick(node), draws(node)
    return lambda *args, **kwargs: each(call, args, kwargs, host, ranked, random)


def _conversion(host: Host) -> Callable[..., Any]:
    def run(x: Any, src: Spec, dst: Spec, **options: Any) -> Any:
        src, dst = at_rank((src, dst), 0)  # what of them is data is alike on all
        return convert(x, src, dst, host, **options)

    return run


def convert(x: Any, src: Spec, dst: Spec, host: Host, **options: Any) -> Any:
    """Convert what the virtual ranks of a process have.

    Args:
        x: under `src`: one tensor, or a `Virtual`. src, dst: run-time layouts. host: the process.
        options: `wire` and `reduces` of the functions of the table.
    """
    ys = on_hosts(values_of(x, host.own), src, dst, host, **options)
    # Of what is whole, and of which no rank has a gradient of its own, one is enough.
    alike = dst.mark == INVARIANT.mark or dst.whole and not any(y.requires_grad for y in ys)
    return ys[0] if alike or host.own == 1 else Virtual(ys)
