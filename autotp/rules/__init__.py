"""The table of operator rules: one small function for each shape of operator."""

from . import lookup, matmul, pointwise, reductions, views
from .core import RULES, Carry, Factor, Op, Rule, RuleFunction, einsum, loops, rule, rule_of

__all__ = [
    "RULES", "Carry", "Factor", "Op", "Rule", "RuleFunction", "einsum", "loops", "rule", "rule_of",
    "lookup", "matmul", "pointwise", "reductions", "views",
]  # fmt: skip
