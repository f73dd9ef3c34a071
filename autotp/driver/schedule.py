"""The order of all passes, from the program of torch.export to that of one rank.

A pass has a place in this order or does not run. `AUTOTP_LOG=debug` prints each with its changes and its seconds, or
the reason why it had nothing to do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from autotp.capture.export_passes import EXPORTED, Exported
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest
from autotp.comm.ranks import PLAIN_PROCESS, Ranks
from autotp.ir.graph import Capture
from autotp.ir.precision import DELAYED
from autotp.passes import optimise
from autotp.passes.base import Pass, run_passes
from autotp.passes.canonicalise.autocast import ExplicitCasts
from autotp.passes.canonicalise.canonicalise import CANONICAL
from autotp.passes.canonicalise.rank_order import RankOrder
from autotp.passes.decompose.counter_random import CountedRandom
from autotp.passes.decompose.float8_products import Float8Products
from autotp.passes.decompose.loss_sums import DecomposeLosses, LossAlone
from autotp.passes.optimise import RankProgram
from autotp.passes.shard.batch_axis import BatchRules
from autotp.passes.shard.deal import DealAxis
from autotp.passes.shard.planner import Reading
from autotp.passes.shard.rewrite import ShardedProgram, ShardOperators, Specialise
from autotp.passes.shard.sequence_axis import SequenceRules

CapturePasses = tuple[Pass[Capture], ...]


class Schedule(NamedTuple):
    """Passes by the kind of program that they rewrite, in the order in which they run.

    Attributes:
        exported: of each attempt of capture: functional, and every block in full.
        canonical: of each attempt: one form for the rules to see, which is then compared with the model.
        requested: once a capture is the model: the rewrites that its request asks for.
        agreed: where every rank has captured for itself. Collective.
        planned: before rules are asked, where there is more than one rank.
        sharded: the program of all ranks, by the plan's decisions.
        rank: the program of one, and its optimisations.
    """

    exported: tuple[Pass[Exported], ...]
    canonical: CapturePasses
    requested: CapturePasses
    agreed: CapturePasses
    planned: CapturePasses
    sharded: tuple[Pass[ShardedProgram], ...]
    rank: tuple[Pass[RankProgram], ...]


def schedule(request: CaptureRequest = DEFAULT_CAPTURE, ranks: Ranks = PLAIN_PROCESS) -> Schedule:
    """Return the passes for a requested capture, in order, by these ranks."""
    products = Float8Products(request.precision)
    history = request.precision is not None and request.precision.recipe == DELAYED
    early = history or request.cp > 1  # largest values are then of all ranks; with dp alone, of a rank's own slice
    return Schedule(
        exported=EXPORTED,
        canonical=(*CANONICAL, ExplicitCasts()),
        requested=(
            *((products,) if early else ()),
            DealAxis(BatchRules, request.dp, ep=request.ep),
            CountedRandom(request.random),  # of a slice of the batch, and of whole sequences
            DealAxis(SequenceRules, request.cp, request.inner, request.cluster),
            LossAlone(request.outputs),
            *(() if early else (products,)),
        ),
        agreed=(RankOrder(ranks),),
        planned=(DecomposeLosses(),),
        sharded=(ShardOperators(request.outputs),),
        rank=(Specialise(), *optimise.OPTIMISATIONS),
    )


def ready(captured: Capture, tp: int) -> Reading:
    """Read the program that rules are asked of, once for all degrees; the captured one stays as it is."""
    several = tp > 1
    if several not in captured.readings:
        program = replace(captured)
        if several:
            run_passes(program, schedule().planned)
        other = captured.readings.get(not several)  # as a rule no pass has anything to do, and one reading is enough
        alike = other is not None and other.program.graph is program.graph
        captured.readings[several] = other if alike else Reading(program)
    return captured.readings[several]
