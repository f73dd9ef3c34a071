"""`ShardedModule.replan`: another plan for a module over the same ranks, in place; its parameters stay the objects
that they were, so that an optimizer goes on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp import compat
from autotp.capture.copies import copied
from autotp.comm.ranks import together
from autotp.comm.turn import within
from autotp.errors import InputError, StateError
from autotp.plans.estimates import Axes
from autotp.plans.pieces import BUCKET
from autotp.runtime import data_parallel, optimizer_steps, state
from autotp.runtime.checkpoint.loading import memory_of
from autotp.runtime.checkpoint.optimizers import updated_by
from autotp.runtime.part import whole_class
from autotp.runtime.storage import ShardState, memory_like
from autotp.text import counts

from .move import Sides, carry

SHAPE = attrgetter("shape")
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_is_full_backward_hook",
)  # fmt: skip


def replan(
    module: Any, tp: int, *, dp: int = 1, fully_shard: bool = False, optimizer: Optimizer | None = None,
    bucket: int = BUCKET,
) -> None:  # fmt: skip
    """Shard by a plan for other degrees from here on, over the same ranks: weights are moved, and nothing is gathered.

    Parameters stay the objects that they are, so that an optimizer made before goes on; only where other degrees hold
    one in other pieces (uneven heads) there are new ones, which the optimizer is given. Gradients are dropped. Hooks,
    modes and which parameters are trained are kept; programs are made anew.

    Args:
        tp, dp, fully_shard: the new degrees, of as many ranks; see `autotp.compile`.
        optimizer: over this module's parameters, whose states are moved too.
        bucket: bytes of messages that a rank holds at once, beside the old parts and the new ones.

    Raises:
        InputError: the degrees make up another number of ranks. StateError: the module is one that cannot be planned
            anew: stages, cp, virtual ranks, no ranks; or this is within a call.
        RankError: that is so on another rank, or one has ended; then the module is what it was.
    """
    shards: ShardState = module._shards
    with module._calls.turn("replan()"):
        ranks = shards.planners
        together(ranks, "reading the degrees", lambda: _check(module, tp, dp, optimizer))
        facts = {"tp": tp, "dp": f"{dp}, fully_shard={fully_shard}", "optimizer": optimizer is not None}
        module._calls.agree("replan()", {**facts, "bucket": bucket})
        data_parallel.refuse_unsummed(shards, "replan()")
        shards.show_own()
        original = _original(shards)
        axes = Axes(dp=dp, fully_shard=fully_shard and dp > 1, ep=dp if module.plan.batch.ep > 1 else 1)
        parts = module._source.again(original, module._source.origin, tp, axes)
        old = _Old(module)
        try:
            kind = old.kind
            module.__dict__.clear()
            module.__class__ = whole_class(original, kind)
            kind.__init__(module, *parts)
            _fill(module, old, ranks, optimizer, bucket)
        except BaseException:
            old.restore()
            raise


def _check(module: Any, tp: int, dp: int, optimizer: Optimizer | None) -> None:
    shards: ShardState = module._shards
    if within():
        raise StateError("replan() within a call of a sharded module, as of a hook. Replan between two calls.")
    special = shards.staged or shards.host is not None or shards.axis.cp > 1
    if shards.ranks.mesh is None or special or module._source.again is None or module._source.origin is None:
        raise StateError(
            "replan() is for modules over ranks of tp and dp, made with example inputs: without stages, cp and virtual "
            "ranks. autotp.move() moves between two modules of any kind."
        )
    have = shards.planners.tp
    if not counts(tp) or not counts(dp) or tp * dp != have:
        raise InputError(f"tp={tp} x dp={dp} are not the {have} ranks that the module is sharded over.")
    if optimizer is not None:
        ids = {id(p) for _, p, _ in shards.pieces()}
        if any(id(p) not in ids for p in updated_by(optimizer)):
            raise StateError("the optimizer updates tensors that are not this module's parameters.")


def _original(shards: ShardState) -> nn.Module:
    """Return the model on the meta device, with the buffers that this rank has whole."""
    names = {id(t): n for n, t in shards.bare.named_buffers(remove_duplicate=False)}
    buffers = dict(shards.root.named_buffers(remove_duplicate=False))

    def empty(tensor: Tensor) -> Tensor:
        first = shards.aliases.get(names.get(id(tensor), ""), "")
        if first in buffers and first not in shards.tables:
            return buffers[first]
        return memory_like(tensor, torch.device("meta"))

    with torch.no_grad():
        return copied(shards.bare, empty)


class _Old:
    """A module before a replan: its parts, under a root of their own.

    Attributes:
        kind: its class among ours. shards: of the parts.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.cls, self.attributes = module, type(module), dict(module.__dict__)
        classes = (c for c in self.cls.__mro__ if c.__module__.startswith("autotp."))
        self.kind = next(c for c in classes if "__call__" in vars(c))
        root = object.__new__(self.cls)
        root.__dict__.update(self.attributes)
        shards: ShardState = module._shards
        paths = [path for path, part in shards.parts.items() if part is module]
        self.shards = replace(shards, parts=dict(shards.parts) | dict.fromkeys(paths, root))
        self.state = compat.forget_state(module)
        compat.remember_state(root, self.state)
        self.spread = data_parallel.forget(module)

    def restore(self) -> None:
        """Restore the module."""
        self.module.__class__ = self.cls
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        compat.forget_state(self.module)
        compat.remember_state(self.module, self.state)
        data_parallel.forget(self.module)
        if self.spread:
            data_parallel.remember(self.module)


