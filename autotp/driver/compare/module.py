"""`compare=`: a sharded module whose call and backward are compared with the original's, on the user's real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.comm.ranks import agree, broadcast
from autotp.errors import InputError
from autotp.log import log
from autotp.plans.plan import Plan
from autotp.runtime import state
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.module import ShardedModule
from autotp.runtime.programs import Source

from .runs import Call
from .trial import Trial


class ComparedModule(ShardedModule):
    """A `ShardedModule` whose first call, or every one, is compared with the original, and so is its backward.

    Attributes:
        compared: what was found equal so far, a line for each forward and backward.
    """

    how: ClassVar[str]
    compared: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, plan: Plan, source: Source) -> None:
        if plan.batch.size > 1 or source.want.outputs == "sharded":
            raise InputError(
                "compare= runs the whole original on every rank: it takes tp alone and outputs='full' or 'loss'. Leave "
                "out dp and outputs, or compare."
            )
        super().__init__(model, plan, source)
        self.__dict__["_compared_with"] = model  # beside this module, not a part of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the sharded module's; then the original's, and a CompareError where they differ (collective)."""
        if self.how == "first" and self.compared:
            return super().forward(*args, **kwargs)
        arguments = Arguments(self._carriers, args, kwargs)
        if arguments.state_objects or kwargs.get("use_cache"):
            raise InputError("compare= compares calls without a cache. Leave out the cache and use_cache, or compare.")
        call = _before(self, args, kwargs)
        with _listening(self) as call.part_values:
            outputs = super().forward(*args, **kwargs)
        match = self._match(arguments)
        assert match is not None  # it has just run
        original: Any = self._compared_with
        trial = Trial(self._shards, self._source, self._order, *match, original, call, self._note)
        with call.undisturbed():
            self._note(trial.forward(compat.tree_leaves(outputs)))
        if not torch.is_grad_enabled():
            return outputs
        leaves, spec = compat.tree_flatten(outputs)
        # Where an output is read within the model too, its own gradient is that of both: the user gets another name.
        for i, x in enumerate(leaves):
            leaves[i] = x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x
        trial.await_backward(leaves)
        return compat.tree_unflatten(leaves, spec)

    def _note(self, text: str) -> None:
        self.compared = (*self.compared, text)
        log.info("%s", text)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._compared_with)] = self._compared_with
        return super().__deepcopy__(memo)


class First(ComparedModule):
    """Compares the first call."""

    how = "first"


class Every(ComparedModule):
    """Compares every call."""

    how = "every"


KINDS: dict[Any, type[ShardedModule]] = {None: ShardedModule, "first": First, "every": Every}


def kind_of(compare: Any) -> type[ShardedModule]:
    """The class of module that the `compare=` of a public function asks for.

    Raises:
        InputError: it is not known.
    """
    if not isinstance(compare, str | None) or compare not in KINDS:
        raise InputError(f"compare={compare!r} is not known; choose None, 'first' or 'every'.")
    return KINDS[compare]


def _before(module: ShardedModule, args: Any, kwargs: Any) -> Call:
    """What the call starts from, alike on every rank."""
    shards = module._shards
    flat, spec = compat.tree_flatten((args, kwargs))
    if shards.ranks is not None or module._source.tp == 1:
        facts = state.input_text(flat, spec, True)
        agree(shards.ranks, "the inputs of this call, with which compare= runs the original", facts)
    call = Call(flat, spec, {name: getattr(*holder[0]) for name, holder in shards.holders.items()}, shards.device)
    call.random = broadcast(shards.ranks, call.random)  # as the call's own are rank 0's
    return call


@contextmanager
def _listening(module: ShardedModule) -> Iterator[list[tuple[str, list[Tensor]]]]:
    """What each part gives in a call, after the user's own hooks, in order; not where a hook would keep it from being
    compiled."""
    values: list[tuple[str, list[Tensor]]] = []
    parts = {id(part): (path, part) for path, part in reversed(module._shards.parts.items()) if path}
    if module._source.lowering.name != "eager":
        parts = {}

    def hear(part: nn.Module, args: Any, outputs: Any) -> None:
        leaves = [t.detach() for t in compat.tree_leaves(outputs) if isinstance(t, Tensor)]
        values.append((parts[id(part)][0], leaves))

    handles = [part.register_forward_hook(hear) for _, part in parts.values()]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()
