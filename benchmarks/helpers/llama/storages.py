"""Which memory the operators of a call read that was there before it: weights and caches, each storage once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.compat import tree_leaves
from autotp.plans.plan import Plan

PLAIN = (Tensor, nn.Parameter)  # others hold tensors and have no memory of their own


SLACK = 0.01  # of what a plan says: inputs, positions, tables of rotary frequencies


def planned_bytes(plan: Plan, tokens: float = 1.0) -> float:
    """Bytes of the weights and the cache of the fullest rank, by the plan.

    Args:
        plan: for decoding. tokens: positions of the cache over those that the plan was made for.
    """
    return plan.memory.parameters + plan.memory.cache * tokens


def as_planned(read: float, planned: float) -> bool:
    """Whether a step reads what its plan says that a rank has, each byte of it and nothing else of that size."""
    return abs(read - planned) <= SLACK * planned


class Storages(TorchDispatchMode):
    """Within this context: the storages that reach operators, but those that operators made within it.

    Attributes:
        read: address -> bytes of each. Storages made within the context live until its end, so that addresses differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, int] = {}
        self._made: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(self.read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in PLAIN for t in types):
            return NotImplemented  # it calls operators on the plain tensors in it, and these come here
        out = func(*args, **(kwargs or {}))
        for x in _plain([args, kwargs or {}]):
            storage = x.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.read[storage.data_ptr()] = storage.nbytes()
        for x in _plain([out]):
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.read:
                self._made[storage.data_ptr()] = storage
        return out


def _plain(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if type(x) in PLAIN and x.device.type != "meta"]
