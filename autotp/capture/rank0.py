"""Captures of rank 0 that other ranks take, as bytes, where all of them would capture the same."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.comm.ranks import Ranks, broadcast, from_all, together
from autotp.ir.graph import Capture, Leaf
from autotp.kernels.functions import CALL
from autotp.log import log
from autotp.passes.base import Pass, run_passes
from autotp.text import failure

from .autograd_functions import PLAIN_TYPES
from .copies import tensors_of

T = TypeVar("T")
Captured = tuple[Capture, T]  # with further results of capturing, such as notes
Make = Callable[[], Captured[T]]
RankKey = tuple[str | None, str]  # a digest of all that a rank's capture depends on, or None and the reason
WHAT = "capturing the model"
MAX_CONSTANT_NUMBERS = 4096  # of the tensors that a forward makes of literals


def capture_once(
    ranks: Ranks,
    agreed: Sequence[Pass[Capture]],
    key: Callable[[], RankKey],
    make: Make[T],
    take: Callable[[Capture, T], Captured[T]],
) -> Captured[T]:
    """Capture a model for all ranks: by rank 0, or by each rank where captures may differ. A collective call.

    Args:
        ranks: that capture. agreed: passes where every rank has captured for itself.
        key: all that a capture depends on; equal keys are equal captures.
        make: captures here; its further results pickle.
        take: makes rank 0's capture this rank's.

    Raises:
        CaptureError: as `make`; then every rank captures, and fails by itself. RankError: it fails on some.
    """
    if ranks.tp == 1:
        captured, rest = make()
        run_passes(captured, agreed)
        return captured, rest
    # Without the key a rank whose dropout or config is another's would run rank 0's program, and nothing would show it.
    mine = together(ranks, WHAT, key)
    rank_keys = from_all(ranks, mine, "what a capture depends on")
    reason = next((reason for word, reason in rank_keys if word is None), "")
    if reason or len({word for word, _ in rank_keys}) > 1:
        return _by_each_rank(ranks, agreed, make, reason or "what it depends on differs between the ranks")
    # Rank 0 captures, or gives the reason for no bytes: its error is raised by all ranks, each by its own capture.
    result, error, message = _first(make) if ranks.rank == 0 else (None, None, None)
    data, reason = broadcast(ranks, message)  # type: ignore[misc]
    if data is None:
        return _by_each_rank(ranks, agreed, lambda: _again(result, error, make), reason)
    if ranks.rank:
        result, reason = _as_own(data, ranks, take)
    # One that cannot read it makes all capture for themselves, or the ranks would take different ways from here on.
    if fault := next(filter(None, from_all(ranks, reason, WHAT)), ""):
        return _by_each_rank(ranks, agreed, lambda: _again(result, None, make), fault)
    assert result is not None
    return result


def _by_each_rank(ranks: Ranks, agreed: Sequence[Pass[Capture]], make: Make[T], reason: str) -> Captured[T]:
    """Capture on every rank, and log the reason for that."""
    log.info("every rank captures the model for itself: %s", reason)
    captured, rest = together(ranks, WHAT, make)
    run_passes(captured, agreed)
    return captured, rest


def _first(make: Make[T]) -> tuple[Any, Exception | None, Any]:
    """Capture on rank 0; return the result, its error, and the message to send: bytes, or None and the reason."""
    try:
        result = make()
    except Exception as error:  # whatever a user's forward may raise: the others then raise it too
        return None, error, (None, f"it failed on rank 0: {type(error).__name__}")
    try:
        return result, None, (pickle.dumps((pack(result[0]), result[1])), "")
    except (Unpackable, pickle.PicklingError, AttributeError, TypeError) as error:  # such as a class within a function
        return result, None, (None, str(error))


def _as_own(data: bytes, ranks: Ranks, take: Callable[..., Captured[T]]) -> tuple[Any, str]:
    """Read rank 0's capture as this rank's, or return the reason why it cannot be."""
    try:
        packed, rest = pickle.loads(data)
        captured = unpack(packed, ranks.device)
    except (Unpackable, AttributeError, ImportError, pickle.UnpicklingError) as error:
        return None, f"rank {ranks.rank} cannot read rank 0's capture: {error}"
    return take(captured, rest), ""


def _again(result: Any, error: Exception | None, make: Make[T]) -> Captured[T]:
    """Return or raise the result that this rank has already, or capture."""
    if error is not None:
        raise error
    return make() if result is None else result


# ---- as bytes ------------------------------------------------------------------------------------------------------


class Unpackable(Exception):
    """Error: a part of a capture, which the message names, has no form in bytes."""


def pack(captured: Capture) -> bytes:
    """Write a capture to bytes, without the skeleton that it was made from.

    Raises:
        Unpackable: it cannot be written.
    """
    # Parts that exist in this process alone, or are large, have no bytes: each rank then captures for itself.
    if captured.conditions is not None:
        raise Unpackable("the capture holds conditions on the values of its inputs")
    if any(node.target is CALL for node in captured.graph.nodes):
        raise Unpackable("the capture calls functions with a backward of their own, which stand in this process")
    large = [n for n, x in captured.constants.items() if isinstance(x, Tensor) and _holds(x) > MAX_CONSTANT_NUMBERS]
    if large:
        raise Unpackable(f"the constant {large[0]} holds {_holds(captured.constants[large[0]])} numbers")
    names = [f.name for f in fields(captured) if f.init and f.name not in ("graph", "origin", "begun")]
    rest = {name: getattr(captured, name) for name in names}
    rest["leaves"] = [(x.node.name, x.kind, x.name) for x in captured.leaves]
    rest["symbols"] = [(symbol, node.name, dim) for symbol, (node, dim) in captured.symbols.items()]
    # By name and place: a copied graph names some nodes otherwise, and plans know operators by their names.
    names = [node.name for node in captured.graph.nodes]
    try:
        return pickle.dumps((compat.packed_graph(captured.graph, rest), names))
    except Exception as error:  # whatever a user's class, or torch, raises in pickling
        raise Unpackable(failure(error)) from error


def unpack(data: bytes, device: torch.device) -> Capture:
    """Read a capture from the bytes of `pack`, with fake tensors and symbols of its own.

    Args:
        data: only from this user's processes: it is a pickle. device: of this process's tensors.

    Raises:
        Unpackable: this process does not know a class or function in it.
    """
    try:
        packed, names = pickle.loads(data)
        graph, rest = compat.unpacked_graph(packed, device)
    except Exception as error:
        raise Unpackable(failure(error)) from error
    if len(graph.nodes) != len(names):
        raise Unpackable("its nodes are others here")
    compat.know_structure(rest["out_spec"])
    nodes = dict(zip(names, graph.nodes, strict=True))
    for name, node in nodes.items():
        node.name = name  # a copy renames what Python knows too, such as an argument `input`
    rest["leaves"] = [Leaf(nodes[at], kind, name) for at, kind, name in rest["leaves"]]
    rest["symbols"] = {symbol: (nodes[at], dim) for symbol, at, dim in rest["symbols"]}
    rest["constants"] = {name: _on(device, x) for name, x in rest["constants"].items()}
    return Capture(graph=graph, **rest)


def _holds(x: Tensor) -> int:
    """Count the numbers that a tensor holds; a fake one holds none."""
    return 0 if isinstance(x, compat.FakeTensor) else x.numel()


def _on(device: torch.device, x: Any) -> Any:
    moves = isinstance(x, Tensor) and not isinstance(x, compat.FakeTensor) and x.device.type == device.type
    return x.to(device) if moves else x


# ---- digest of a model -----------------------------------------------------------------------------------------------

# A digest of all that a capture of a model depends on, the same in every process; none where it cannot be told.
#
# That is the tree of modules: their classes by name, flags, attributes and config, and of weights shapes and types,
# not their numbers. The code of classes is taken to be the same in every process of a run.

KEYED_TYPES = (*PLAIN_TYPES, Enum, slice)
OWN = {"_parameters", "_buffers", "_modules"}
MAX_DEPTH = 12  # containers within each other


class Untold(Exception):
    """Error: the equality of a value, which the message names, cannot be told across processes."""


def model_key(bare: nn.Module, *extra: Any) -> str:
    """Return a digest of all that a capture of this model depends on.

    Args:
        bare: the skeleton. extra: further values that it depends on, such as the inputs: of tensors shapes and types.

    Raises:
        Untold: the model holds a value that cannot be compared, such as a closure.
    """
    first: dict[int, str] = {}
    named_tensors = tensors_of(bare, every_name=True).items()
    tensors = [(n, first.setdefault(id(t), n), type(t).__name__, _tensor(t)) for n, t in named_tensors]
    digests: dict[int, str] = {}
    modules = [(n, _class(type(m)), _attributes(n, m, digests)) for n, m in bare.named_modules()]
    return hashlib.sha256(repr((tensors, modules, [words(x) for x in extra])).encode()).hexdigest()


def _attributes(name: str, module: nn.Module, digests: dict[int, str]) -> Any:
    tables = vars(module)
    plain = {k: v for k, v in tables.items() if k not in OWN and "_hooks" not in k}
    for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        kwargs = tables.get(f"{table}_with_kwargs", ())  # by numbers that are others in every process
        plain |= {table: [(hook, number in kwargs) for number, hook in tables[table].items()]}
    return [(k, _remembered(f"{name}.{k}", v, digests)) for k, v in sorted(plain.items())]


def _remembered(path: str, value: Any, digests: dict[int, str]) -> Any:
    """Return an attribute's words; of a config, which every module has, a digest made once."""
    try:
        if not hasattr(value, "to_dict"):
            return words(value)
        if id(value) not in digests:
            digests[id(value)] = hashlib.sha256(repr(words(value)).encode()).hexdigest()
        return digests[id(value)]
    except Untold as error:
        raise Untold(f"{path.removeprefix('.')} is {error}") from None


