"""The model's own inputs, dealt to the stages: each takes those that it reads, in every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.errors import InputError
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.op import expression
from autotp.ir.sizes import substitute
from autotp.passes.stages.cut import Wire
from autotp.runtime.programs import Form, form


@dataclass(frozen=True)
class Feed:
    """Map from a call of the whole model to inputs of its stages.

    Attributes:
        bare: the model's skeleton. capture: its program.
    """

    bare: nn.Module
    capture: Capture

    @cached_property
    def names(self) -> list[str]:
        """The names of the tensors among the program's inputs, in its order."""
        return [x.node.name for x in self.capture.inputs if isinstance(x.node.meta.get("val"), Tensor)]

    @cached_property
    def _form(self) -> Form:
        values = [x.node.meta.get("val") for x in self.capture.inputs]
        return form(self.bare, values, self.capture.in_spec)[0]

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        """The tensors of a call by the program's names.

        Raises:
            InputError: the model was captured for another kind of call.
        """
        flat, spec = compat.tree_flatten((inputs.args, dict(inputs.kwargs)))
        call_form = form(self.bare, flat, spec)[0]
        if call_form.key != self._form.key:
            raise InputError(
                "this call has other arguments than the example inputs: stages run the one program that they were cut "
                f"from. The program takes {', '.join(self.names)}."
            )
        order = [flat[i] for i in call_form.order]
        place = dict(zip(self._form.order, order, strict=True))
        tensors = [i for i, x in enumerate(self.capture.inputs) if isinstance(x.node.meta.get("val"), Tensor)]
        return {name: place[i] for name, i in zip(self.names, tensors, strict=True)}

    def sizes(self, tensors: Mapping[str, Tensor]) -> dict[Any, int]:
        """The program's size symbols for these tensors."""
        return {s: tensors[node.name].shape[dim] for s, (node, dim) in self.capture.symbols.items()}


def split_of(tensors: Mapping[str, Tensor], microbatches: int) -> dict[str, tuple[int, ...]]:
    """The shape of each input in one micro-batch.

    Raises:
        InputError: an input has another first dimension than the others, or micro-batches do not divide it.
    """
    rows = {name: next(iter(t.shape), None) for name, t in tensors.items()}
    if None in rows.values() or len(set(rows.values())) > 1:
        raise InputError(
            f"micro-batches are slices of the first dimension of every input, and these have {rows}. Give each input "
            "the batch as its first dimension."
        )
    size = next((n for n in rows.values() if n is not None), microbatches)
    if size % microbatches:
        raise InputError(
            f"{microbatches} micro-batches do not divide a batch of {size}: take one of "
            f"{[n for n in range(1, size + 1) if size % n == 0]}, or another batch."
        )
    return {name: (size // microbatches, *t.shape[1:]) for name, t in tensors.items()}


def local_example(wire: Wire, sizes: Mapping[Any, int], rank: int, tp: int) -> Tensor:
    """Example of what a tp rank sends over a wire in one micro-batch: a tensor on the meta device.

    Args:
        sizes: of the program's symbols. rank, tp: this rank and how many there are.
    """

    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(substitute(size, sizes))

    whole = torch.empty([number(expression(n)) for n in wire.value.shape], dtype=wire.value.dtype, device="meta")
    layout: Layout = wire.layout
    if layout.mark == "S":
        spec: Any = layout.to_runtime(number)
        whole = spec.take(whole, rank, tp)
    return torch.empty(whole.shape, dtype=whole.dtype, device="meta", requires_grad=wire.graded)
