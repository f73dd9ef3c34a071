"""Entries of continuous batching that a sharded module has in place of its class's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autotp.errors import StateError

NO_BATCHES = (
    "{name} has no {method}(): its class brings none. Those of transformers that end in a language model's head do, "
    "with transformers 5.23 or later."
)
CACHED = "_cached_continuous_batching_manager"  # where transformers looks for a manager to use again


class Batching:
    """Transformers' continuous batching over the ranks: its engine schedules on rank 0, and the others follow."""

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Return a manager of requests, as the original's own. A collective call: each rank starts and stops its own.

        Args:
            generation_config, continuous_batching_config, workload_hints: as transformers has them.

        Raises:
            StateError: an option that would not be followed, a model that cannot be served, or axes beside tp.
            RankError: the ranks pass other options.
        """
        if (before := vars(self).get(CACHED)) is not None:
            return before
        module: Any = self
        _check(module, "init_continuous_batching")
        from .batch_manager import manager_of  # noqa: PLC0415  transformers' engine, only where it is asked for

        with module._calls.turn("init_continuous_batching()"), torch.no_grad():
            return manager_of(module, generation_config, continuous_batching_config, workload_hints)

    def generate_batch(self, inputs: Sequence[Sequence[int]], **kwargs: Any) -> dict[str, Any]:
        """Return what is generated from each prompt by its request's name, as the original's own. A collective call.

        Args:
            inputs: tokens of each prompt, the same on all ranks. kwargs: of the original's own.

        Raises:
            InputError: an argument that would be ignored. StateError: a request failed, or as of a manager.
        """
        module: Any = self
        _check(module, "generate_batch")
        from .batch_manager import results_of  # noqa: PLC0415  transformers' engine, only where it is asked for

        prompts = [list(map(int, x)) for x in inputs]
        texts = {"prompts": str(prompts)} | {f"argument {n}": str(x) for n, x in kwargs.items()}
        module._calls.agree("generate_batch()", texts)
        return results_of(module, prompts, kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return a context with a manager that runs, as the original's own. Collective as it is entered and left."""
        _check(self, "continuous_batching_context_manager")
        own: Any = super()
        return own.continuous_batching_context_manager(*args, **kwargs)


def _check(module: Any, method: str) -> None:
    bare = module._source.bare
    if not callable(getattr(type(bare), method, None)):
        raise StateError(NO_BATCHES.format(name=type(bare).__name__, method=method))
