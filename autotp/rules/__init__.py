"""The table of operator rules: one small function for each shape of operator."""

from autotp.ir.op import Carry, Factor, Op, Rule

from . import (
    creation,
    float8_rules,
    images,
    lookup,
    losses,
    matmul,
    pointwise,
    recurrent,
    reductions,
    updates,
    views,
)
from .core import RULES, RuleFunction, einsum, loops, rule, rule_of

__all__ = [
    "RULES", "Carry", "Factor", "Op", "Rule", "RuleFunction", "einsum", "loops", "rule", "rule_of",
    "creation", "float8_rules", "images", "lookup", "losses", "matmul", "pointwise",
    "recurrent", "reductions", "updates", "views",
]  # fmt: skip
