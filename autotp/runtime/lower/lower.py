"""Lowering: how one rank's program runs, by which backend and with which optimisations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autotp import compat
from autotp.comm import conversions
from autotp.comm.ranks import Ranks
from autotp.cost import Cluster
from autotp.cost.objective import TRAINING, Objective
from autotp.errors import InputError
from autotp.ir.graph import Function
from autotp.ir.marks import mark
from autotp.ir.program import MeshPlace, Sharded
from autotp.log import dump
from autotp.passes.base import Pass, run_passes
from autotp.passes.optimise import MEASURED, OPTIMISATIONS, Fired, Judge, RankProgram, Setting, read_switches
from autotp.text import BITS

from .measured import Measures, path_of
from .regional import Compiler

EAGER, INDUCTOR = "eager", "inductor"
WIDE = {"float32": torch.float32, "float64": torch.float64}  # types that gradients are added up in


@dataclass(frozen=True)
class Lowering:
    """A backend and its options, and which optimisations run before it.

    Attributes:
        backend: "eager", or what `torch.compile` takes as its backend; `options`: what it takes as its options.
        switches: optimisations that are switched on or off, or to be measured, by name.
        cluster, objective: what they are priced by.
        reduces: type in which gradients of narrower parameters are added up; None for their own.
        passes: of a rank's program: what makes it of all ranks', then those that make it faster.
    """

    backend: str | Function = EAGER
    options: Mapping[str, Any] | None = None
    switches: Mapping[str, bool | str] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=lambda: Cluster.resolve(None))
    objective: Objective = TRAINING
    reduces: torch.dtype | None = None
    passes: Sequence[Pass[RankProgram]] = ()

    @classmethod
    def read(cls, keywords: Mapping[str, Any]) -> Lowering:
        """Read the keywords of a public function, checked."""
        backend, options = keywords.get("backend", EAGER), keywords.get("options")
        if backend == EAGER and options:
            raise InputError(f"options={options!r}: backend='eager' has no options. Leave it out.")
        if not callable(backend) and backend not in (EAGER, *torch.compiler.list_backends(exclude_tags=None)):
            names = ", ".join(map(repr, (EAGER, *torch.compiler.list_backends())))
            raise InputError(f"backend={backend!r} is not known to torch.compile; choose {names}, or pass a function.")
        reduces = read_reduce_dtype(keywords.get("reduce_dtype"))
        switches = keywords.get("optimise") if not any(map(keywords.get, BITS)) else False
        return cls(backend, options, read_switches(switches), reduces=reduces)

    def compiler(self) -> Compiler | None:
        """Make what compiles one program; None where it runs as it is."""
        return None if self.backend == EAGER else Compiler(self._compiled)

    def _compiled(self, function: Function, whole: bool = False) -> Any:
        """Compile a function; one that is a whole program is called at every token, and checks less."""
        options = dict(self.options) if self.options is not None else None
        if whole and self.backend == INDUCTOR:
            options = {**compat.UNASSERTED, **(options or {})}
        return compat.compile_whole(function, self.backend, options)

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "backend")

    def priced(self, cluster: Cluster, objective: Objective, passes: Sequence[Pass[RankProgram]]) -> Lowering:
        """Copy it for these machines, this objective, and these passes of a rank's program."""
        return replace(self, cluster=cluster, objective=objective, passes=tuple(passes))

    def judges(self, ranks: Ranks, tp: int, device: torch.device) -> dict[str, Judge]:
        """Make what measures optimisations, by name: on CUDA devices those that are not switched.

        Where there is one process for several ranks, what they send cannot be measured, and the rest only if asked for.

        Args:
            ranks: that run. tp: of the plan. device: of this rank.
        """
        alone = ranks.mesh is None and tp > 1
        wish = {x.name: self.switches.get(x.name) for x in OPTIMISATIONS if x.measurable and not (alone and x.sends)}
        default = device.type == "cuda" and not alone
        # Measuring takes seconds at the first use, so without a wish it is done where kernels may win: on CUDA devices.
        names = [name for name, on in wish.items() if on == MEASURED or (on is None and default)]
        group = ranks.planners.group
        # Ranks of torch's fake group do not exist, and would never say what they measured.
        if not names or (group is not None and dist.get_backend(group) == "fake"):
            return {}
        compiled = None if self.backend == EAGER else self._compiled
        return dict.fromkeys(names, Measures(ranks.planners, device, self.objective.training, path_of(), compiled))

    def program(
        self,
        sharded: Sharded,
        axes: Mapping[str, MeshPlace],
        device: torch.device,
        rank_bytes: float,
        judges: Mapping[str, Judge] | None = None,
    ) -> tuple[fx.Graph, Fired]:
        """Make the program of one rank, optimised; return it, and what became of each optimisation.

        Args:
            sharded: the program of all ranks.
            axes: this rank's place on each mesh axis.
            device: where it computes.
            rank_bytes: bytes that the fullest rank holds by the plan.
            judges: as `judges` gives them, the same on every rank.
        """
        setting = Setting(axes["tp"], self.cluster, self.objective, device, self.name, rank_bytes, judges or {})
        program = RankProgram(sharded.graph, setting, axes)
        specialise, *optimisations = self.passes
        run_passes(program, (specialise,))
        if self.reduces is not None:
            reduce_in(program.graph, self.reduces)
        results = run_passes(program, optimisations, {name: bool(on) for name, on in self.switches.items()})
        dump("optimised", program.graph)
        return program.graph, tuple((name, changes.what) for name, changes in results)


def read_reduce_dtype(request: Any) -> torch.dtype | None:
    """Read and check the type that a public function's argument asks for.

    Raises:
        InputError: it is none that gradients are added up in.
    """
    dtype: Any = WIDE.get(request, request) if isinstance(request, str) else request
    if dtype is not None and dtype not in WIDE.values():
        raise InputError(
            f"reduce_dtype={request!r}: give torch.float32 or torch.float64, or None for the parameters' own."
        )
    return dtype


def narrower(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers of a tensor have less precision than this type."""
    return x.is_floating_point() and x.dtype.itemsize < dtype.itemsize


def reduce_in(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Let the conversions of parameters in one rank's graph add up gradients in this type."""
    for node in graph.nodes:
        source: Any = node.args[0] if mark(node).conversion is not None else None
        val = source.meta.get("val") if isinstance(source, fx.Node) and source.op == "placeholder" else None
        if node.target in conversions.FUNCTIONS.values() and val is not None and narrower(val, dtype):
            node.kwargs = {**node.kwargs, "reduces": dtype}


def accumulate_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter's gradient this type, so that those of several backwards are added up in it."""
    if parameter.requires_grad and narrower(parameter, dtype):
        parameter.grad_dtype = dtype
