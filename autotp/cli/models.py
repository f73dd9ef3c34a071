"""Models as the command line names them: a module and its example inputs."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import InputError
from autotp.inputs import Inputs, for_model, mapped, normalise
from autotp.pretrained import from_config
from autotp.text import first_line

from .flags import ModelOptions, config_path, known_shapes

SHAPE_BATCH, SHAPE_TOKENS = 8, 4096  # sizes that a known shape is priced for, where none are asked for


@dataclass(frozen=True)
class LoadedModel:
    """A model and its example inputs; `remark`: a warning about these for the user."""

    model: nn.Module
    inputs: Inputs
    remark: str = ""

    @property
    def sizes(self) -> str:
        """Example inputs as text: `input_ids (2 x 16)`."""
        tensors = [("", x) for x in self.inputs.args]
        tensors += [(f"{name} ", x) for name, x in self.inputs.kwargs.items()]
        words = [f"{name}({' x '.join(map(str, x.shape))})" for name, x in tensors if isinstance(x, Tensor)]
        return ", ".join(words) or "no tensors"


def load(text: str, sizes: ModelOptions, training: bool = True, real: bool = False) -> LoadedModel:
    """Load the model that the command line names, with example inputs of the sizes asked for.

    Args:
        text: a folder or config.json of transformers, a known shape, or `package.module:factory`.
        training: the mode of a model that is built from a config: with live dropout, or without.
        real: build it from a config with random weights, where they are small enough to be compared.

    Raises:
        InputError: there is no such model, or it cannot be built or sized so.
    """
    dtype = read_dtype(sizes.dtype)
    path = config_path(text)
    shape = known_shapes().get(text) if path is None else None
    if path is not None or shape is not None:
        fields = None if shape is None else shape["config"]
        model, example = from_config(path or text, dtype, sizes.fields(), real, fields).train(training), None
    elif sizes.set:
        raise InputError(f"{text} is a factory, which has no fields to set: --set goes with a config.json.")
    else:
        model, example = from_factory(text, dtype)
    inputs = for_model(model) if example is None else normalise(example)
    if inputs is None:
        raise InputError(
            f"{text}: {type(model).__name__} needs example inputs, and only a transformers config says them. Let the "
            "factory return (module, example_inputs)."
        )
    batch, seq = sizes.batch, sizes.seq
    if shape is not None and not real:  # what is only priced has sizes that somebody would train with
        batch, seq = batch or SHAPE_BATCH, seq or min(SHAPE_TOKENS, _positions(model) or SHAPE_TOKENS)
    return LoadedModel(model, resized(inputs, batch, seq), _too_long(model, sizes.seq))


def from_factory(text: str, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Return the module, and example inputs or None, of `package.module:factory`; the working directory is importable.

    Args:
        text: `module:function`. dtype: of the weights, or None to leave them.
    """
    where, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(where)
        for part in name.split("."):
            value = getattr(value, part)
        value = value if isinstance(value, nn.Module) else value()
    except Exception as error:
        kind = type(error).__name__
        raise InputError(f"{text}: {kind}: {first_line(error, kind)} (--debug shows where)") from error
    model, example = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module):
        kind = type(value).__name__
        raise InputError(f"{text} gives {kind}: it must give an nn.Module, or (module, example_inputs).")
    if dtype is None:
        return model, example
    inputs = None if example is None else mapped(normalise(example), lambda x: _cast(x, dtype))
    return model.to(dtype), inputs


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def resized(inputs: Inputs, batch: int | None, seq: int | None) -> Inputs:
    """Return the inputs with another batch size and length, repeated or cut.

    The batch is the first dimension of the first tensor, and of all others where it is as large. The length is the
    second dimension of the first tensor that has two or three; other ids keep their ratio to it.

    Args:
        inputs: the example. batch, seq: the sizes wanted of the first and second dimension, or None.

    Raises:
        InputError: no tensor has such a dimension.
    """
    tensors = [x for x in inputs.tensors if x.ndim]
    # The first tensor tells the batch, and the first with two or three dimensions the length: ids of a decoder beside
    # those of an encoder keep their ratio.
    rows = tensors[0].shape[0] if tensors else None
    lengths = [x.shape[1] for x in tensors if _has_length(x)]
    if batch is not None and rows is None:
        raise InputError("--batch: the example inputs hold no tensor with a batch dimension. Leave it out.")
    if seq is not None and not lengths:
        raise InputError("--seq: the example inputs hold no sequence (a tensor of 2 or 3 dimensions). Leave it out.")

    def resize(x: Tensor) -> Tensor:
        if not x.ndim:
            return x
        # Features of another length, such as those of an image, are no part of the sequence; ids always are.
        if seq is not None and _has_length(x) and (x.shape[1] == lengths[0] or not x.is_floating_point()):
            x = _tiled(x, 1, max(1, x.shape[1] * seq // lengths[0]))
        return _tiled(x, 0, batch) if batch is not None and x.shape[0] == rows else x

    return mapped(inputs, resize)


def _has_length(x: Tensor) -> bool:
    return x.ndim == 3 or x.ndim == 2 and x.shape[1] > 1


def _tiled(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `size` slices along `dim`: the first ones, or all again and again."""
    return x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])


def read_dtype(text: str | None) -> torch.dtype | None:
    """Return a torch dtype by its name."""
    dtype = None if text is None else getattr(torch, text.removeprefix("torch."), None)
    if text is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"--dtype {text}: give a floating-point dtype of torch, such as bfloat16.")
    return dtype


def _too_long(model: nn.Module, seq: int | None) -> str:
    """Return a remark where the length asked for is more than the config allows."""
    most = _positions(model)
    if seq is None or not 0 < most < seq:
        return ""
    return f"--seq {seq} is more than the config's max_position_embeddings, {most}"


def _positions(model: nn.Module) -> int:
    """Return the longest sequence that the config allows; 0 where it says none."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) else 0
