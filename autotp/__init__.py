"""autotp: tensor parallelism for an ordinary PyTorch model, by itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .log import configure

if TYPE_CHECKING:
    from autotp.cost import Cluster
    from autotp.cost.machines.calibrate import calibrate
    from autotp.driver.stages import stages
    from autotp.driver.verify import certify, verify
    from autotp.proof.rule import prove_rule
    from autotp.rules.register import register_rule
    from autotp.runtime.module import ShardedModule
    from autotp.runtime.moving.move import move

    from .api import Sweep, compile, parallelize, plan, sweep
    from .errors import AutoTPError
    from .inputs import Inputs
    from .plans.plan import Plan
    from .pretrained import from_pretrained

# Public name -> its home, imported when the name is first used: torch takes two seconds.
HOMES = {
    "AutoTPError": "autotp.errors",
    "Cluster": "autotp.cost",
    "Inputs": "autotp.inputs",
    "Plan": "autotp.plans.plan",
    "ShardedModule": "autotp.runtime.module",
    "Sweep": "autotp.api",
    "calibrate": "autotp.cost.machines.calibrate",
    "certify": "autotp.driver.verify",
    "compile": "autotp.api",
    "from_pretrained": "autotp.pretrained",
    "move": "autotp.runtime.moving.move",
    "parallelize": "autotp.api",
    "plan": "autotp.api",
    "prove_rule": "autotp.proof.rule",
    "register_rule": "autotp.rules.register",
    "stages": "autotp.driver.stages",
    "sweep": "autotp.api",
    "verify": "autotp.driver.verify",
}

configure()


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = member = getattr(import_module(HOMES[name]), name)
    return member


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})


__all__ = [
    "AutoTPError",
    "Cluster",
    "Inputs",
    "Plan",
    "ShardedModule",
    "Sweep",
    "__version__",
    "calibrate",
    "certify",
    "compile",
    "from_pretrained",
    "move",
    "parallelize",
    "plan",
    "prove_rule",
    "register_rule",
    "stages",
    "sweep",
    "verify",
]
