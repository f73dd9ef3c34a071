"""An optimizer's first step, rehearsed: on small tensors that lie as the parameters do, beside the same tensors whole.

What an optimizer computes of a parameter it computes of a rank's part, unless DTensor knows better; and whether it does
is a matter of each operator that the optimizer uses. So before the first step a copy of the optimizer takes steps on
stand-ins of a few elements. Where these end elsewhere than on whole tensors, or fail, the step is refused and nothing
has been changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotp.comm.ranks import Ranks
from autotp.errors import StateError
from autotp.runtime.shard_state import ShardState
from autotp.runtime.storage import Storage

from . import foreign
from .copied_optimizer import can_copy, copied

STEPS = 2  # the second one meets the state that the first one made
RATE = 0.1  # of learning in a rehearsal: the model's own may be so small that rounding hides the rest, or 0
CLOSE = 0.1  # largest difference as a part of the largest change: rounding in bfloat16 stays far below
REST = 5  # elements of a dimension that is not split
RIGHT = "Adam, AdamW, SGD, Adagrad, Adafactor, RMSprop, Adadelta, NAdam, RAdam, Adamax, ASGD and Rprop of torch.optim"

_states_by_id: weakref.WeakValueDictionary[int, ShardState] = weakref.WeakValueDictionary()
_rehearsals: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
_exempt: set[Any] = set()  # optimizers with options, and kinds, that need no further rehearsal
_rehearsing = False


def watch(shards: ShardState) -> None:
    """Optimizers over this module's parameters are rehearsed before their first step."""
    _states_by_id[id(shards)] = shards
    _hook()


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called before every step of every optimizer."""
    if torch.compiler.is_compiling():
        return
    sizes = id(optimizer.state), *(len(group["params"]) for group in optimizer.param_groups)  # other states when loaded
    if _rehearsing or _rehearsals.get(optimizer) == sizes:
        return
    for shards in list(_states_by_id.values()):
        if shards.ranks is not None and shards.tp > 1 and (kinds := _kinds(optimizer, shards)):
            foreign.refuse_states(optimizer, shards.ranks)
            rehearse(optimizer, kinds, shards.ranks)
            if optimizer not in _rehearsals:
                optimizer.register_state_dict_pre_hook(foreign.refuse_writers)
    _rehearsals[optimizer] = sizes


@dataclass(frozen=True)
class PieceKind:
    """Parameters that an optimizer cannot tell apart but for their sizes: a group, a type, a small way of lying."""

    group: int
    dtype: torch.dtype
    storage: Storage


Kinds = dict[PieceKind, list[tuple[str, list[Tensor]]]]  # with the names and the pieces of the parameters of a kind


def rehearse(optimizer: Optimizer, kinds: Kinds, ranks: Ranks) -> None:
    """Refuse an optimizer that steps otherwise on parameters of these kinds than on whole ones. A collective call.

    An optimizer that cannot be copied (`can_copy`) is not rehearsed.

    Args:
        optimizer: of a user, before its first step. kinds: one of each kind of parameter that it has. ranks: all tp.

    Raises:
        StateError: on every rank; it names the optimizer, a parameter, and what to use instead.
    """
    kinds = {k: v for k, v in kinds.items() if _key(optimizer, k) not in _exempt}
    if not kinds or not can_copy(optimizer):
        return
    fault = _trial(optimizer, kinds, ranks)
    everyone: list[Any] = [None] * ranks.tp
    dist.all_gather_object(everyone, fault, group=ranks.group)
    fault = next((f for f in everyone if f), None)
    if fault:
        raise StateError(
            f"{type(optimizer).__name__} does not step on this module's parameters as on the model's: {fault}. Nothing "
            f"was changed.{_slower(optimizer)} Give such parameters to another optimizer. Right are {RIGHT}; of those "
            "that look at whole matrices, as Muon does, those that compute with DTensors throughout, on parameters "
            "held in one piece."
        )
    _exempt.update(_key(optimizer, kind) for kind in kinds)


def _slower(optimizer: Optimizer) -> str:
    """An option that an optimizer has, with which it takes one parameter after the other."""
    switch = any("foreach" in x and x["foreach"] is not False for x in [*optimizer.param_groups, vars(optimizer)])
    return " Try it with foreach=False first." if switch else ""


def _key(optimizer: Optimizer, kind: PieceKind) -> Any:
    """What a rehearsal is of: the optimizer's class, the group's options but for rates, and how the parameters lie."""
    options = {k: v for k, v in optimizer.param_groups[kind.group].items() if k not in ("params", "lr", "initial_lr")}
    own = {k: v for k, v in vars(optimizer).items() if k[0] != "_" and isinstance(v, int | float | str | None)}
    return type(optimizer), repr(options), repr(own), replace(kind, group=0)


def _kinds(optimizer: Optimizer, shards: ShardState) -> Kinds:
    """The kinds of this module's parameters that the optimizer updates."""
    group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    kinds: Kinds = {}
    for name, storage in shards.storages.items():
        owner, _, leaf = name.rpartition(".")
        pieces = [p for n in storage.names(leaf) if (p := shards.parts[owner]._parameters.get(n)) is not None]
        if pieces and pieces[0] in group_of and len(pieces) == len(storage.names(leaf)):
            kind = PieceKind(group_of[pieces[0]], pieces[0].dtype, small(storage))
            kinds.setdefault(kind, []).append((name, [*pieces]))
    return kinds


def small(storage: Storage) -> Storage:
    """The same way of lying with a few elements."""
    shape = [min(n, REST) for n in storage.shape]
    layout, dim = storage.layout.small(storage.tp), storage.layout.sharded_dim
    if dim is not None and layout.distribution is not None:
        shape[dim] = int(layout.distribution.length)
    return replace(storage, shape=tuple(shape), layout=layout)


