"""Turns: one call at a time in a process, and an exception that ends one is told to the other ranks.

A forward, a backward, `generate()` and a save are a turn each, within which there may be others. Threads queue for
them, for the collectives of two would mix. A rank whose turn ends by an exception sends that to all ranks that its
channels reach: they raise it where they meet this rank next, instead of waiting for it, and the turn after that is
common again. Where all ranks leave at the same place each sends it to the others, and nobody reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any

from torch import Tensor

from autotp.text import message_of

from .channel import LEAVES, Channel

CAUSE_CHARACTERS = 400  # characters of a cause that other ranks are told
TOLD = "_told_by_autotp"  # an attribute of an error that the other ranks have heard of


class _UnderWay:
    """The outermost turn of this process.

    Attributes:
        lock: held by the thread that has the turn. depth: of turns within it.
        channels: by which it may meet other ranks.
        holds: whether collectives are under way, which a hook's error must not keep from the other ranks.
        hook_error: that error. hook_changes: how many hooks then put something in the place of what they saw.
    """

    def __init__(self) -> None:
        self.lock, self.depth = threading.RLock(), 0
        self.channels: dict[Channel, None] = {}
        self.holds = False
        self.hook_error: BaseException | None = None
        self.hook_changes = 0


_now = _UnderWay()


class Turn(ContextDecorator):
    """Context in which this thread alone calls sharded modules, and whose failure is told to the other ranks.

    It decorates functions too.

    Args:
        what: the work, in words that other ranks are told.
        channels: connections to the ranks that it meets, as far as these are known.
    """

    def __init__(self, what: str, *channels: Channel) -> None:
        self.what, self.channels = what, channels

    def __enter__(self) -> None:
        _now.lock.acquire()
        Channel.begun += not _now.depth
        _now.depth += 1
        _now.channels.update(dict.fromkeys(self.channels))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None and _now.depth == 1 and not hasattr(error, TOLD):
                depart(f"{self.what}, by {message_of(error)}")
                setattr(error, TOLD, True)  # it may be raised within another turn again, so that this is told
        finally:
            _now.depth -= 1
            if not _now.depth:
                _now.channels.clear()
                release()
            _now.lock.release()


def within() -> bool:
    """Return whether the turn that this thread has is within another one, as that of a call that a hook makes."""
    return _now.depth > 1


def joined(channel: Channel) -> None:
    """Note that the turn that is under way meets other ranks by this channel too."""
    if _now.depth:  # not so in a backward that torch began itself
        _now.channels[channel] = None


def call_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a user's hook on a module; amid collectives its error waits for `release`, and ends the calls of hooks."""
    if not _now.holds:
        return hook(*args)
    if _now.hook_error is None:
        before = _versions(args)
        try:
            result = hook(*args)
        except BaseException as error:  # Ctrl-C in it too: the other ranks are amid the same collectives
            _now.hook_error = error
            return None
        _now.hook_changes += result is not None or _versions(args) != before
        return result
    return None


def _versions(args: Iterable[Any]) -> list[int]:
    """List the versions of tensors among a hook's arguments, by which writes show; inference tensors have none."""
    values: list[Any] = []
    for arg in args:
        values += arg if isinstance(arg, tuple | list) else (arg,)
    return [x._version for x in values if isinstance(x, Tensor) and not x.is_inference()]


def hold() -> None:
    """Begin to keep errors of hooks, and to count what they change."""
    _now.holds, _now.hook_error, _now.hook_changes = True, None, 0


def holding() -> bool:
    """Return whether collectives are under way: a hook that begins others on one rank alone would wait for ever."""
    return _now.holds


def release() -> tuple[BaseException | None, int]:
    """End what `hold` began; return the error that was kept and the count of changes."""
    error, _now.holds, _now.hook_error = _now.hook_error, False, None
    return error, _now.hook_changes


def depart(text: str, *channels: Channel) -> None:
    """Tell the other ranks that this one leaves, except those that left at the same place or were told of it.

    A rank that has begun something else since tells all again, for the others would wait for it.

    Args:
        text: what is left, and why. channels: further ones beside those of the turn that is under way.
    """
    joint = [*_now.channels, *channels]
    around = [wider for channel in joint for wider in channel.around]  # who waits with other tp groups by now
    for link in {link for channel in (*joint, *around) for link in channel.links.values()}:
        if link.departure != (link.turn, Channel.begun):
            link.send(LEAVES, text.encode()[:CAUSE_CHARACTERS])
    for channel in joint:
        channel.leave()


def forked() -> None:
    """Reset the state in a child process, where no other thread can hold the lock."""
    _now.__init__()
