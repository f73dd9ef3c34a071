"""autotp: tensor parallelism for an ordinary PyTorch model, by itself."""

import sys
from typing import TYPE_CHECKING

from ._version import __version__
from .log import configure
from .package import lazily

if TYPE_CHECKING:
    from autotp.cost import Cluster

    # Plan comes by way of .api: an import from .plan here would make `autotp.plan` that module to type checkers.
    from .api import Plan, Sweep, compile, parallelize, plan, sweep
    from .calibrate import calibrate
    from .custom import prove_rule, register_rule
    from .errors import AutoTPError
    from .inputs import Inputs
    from .module import ShardedModule
    from .verify import verify

HOMES = {
    "api": ("Plan", "Sweep", "compile", "parallelize", "plan", "sweep"),
    "calibrate": ("calibrate",),
    "cost": ("Cluster",),
    "custom": ("prove_rule", "register_rule"),
    "errors": ("AutoTPError",),
    "inputs": ("Inputs",),
    "module": ("ShardedModule",),
    "verify": ("verify",),
}

configure()
sys.modules[__name__].__class__ = lazily({name: f"autotp.{home}" for home, names in HOMES.items() for name in names})

__all__ = [
    "AutoTPError",
    "Cluster",
    "Inputs",
    "Plan",
    "ShardedModule",
    "Sweep",
    "__version__",
    "calibrate",
    "compile",
    "parallelize",
    "plan",
    "prove_rule",
    "register_rule",
    "sweep",
    "verify",
]
