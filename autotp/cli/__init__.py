"""autotp from the command line: `python -m autotp`, or the script `autotp`."""

from .app import app, main

__all__ = ["app", "main"]
