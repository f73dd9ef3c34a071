"""Calls that differ from the one before in a few tensors alone, as the batches of an engine do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from autotp import compat
from autotp.runtime.call_message import short
from autotp.runtime.module_hooks import hooked
from autotp.runtime.program_search import kind_of

MAX_KINDS = 64


class Repetition(NamedTuple):
    """Knowledge of calls of one kind: the last one, its program, where its new tensors lie, and where its logits."""

    call: Any
    kind: Any
    program: Any
    places: Sequence[int]
    logits: int


class Repeated:
    """Forwards of one module whose sizes follow from what ranks have agreed on before them.

    The first of a kind is a call like any other. In those that follow nothing is read again but the tensors that are
    new, and nothing is compared but `words`, which the engine's turn takes along. Where these differ on a rank, or a
    rank has none, all make the next call in full, which says what differs.

    Attributes:
        agreed: whether the ranks' words were the same, and the next call is short. last: of the kind that it is of.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.agreed, self.kinds = module, False, dict[Any, Repetition]()
        self.last: Repetition | None = None

    def _now(self) -> Any:
        return self.module._mode(), self.module._changes.key()

    def words(self, tokens: Tensor) -> bytes:
        """Return what the ranks must have alike before a short call; nothing where this one makes none.

        Args:
            tokens: that the last call gave, from which all sizes follow.
        """
        module, inventory = self.module, self.module._calls.inventory
        hooks = hooked(module._forward_pre_hooks, module._forward_hooks) or any(inventory.hooked)
        self.last = last = self.kinds.get(self._now())
        if last is None or hooks or module._calls.writes():
            return b""
        return short((inventory.trained(), tokens.tolist(), last.kind.digest))

    def __call__(self, kwargs: dict[str, Any], new: Sequence[Tensor]) -> Tensor:
        """Return the logits of a forward.

        Args:
            kwargs: its arguments. new: those of their tensors that are others in each call, always in one order.
        """
        module = self.module
        with module._calls.turn():
            last = self.last
            if self.agreed and last is not None:
                call = last.call.again(dict(zip(last.places, new, strict=True)))
                match = last.kind.program(call.shapes)
                if match is not None and match[0] is last.program:
                    outputs = module._run(last.program, inputs := [call.flat[i] for i in match[1]], 0)
                    for at, taker in last.program.capture.mutations.items():
                        if outputs[at] is not inputs[taker]:  # a state that is not written in place
                            inputs[taker].copy_(outputs[at])
                    module._calls.end((), inputs)
                    return outputs[last.logits]
            return self._in_full(kwargs, new)

    def _in_full(self, kwargs: dict[str, Any], new: Sequence[Tensor]) -> Tensor:
        """Make a call as any is made, and note what is so in those that follow."""
        module, before = self.module, self.module._arguments((), kwargs, "")
        logits, call = module(**kwargs).logits, module._arguments((), kwargs, "")
        kind, flat = kind_of(module, call), [id(x) for x in call.flat]
        match = kind.program(call.shapes)
        # States that the caller's object has otherwise afterwards, and buffers that are written, take more than this.
        if match is None or type(logits) is not Tensor or module._source.check or flat != [id(x) for x in before.flat]:
            return logits
        program = match[0]
        writes, returns = program.capture.mutations, program.returns
        place = getattr(compat.tree_unflatten(returns.leaves, returns.outputs), "logits", None)
        buffers = any(isinstance(taker, str) for taker in writes.values())
        if isinstance(place, int) and not (buffers or program.seeds or program.draws) and program.flat:
            at = [i for i in range(len(writes) + len(returns.leaves)) if i not in writes][place]
            if len(self.kinds) >= MAX_KINDS:
                self.kinds.clear()
            self.kinds[self._now()] = Repetition(call, kind, program, [flat.index(id(x)) for x in new], at)
        return logits
