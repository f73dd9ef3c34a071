"""Models of the transformers library from their configs, on the meta device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.capture.selfcheck import LARGEST
from autotp.errors import InputError
from autotp.ir import files

MAX_CONFIG_BYTES = 100_000_000  # bytes of a config; it has thousands
# Which of transformers' tables to ask, in this order, for a config that does not name its class.
TABLES = ("PreTraining", "CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "AudioClassification")


def from_config(path: Path, dtype: torch.dtype | None, fields: Mapping[str, Any], real: bool = False) -> Any:
    """A model of the transformers library from its config, of the class that the config names.

    Args:
        path: of config.json; nothing that it names is fetched, and no code of its own is run.
        dtype: of the weights; None takes the config's.
        fields: other values for fields of the config.
        real: with random weights where they take less than 1 GB, and not on the meta device.

    Raises:
        InputError: the config cannot be read, or transformers cannot build it.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "0")  # transformers reads it when it is imported
    try:
        import transformers  # noqa: PLC0415  only where a config is read
    except ImportError as error:
        raise InputError(f"{path}: reading a config needs transformers ({error}). pip install transformers.") from error
    transformers.logging.set_verbosity_error()
    data = _fields(path)
    if "model_type" not in data:
        raise InputError(f"{path} is no config of transformers: it has no model_type.")
    _refuse_fetched(path, {**data, **fields})
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        for name, value in fields.items():
            getattr(config, name)  # a field that it has
            setattr(config, name, value)
        build = _builder(transformers, config, dtype)
        with torch.device("meta"):
            model = build()
        if real and sum(p.numel() * p.element_size() for p in model.parameters()) < LARGEST:
            torch.manual_seed(0)
            model = build()
    except Exception as error:  # whatever a config of another version, or of code of its own, lacks
        own = " It names code of its own (auto_map), which is not run: build the model in a factory."
        raise InputError(
            f"{path}: transformers {transformers.__version__} cannot build it: {first_line(error)}"
            f"{own if 'auto_map' in data else ''}"
        ) from error
    return model


def _builder(transformers: Any, config: Any, dtype: torch.dtype | None) -> Callable[[], nn.Module]:
    """Find what makes the model: the class that the config names, otherwise the first of `TABLES` that knows it."""
    options = {} if dtype is None else {"dtype": dtype}
    classes = [getattr(transformers, str(n), None) for n in config.architectures or ()]
    models = (c for c in classes if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel))
    model_class = next(models, None)
    if model_class is not None:
        return lambda: model_class._from_config(config, **options)
    classes = [getattr(transformers, f"AutoModelFor{name}") for name in TABLES]
    table = next((c for c in classes if type(config) in c._model_mapping), transformers.AutoModel)
    return lambda: table.from_config(config, trust_remote_code=False, **options)


def _refuse_fetched(path: Path, data: Mapping[str, Any]) -> None:
    """Refuse a config by which transformers would fetch kernels: code that comes from a hub."""
    todo: list[tuple[str, Any, bool]] = [("", data, False)]
    while todo:
        name, value, implementation = todo.pop()
        if isinstance(value, Mapping):
            todo += [(str(k) or name, v, implementation or "implementation" in str(k)) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(name, v, implementation) for v in value]
        elif implementation and isinstance(value, str) and ("/" in value or "flash" in value):
            raise InputError(
                f"{path}: {name} is {value!r}, for which transformers may fetch code from a hub: nothing that a config "
                "names is fetched or run. Set it to 'sdpa' or 'eager', or build the model in a factory."
            )


def _fields(path: Path) -> Mapping[str, Any]:
    """The fields in a config's file."""
    data = files.read_json(path, MAX_CONFIG_BYTES, error=InputError)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}: it must hold a config.")
    return data


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
