"""Inputs of a model's call: normalised, made for a transformers model, fitted to `forward`."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat

from .errors import InputError

Args = tuple[Any, ...]  # of a call, by position
Kwargs = dict[str, Any]  # by name
Leaves = Sequence[Any]  # of a call's arguments or results: tensors and other objects
BATCH, LENGTH, DECODER_LENGTH, FRAMES, SAMPLES = 2, 16, 12, 32, 16000
CACHES = ("past_key_values", "past_key_value", "cache_params", "past_buckets_states")
MARK = "autotp_part"  # attribute of a tensor that is a context-parallel rank's part: its place, and how many there are
ACCEPTED = "a tensor, a tuple (positional arguments), a mapping (keyword arguments), or autotp.Inputs(*args, **kwargs)"


@dataclass(frozen=True, eq=False, init=False)
class Inputs:
    """The arguments of one call of a model: `model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)

    @property
    def leaves(self) -> list[Any]:
        """Arguments, those in containers one by one."""
        return compat.tree_leaves((self.args, self.kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these."""
        return [x for x in self.leaves if isinstance(x, Tensor)]

    def part(self, rank: int, ranks: int, device: torch.device | str | None = None) -> Inputs:
        """Return the part of every sequence of one context-parallel rank: a chunk from the front, one from the end.

        Sequences are the second dimension of the first tensor that has two, and of all of the same length. Tensors that
        are cut are marked, so that a sharded module that gets them knows that they are no whole sequences.

        Args:
            rank: place on the axis, 0 to ranks - 1. ranks: size of the axis, `cp`.
            device: that all tensors are sent to afterwards; a copy made later has no mark.

        Raises:
            InputError: there is no sequence, or its length is no multiple of 2 x ranks.
        """
        leaves = self._rows()
        length = leaves[0].shape[1] if leaves else 0
        if not leaves or length % (2 * ranks):
            raise InputError(
                f"a sequence of {length} is not divided over {ranks} ranks in two chunks each: its length must be a "
                f"multiple of {2 * ranks}. Pad sequences, and mask what is padding."
            )

        def local(x: Tensor) -> Tensor:
            if x.ndim < 2 or x.shape[1] != length:
                return x.to(device)
            pieces = x.chunk(2 * ranks, 1)
            part = torch.cat((pieces[rank], pieces[-1 - rank]), 1).to(device)
            setattr(part, MARK, (rank, ranks))
            return part

        return mapped(self, local)

    def _rows(self) -> list[Tensor]:
        """Return all tensors of two or more dimensions."""
        return [x for x in self.tensors if x.ndim > 1]

    def own_part(self, rank: int, ranks: int) -> tuple[Inputs, bool]:
        """Return a context-parallel rank's part of a call, and whether whole sequences were given.

        Args:
            rank, ranks: see `part`.

        Raises:
            InputError: see `part`; or some of the inputs are a rank's part and others not, or they are another rank's.
        """
        marked = [x for x in self._rows() if hasattr(x, MARK)]
        if not marked:
            return self.part(rank, ranks), True
        places, length = {getattr(x, MARK) for x in marked}, marked[0].shape[1]
        if places != {(rank, ranks)}:
            parts = ", ".join(f"{at} of {count}" for at, count in sorted(places))
            raise InputError(
                f"the inputs are parts {parts} of their sequences, and this is cp rank {rank} of {ranks}: pass "
                f"whole sequences, or all of Inputs.part({rank}, {ranks})."
            )
        if any(x.shape[1] in (length, length * ranks) for x in self._rows() if not hasattr(x, MARK)):
            raise InputError(
                f"some inputs are part {rank} of {ranks} of their sequences, and others of {length} or "
                f"{length * ranks} tokens are not marked as that: pass whole sequences, or give Inputs.part all inputs "
                "of the call, and pass what it returns as it is (a copy of a part, as to a device, has no mark)."
            )
        return self, False


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the inputs with each tensor changed."""
    args, kwargs = compat.tree_map_only(Tensor, change, (inputs.args, inputs.kwargs))
    return Inputs(*args, **kwargs)


def examples_of(tree: Any) -> int:
    """Return the number of examples of a call: the first dimension of the first tensor argument that has one."""
    leaves = compat.tree_leaves(tree)
    return next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim and len(x)), 1)


def over_batch(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with each tensor changed whose first dimension is the batch."""
    examples = examples_of(tree)

    def change_examples(x: Any) -> Any:
        return change(x) if isinstance(x, Tensor) and x.ndim and len(x) == examples else x

    return compat.tree_map(change_examples, tree)


def micro_batch(tree: Any, parts: int) -> Any:
    """Return the first of so many virtual micro-batches of the arguments of a call.

    Raises:
        InputError: they are not of one size.
    """
    if (examples := examples_of(tree)) % parts:
        raise InputError(
            f"a batch of {examples} is not divided into {parts} virtual micro-batches of one size, which this process "
            "has of dp_invariant: the first dimension of the first input must be a multiple of that."
        )
    return tree if parts == 1 else over_batch(tree, lambda x: x[: len(x) // parts])


def first_part(inputs: Inputs, parts: int) -> Inputs:
    """Return the inputs of the first of so many virtual micro-batches; see `micro_batch`."""
    args, kwargs = micro_batch((inputs.args, dict(inputs.kwargs)), parts)
    return Inputs(*args, **kwargs)


def normalise(example: object) -> Inputs:
    """Return `example_inputs`, in any accepted form, as `Inputs`; plain dataclasses among them are containers then.

    Args:
        example: a tensor (one argument), a tuple or list (positional arguments), a mapping (keyword arguments; a
            transformers `BatchEncoding` is one), or `Inputs`.
    Raises:
        InputError: for anything else, or where a key of the mapping is not a string.
    """
    if isinstance(example, Inputs):
        compat.know_records((example.args, dict(example.kwargs)))
        return example
    if isinstance(example, (tuple, list, Mapping)):
        compat.know_records(list(example.values()) if isinstance(example, Mapping) else list(example))
    if isinstance(example, Tensor):
        return Inputs(example)
    if isinstance(example, (tuple, list)):
        return Inputs(*example)
    if not isinstance(example, Mapping):
        raise InputError(f"example_inputs is {type(example).__name__}, which says no arguments. Give {ACCEPTED}.")
    unnamed = [key for key in example if not isinstance(key, str)]
    if unnamed:
        raise InputError(
            f"example_inputs has the key {unnamed[0]!r}: the keys of a mapping are names of arguments of forward, "
            f"so they must be strings. Give {ACCEPTED}."
        )
    return Inputs(**dict(example))


def bind(forward: Callable[..., Any], inputs: Inputs) -> inspect.BoundArguments:
    """Check that `forward(*inputs.args, **inputs.kwargs)` is a call that the signature of `forward` allows.

    Returns: the bound arguments.
    Raises:
        InputError: names the argument that is missing, unknown, or one too many, and those that are accepted. Where
            `forward` has `**kwargs`, a name that is nearly that of another argument is refused too: it would
            be ignored.
    """
    signature = inspect.signature(forward)
    accepts = f"forward accepts {signature_text(signature)}"
    try:
        bound = signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        call = f"{len(inputs.args)} positional, and by name {sorted(inputs.kwargs) or 'none'}"
        raise InputError(f"The inputs do not fit forward: {error}. Given: {call}; {accepts}.") from None
    free = [name for name in signature.parameters if name not in bound.arguments]
    for name in inputs.kwargs.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(name, free, n=1, cutoff=0.85)
        if near and name not in _further(forward):
            raise InputError(f"forward would ignore the input {name!r}: did you mean {near[0]!r}? {accepts}.")
    return bound


def _further(forward: Callable[..., Any]) -> set[str]:
    """Return the names that `**kwargs: Unpack[SomeTypedDict]` says."""
    try:
        signature = inspect.signature(forward, eval_str=True)
    except Exception:  # annotations may name what is imported for type checkers alone
        return set()
    rest = next((p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    annotation = typing.get_args(rest.annotation) if rest is not None else ()
    return set().union(*(getattr(kind, "__annotations__", {}) for kind in annotation))


def signature_text(signature: inspect.Signature) -> str:
    """Return the names in a signature, `=` after those that may be left out: `(input_ids, mask=, **kwargs)`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = (
        stars.get(p.kind, "") + name + ("" if p.default is inspect.Parameter.empty else "=")
        for name, p in signature.parameters.items()
    )
    return f"({', '.join(names)})"


def without_cache(model: nn.Module, inputs: Inputs, running: bool = False) -> tuple[Inputs, str | None]:
    """Switch the key/value cache off in these inputs, where the inputs or the config would switch it on.

    Args:
        model: whose config may ask for a cache. inputs: of one call.
        running: whether it is a call of a sharded module: a cache that is asked for, or is passed in by its tensors
            (`ir/carried.py`), stays.

    Returns: the inputs, and a note for the plan where something was switched off.
    Raises:
        InputError: a cache is passed in.
    """
    signature = inspect.signature(model.forward)
    arguments = bind(model.forward, inputs).arguments | inputs.kwargs
    for name in CACHES:
        cache = arguments.get(name)
        if cache is not None and not (running and compat.is_node(cache)):
            raise InputError(
                f"The input {name!r} is a cache ({type(cache).__name__}), and plans are made for calls without "
                f"one. Leave {name!r} out of the example inputs; the sharded module's calls and generate() take it."
            )
    # A forward with **kwargs takes use_cache without naming it.
    parameter = signature.parameters.get("use_cache")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if parameter is None and not takes_any:
        return inputs, None
    use_cache, reason = arguments.get("use_cache"), "use_cache=True was given"
    if use_cache and running:
        return inputs, None
    # Asked in the order in which a forward of transformers decides: the argument, its default, the config, where True
    # is the default (Llama). So use_cache=False in the call wins over all.
    if use_cache is None and parameter is not None and parameter.default is True:
        use_cache, reason = True, "the default of use_cache is True"
    if use_cache is None and any(getattr(c, "use_cache", False) for c in _configs(getattr(model, "config", None), ())):
        use_cache, reason = True, "config.use_cache=True"
    if not use_cache:
        return inputs, None
    # A forward that returns its cache would have the keys and values of every layer as outputs of the plan.
    return _replace(signature, inputs, "use_cache", False), f"captured without the key/value cache ({reason})"


def with_cache(model: nn.Module, inputs: Inputs) -> Inputs | None:
    """Switch the key/value cache on in these inputs; None where `forward` takes no `use_cache`.

    Args:
        model: whose config says of a forward with `**kwargs` whether it knows a cache. inputs: of one call.
    """
    signature = inspect.signature(model.forward)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    has_cache = takes_any and any(hasattr(c, "use_cache") for c in _configs(getattr(model, "config", None), ()))
    if "use_cache" not in signature.parameters and not has_cache:
        return None
    return _replace(signature, inputs, "use_cache", True)


def _replace(signature: inspect.Signature, inputs: Inputs, name: str, value: object) -> Inputs:
    """Return inputs with one argument set; it stays positional where it was given so."""
    names = list(signature.parameters)
    at = names.index(name) if name in names else len(inputs.args)
    if at < len(inputs.args):
        return Inputs(*inputs.args[:at], value, *inputs.args[at + 1 :], **inputs.kwargs)
    return Inputs(*inputs.args, **{**inputs.kwargs, name: value})


def for_model(model: nn.Module) -> Inputs | None:
    """Make small example inputs for a transformers model, from its config, `main_input_name` and `forward`'s signature.

    Text is (2, 16) token ids, images (2, channels, height, width), videos (2, frames, channels, height, width), audio
    (2, samples) or features as the config says. Two towers (text beside images or audio) are both fed, except where
    the text must hold placeholders for the other: then text alone. Equal on every rank, in the model's dtype, on the
    model's device (the CPU for a meta model).

    Returns: the inputs as keyword arguments; None for another module, or where the config does not say enough.
    """
    if not is_transformers(model):
        return None
    parameters = inspect.signature(model.forward).parameters
    names = _input_names(model, parameters)
    if any(name not in MAKERS or name not in parameters for name in names):
        return None
    generator = torch.Generator().manual_seed(0)
    example = next(model.parameters(), torch.empty(0))
    device = torch.device("cpu") if example.is_meta else example.device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tensors = {name: MAKERS[name](getattr(model, "config", None), generator) for name in names}
    for name, x in tensors.items():
        tensors[name] = x.to(device, dtype if x.is_floating_point() else x.dtype)
    return Inputs(**tensors)


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model speaks transformers' protocol: a config, and a class that names its main input."""
    return hasattr(type(model), "main_input_name") and getattr(model, "config", None) is not None


def _input_names(model: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the inputs to make: the main one, those that `forward` requires, other towers', the decoder's."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    empty = inspect.Parameter.empty
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [main] if isinstance(main, str) else list(main)
    names += [name for name, p in parameters.items() if p.default is empty and p.kind not in variadic]
    towers = [name for field, name in TOWERS.items() if getattr(config, field, None) is not None]
    if not any(getattr(config, field, None) is not None for field in PLACEHOLDERS):
        names += [name for name in towers if name in parameters]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        names.append("decoder_input_ids")
    return list(dict.fromkeys(names))


def _configs(config: object, kinds: tuple[str, ...]) -> list[object]:
    """List the configs that may hold a field: sub-configs whose name holds one of `kinds`, the config, others."""
    if config is None:
        return []
    subs = {name: sub for name, sub in vars(config).items() if hasattr(sub, "model_type")}
    fits = [sub for kind in kinds for name, sub in subs.items() if kind in name]
    return [*fits, config, *subs.values()]


def _field(config: object, kinds: tuple[str, ...], *names: str) -> Any:
    """Return the first of the fields `names` that a config sets, or None. See `_configs` for the order."""
    values = (getattr(c, name, None) for c in _configs(config, kinds) for name in names)
    return next((value for value in values if value is not None), None)


TEXT, DECODER = ("text", "encoder"), ("decoder", "text")
VISION, AUDIO = ("vision", "image", "encoder"), ("audio", "speech", "encoder")


def _ids(config: object, generator: torch.Generator, kinds: tuple[str, ...] = TEXT, length: int = LENGTH) -> Tensor:
    """Draw token ids over the whole vocabulary, without special ones (padding, end, mask...)."""
    vocabulary = _field(config, kinds, "vocab_size", "src_vocab_size") or 256
    longest = _field(config, kinds, "max_position_embeddings", "max_target_positions") or length
    length = min(length, longest) if longest > 0 else length  # XLNet says -1: no limit
    plain = torch.ones(vocabulary, dtype=torch.bool)
    for c in _configs(config, kinds):
        for name, value in vars(c).items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                special = value if isinstance(value, (list, tuple)) else [value]
                plain[[i for i in special if isinstance(i, int) and 0 <= i < vocabulary]] = False
    choice = plain.nonzero()[:, 0] if plain.any() else torch.arange(vocabulary)
    return choice[torch.randint(len(choice), (BATCH, length), generator=generator)]


def _pixels(config: object, generator: torch.Generator) -> Tensor:
    size = _field(config, VISION, "image_size", "crop_size") or 224
    size = size.values() if isinstance(size, Mapping) else size
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    frames = _field(config, VISION, "num_frames", "frames_per_clip")
    channels = _field(config, VISION, "num_channels", "in_channels", "in_chans") or 3
    return torch.randn((BATCH, *([frames] if frames else []), channels, height, width), generator=generator)


def _wave(config: object, generator: torch.Generator) -> Tensor:
    """Draw sound: samples that the convolutional front end turns into `FRAMES`, or a spectrogram (time, mel bins)."""
    kernels, strides = _field(config, AUDIO, "conv_kernel"), _field(config, AUDIO, "conv_stride")
    bins, channels = _field(config, AUDIO, "num_mel_bins"), _field(config, AUDIO, "audio_channels")
    shape: tuple[int, ...] = (SAMPLES,) if channels is None else (channels, SAMPLES)
    if kernels and strides:
        samples = FRAMES
        for kernel, stride in reversed(list(zip(kernels, strides, strict=True))):
            samples = (samples - 1) * stride + kernel
        shape = (samples,)
    elif bins:
        shape = (_field(config, AUDIO, "max_length") or FRAMES, bins)
    return torch.randn((BATCH, *shape), generator=generator)


# Features of sound: the first row whose fields the config has gives the shape, without the batch.
FEATURES: tuple[tuple[tuple[str, ...], Callable[..., tuple[int, ...]]], ...] = (
    (("spec_size", "num_mel_bins"), lambda size, bins: (1, size * (size // bins), bins)),
    (("feature_projection_input_dim",), lambda size: (FRAMES, size)),
    (("input_feat_per_channel", "input_channels"), lambda size, channels: (2 * FRAMES, size * channels)),
    (("num_mel_bins", "max_source_positions"), lambda bins, positions: (bins, 2 * positions)),
    (("num_mel_bins",), lambda bins: (2 * FRAMES, bins)),
)


def _features(config: object, generator: torch.Generator) -> Tensor:
    for fields, shape in FEATURES:
        values = [_field(config, AUDIO, field) for field in fields]
        if all(isinstance(value, int) for value in values):
            return torch.randn((BATCH, *shape(*values)), generator=generator)
    return torch.randn((BATCH, 2 * FRAMES, 80), generator=generator)


MAKERS: dict[str, Callable[[object, torch.Generator], Tensor]] = {
    "input_ids": _ids,
    # Of another length, so that the two sizes are two symbols.
    "decoder_input_ids": partial(_ids, kinds=DECODER, length=DECODER_LENGTH),
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_values": _wave,
    "input_features": _features,
}
TOWERS = {"text_config": "input_ids", "vision_config": "pixel_values", "audio_config": "input_features"}
PLACEHOLDERS = tuple(
    f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")
)  # config fields of models whose text holds a token per image patch or audio frame
