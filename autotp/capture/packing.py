"""A capture as bytes for another process, and back. Weights are not in it: a capture has none."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.ir.graph import Capture, Leaf
from autotp.kernels.functions import CALL

LARGEST = 4096  # elements of the tensors that a forward makes of literals


class Unpackable(Exception):
    """Something in a capture has no form in bytes; the message says what."""


def pack(captured: Capture) -> bytes:
    """A capture without the skeleton that it was made from.

    Raises:
        Unpackable: it cannot be written.
    """
    if captured.conditions is not None:
        raise Unpackable("the capture holds conditions on the values of its inputs")
    if any(node.target is CALL for node in captured.graph.nodes):
        raise Unpackable("the capture calls functions with a backward of their own, which stand in this process")
    large = [n for n, x in captured.constants.items() if isinstance(x, Tensor) and _holds(x) > LARGEST]
    if large:
        raise Unpackable(f"the constant {large[0]} holds {_holds(captured.constants[large[0]])} numbers")
    rest = {f.name: getattr(captured, f.name) for f in fields(captured) if f.name not in ("graph", "origin", "begun")}
    rest["leaves"] = [(x.node.name, x.kind, x.name) for x in captured.leaves]
    rest["symbols"] = [(symbol, node.name, dim) for symbol, (node, dim) in captured.symbols.items()]
    names = [node.name for node in captured.graph.nodes]
    try:
        return pickle.dumps((compat.packed_graph(captured.graph, rest), names))
    except Exception as error:  # whatever a user's class, or torch, raises in pickling
        raise Unpackable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def unpack(data: bytes, device: torch.device) -> Capture:
    """The inverse of `pack`, with fake tensors and symbols of its own.

    Args:
        data: only what this user's processes wrote: it is a pickle. device: of this process's tensors.

    Raises:
        Unpackable: this process does not know what is in it.
    """
    try:
        packed, names = pickle.loads(data)
        graph, rest = compat.unpacked_graph(packed, device)
    except Exception as error:
        raise Unpackable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    if len(graph.nodes) != len(names):
        raise Unpackable("its nodes are others here")
    nodes = dict(zip(names, graph.nodes, strict=True))
    for name, node in nodes.items():
        node.name = name  # a copy renames what Python knows too, such as an argument `input`
    rest["leaves"] = [Leaf(nodes[at], kind, name) for at, kind, name in rest["leaves"]]
    rest["symbols"] = {symbol: (nodes[at], dim) for symbol, at, dim in rest["symbols"]}
    rest["constants"] = {name: _on(device, x) for name, x in rest["constants"].items()}
    return Capture(graph=graph, **rest)


def _holds(x: Tensor) -> int:
    """Numbers that a tensor holds; a fake one holds none."""
    return 0 if isinstance(x, compat.FakeTensor) else x.numel()


def _on(device: torch.device, x: Any) -> Any:
    moves = isinstance(x, Tensor) and not isinstance(x, compat.FakeTensor) and x.device.type == device.type
    return x.to(device) if moves else x
