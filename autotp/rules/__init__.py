# ruff: noqa: F401  names that others import from here
"""The rules of operators: a table of notations, and a small function for each operator that is no row of it."""

from autotp.ir.op import Carry, Factor, Op, Rule

from . import lookup, losses, matmul, table, views
from .core import RULES, RuleFunction, loops, rule, rule_of
from .notation import einsum