def _trial(optimizer: Optimizer, kinds: Kinds, ranks: Ranks) -> str:
    """What is wrong with the optimizer on this rank; empty where nothing is."""
    draw = torch.Generator().manual_seed(0)
    data = {kind: _data(kind, ranks, draw) for kind in kinds}
    whole, closure = None, False
    for closure in _closures(optimizer):
        with contextlib.suppress(Exception), _rehearsal(ranks.device):
            whole = _stepped(optimizer, {k: _whole(v) for k, v in data.items()}, kinds, closure)
            break
    if whole is None:
        return ""  # it cannot be rehearsed, or is wrong on the model too
    try:
        with _rehearsal(ranks.device):
            cut = _stepped(optimizer, {k: _cut(k, v, ranks) for k, v in data.items()}, kinds, closure)
    except Exception as error:
        return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    wrong = [k for k in kinds if _apart(k, data[k][0], whole[k][0], cut[k], ranks)]
    if not wrong:
        return ""
    name, parts = kinds[wrong[0]][0]
    pieces = f", which is held in {len(parts)} pieces," if len(parts) > 1 else ""
    return f"a step on {name}{pieces} comes out otherwise"


@contextlib.contextmanager
def _rehearsal(device: torch.device) -> Iterator[None]:
    """Steps within it are no user's, and random numbers are drawn after it as if it had not been."""
    global _rehearsing
    _rehearsing = True
    try:
        with torch.random.fork_rng([device] if device.type != "cpu" else []):
            yield
    finally:
        _rehearsing = False


def _data(kind: PieceKind, ranks: Ranks, draw: torch.Generator) -> list[Tensor]:
    """A parameter, and a gradient for each step."""
    return [_values(kind, ranks, draw) for _ in range(STEPS + 1)]


def _values(kind: PieceKind, ranks: Ranks, draw: torch.Generator) -> Tensor:
    """Numbers whose slices differ in size, so that a number of one slice is far from that of the whole."""
    dtype = torch.promote_types(kind.dtype, torch.float32)
    value = torch.randn(kind.storage.shape, generator=draw, dtype=torch.float64).to(dtype)
    d = kind.storage.layout.sharded_dim
    if d is not None:
        growth = torch.linspace(1, 4, value.shape[d]).view(-1, *[1] * (value.ndim - d - 1))
        value = value * growth.to(value.real.dtype if value.is_complex() else value.dtype)
    return value.to(ranks.device)


def _whole(values: list[Tensor]) -> list[list[Tensor]]:
    return [[v.clone()] for v in values]


def _cut(kind: PieceKind, values: list[Tensor], ranks: Ranks) -> list[list[Any]]:
    return [kind.storage.shard(v, ranks.mesh, ranks.rank, ranks.device) for v in values]


def _stepped(
    optimizer: Optimizer, values: dict[PieceKind, list[list[Any]]], kinds: Kinds, with_closure: bool
) -> dict[PieceKind, Any]:
    """Stand-ins after steps of a copy of the optimizer: kind -> [its pieces]."""
    stand = {kind: list(map(nn.Parameter, copies[0])) for kind, copies in values.items()}
    copied_optimizer = _over(optimizer, stand, kinds)
    step: Any = type(optimizer).step
    for i in range(STEPS):

        def closure(i: int = i) -> Tensor:
            """As a backward through a loss that the steps do not change."""
            for kind, parameters in stand.items():
                for p, g in zip(parameters, values[kind][i + 1], strict=True):
                    p.grad = g.clone()
            return torch.zeros(())

        closure()
        if with_closure:
            step(copied_optimizer, closure)
        else:
            step(copied_optimizer)
    after: dict[PieceKind, Any] = {}
    for kind, parameters in stand.items():
        after[kind] = [p.detach() for p in parameters]
    return after


def _over(optimizer: Optimizer, stand: dict[PieceKind, list[nn.Parameter]], kinds: Kinds) -> Optimizer:
    """The optimizer as it is made, with stand-ins in place of parameters; nothing that it holds is shared."""
    memo: dict[int, Any] = {}
    for kind, entries in kinds.items():
        for _, parameters in entries:
            for i, p in enumerate(parameters):
                memo[id(p)] = stand[kind][min(i, len(stand[kind]) - 1)]
    groups: list[dict[str, Any]] = []
    for i, group in enumerate(optimizer.param_groups):
        options = copy.deepcopy({k: v for k, v in group.items() if k != "params"}, {**memo})
        if "lr" in options:
            options["lr"] = torch.full_like(options["lr"], RATE) if isinstance(options["lr"], Tensor) else RATE
        groups.append({**options, "params": [p for kind, ps in stand.items() if kind.group == i for p in ps]})
    return copied(optimizer, groups, memo)


def _apart(kind: PieceKind, start: Tensor, whole: Tensor, cut: list[Any], ranks: Ranks) -> bool:
    """Whether this rank's pieces ended elsewhere than the whole tensor's did."""
    expected = kind.storage.shard(whole, ranks.mesh, ranks.rank, ranks.device)
    change = float((whole - start).abs().max())
    far = [(a.to_local() - b.to_local()).abs() for a, b in zip(cut, expected, strict=True)]
    return any(x.numel() > 0 and not float(x.max()) <= CLOSE * change for x in far)


def _closures(optimizer: Optimizer) -> list[bool]:
    """Whether `step` gets a closure: where it cannot do without, or is that of an optimizer which holds another, as SAM
    does; where it may have one, it is tried without first."""
    step: Any = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None:
        return [False]
    holds = any(isinstance(v, Optimizer) for v in vars(optimizer).values())
    return [True] if holds or closure.default is inspect.Parameter.empty else [False, True]
