"""Models of the transformers library from their folders and configs: no rank ever holds a whole one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.capture.selfcheck import MAX_WEIGHT_BYTES
from autotp.comm.ranks import Ranks, together
from autotp.ir import files
from autotp.runtime.checkpoint.loading import Adapted, add_adapters
from autotp.runtime.module import LazyModule, ShardedModule

from .api import compile as compile_model
from .errors import InputError
from .text import first_line

CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_CONFIG_BYTES = 100_000_000  # bytes of a config; it has thousands
# Which of transformers' tables to ask, in this order, for a config that does not name its class.
TABLES = ("PreTraining", "CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "AudioClassification")


def from_pretrained(
    folder: str | os.PathLike[str],
    tp: int | Literal["auto"] | None = None,
    *,
    dtype: torch.dtype | None = None,
    example_inputs: Any = None,
    mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    trusted: bool = False,
    adapters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
    **options: Any,
) -> ShardedModule:
    """Shard a model that `save_pretrained` of transformers wrote. Run it by torchrun, alike on all ranks.

    The model of the class that the folder's config names is built on the meta device, compiled by `autotp.compile`, and
    every rank reads its own slices of the files (`ShardedModule.load_checkpoint`). It is in eval mode, and has the
    folder's generation config.

    Args:
        folder: with config.json and weights; nothing is downloaded, and no code that it names is run.
        tp, mesh: see `autotp.compile`.
        dtype: of the weights; others in the files are cast to it. None takes the config's.
        example_inputs: see `autotp.compile`; where the config says enough they may be left out.
        prepare: called with the model on the meta device before it is sharded, such as to freeze parameters.
        trusted: allow pickled weights (.bin), which torch opens with `weights_only=True`.
        adapters: folders of adapters of PEFT by names of yours without a dot, put in before the model is planned and
            cast to its types. The first is active; `set_adapter(name)` of the module takes another.
        options: the other arguments of `autotp.compile`, such as `objective="decode"` or `backend="inductor"`.

    Returns: the `ShardedModule` with its weights.

    Raises:
        InputError: the folder or its config cannot be used, or there are too few ranks. StateError: the weights do not
            fit the config. All ranks raise together.
    """
    path, world = Path(folder), Ranks.find(None, mesh, options.get("dp") or 1, options.get("cp") or 1)
    model = together(world.planners, "reading the folder", lambda: _empty(path, dtype))
    if world.mesh is None and tp not in (None, 1, "auto"):
        raise InputError(
            f"tp={tp}, and this is one process: weights are read by the ranks. Start it with "
            f"torchrun --nproc-per-node {tp}. A plan alone is what autotp.plan makes, without weights."
        )
    beside = {name: Path(x) for name, x in adapters.items()}
    if beside:
        together(world.planners, "reading the adapters", lambda: add_adapters(model, beside))
    if prepare is not None:
        together(world.planners, "preparing the model", lambda: prepare(model))
    sharded = compile_model(model, tp, example_inputs=example_inputs, mesh=mesh, **options)
    if isinstance(sharded, LazyModule):
        raise InputError(
            f"{path}: the config of {type(model).__name__} does not say what the model is called with. Give "
            "example_inputs, as for autotp.compile."
        )
    if sharded.__dict__.get("_kept") is None:  # else it has the weights of a later step
        source: Any = Adapted(sharded._shards.bare, path, beside, trusted) if beside else path
        sharded.load_checkpoint(source, cast=dtype is not None or bool(beside), trusted=trusted)
    if beside:
        sharded.set_adapter(next(iter(beside)))
    return sharded


def _empty(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Build the folder's model on the meta device, with its generation config."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder. Give one that save_pretrained wrote; nothing is downloaded, so of a name on a hub "
            "give the folder of its snapshot."
        )
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} holds no {CONFIG}. Give a folder that save_pretrained of transformers wrote.")
    model = from_config(folder / CONFIG, dtype, {}).eval()
    if (folder / GENERATION).is_file():
        model.generation_config = _generation(folder)
    return model


def _generation(folder: Path) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415  only where a folder is read

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a file of another version lacks
        raise InputError(f"{folder / GENERATION} cannot be read: {first_line(error, type(error).__name__)}") from error


# ---- from a config --------------------------------------------------------------------------------------------------


def from_config(
    path: Path | str, dtype: torch.dtype | None, fields: Mapping[str, Any], real: bool = False,
    shape: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Build a model of the transformers library from its config, of the class that the config names.

    Args:
        path: of config.json; nothing that it names is fetched, and no code of its own is run.
        dtype: of the weights; None takes the config's.
        fields: other values for fields of the config.
        real: with random weights where they take less than 1 GB, and not on the meta device.
        shape: the config itself, where it is in no file: `path` is then its name.

    Raises:
        InputError: the config cannot be read, or transformers cannot build it.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "0")  # transformers reads it when it is imported
    try:
        import transformers  # noqa: PLC0415  only where a config is read
    except ImportError as error:
        raise InputError(f"{path}: reading a config needs transformers ({error}). pip install transformers.") from error
    transformers.logging.set_verbosity_error()
    data = _fields(Path(path)) if shape is None else shape
    if "model_type" not in data:
        raise InputError(f"{path} is no config of transformers: it has no model_type.")
    _refuse_fetched(path, {**data, **fields})
    try:
        if shape is None:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        else:
            config = transformers.AutoConfig.for_model(**shape)
        for name, value in fields.items():
            getattr(config, name)  # a field that it has
            setattr(config, name, value)
        build = _builder(transformers, config, dtype)
        with torch.device("meta"):
            model = build()
        if real and sum(p.numel() * p.element_size() for p in model.parameters()) < MAX_WEIGHT_BYTES:
            torch.manual_seed(0)
            model = build()
    except Exception as error:  # whatever a config of another version, or of code of its own, lacks
        remark = " It names code of its own (auto_map), which is not run: build the model in a factory."
        raise InputError(
            f"{path}: transformers {transformers.__version__} cannot build it: "
            f"{first_line(error, type(error).__name__)}"
            f"{remark if 'auto_map' in data else ''}"
        ) from error
    return model


def _builder(transformers: Any, config: Any, dtype: torch.dtype | None) -> Callable[[], nn.Module]:
    """Return a constructor: of the class that the config names, else of the first of `TABLES` that knows it."""
    options = {} if dtype is None else {"dtype": dtype}
    classes = [getattr(transformers, str(n), None) for n in config.architectures or ()]
    models = (c for c in classes if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel))
    model_class = next(models, None)
    if model_class is not None:
        return lambda: model_class._from_config(config, **options)
    classes = [getattr(transformers, f"AutoModelFor{name}") for name in TABLES]
    table = next((c for c in classes if type(config) in c._model_mapping), transformers.AutoModel)
    return lambda: table.from_config(config, trust_remote_code=False, **options)


def _refuse_fetched(path: Path | str, data: Mapping[str, Any]) -> None:
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
    """Return the fields in a config's file."""
    data = files.read_json(path, MAX_CONFIG_BYTES, error=InputError)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}: it must hold a config.")
    return data
