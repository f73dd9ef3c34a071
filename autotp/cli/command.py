"""The frame that makes a function a command: shared options, one-line errors, exit codes."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from autotp.errors import AutoTPError, CaptureError, InputError, PlanError

from .screen import Screen, rank

FINE, NO, USAGE, CAPTURE, OTHER, STOPPED = 0, 1, 2, 3, 4, 130
GRACE = 1.5  # seconds after Ctrl-C in which a command may end by itself
CODES: tuple[tuple[type[BaseException], int], ...] = (
    (InputError, USAGE), (PlanError, NO), (CaptureError, CAPTURE), (OSError, USAGE), (KeyboardInterrupt, STOPPED),
)  # fmt: skip


class QuickHelp:
    """A command's help, which is off unless asked for, which typer otherwise loads pydantic to find."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, with a default."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class PlainCommand(QuickHelp, TyperCommand):
    """A command by itself."""


class CommandGroup(QuickHelp, TyperGroup):
    """Commands whose usage errors are one line, and whose results are exit codes."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run and leave the process with the command's exit code."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        arguments = extra.get("args", args[0] if args else None)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except Exception as error:
            code = _usage(error, "--json" in (sys.argv if arguments is None else arguments))
        sys.exit(code or FINE)


def _usage(error: Exception, as_json: bool) -> int:
    """Report an error of the command line itself; anything else goes on."""
    format_message: Callable[[], str] | None = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "autotp"
    if format_message().strip():  # nothing where the help was asked for, which has been printed
        Screen(json=as_json).fail(f"{' '.join(format_message().split())} See {where} --help.", "UsageError", USAGE)
    return USAGE


def command(fn: Callable[..., int], everywhere: bool = False, drains: bool = False) -> Callable[..., int]:
    """Make a function a command for typer: its parameters are arguments and options, as its docstring says them.

    Args:
        fn: gives the exit code. A parameter without a default is an argument; one that is annotated with a dataclass
            stands for options, one for each field; one of these is the `Screen`.
        everywhere: whether ranks other than the first run it too.
        drains: whether Ctrl-C is its own to hear, and may take longer than that of others.
    """
    hints = get_type_hints(fn)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(fn)
    def call(**values: Any) -> int:
        built: dict[str, Any] = {}
        for n, cls in groups.items():
            built[n] = cls(**{f.name: values.pop(f.name) for f in fields(cls) if f.init})
        screen = next(x for x in built.values() if isinstance(x, Screen))
        if rank() != 0 and not everywhere:
            return FINE
        with _quiet(screen), nullcontext() if drains else _stoppable(screen):
            try:
                code = fn(**values, **built)
                _printed().flush()  # a reader that is gone shows here, not when the interpreter ends
                return code
            except (Exception, KeyboardInterrupt) as error:
                return _failed(screen, error)

    parameters = [p for name in inspect.signature(fn).parameters for p in _parameters(fn, name, hints[name])]
    call.__doc__ = described(fn)[0]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _parameters(fn: Callable[..., Any], name: str, hint: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for typer, or those that a dataclass stands for."""
    if not is_dataclass(hint):
        default, words = inspect.signature(fn).parameters[name].default, described(fn)[1]
        yield _parameter(name, hint, default, words.get(name, ""), None)
        return
    types, (title, words) = get_type_hints(hint), described(hint)
    for f in fields(hint):
        if f.init:
            yield _parameter(f.name, types[f.name], f.default, words.get(f.name, ""), title)


def described(x: Any) -> tuple[str, dict[str, str]]:
    """Return the first part of a docstring, and the text of its Args or Attributes, by name."""
    text, *listed = re.split(r"\n\n(?:Args|Attributes):\n", inspect.getdoc(x) or "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", "".join(listed), re.MULTILINE)
    return text, {name: " ".join(words.split()) for name, words in entries}


# Kind of an option -> what stands for its value in help, and what is allowed: whole numbers count.
KINDS: dict[Any, dict[str, Any]] = {
    str: {"metavar": "NAME"}, int: {"metavar": "N", "min": 1}, float: {"metavar": "NUMBER", "min": 0},
    Path: {"metavar": "FILE"}, bool: {"metavar": ""},
}  # fmt: skip


def _parameter(name: str, hint: Any, default: Any, words: str, panel: str | None) -> inspect.Parameter:
    """Make a parameter for typer: an argument where it has no default, otherwise an option."""
    kinds = {x: None for part in (hint, *get_args(hint)) for x in (part, *get_args(part)) if x in KINDS}
    kind, flag = next(iter(kinds)), name.replace("_", "-")
    declared = f"--{flag}/--no-{flag}" if kind is bool and default is None else f"--{flag}"
    has_value = default is not None and kind is not bool
    info = typer.Option(declared, help=words, rich_help_panel=panel, show_default=has_value, **KINDS[kind])
    if default is inspect.Parameter.empty:
        info = typer.Argument(metavar=name.upper(), help=words, show_default=False)
    annotation = Annotated[hint, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def _quiet(screen: Screen) -> Iterator[None]:
    """Leave nothing but the result on stdout where programs read it; libraries' warnings and logs only with --debug."""
    with redirect_stdout(sys.stderr) if screen.json else nullcontext(), warnings.catch_warnings():
        if not screen.debug:
            warnings.simplefilter("ignore")
        log, level = logging.getLogger("autotp"), logging.getLogger("autotp").level
        handler = logging.StreamHandler()
        if screen.debug:
            log.addHandler(handler)
            log.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)


@contextmanager
def _stoppable(screen: Screen) -> Iterator[None]:
    """Let Ctrl-C end the process within two seconds in this context, also amid a solver that ignores it.

    Python raises a KeyboardInterrupt between two of its own steps, and loses one in a call that nobody waits for. Its
    byte on the socket comes at once, and wakes a thread.
    """
    if threading.current_thread() is not threading.main_thread():  # as in another program's tests: signals are its own
        yield
        return
    wakes, woken = socket.socketpair()
    woken.setblocking(False)

    def watch() -> None:
        with wakes:
            while arrived := wakes.recv(1):
                if arrived[0] == signal.SIGINT and not over.wait(GRACE):
                    _failed(screen, KeyboardInterrupt())
                    os._exit(STOPPED)

    over, before = threading.Event(), signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        woken.close()  # which ends the thread


def _printed() -> TextIO:
    """Return the stream that the shell reads, also where `sys.stdout` is redirected."""
    return sys.__stdout__ or sys.stdout


def _failed(screen: Screen, error: BaseException) -> int:
    """Report an error of a command, and return its exit code."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError):  # such as `autotp plan ... | head`: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), _printed().fileno())
        return FINE
    if screen.debug:
        traceback.print_exception(error, file=sys.stderr)
    code = next((c for kind, c in CODES if isinstance(error, kind)), OTHER)
    screen.fail(_message(error), type(error).__name__, code, everywhere=code == OTHER)
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C, without a result."
    if isinstance(error, OSError):
        return f"{error.filename or type(error).__name__}: {error.strerror or error}."
    if isinstance(error, AutoTPError):
        return str(error).strip()
    return f"unexpected {type(error).__name__}: {str(error).strip() or 'no message'} (--debug shows where it came from)"
