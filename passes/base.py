"""What a pass is, and the one hook between passes: verification, timing, dumps (`AUTOTP_LOG`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotp.ir.graph import Capture
from autotp.log import dump, log

from .schema import verify


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a captured graph; options are fields. `run` returns how many places it changed."""

    name: ClassVar[str] = "pass"

    def idle(self, program: Capture) -> str:
        """Why it has nothing to do for this program; empty where it runs."""
        return ""

    def run(self, program: Capture) -> int:
        raise NotImplementedError


def run_passes(program: Capture, passes: Sequence[Pass]) -> None:
    """Run the passes in order; after each its changes and time are logged, and a changed graph is linted and dumped."""
    for number, each in enumerate(passes):
        start = time.process_time()
        changed = 0 if each.idle(program) else each.run(program)
        if changed:
            program.graph.lint()
            verify(program, f"pass {each.name}")
        log.debug("pass %s: %d changes, %.1f ms", each.name, changed, 1e3 * (time.process_time() - start))
        if changed:
            dump(f"{number:02d}-{each.name}", program.graph)
