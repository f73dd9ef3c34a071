"""The table of operator calls on which the rules are proved: small sizes, some divisible by the ranks and some not."""

from autotp.proof.case import Case
from tests.rules.cases.contractions import ATTENTION, EXPERTS, MATMUL
from tests.rules.cases.draw import aten, case, f, flags, ints
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

__all__ = ["CASES", "aten", "case", "f", "flags", "ints"]
