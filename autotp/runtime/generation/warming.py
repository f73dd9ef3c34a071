"""Programs of calls that are still to come, made before anybody waits for them: `ShardedModule.warmup`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autotp.errors import InputError
from autotp.inputs import Inputs, normalise
from autotp.runtime.program_search import program_of

# Kinds of calls by name -> options of a `generate()` whose calls are of that kind.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "prefill": {"max_new_tokens": 1},
    "decode": {"max_new_tokens": 2},
    "static": {"max_new_tokens": 2, "cache_implementation": "static"},
}
UNKNOWN = (
    "warmup({name!r}): kinds of calls are {kinds}; other calls are given as examples, as to autotp.compile (a mapping, "
    "a tuple, or autotp.Inputs)."
)


def warmup(
    module: Any, *calls: str | Inputs | Mapping[str, Any] | tuple[Any, ...], batch: int = 2, length: int = 4
) -> int:
    """Make the programs of further calls now, in the mode that the module is in. A collective call.

    Args:
        module: the sharded module.
        calls: kinds of calls by name: "prefill" and "decode" of `generate()`, and "static" for both with a static
            cache, for which a prompt of ones is generated from; or example inputs of a call, which is captured and not
            run, with gradients where these are recorded now.
        batch, length: sequences and tokens of that prompt. Programs take every number of them; of one token, or one
            sequence, only where the model does for one what it does for more, and else those are programs of their own.

    Returns: how many programs were made.

    Raises:
        InputError: a kind has another name. RankError: the ranks ask for other calls.
        StateError: the model has no `generate`.
    """
    before = module._programs_made.total
    # Read before the ranks are compared, and refused after: a rank that asks for something else is named as such.
    examples = [_read(call) for call in calls]
    with module._calls.turn("warmup()"):
        words = {f"call {i}": _words(x) for i, x in enumerate(examples)}
        module._calls.agree("warmup()", words | {"prompt": f"{batch} x {length}"})
        for name in examples:
            if isinstance(name, str) and name not in KINDS:
                raise InputError(UNKNOWN.format(name=name, kinds=", ".join(map(repr, KINDS))))
        with torch.random.fork_rng():  # what is drawn afterwards is what it would have been
            for call in examples:
                if isinstance(call, str):
                    _generate(module, KINDS[call], batch, length)
                else:
                    program_of(module, module._arguments(call.args, dict(call.kwargs), ""))
    return module._programs_made.total - before


def _generate(module: Any, options: Mapping[str, Any], batch: int, length: int) -> None:
    """Generate as many tokens as the kinds of calls take."""
    prompt = torch.ones(batch, length, dtype=torch.int64, device=module._shards.device)
    with torch.no_grad():
        module.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=options["max_new_tokens"],
            **options,
        )  # fmt: skip


def _read(call: Any) -> str | Inputs:
    return call if isinstance(call, str) else normalise(call)


def _words(call: str | Inputs) -> str:
    """A call in words that are the same in every process."""
    if isinstance(call, str):
        return call
    return str({key: _of_value(x) for key, x in [*enumerate(call.args), *sorted(call.kwargs.items())]})


def _of_value(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
