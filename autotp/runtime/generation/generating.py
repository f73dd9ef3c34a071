"""`generate()` and `warmup()` of a sharded module: the original's own loop, and programs that are made ahead."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.comm.ranks import Facts
from autotp.errors import InputError, StateError
from autotp.inputs import Inputs, Leaves, normalise
from autotp.runtime import data_parallel
from autotp.runtime.program_search import program_of

from .generate_methods import one_generator

NO_GENERATE = (
    "{name} has no generate(): its class brings none. Those of transformers that end in a language model's head do; "
    "for others call the sharded module itself, with the cache that it gave."
)
PAGED = (
    "generate(cache_implementation='paged') hands its prompts to the engine of continuous batching and drops the "
    "options that this does not know. Take sharded.generate_batch(...), which names them."
)
SYNCED = 5  # the place of `synced_gpus` among the arguments of `generate`

ALONE = ("streamer",)  # arguments that a rank may have alone

APART = (
    "generate({name}=...) with dp: it takes as many forwards, of as many tokens, as the prompts of a slice want, and "
    "ranks of another slice make others. Leave it out, or generate with a module that is compiled without dp."
)
BY_PROMPT = ("token_healing", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")


def refuse(args: Leaves, kwargs: Mapping[str, Any], config: Any, dp: int) -> None:
    """Refuse options that the loops of `generate` would silently ignore with several ranks.

    Args:
        args, kwargs: of the call. config: the module's `generation_config`. dp: number of slices of the batch.

    Raises:
        StateError: it says what to do instead.
    """
    if kwargs.get("cache_implementation") == "paged":
        raise StateError(PAGED)
    defaults = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or config
    for name in BY_PROMPT if dp > 1 else ():
        if kwargs.get(name, getattr(defaults, name, None)):
            raise StateError(APART.format(name=name))


def option_texts(args: Leaves, kwargs: Mapping[str, Any], config: Any) -> Facts:
    """Return the options of `generate` as texts that are equal in every process: a tensor's shape, an object's class.

    Args:
        args, kwargs: of the call. config: the module's `generation_config`, which holds where an argument is silent.
    """
    values = {**dict(enumerate(args)), **kwargs, "generation_config": kwargs.get("generation_config") or config}
    options = {f"argument {name}": _text(x) for name, x in values.items() if name not in ALONE}
    return {name: text for name, text in options.items() if text != "None"}


def _takes_synced(kind: Any) -> bool:
    """Return whether the `generate` of a class takes transformers' option `synced_gpus`."""
    parameters = inspect.signature(kind.generate).parameters if hasattr(kind, "generate") else {}
    return "synced_gpus" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return str({str(key): _text(x) for key, x in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        texts = [_text(x) for x in value]
        return str(texts if isinstance(value, list | tuple) else sorted(texts))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    options = _text(value.to_dict()) if hasattr(value, "to_diff_dict") else ""
    return f"{type(value).__name__} {options}".rstrip()


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the original class's own `generate`: its arguments, its results, on every rank the same. A collective call.

    Every rank passes the same prompts, with dp each dp rank its own; all go on until the last is done (the option
    `synced_gpus`). The cache is this rank's part. Random numbers are rank 0's.

    Raises:
        RankError: the ranks pass other options, or one of them has left by an exception, as of its streamer.
        StateError: the class has no `generate`; there is cp; or an option is one that ranks cannot follow.
    """
    shards, calls, original = self._shards, self._calls, type(self._shards.bare)
    function = getattr(original, "generate", None)
    if not callable(function):
        raise StateError(NO_GENERATE.format(name=original.__name__))
    if shards.axis.size > 1 and len(args) <= SYNCED and _takes_synced(original):
        kwargs.setdefault("synced_gpus", True)
    with calls.turn("generate()"):
        config = getattr(self, "generation_config", None)
        calls.agree("generate()", option_texts(args, kwargs, config))
        refuse(args, kwargs, config, shards.axis.size)
        with one_generator(self._shards.ranks, shards.device), _under_way(self):
            outputs = function(self, *args, **kwargs)
        calls.agree("end of generate()", {})
        return outputs


@contextlib.contextmanager
def _under_way(module: Any) -> Iterator[None]:
    """Note a generation on the module, and delete attributes that `generate` leaves there, such as a cache."""
    attributes, before = vars(module), {*vars(module)}
    outer = module._generation
    attributes["_generation"] = outer if outer is not None else set()
    try:
        yield
    finally:
        attributes["_generation"] = outer
        if outer is None:
            data_parallel.show_gradients(module._shards)
        for name in attributes.keys() - before:
            del attributes[name]


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
    examples = []
    for call in calls:
        examples.append(call if isinstance(call, str) else normalise(call))
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


def _words(call: str | Inputs) -> str:
    """Return a call as a text that is equal in every process."""
    return call if isinstance(call, str) else _text([*call.args, dict(sorted(call.kwargs.items()))])


# ---- continuous batching ---------------------------------------------------------------------------------------------


NO_BATCHES = (
    "{name} has no {method}(): its class brings none. Those of transformers that end in a language model's head do, "
    "with transformers 5.23 or later."
)
CACHED = "_cached_continuous_batching_manager"  # where transformers looks for a manager to use again


class Batching:
    """Transformers' continuous batching over the ranks: its engine schedules on rank 0, and the others follow."""

    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
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
        _check(self, "init_continuous_batching")
        from .batch_manager import manager_of  # noqa: PLC0415  transformers' engine, only where it is asked for

        with self._calls.turn("init_continuous_batching()"), torch.no_grad():
            return manager_of(self, generation_config, continuous_batching_config, workload_hints)

    def generate_batch(self: Any, inputs: Sequence[Sequence[int]], **kwargs: Any) -> dict[str, Any]:
        """Return what is generated from each prompt by its request's name, as the original's own. A collective call.

        Args:
            inputs: tokens of each prompt, the same on all ranks. kwargs: of the original's own.

        Raises:
            InputError: an argument that would be ignored. StateError: a request failed, or as of a manager.
        """
        _check(self, "generate_batch")
        from .batch_manager import results_of  # noqa: PLC0415  transformers' engine, only where it is asked for

        prompts = [list(map(int, x)) for x in inputs]
        texts = {"prompts": prompts} | {f"argument {n}": x for n, x in kwargs.items()}
        self._calls.agree("generate_batch()", texts)
        return results_of(self, prompts, kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return a context with a manager that runs, as the original's own. Collective as it is entered and left."""
        _check(self, "continuous_batching_context_manager")
        original: Any = super()
        return original.continuous_batching_context_manager(*args, **kwargs)


def _check(module: Any, method: str) -> None:
    bare = module._shards.bare
    if not callable(getattr(type(bare), method, None)):
        raise StateError(NO_BATCHES.format(name=type(bare).__name__, method=method))
