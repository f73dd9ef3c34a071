"""States that a user names: outputs of a model, each of which is an input of the next call."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autotp import compat
from autotp.errors import InputError
from autotp.inputs import Inputs, bind
from autotp.text import listed

from .graph import STATE, Capture

Path = tuple[int | str, ...]  # of an output, or of a container of some: places and keys, from the outside in
Names = tuple[tuple[Path, str], ...]  # and the argument of forward that takes it

FORM = "give a mapping such as {1: 'past_k', 2: 'past_v'}: the place or key of an output, and the name of an argument"


def read_carried(carried: Any) -> Names:
    """Read and check `carried` of the public functions.

    Raises:
        InputError: it is no mapping of places to names, or two outputs come back as one input.
    """
    if carried is None:
        return ()
    if not isinstance(carried, Mapping):
        raise InputError(f"carried is {type(carried).__name__}; {FORM}.")
    names: dict[Path, str] = {}
    for key, name in carried.items():
        path = key if isinstance(key, tuple) else (key,)
        places = [isinstance(x, int | str) and not isinstance(x, bool) for x in path]
        if not path or not all(places) or not isinstance(name, str):
            raise InputError(f"carried has {key!r}: {name!r}; {FORM}.")
        names[path] = name
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise InputError(f"carried lets two outputs come back as {twice[0]!r}; {FORM}.")
    return tuple(names.items())


def places_of(forward: Callable[..., Any], spec: compat.TreeSpec, names: Iterable[str]) -> dict[int, str]:
    """Map the leaves of a call that are states: their flat position -> the state's name.

    Args:
        forward: says which argument is where. spec: of `(args, kwargs)`.
        names: of the arguments that are states, or containers of some.
    """
    args, kwargs = compat.tree_unflatten(list(range(spec.num_leaves)), spec)
    arguments = {**bind(forward, Inputs(*args, **kwargs)).arguments, **kwargs}
    return {at: place for name in names if name in arguments for place, at in _leaves(name, arguments[name])}


def check_names(forward: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse arguments that `forward` has not.

    Raises:
        InputError: it names one.
    """
    accepted = list(inspect.signature(forward).parameters)
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise InputError(f"carried names {unknown[0]!r}, and forward has no such argument; it has {listed(accepted)}.")


def name_states(program: Capture, forward: Callable[..., Any], names: Names) -> None:
    """Tell a capture which of its inputs and outputs are states.

    Args:
        program: is changed. forward: of the model, for the names of its arguments.
        names: of each state the output that it leaves by, and the argument that it comes back as.

    Raises:
        InputError: there is no such output, or it has other parts than the input that it comes back as.
    """
    state_names = places_of(forward, program.in_spec, [name for _, name in names])
    for at, leaf in enumerate(program.inputs):
        if at in state_names and leaf.is_tensor:
            leaf.kind, leaf.name = STATE, state_names[at]
    states = {leaf.name for leaf in program.inputs if leaf.kind is STATE}
    # Outputs as positions in the program, which gives the values of buffers too: `follow` then finds what it would
    # find in a call's outputs.
    positions = iter(i for i in range(len(program.results)) if i not in program.mutations)
    outputs = compat.tree_unflatten([next(positions) for _ in range(program.out_spec.num_leaves)], program.out_spec)
    for path, name in names:
        positions_of = dict(_leaves(name, follow(outputs, path)))
        before = {x for x in states if x == name or x.startswith((name + "[", name + "."))}
        if before and before != set(positions_of):
            part = min(before ^ set(positions_of))
            raise InputError(
                f"carried says that the output {_text(path)} comes back as {name!r}, and only one of them has "
                f"{part!r}. Name outputs that have the parts of the input."
            )
        program.carried |= {at: place for place, at in positions_of.items()}


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """List the leaves of an argument or output, each with a name that begins with the argument's."""
    pairs = [(place, leaf) for place, leaf in compat.named_leaves(tree).items() if leaf is not None]
    if len(pairs) == 1 and pairs[0][1] is tree:
        return [(name, tree)]
    out = []
    for place, leaf in pairs:
        out.append((f"{name}{place}" if place.startswith("[") else f"{name}.{place}", leaf))
    return out


def follow(outputs: Any, path: Path) -> Any:
    """Return what is at this place of a model's outputs."""
    value: Any = outputs
    if path == (0,) and compat.tree_leaves(outputs) == [outputs]:  # the one output of a model
        return outputs
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            outputs_text = listed(compat.named_leaves(outputs))
            raise InputError(
                f"carried names the output {_text(path)}, and the model gives none there; it gives {outputs_text}."
            ) from None
    return value


def _text(path: Path) -> str:
    return repr(path[0] if len(path) == 1 else path)
