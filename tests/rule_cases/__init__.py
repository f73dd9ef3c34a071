"""The table of operator calls on which the rules are proved: small sizes, some divisible by the ranks and some not."""

from autotp.proof_case import Case

from .contractions import ATTENTION, EXPERTS, MATMUL
from .draw import aten, case, f, flags, ints
from .images import IMAGES
from .lookup import LOOKUP, UPDATES
from .pointwise import POINTWISE
from .reductions import LOSSES, REDUCTIONS
from .views import FACTORIES, VIEWS

CASES: list[Case] = [
    *POINTWISE, *MATMUL, *ATTENTION, *EXPERTS, *IMAGES, *REDUCTIONS, *LOSSES, *VIEWS, *FACTORIES, *LOOKUP, *UPDATES,
]  # fmt: skip

__all__ = ["CASES", "aten", "case", "f", "flags", "ints"]
