"""Matrix products, attention, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers its grouped matrix product

from autotp.proof.case import Case
from tests.rules.cases.draw import aten, case, f, flags, frozen, ints, narrow, since, whole

SCALED: list[dict[str, Any]] = [{"out_dtype": torch.float32}, {"bias": whole(5), "out_dtype": torch.bfloat16}]


def scaled(a: tuple[int, ...], b: tuple[int, ...], **options: Any) -> Case:
    """A product in float8 with scales of these shapes."""
    scales = 2.0 ** ints(3, *a), 2.0 ** ints(3, *b)
    return frozen(5, aten._scaled_mm, narrow(4, 6), narrow(5, 6).t(), *scales, **options)


MATMUL = [
    case(aten.linear, f(2, 3, 6), f(4, 6), f(4)),
    case(aten.linear, f(2, 3, 6), f(4, 6)),
    case(aten.linear, f(6), f(4, 6), f(4)),
    case(aten.mm, f(4, 6), f(6, 5)),
    case(aten._int_mm, (ints(9, 4, 6) - 4).to(torch.int8), (ints(9, 6, 5) - 4).to(torch.int8)),
    *since((2, 12), *(scaled((4, 1), (1, 5), **options) for options in SCALED)),  # rows and columns
    *(scaled(a, b, **options) for a, b in [((1, 1), (1, 1)), ((), ())] for options in SCALED),
    case(aten.bmm, f(2, 4, 6), f(2, 6, 5)),
    *(case(aten.addmm, f(*s), f(4, 6), f(6, 5), beta=2, alpha=3) for s in [(5,), (1,), (4, 5), (1, 5), (4, 1), ()]),
    *(case(aten.baddbmm, f(*s), f(2, 4, 6), f(2, 6, 5), alpha=3) for s in [(2, 4, 5), (1, 4, 5), (4, 5), (1,)]),
    case(aten.matmul, f(6), f(6)),
    case(aten.matmul, f(4, 6), f(6)),
    case(aten.matmul, f(6), f(6, 4)),
    case(aten.matmul, f(4, 6), f(6, 5)),
    case(aten.matmul, f(2, 3, 4, 6), f(2, 3, 6, 5)),
    case(aten.matmul, f(2, 3, 4, 6), f(3, 6, 5)),
    case(aten.matmul, f(2, 1, 4, 6), f(3, 6, 5)),
    case(aten.matmul, f(3, 4, 6), f(6)),
    case(aten.matmul, f(6), f(3, 6, 4)),
    case(aten.matmul, f(3, 4, 6), f(6, 5)),
    case(aten.outer, f(4), f(6)),
    case(aten.mv, f(4, 6), f(6)),
    case(aten.dot, f(6), f(6)),
    case(aten.vdot, f(6), f(6)),
    *(case(aten.addmv, f(*s), f(4, 6), f(6), beta=2, alpha=3) for s in [(4,), (1,), ()]),
    *(case(aten.addbmm, f(*s), f(2, 4, 6), f(2, 6, 5), alpha=3) for s in [(4, 5), (1, 5), (4, 1), (5,)]),
    case(aten.inner, f(3, 4, 6), f(5, 6)),
    case(aten.inner, f(6), f(6)),
    case(aten.inner, f(4, 6), f()),
    case(aten.linalg_vecdot, f(4, 6), f(3, 4, 6)),
    case(aten.linalg_vecdot, f(4, 6, 3), f(1, 6, 3), dim=1),
    case(aten.bilinear, f(2, 3, 4), f(2, 3, 6), f(5, 4, 6), f(5)),
    case(aten.bilinear, f(3, 4), f(3, 6), f(5, 4, 6)),
    case(aten.cdist, f(2, 4, 3), f(2, 6, 3)),
    case(aten.einsum, "bqhd, bkhd -> bhqk", [f(2, 3, 4, 5), f(2, 6, 4, 5)]),
    case(aten.einsum, "ij,jk", [f(3, 4), f(4, 5)]),
    case(aten.einsum, "...ij,...jk->...ik", [f(2, 3, 4), f(4, 5)]),
    case(aten.einsum, "bij,bjk", [f(1, 3, 4), f(2, 4, 5)]),
    case(aten.einsum, "ij->j", [f(3, 4)]),
    case(aten.einsum, "ii->i", [f(4, 4)]),
    case(aten.einsum, "ij,jk,kl->il", [f(3, 4), f(4, 5), f(5, 2)]),
]


EXPERTS = [
    case(aten._grouped_mm, whole(8, 16), whole(3, 16, 24), torch.tensor([2, 5, 8], dtype=torch.int32)),
    case(torch.ops.transformers.grouped_mm_fallback, f(8, 4), f(3, 4, 6), torch.tensor([2, 2, 8])),
]

MASKS = [(4, 5), (1, 5), (4, 1), (2, 6, 4, 5), (1, 1, 4, 5), (2, 1, 1, 5), (6, 4, 5), (1, 6, 1, 5)]
ATTENTION = [
    case(aten.scaled_dot_product_attention, f(2, 6, 4, 8), f(2, 6, 5, 8), f(2, 6, 5, 3)),
    case(aten.scaled_dot_product_attention, f(2, 6, 4, 8), f(2, 6, 4, 8), f(2, 6, 4, 8), is_causal=True),
    case(aten.scaled_dot_product_attention, f(2, 4, 8), f(2, 5, 8), f(2, 5, 6), scale=0.3),
    case(aten.scaled_dot_product_attention, f(4, 8), f(5, 8), f(5, 6)),
    case(aten.scaled_dot_product_attention, f(2, 3, 6, 4, 8), f(2, 3, 6, 5, 8), f(2, 3, 6, 5, 8)),
    *(
        case(aten.scaled_dot_product_attention, f(2, 6, 4, 8), f(2, 6, 5, 8), f(2, 6, 5, 8), m)
        for s in MASKS
        for m in (f(*s), flags(*s) | (torch.arange(s[-1]) == 0))
    ),
    case(aten.scaled_dot_product_attention, f(2, 4, 8), f(2, 5, 8), f(2, 5, 8), f(2, 4, 5)),
    *(
        case(aten.scaled_dot_product_attention, f(2, 6, 4, 8), f(2, h, 4, 8), f(2, h, 4, 8), **k, enable_gqa=True)
        for h in (2, 3, 1)
        for k in ({"is_causal": True}, {"attn_mask": f(2, 6, 4, 4)}, {"attn_mask": f(1, 1, 4, 4)})
    ),
]
