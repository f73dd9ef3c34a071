"""`generate()` of a sharded module: the original class's own, on an object of that class whose forward is sharded."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autotp.comm.ranks import Ranks, broadcast
from autotp.errors import StateError

NO_GENERATE = (
    "{name} has no generate(): its class brings none. Those of transformers that end in a language model's head do; "
    "for others call the sharded module itself, with the cache that it gave."
)

_drawing: list[str] = []  # groups whose ranks draw from rank 0's random numbers now


class Shell(nn.Module):
    """Stands for the original where its class generates: all but the forward is the class's own.

    Its modules are the skeleton's, without weights.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: the original's classes may keep a register of what derives from them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The sharded module's, or that of its part which this stands for."""
        kwargs = {name: x for name, x in kwargs.items() if name not in self.__dict__["_of_generate"]}
        return self.__dict__["_call_at"](self.__dict__["_path"], args, kwargs)

    __call__ = nn.Module.__call__

    def get_compiled_call(self, compile_config: Any = None) -> Any:
        """The plain call: what runs is compiled by autotp or not at all."""
        return self.__call__

    def _extract_generation_mode_kwargs(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', whose loop passes to the forward what `generate` takes for itself, such as a tokenizer."""
        options: Any = super()._extract_generation_mode_kwargs(*args, **kwargs)  # type: ignore[misc]
        own = set(options) - set(inspect.signature(self.forward).parameters)
        self.__dict__["_of_generate"] |= own  # of a `generate` within one, as where prompts are healed, too
        return options

    def _has_unfinished_sequences(self, this_peer_finished: Any, synced_gpus: bool, device: torch.device) -> bool:
        """Whether to go on, with `synced_gpus` as long as a rank of any axis does: by a turn, which ranks can leave."""
        goes_on = not bool(this_peer_finished)
        return self.__dict__["_any_rank"](goes_on, "next token of generate()") if synced_gpus else goes_on

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False


@functools.lru_cache(256)
def shell_class(original: type[nn.Module]) -> type[Shell]:
    """The class of shells of models of this class."""

    @functools.wraps(original.forward)
    def forward(self: Shell, *args: Any, **kwargs: Any) -> Any:
        return Shell.forward(self, *args, **kwargs)

    body = {n: getattr(original, n) for n in ("__module__", "__qualname__", "__doc__")} | {"forward": forward}
    kind: Any = type(original)
    return kind(original.__name__, (Shell, original), body)


def shell(
    sharded: Any, bare: nn.Module, call: Callable[..., Any], any_rank: Callable[[bool, str], bool] = lambda own, _: own
) -> Any:
    """An object of the original's class that calls the sharded module, and so do its parts.

    Args:
        sharded: what was set on it counts, such as its generation_config.
        bare: the original's skeleton.
        call: runs the sharded module's part at a path, with these positional arguments and keywords.
        any_rank: whether something is so on any rank of the module, of whether it is on this one and its name.

    Raises:
        StateError: the class has no `generate`.
    """
    if not callable(getattr(type(bare), "generate", None)):
        raise StateError(NO_GENERATE.format(name=type(bare).__name__))
    stand_ins: dict[int, nn.Module] = {}
    for path, module in bare.named_modules():
        stand_ins[id(module)] = _standing(call, module, path)
    for module in bare.modules():
        children = {name: child and stand_ins[id(child)] for name, child in module._modules.items()}
        stand_ins[id(module)].__dict__["_modules"] = children
    root = stand_ins[id(bare)]
    root.__dict__["_any_rank"] = any_rank
    plain = set(bare.__dict__) - set(nn.Module().__dict__)
    root.__dict__.update({n: sharded.__dict__[n] for n in plain if n in sharded.__dict__})
    return root


def _standing(call: Callable[..., Any], module: nn.Module, path: str) -> nn.Module:
    try:
        kind = shell_class(type(module))
    except TypeError:  # a class that allows no other to derive from it
        kind = type(module)
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(module.__dict__, _call_at=call, _path=path, _of_generate=set())
    return stand_in


@contextlib.contextmanager
def one_generator(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """Within this context every rank draws from rank 0's random numbers; those of the others go on as they were.

    What is drawn in a context within one, as that of an assistant which drafts, counts in the outer one.
    """
    if ranks is None or ranks.tp == 1 or ranks.group_name in _drawing:
        yield
        return
    cuda = device.type == "cuda"
    own = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None)
    common: Any = broadcast(ranks, own)
    _drawing.append(ranks.group_name)
    try:
        _draw_from(common, device)
        yield
    finally:
        _drawing.remove(ranks.group_name)
        if ranks.rank and not _drawing:
            _draw_from(own, device)


def _draw_from(state: Any, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
