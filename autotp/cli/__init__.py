"""autotp from the command line: `python -m autotp`, or the script `autotp`; the commands, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from autotp import __version__

from .command import CommandGroup, PlainCommand, command
from .doctor import doctor
from .on_machine import calibrate, serve, tune, verify
from .planning import explain, plan, sweep

__all__ = ["app", "main"]

app = typer.Typer(
    name="autotp",
    cls=CommandGroup,
    help="Tensor parallelism for an untouched PyTorch model: plan it, read the plan, prove it.",
    epilog="Exit codes: 0 fine; 1 the answer is no (a proof failed, nothing fits, a pin cannot be kept); 2 wrong usage "
    "or input; 3 the model cannot be captured; 4 anything else; 130 stopped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (plan, sweep, explain, verify, calibrate, tune, serve, doctor):
    frame = command(function, everywhere=function in (calibrate, tune), drains=function is serve)
    app.command(cls=PlainCommand)(frame)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"autotp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Read the options that every command has."""


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="autotp")
