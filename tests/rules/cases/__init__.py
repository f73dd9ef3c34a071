"""The table of operator calls on which the rules are proved: small sizes, some divisible by the ranks and some not."""

from functools import cache
from typing import Any

from autotp.proof.case import Case, RuleProgram, program
from autotp.rules.core import function_of
from tests.rules.cases.contractions import ATTENTION, EXPERTS, MATMUL
from tests.rules.cases.draw import REFUSED, aten, case, f, flags, ints
from tests.rules.cases.float8 import FLOAT8
from tests.rules.cases.images import IMAGES
from tests.rules.cases.lookup import LOOKUP, UPDATES
from tests.rules.cases.pointwise import POINTWISE
from tests.rules.cases.recurrent import RECURRENT
from tests.rules.cases.reductions import LOSSES, REDUCTIONS
from tests.rules.cases.views import FACTORIES, VIEWS

CASES: list[Case] = [
    *POINTWISE, *MATMUL, *ATTENTION, *EXPERTS, *IMAGES, *REDUCTIONS, *LOSSES, *VIEWS, *FACTORIES, *LOOKUP, *UPDATES,
    *RECURRENT, *FLOAT8,
]  # fmt: skip

__all__ = ["CASES", "REFUSED", "aten", "case", "f", "flags", "ints", "program_of"]


def program_of(call: Case) -> RuleProgram:
    """The program of a call by the table as it is now, which tests share: they prove it and read it."""
    return _program(call, function_of(call.target))


@cache
def _program(call: Case, function: Any) -> RuleProgram:
    return program(call)
