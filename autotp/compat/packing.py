"""Serialisation of graphs with fake tensors and symbolic sizes for other processes, by torch's own pickler."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from typing import Any

import torch
from torch import fx, nn

from .fake import fake_mode

pickler: Any = importlib.import_module("torch.fx._graph_pickler")
# What the exporter notes for its own use, with references to what stays in its process.
DROPPED = {"from_node", "source_fn_stack", "fwd_source_fn_stack", "original_aten", "tensor_meta", "eager_input_vals"}

# Torch's pickler takes calls of its own functions alone: ours go beside the graph, by name, with one of those in place.
PACKAGE, FOREIGN = "autotp.", torch.clone


def packed_graph(graph: fx.Graph, rest: Any) -> bytes:
    """Serialise a graph, with other data that may refer to its symbols.

    Args:
        graph: stays as it is, and holds no modules of its own. rest: plain data, sympy, classes that can be imported.

    Raises:
        Exception: of many kinds; something in it has no form in bytes.
    """
    if any(node.op == "get_attr" for node in graph.nodes):
        raise LookupError("a graph with modules of its own")
    copy, nodes, targets = fx.Graph(), {}, {}
    for place, node in enumerate(graph.nodes):
        nodes[node] = copied = copy.node_copy(node, nodes.__getitem__)
        if (getattr(node.target, "__module__", None) or "").startswith(PACKAGE):
            targets[place], copied.target = node.target, FOREIGN
    options = pickler.Options(ops_filter=None, node_metadata_key_filter=lambda name: name not in DROPPED)
    with _quiet():
        return pickler.GraphPickler.dumps((fx.GraphModule(nn.Module(), copy), targets, rest), options)


def unpacked_graph(data: bytes, device: torch.device) -> tuple[fx.Graph, Any]:
    """Read what `packed_graph` gave, with new symbols; only for bytes that this user's processes wrote.

    Args:
        data: the bytes. device: replaces every device of its type, so that a rank's program is on its own.
    """
    state = pickler._UnpickleState(fake_mode())
    slices = getattr(pickler, "patch_pytree_map_over_slice", contextlib.nullcontext)  # torch 2.11 has none
    with _quiet(), slices(), io.BytesIO(data) as stream:
        module, targets, rest = _reader(stream, state, device).load()
    for place, node in enumerate(module.graph.nodes):
        node.target = targets.get(place, node.target)
    return module.graph, rest


def _reader(stream: io.BytesIO, state: Any, device: torch.device) -> Any:
    def device_of(kind: str, *index: int) -> torch.device:
        return device if kind == device.type else torch.device(kind, *index)

    class Reader(pickler._GraphUnpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            kind = super().find_class(module, name)
            return device_of if kind is torch.device else kind

    return Reader(stream, state)


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own trees
        yield
