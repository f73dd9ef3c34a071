"""What other libraries read of a model before they use it: a sharded module shows its original's."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from torch import nn

from autotp.errors import StateError
from autotp.inputs import is_transformers
from autotp.runtime.checkpoint.saving import save_into

# Of an original that has them; what it keeps on itself, such as its generation_config, is read there anyway.
ASKED = (
    "device", "dtype", "can_generate",
)  # fmt: skip


# What transformers' Trainer asks a model, and nobody else. `autotp.integrations` sets it where it tells a trainer more.
LOADED = "is_distributed_loading_by_transformers"
TRAINER = (
    "transformers' Trainer would deal each rank a batch of its own, and save on its first rank alone. Say which ranks "
    "share a batch: TrainingArguments(..., parallelism_config=ShardedParallelism(sharded), save_only_model=True). With "
    "optimizer states in checkpoints, or dp, take ShardedTrainer in its place. Both are of autotp.integrations."
)


@functools.lru_cache(256)
def looking_like(kind: Any, original: type[nn.Module], forward_class: type[nn.Module], named: bool) -> Any:
    """A class of sharded modules with the signature of a forward, and where `named` with the original's name.

    Args:
        kind: of sharded modules. original: the model's class. forward_class: the class of the forward.
        named: whether tools ask for the name.
    """

    @functools.wraps(forward_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward}
    return type(kind)(original.__name__ if named else kind.__name__, (kind,), body)


def _with_arguments(model: nn.Module) -> type[nn.Module]:
    """The class whose forward says what a model takes: PEFT's may take anything, and pass it on to the base model."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    anything = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    base: Any = getattr(model, "get_base_model", None) if anything else None
    inner: Any = base() if callable(base) else model
    return type(inner)


class OriginalInterface:
    """For a sharded module."""

    _source: Any
    _shards: Any

    def _looks_like(self, model: nn.Module) -> None:
        """Be of a class that shows the original's: tools ask it for the forward's arguments, and some for its name."""
        if not isinstance(model, OriginalInterface):
            generates = callable(getattr(type(model), "generate", None))
            shows_name = generates or is_transformers(model)
            self.__class__ = looking_like(type(self), type(model), _with_arguments(model), shows_name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            shards = self.__dict__.get("_shards")
            if name == LOADED and shards is not None and shards.tp * shards.axis.size > 1:
                raise StateError(TRAINER) from None
            source = self.__dict__.get("_source")
            if name not in ASKED or source is None or not hasattr(type(source.bare), name):
                raise
            return getattr(source.bare, name)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of elements of the original's parameters, tied ones once.

        Args:
            only_trainable: of those that require a gradient.
            exclude_embeddings: without those of `nn.Embedding`.
        """
        root: Any = self
        tables = [m for m in root.modules() if isinstance(m, nn.Embedding) and exclude_embeddings]
        left_out = {id(p) for m in tables for p in m.parameters(recurse=False)}
        counted = [p for p in root.parameters() if id(p) not in left_out]
        return sum(p.numel() for p in counted if p.requires_grad or not only_trainable)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], max_shard_size: int | str = "5GB", **kwargs: Any
    ) -> None:
        """Write the whole weights and the config as transformers does, for its `from_pretrained`. A collective call.

        `save_checkpoint(format="huggingface")` replaces a folder in one step; this one writes into it, beside whatever
        else lies there.

        Args:
            save_directory: the folder.
            max_shard_size: largest size of one file, in bytes or such as "5GB"; with more, files have an index.
            kwargs: of those that transformers takes, what says how one process writes all is not needed here:
                state_dict, is_main_process, save_function and safe_serialization=True.

        Raises:
            InputError: another argument, or a size that cannot be read.
            StateError: the folder cannot be written.
            RankError: that is so on another rank.
        """
        save_into(self._shards, save_directory, max_shard_size, kwargs)
