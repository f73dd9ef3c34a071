"""The programs that a sharded module runs, and what a further capture is made into one by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx, nn

from autotp.comm.ranks import Ranks
from autotp.driver.pipeline import PLAIN, Want
from autotp.ir.graph import Capture
from autotp.passes.optimise import Fired
from autotp.passes.shard.rewrite import Place, Sharded
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.lower.regional import Compiler

from .call_key import Form


@dataclass
class Program:
    """One captured graph made runnable on this rank: for one mode, dtype and autocast state.

    Attributes:
        form: of the call that it was captured with.
        seeds: how many operators draw by counters.
        fired: what became of each optimisation; `compiler`: what compiles it.
    """

    capture: Capture
    sharded: Sharded
    graph: fx.Graph
    key: int
    form: Form
    seeds: int = 0
    fired: Fired = ()
    compiler: Compiler | None = None


@dataclass
class Source:
    """What a sharded module keeps of the original: its skeleton, and how a further capture becomes a program.

    Attributes:
        bare: the original with fake tensors; it holds no weights.
        make: the program of a capture, under the module's plan.
        ranks: None in one plain process.
        aliases: every name of a parameter or buffer -> the first name of the same tensor.
        want: what captures are to be.
        lowering: how programs run.
        check: compare input values between the ranks at every call.
        ready: captures that exist already.
    """

    bare: nn.Module
    make: Callable[[Capture], Sharded]
    ranks: Ranks | None
    tp: int
    aliases: dict[str, str]
    want: Want = PLAIN
    lowering: Lowering = field(default_factory=Lowering)
    check: bool = False
    ready: list[tuple[Capture, Sharded]] = field(default_factory=list)

    def places(self) -> dict[str, Place]:
        """This rank's place on each mesh axis; rank 0's in one plain process, which does not run."""
        if self.ranks is None:
            return {"tp": Place(0, self.tp, ""), "dp": Place(0, 1, "")}
        axes = {"tp": self.ranks, "dp": self.ranks.batch}
        return {name: Place(x.rank, x.tp, x.group_name) for name, x in axes.items() if x is not None}
