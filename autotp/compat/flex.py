"""flex_attention as the operators that its score and mask functions are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex


@contextmanager
def flex_as_products() -> Iterator[None]:
    """Within this context flex_attention computes all scores, by torch's own reference: its functions for every score
    at once, between two products. The operator takes them as graphs, which do not say what may be split.
    """

    def reference(query: Any, key: Any, value: Any, score: Any, mask: Any, scale: float, options: Any) -> Any:
        return math_attention(query, key, value, score, mask, scale, options)

    others: dict[str, Any] = {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True, "setup_compilation_env": nullcontext}
    others["_validate_device"] = lambda *operands: None  # on the CPU it refuses gradients, which the reference has
    with mock.patch.multiple(flex, flex_attention_hop=reference, **others):
        yield