Pieces = dict[str, list[Any]]  # first name of a parameter -> the tensors that hold it


def _fill(module: Any, old: _Old, ranks: Any, optimizer: Optimizer | None, bucket: int) -> None:
    """Move weights and states into the new parts, and put the old parameters in the new ones' places."""
    shards: ShardState = module._shards
    replacements: dict[Any, Tensor] = {}
    for name in shards.storages:
        memory_of(shards, state.pieces(shards, name), replacements)
    state.install(shards, replacements)
    before, after = _pieces(old.shards), _pieces(shards)
    twin = _twin(optimizer, before, after) if optimizer is not None else None
    source: Any = SimpleNamespace(_shards=old.shards)
    carry(ranks, Sides(source, module, ("weights", "optimizer"), (optimizer, twin), {}), bucket)
    # From here on nothing waits for another rank: all has come, and the old parts are let go of.
    stand = _identities(before, after)
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter in stand:
                part._parameters[leaf] = stand[parameter]
    if optimizer is not None and twin is not None:
        optimizer.state.clear()
        optimizer.state.update({stand[p]: states for p, states in twin.state.items()})
        for group, new_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group["params"][:] = [stand[p] for p in new_group["params"]]
    _keep_hooks(old.shards, shards)
    optimizer_steps.unwatch(old.shards.counter)
    module._calls.settle()


def _pieces(shards: ShardState) -> Pieces:
    return {name: state.pieces(shards, name) for name in shards.storages}


def _identities(before: Pieces, after: Pieces) -> dict[Any, Any]:
    """Return new parameter -> the old one, which holds its values from here on; itself where the pieces differ."""
    stand = {}
    for name, pieces in after.items():
        olds = before[name]
        same = list(map(SHAPE, olds)) == list(map(SHAPE, pieces))
        for new, was in zip(pieces, olds if same else pieces, strict=True):
            new.requires_grad_(olds[0].requires_grad)
            stand[new] = was
            if was is not new:
                was.grad = None
                compat.lie_as(was, new)
    return stand


def _twin(optimizer: Optimizer, before: Pieces, after: Pieces) -> Any:
    """Return an optimizer of the same class and groups over the new parameters, without states."""
    names = {p: name for name, pieces in before.items() for p in pieces}
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        firsts = dict.fromkeys(names[p] for p in group["params"])
        twin.param_groups.append({**group, "params": [*chain.from_iterable(after[name] for name in firsts)]})
    return twin


def _keep_hooks(before: ShardState, after: ShardState) -> None:
    """Give the new parts the modes of the old ones and the user's hooks; those of torch's data parallelism are new."""
    for path, part in after.parts.items():
        was = before.parts[path]
        part.training = was.training
        hooks = [*was._forward_hooks.items(), *was._forward_pre_hooks.items()]
        torchs = {key for key, hook in hooks if compat.of_sharding(hook)}
        for table in HOOKS:
            value, new = vars(was)[table], vars(part)[table]
            if isinstance(value, dict):  # the very one: handles that remove hooks know it
                users = {key: hook for key, hook in value.items() if key not in torchs}
                value.clear()
                value.update({**new, **users})
            part.__dict__[table] = value
