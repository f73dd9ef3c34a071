"""One-shot all-reduces: sums over ranks of few bytes in one step, through symmetric memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autotp.comm import one_shot
from autotp.cost import tensor_bytes
from autotp.passes.base import Changes

from .base import Optimisation, RankProgram
from .judged import Change, Judged, Position
from .products import over_tp

WHAT = "all-reduce in one step"


@dataclass(frozen=True)
class OneShot(Optimisation):
    """Where ranks read each other's memory: every small all-reduce that was measured to be faster so."""

    name: ClassVar[str] = "one_shot"
    measurable: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def idle(self, program: RankProgram) -> str:
        """For GPUs that share memory, where somebody measures it."""
        alone = program.setting.place.size == 1
        return "nowhere: nothing is sent in one process" if alone else self.unshared(program.setting)

    def run(self, program: RankProgram) -> Changes:
        """Rewrite the conversions."""
        judged = Judged(program, self, _rewritten)
        fired = Counter(x.name for x in _rewritten(program.graph, judged.refused))
        return Changes(
            sum(fired.values()), ", ".join(judged.summary(fired)) or "nowhere: the plan has no small all-reduce"
        )


def _rewritten(graph: fx.Graph, refused: Container[Position]) -> Iterator[Change]:
    for node in list(graph.nodes):
        if not over_tp(node, *one_shot.FORMS) or (node, 0) in refused:
            continue
        if node.args[1].reduction == "sum" and tensor_bytes(node.meta["val"]) <= one_shot.MOST:
            node.target = one_shot.FORMS[node.target]
            yield Change(WHAT, (node, 0), node)
