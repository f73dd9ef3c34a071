"""A program as one function without calls of modules; compiled, it has what equal blocks compute once.

For a step of decoding, whose arithmetic is so short that what surrounds it counts: calls of modules, the lookup among
what was compiled, the sizes that it is given, Python between one block and the next. `tree.py` runs it by modules,
`regional.py` compiles by parts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm.conversions import KEEPS
from autotp.ir.graph import Env, Nodes, copy_node
from autotp.ir.scopes import block_of, module_of
from autotp.log import log
from autotp.runtime.generation.in_place import METHODS, WRITES, worded

from . import eager
from .regional import Compiler, Function, Watch, flow, function_of, pure, renumbered, structure

Fetch = tuple[list[fx.Node], Callable[[], Sequence[Tensor]]]
WRITTEN = frozenset(WRITES.values())
NOTHING = type(None)
TRAINED = attrgetter("requires_grad")


def single(graph: fx.Graph, scope: Any, inputs: Nodes, fetches: Sequence[Fetch], compiler: Compiler | None) -> Function:
    """A whole program as one function of its inputs; it gives None where a module is to read its own weights.

    Args:
        graph: of one rank. scope: the calls that it is made of (`tree.Scope`). inputs: what it is called with.
        fetches: what it reads of the module, and what reads that. compiler: knows the backend; None where it runs as
            it is.
    """
    # Weights come as arguments, for a user may change them between calls; each is read as its module would read it.
    takes = [*inputs, *(node for nodes, _ in fetches for node in nodes)]
    whole = fx.Graph()
    env = {node: whole.placeholder(node.name) for node in takes}
    if compiler is None:
        _write_operators(whole, graph, env)
    else:
        _write_blocks(whole, list(_parts(scope)), env)
    whole.output(compat.tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, graph.output_node().args[0]))
    function = worded(function_of(whole, "program")) if compiler is None else compiler.whole(whole)
    reads = [read for _, read in fetches]

    def run(*arguments: Tensor) -> Any:
        values: list[Any] = [*arguments]
        for read in reads:
            values += read()
        return None if NOTHING in map(type, values) else function(*values)

    return run


def _write_operators(whole: fx.Graph, graph: fx.Graph, env: Env) -> None:
    """The program's operators, as Python calls them at least cost where there are no gradients."""
    for node in graph.nodes:
        if node.target in KEEPS:
            env[node] = env[node.args[0]]
        elif node.op not in ("placeholder", "output"):
            env[node] = copy_node(node, whole, env.__getitem__)
            if (summed := eager.summed(node)) is not None:
                env[node].target, env[node].args, env[node].kwargs = summed, env[node].args[:1], {}
            else:
                env[node].target = METHODS.get(node.target) or eager.quick(node)


def _write_blocks(whole: fx.Graph, parts: Sequence[Any], env: Env) -> None:
    """The program's operators, and calls of what equal blocks share."""
    # A block that occurs once gains nothing by a function of its own, and inlined it is fused with what is around it.
    blocks = {id(part): _block(part.nodes()) for part in parts if not isinstance(part, fx.Node)}
    counts = Counter(key for key, *_ in blocks.values())
    shared: dict[Any, Function] = {}
    for part in parts:
        key, operands, gives = blocks.get(id(part), (None, [], []))
        if counts[key] < 2:
            for node in [part] if isinstance(part, fx.Node) else part.nodes():
                env[node] = copy_node(node, whole, env.__getitem__)
            continue
        if key not in shared:
            function = function_of(pure(part.nodes(), operands, gives), part.path)
            shared[key] = compat.compiled_once(function, __name__, "block")
        value = whole.call_function(shared[key], tuple(env[n] for n in operands))
        env.update((node, whole.call_function(operator.getitem, (value, i))) for i, node in enumerate(gives))
        # A state that the block writes to in place is read afterwards as the same tensor, not as a result.
        env.update((node, env[node.args[0]]) for node in part.nodes() if node.target in WRITTEN)  # type: ignore[index]


def _parts(scope: Any) -> Iterator[Any]:
    """Operators and repeated blocks, in order."""
    for item in scope.items:
        if isinstance(item, fx.Node) or block_of(path := module_of(item.path)) == path != "":
            yield item
        else:
            yield from _parts(item)


def _block(nodes: Nodes) -> tuple[Any, list[fx.Node], list[fx.Node]]:
    """Return what equal blocks share, and what one takes and gives but for states that it writes to."""
    inside = dict.fromkeys(nodes)
    takes = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    read = [n for n in nodes if not n.users.keys() <= inside.keys()]  # outside of it
    gives = [n for n in read if n.target not in WRITTEN]
    return (renumbered([flow(n) for n in takes]), structure(pure(nodes, takes, gives))), takes, gives


def unless_touched(whole: Function, watch: Watch, by_parts: Function) -> Function:
    """A program that runs as one function without gradients, and else by parts.

    By parts it runs too where a module in it, or every module, is hooked or wrapped, and from then on where torch
    cannot compile it as one; both are the same operators and collectives in the same order.

    Args:
        whole: the one function. watch: over all modules of the program. by_parts: the same with a function for each.
    """
    compiles = [True]

    def run(*inputs: Tensor) -> Any:
        graded = torch.is_grad_enabled() or any(map(TRAINED, inputs))
        if graded or not compiles[0] or not watch.untouched() or compat.hooks_all_modules():
            return by_parts(*inputs)
        try:
            with compat.below_autograd():  # above it torch's wait for a collective is a Python function, at every one
                outputs = whole(*inputs)
            if outputs is not None:
                return outputs
        except compat.CannotCompile as error:
            log.warning("the program is compiled by parts, since torch cannot compile it as one: %s", error)
            compiles[0] = False
        return by_parts(*inputs)

    return run
