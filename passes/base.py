"""The base class of passes, and the steps between passes: checks, counts and times, dumps (`AUTOTP_LOG`).

A pass rewrites one kind of program in place and says what it changed. This is a whole one:

    class DropDetach(Pass[Capture]):
        name = "drop-detach"

        def run(self, program: Capture) -> Changes:
            cuts = program.graph.find_nodes(op="call_function", target=aten.detach.default)
            for node in cuts:
                node.replace_all_uses_with(node.args[0])
                program.graph.erase_node(node)
            return Changes(len(cuts), "detached values read as they are")

Its place in the order is a line of `autotp/driver/schedule.py`, where the kinds of programs stand too, from an exported
module to the program of one rank. Options are fields: `Overlap(chunks=4)`. A program that is needed as it was (one
capture is planned for several degrees) is given to the passes as a record of its own (`dataclasses.replace`), and a
pass gives that a graph of its own before it changes it (`Capture.own_graph`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import fx

from autotp.ir.graph import Capture
from autotp.log import dump, log

from .schema import enabled, verify


class HasGraph(Protocol):
    """Program that passes rewrite: some record of a graph and of what is known of it."""

    @property
    def graph(self) -> fx.Graph: ...


P = TypeVar("P", bound=HasGraph)


@dataclass(frozen=True)
class Changes:
    """Changes of a pass: in how many places, and in words; without places, why there are none."""

    count: int
    what: str = ""

    def __str__(self) -> str:
        return f"{self.count} changes ({self.what})"


@dataclass(frozen=True)
class Pass(Generic[P]):
    """A named rewrite of a program in place; one with options is a frozen dataclass, whose fields they are."""

    name: ClassVar[str]
    priced: ClassVar[bool] = False  # whether a program that was planned before may come to it

    def idle(self, program: P) -> str:
        """Say why it has nothing to do for this program unless it is asked for by name; empty where it runs by
        itself."""
        return ""

    def run(self, program: P) -> Changes:
        """Rewrite the program, and say what was changed."""
        raise NotImplementedError

    def check(self, program: P, before: Set[fx.Node]) -> None:
        """Refuse marks that the pass forgot (`autotp.passes.schema`); `before` has the nodes that it found."""
        if isinstance(program, Capture):
            verify(program, f"pass {self.name}", priced=self.priced)


def run_passes(
    program: P, passes: Sequence[Pass[P]], switches: Mapping[str, bool] | None = None
) -> tuple[tuple[str, Changes], ...]:
    """Run passes in order; a graph that was changed is linted and dumped, and every pass is logged with its time.

    Args:
        program: what they rewrite.
        passes: of one kind of program.
        switches: on or off by name; what is not named decides by `idle`.

    Returns:
        The name of each pass with its changes.
    """
    results = []
    for number, step in enumerate(passes):
        start = time.process_time()
        before = set(program.graph.nodes) if enabled() else set()
        changes = _run(step, program, switches or {})
        if changes.count:
            program.graph.lint()
            step.check(program, before)
        log.debug("pass %s: %s, %.1f ms", step.name, changes, 1e3 * (time.process_time() - start))
        if changes.count:
            dump(f"{number:02d}-{step.name}", program.graph)
        results.append((step.name, changes))
    return tuple(results)


def _run(step: Pass[Any], program: Any, switches: Mapping[str, bool]) -> Changes:
    """Run one pass; gives its changes, or the reason why it does not run in place of them."""
    switch = switches.get(step.name)
    if switch is False:
        return Changes(0, "switched off")
    reason = "" if switch else step.idle(program)
    return Changes(0, reason) if reason else step.run(program)
