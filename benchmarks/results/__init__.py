"""What was measured, and the command that measures again what is older than the code that it depends on."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str | None:
    """What git prints in a folder, without its end; None where it ends with another status than 0."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
