"""Products in float8 with their scales, and largest values of gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.cases.draw import case, f, frozen, pos

OPS: Any = torch.ops.autotp

FLOAT8 = [
    frozen(1, OPS.float8_amax, f(4, 6), [1], True),
    frozen(1, OPS.float8_amax, f(2, 4, 6), [0, 1], False),
    frozen(1, OPS.float8_amax, f(4, 6), [0, 1], False),
    frozen(1, OPS.float8_cast, f(2, 4, 6), pos()),
    frozen(2, OPS.float8_linear, f(2, 4, 6), f(5, 6), pos(), pos()),
    frozen(2, OPS.float8_linear, f(4, 6), f(6, 6), pos(), pos()),
    case(OPS.float8_seen, f(2, 4, 6), f()),
    frozen(4, OPS.float8_rows, f(2, 4, 6), f(5, 6), pos(2, 4, 1), pos(5, 1), pos(6), pos(6)),
    frozen(4, OPS.float8_rows, f(4, 6), f(6, 6), pos(4, 1), pos(6, 1), pos(6), pos(6)),
    frozen(3, OPS.float8_rows_hp, f(2, 4, 6), f(5, 6), pos(2, 4, 1), pos(5, 1), pos()),
    case(OPS.float8_row_seen, f(2, 4, 6), f(2, 4, 1)),
    frozen(3, OPS.float8_delayed, f(2, 4, 6), f(5, 6), pos(), pos(3), pos()),
    frozen(2, OPS.float8_before, pos(3, 4), pos()),
    frozen(4, OPS.float8_record, pos(3, 4), pos(), pos(), pos()),
    case(OPS.float8_rows_seen, f(2, 4, 6), f(2, 4, 1), f(6)),
]
