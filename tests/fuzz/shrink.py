"""The smallest module that fails in the same way, and a script of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from . import plans
from .check import Failure, InvalidModule
from .modules import Module

TRIES = 200
PLANS = 2  # that are drawn for a smaller module


def shrink(
    module: Module, failure: Failure, check: Callable[[Module], Failure | None], tries: int = TRIES
) -> tuple[Module, Failure]:
    """Take a part away, or a simpler value, as long as what is left fails in the same way.

    Args:
        module: that fails; `failure`: how.
        check: what came of a module. tries: how many modules it is asked of at most.

    Returns:
        A module of which nothing more can be taken away so (or tries ran out), and its failure.
    """
    again = True
    while again and tries > 0:
        again = False
        for candidate in chain.from_iterable(map(_drawn_again, module.smaller())):
            if candidate == module:
                continue
            tries -= 1
            try:
                found = check(candidate)
            except InvalidModule:
                continue
            if found is not None and found.kind == failure.kind:
                module, failure, again = candidate, found, True
                break
            if tries <= 0:
                break
    return module, failure


def _drawn_again(module: Module) -> Iterator[Module]:
    """The module, and where its plan is drawn others of its plans: one seed draws another plan of a smaller graph."""
    yield module
    if module.plan == "any":
        yield from (replace(module, seed=module.seed + i) for i in range(1, PLANS))


def script(module: Module, failure: Failure) -> str:
    """A program of its own that shows a failure.

    Args:
        module: that fails; `failure`: how.
    """
    comment = "\n".join(f"# {line}" for line in failure.text.splitlines()[:12])
    verify = f"print(autotp.verify(build(), tp, (inputs(),), sequence_parallel={module.sequence}))"
    source, within = module.source(), ""
    if module.plan == "any":
        source += "\n\n" + Path(plans.__file__).read_text(encoding="utf-8").partition("import annotations\n")[2]
        within = f"    with any_plan({module.seed}):\n    "
    return f"{comment}\nimport autotp\n{source}\n\nfor tp in {module.degrees}:\n{within}    {verify}\n"
