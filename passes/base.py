"""What a pass is, and the one hook between passes: verification, timing, dumps (`AUTOTP_LOG`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autotp.graph import Capture

log = logging.getLogger("autotp.passes")


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a captured graph; options are fields. `run` returns how many places it changed."""

    name: ClassVar[str] = "pass"

    def run(self, program: Capture) -> int:
        raise NotImplementedError


def run_passes(program: Capture, passes: Sequence[Pass]) -> None:
    """Run the passes in order; the graph is linted after each.

    `AUTOTP_LOG=debug` logs changes and times, `AUTOTP_LOG=DIR` also writes the graph after every pass to DIR.
    """
    where = os.environ.get("AUTOTP_LOG", "")
    for number, each in enumerate(passes):
        start = time.process_time()
        changed = each.run(program)
        program.graph.lint()
        log.debug("%s: %d changes, %.1f ms", each.name, changed, 1e3 * (time.process_time() - start))
        if where and where.lower() not in ("debug", "info", "warning") and changed:
            Path(where).mkdir(parents=True, exist_ok=True)
            Path(where, f"{number:02d}-{each.name}.txt").write_text(str(program.graph))
