"""Lowering: how one rank's program runs, by which backend and with which optimisations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autotp.cost import Cluster
from autotp.optimise import Setting, optimise, read_switches

from .errors import InputError
from .objective import TRAINING, Objective
from .rewrite import Place
from .segments import Compiler

EAGER = "eager"


@dataclass(frozen=True)
class Lowering:
    """How programs run.

    Attributes:
        backend: "eager", or what `torch.compile` takes as its backend; `options`: what it takes as its options.
        switches: optimisations that are switched on or off by name.
        cluster, objective: what they are priced by.
    """

    backend: str | Callable[..., Any] = EAGER
    options: Mapping[str, Any] | None = None
    switches: Mapping[str, bool] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=lambda: Cluster.resolve(None))
    objective: Objective = TRAINING

    @classmethod
    def read(cls, backend: Any, options: Any, switches: Any) -> Lowering:
        """From a public function's arguments, checked."""
        if backend == EAGER and options:
            raise InputError(f"options={options!r}: backend='eager' has no options. Leave it out.")
        known = [EAGER, *torch.compiler.list_backends(exclude_tags=None)]
        if not callable(backend) and backend not in known:
            raise InputError(f"backend={backend!r} is not known; choose {', '.join(known)}, or pass a function.")
        return cls(backend, options, read_switches(switches))

    def compiler(self) -> Compiler | None:
        """What compiles one program; None where it runs as it is."""
        if self.backend == EAGER:
            return None
        options = dict(self.options) if self.options is not None else None
        return Compiler(lambda f: torch.compile(f, fullgraph=True, backend=self.backend, options=options))

    def priced(self, cluster: Cluster, objective: Objective) -> Lowering:
        """The same, for these machines and this objective."""
        return replace(self, cluster=cluster, objective=objective)

    def optimised(self, graph: fx.Graph, place: Place, device: torch.device) -> tuple[str, ...]:
        """Optimise one rank's graph in place; what fired, in words."""
        setting = Setting(place, self.cluster, self.objective, device, self.backend != EAGER)
        return optimise(graph, setting, self.switches)
