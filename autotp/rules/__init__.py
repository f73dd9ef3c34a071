"""The table of operator rules: one small function for each shape of operator."""

from autotp.ir.op import Carry, Factor, Op, Rule

from . import (
    bags,
    experts,
    factories,
    float8_rules,
    images,
    lookup,
    losses,
    matmul,
    matrices,
    pointwise,
    random,
    recurrent,
    reductions,
    updates,
    views,
)
from .core import RULES, RuleFunction, einsum, loops, rule, rule_of

__all__ = [
    "RULES", "Carry", "Factor", "Op", "Rule", "RuleFunction", "einsum", "loops", "rule", "rule_of",
    "bags", "experts", "factories", "float8_rules", "images", "lookup", "losses", "matmul", "matrices", "pointwise",
    "random", "recurrent", "reductions", "updates", "views",
]  # fmt: skip
