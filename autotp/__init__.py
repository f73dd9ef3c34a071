"""autotp: tensor parallelism for an ordinary PyTorch model, by itself."""

from autotp.cost import Cluster

# Plan comes by way of .api: an import from .plan here would make `autotp.plan` that module to type checkers.
from ._version import __version__
from .api import Plan, Sweep, compile, parallelize, plan, sweep
from .calibrate import calibrate
from .custom import prove_rule, register_rule
from .errors import AutoTPError
from .inputs import Inputs
from .log import configure
from .module import ShardedModule
from .verify import verify

configure()

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
