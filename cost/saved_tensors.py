"""Tensors that autograd saves of an operator for its backward: asked of torch on the meta device, call by call.

The operator runs on meta tensors of the example inputs' sizes, and `saved_tensors_hooks` hears what it keeps. So a
linear keeps its input and weight, a softmax its result, a view nothing, a norm its statistics, without a table. Two
operators are told what the kernels of an accelerator keep, which the meta device does not run: dropout one byte an
element (its mask), and attention q, k, v, its result and a statistic a row (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autotp.comm.conversions import FUNCTIONS
from autotp.ir.graph import Alike, Value, draws, on_meta, resolve, tensor_at, tensors
from autotp.ir.marks import Saved, mark, write
from autotp.ir.op import Op, Ops, gives_views, operator_name, several

from .compute import example, size_hint, tensor_bytes

STATISTIC = 4  # bytes: the logarithm of a softmax's sum, fp32


Extra = tuple[float, int | None]


def _ask(op: Op, grads: set[fx.Node]) -> Saved:
    if not tensors(op.node) or op.target in FUNCTIONS.values():
        return Saved()  # a conversion keeps nothing
    if op.node not in grads:
        return Saved(views=((0, 0),) if op.slots and gives_views(op.target) else ())
    kernel = KERNELS.get(operator_name(op.target))
    answer = kernel(op, grads) if kernel is not None else None
    if answer is not None:
        return answer
    try:
        return _run(op, grads)
    except Exception:  # an operator that the meta device does not run: all that a backward could need
        every = frozenset(i for i, s in enumerate(op.slots) if s.meta["val"].is_floating_point())
        return Saved(every, frozenset(range(len(tensors(op.node)))))


def _run(op: Op, grads: set[fx.Node]) -> Saved:
    """The tensors that torch saves when it runs the operator on meta tensors."""
    examples: dict[fx.Node, Any] = {n: example(n.meta.get("val"), n in grads) for n in op.node.all_input_nodes}
    saved = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), examples.__getitem__)  # type: ignore[arg-type]
    args, kwargs = fx.node.map_aggregate((args, kwargs), on_meta)  # type: ignore[misc,assignment]
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        out = op.target(*args, **kwargs)
    results = [x for x in several(out) if isinstance(x, Tensor)]
    # Memory tells which tensor it is: autograd saves aliases, never the objects that went in. Of x * x the first slot
    # answers, so the later ones are entered before it. A result in an operand's memory is a view.
    slots = {_memory(examples[s]): i for i, s in reversed(list(enumerate(op.slots)))}
    outs = {_memory(x): i for i, x in reversed(list(enumerate(results))) if _memory(x) not in slots}
    others = {_memory(x): x for x in saved if _memory(x) not in {**slots, **outs}}.values()
    return Saved(
        frozenset(slots[_memory(x)] for x in saved if _memory(x) in slots),
        frozenset(outs[_memory(x)] for x in saved if _memory(x) in outs),
        tuple((float(x.untyped_storage().nbytes()), _alike(x, op, examples, results)) for x in others),
        tuple((i, slots[_memory(x)]) for i, x in enumerate(results) if _memory(x) in slots),
    )


def _alike(x: Tensor, op: Op, examples: Mapping[fx.Node, Any], results: list[Tensor]) -> int | None:
    """Position of the first value with as many elements, which this one is sharded with; None where there is none.

    A guess by size: a contiguous copy of an operand has its size, a mask that of the result. Of two operands of one
    size the first one answers, also for a copy of the second, which may be sharded otherwise: then the bytes are wrong.
    """
    counts = [y.numel() for y in (*map(examples.__getitem__, op.slots), *results)]
    return counts.index(x.numel()) if x.numel() in counts else None


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _dropout(op: Op, grads: set[fx.Node]) -> Saved | None:
    """A mask of one byte an element, as the fused kernel keeps it."""
    return Saved(extra=((_count(tensors(op.node)[0].shape), 0),)) if draws(op.node) else None


def _attention(op: Op, grads: set[fx.Node]) -> Saved | None:
    """Query, key, value, result and a statistic a row; a mask that carries a gradient leaves the fused kernels."""
    mask = op.slot("attn_mask")
    if mask is not None and op.slots[mask] in grads:
        return None
    slots = {0, 1, 2}
    query = op.slots[0].meta["val"]
    extra: list[Extra] = [(STATISTIC * _count(tensors(op.node)[0].shape[:-1]), None)]
    if mask is not None and op.slots[mask].meta["val"].dtype == torch.bool:  # made anew as addends in every call
        extra.append((query.element_size() * _count(op.slots[mask].meta["val"].shape), mask))
    elif mask is not None:
        slots.add(mask)
    return Saved(frozenset(slots), frozenset({0}), tuple(extra))


def _dealt_attention(op: Op, grads: set[fx.Node]) -> Saved | None:
    """Return what attention keeps, and results of its runs beside the whole one."""
    saved = _attention(op, grads)
    runs: Extra = float(tensor_bytes(tensors(op.node)[0])), len(op.slots)
    return saved and replace(saved, extra=(*saved.extra, runs))


def _count(shape: Iterable[Any]) -> float:
    return float(math.prod(size_hint(n) for n in shape))


KERNELS: dict[str, Callable[[Op, set[fx.Node]], Saved | None]] = {
    "aten.dropout": _dropout,
    "aten.scaled_dot_product_attention": _attention,
    "dealt_attention": _dealt_attention,
}


SavedPart = tuple[float | Tensor, int | None]  # a value or bytes, whole; the position that it is sharded with


@dataclass
class Keepers:
    """Table of the operators that answer for what is kept: of those that keep the same memory, the first in the graph.

    Attributes:
        ops: the calls, in the order of the graph; `same`: the equal call of the first repeated block.
        grads: nodes whose values carry gradients.
    """

    ops: Ops
    same: Alike
    grads: set[fx.Node]

    def saved(self, node: fx.Node) -> Saved:
        """The tensors that a call saves for the backward, and results that are views; sizes are the example inputs'.

        Shapes are whole: what is kept does not depend on how a call is split, only how much of it.
        """
        op = self.ops[self.same[node]]
        saved = mark(op.node).saved
        if saved is None:
            write(op.node, saved=(saved := _ask(op, self.grads)))
        return saved

    def of(self, node: fx.Node) -> list[SavedPart]:
        """The values and bytes that count as saved by this call.

        Args:
            node: a call of `ops`.
        """
        saved, op = self.saved(node), self.ops[node]
        first = {}
        for slot in sorted(saved.slots):
            base = self._base(resolve(op.slots[slot]))
            if base[0] in self.ops and self._first(base) is node:
                first.setdefault(base, (tensor_at(base), slot))
        for i in saved.results:
            if self._first((node, i)) is node:
                first[node, i] = tensors(node)[i], len(op.slots) + i
        return [*first.values(), *saved.extra]

    def _base(self, value: Value) -> Value:
        """The value that this one is a view of, or the value itself."""
        node, index = value
        while node in self.ops and (slot := dict(self.saved(node).views).get(index)) is not None:
            node, index = resolve(self.ops[node].slots[slot])
        return node, index

    def _first(self, value: Value) -> fx.Node | None:
        """The first call that keeps this memory: its maker, or a reader of the value or of a view of it."""
        node, index = value
        if index in self.saved(node).results:
            return node
        keeping, work = set(), [value]
        while work:
            at = work.pop()
            for reader, slot in self._readers(at):
                saved = self.saved(reader)
                if slot in saved.slots:
                    keeping.add(reader)
                work += [(reader, i) for i, s in saved.views if s == slot]
        return min(keeping, default=None)

    def _readers(self, value: Value) -> list[tuple[fx.Node, int]]:
        node, index = value
        items = [n for n in node.users if n not in self.ops and resolve(n) == value]
        users = dict.fromkeys([*node.users, *(user for item in items for user in item.users)])
        return [(u, i) for u in users if u in self.ops for i, s in enumerate(self.ops[u].slots) if resolve(s) == value]