def words(x: Any, depth: int = 0) -> Any:
    """Convert a value to one whose `repr` is the same in every process.

    Raises:
        Untold: it is known by its identity alone, or holds such a value.
    """
    if depth > MAX_DEPTH:
        raise Untold("nested too deep")
    # Its shape and type alone: weights of the same shapes are captured as the same graph.
    if isinstance(x, Tensor):
        return _tensor(x)
    # By its repr, which is the same in every process: the hash of a string is not.
    if isinstance(x, KEYED_TYPES):
        return type(x).__name__, repr(x)
    if isinstance(x, type):
        return _class(x)
    # A closure computes with what its cells hold, which may be anything: it is refused below. Not so a function that
    # its file has decorated, which is one for the process.
    if isinstance(x, FunctionType) and (x.__closure__ is None or _decorated(x)):
        return x.__module__, x.__qualname__, x.__code__.co_firstlineno, repr(x.__defaults__)
    # Of a module or a class, as `torch.tanh` is; `[].append` is known by its address, another in the next process.
    if isinstance(x, BuiltinFunctionType) and isinstance(x.__self__, type | ModuleType | None):
        return "built-in", getattr(x.__self__, "__name__", ""), x.__name__
    inner = _inner(x)
    if inner is None:
        raise Untold(f"a {type(x).__name__}, whose equality cannot be told")
    # A set of strings has another order in every process.
    items = [words(y, depth + 1) for y in inner]
    return type(x).__qualname__, sorted(map(repr, items)) if isinstance(x, set | frozenset) else items


def _decorated(function: FunctionType) -> bool:
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def _inner(x: Any) -> Iterable[Any] | None:
    """List the items of a container; None where the value is none."""
    if isinstance(x, partial):
        return x.func, x.args, x.keywords
    if isinstance(x, Mapping):
        return list(x.items())
    if isinstance(x, list | tuple | set | frozenset):
        return x
    if hasattr(x, "to_dict"):  # a config of transformers; what hash() says of the rest is another in every process
        return [(k, v) for k, v in vars(x).items() if not k.endswith("_hash")]
    if is_dataclass(x) and type(x).__eq__ is not object.__eq__:
        return list(vars(x).items())
    return None


def _tensor(t: Tensor) -> Any:
    device = t.device.type  # its index is another on every rank
    return tuple(t.shape), t.stride(), str(t.dtype), device, t.requires_grad, t.is_inference()


@cache
def _class(kind: type) -> Any:
    return kind.__module__, kind.__qualname__, [_class(base) for base in kind.__bases__ if base is not object]
