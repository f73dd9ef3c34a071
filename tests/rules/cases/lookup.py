"""Looking up, and writing into a part of a value."""

from __future__ import annotations

import torch

from tests.rules.cases.draw import aten, case, f, flags, ints

STARTS, BAGS = torch.tensor([0, 3, 3, 6]), aten.embedding_bag.padding_idx
LOOKUP = [
    case(aten.embedding, f(7, 6), ints(7, 4, 3)),
    case(aten.embedding, f(8, 6), ints(8, 4, 3), 2),
    case(aten.embedding, f(4, 6), ints(4, 5), -1, True),
    case(aten.index_select, f(4, 6, 5), 1, ints(6, 3)),
    *(case(BAGS, f(7, 6), ints(7, 10), STARTS, False, mode, False, None, False, 2) for mode in range(3)),
    case(BAGS, f(7, 6), ints(7, 10), STARTS, False, 0, False, f(10), False, None),
    case(BAGS, f(7, 6), ints(7, 10), STARTS, False, 1, False, None, True, None),
    case(aten.embedding_bag, f(7, 6), ints(7, 10), STARTS, True, 0),
    case(aten.repeat_interleave.self_Tensor, f(4, 3, 5), torch.tensor([2, 0, 3]), 1, output_size=5),
    case(aten.gather, f(4, 6, 5), 1, ints(6, 4, 3, 2)),
    case(aten.gather, f(4, 6), -1, ints(6, 4, 6)),
    case(aten.gather, f(4, 6), 1, ints(6, 1, 6)),  # of one row, which is no broadcast
    case(aten.take_along_dim, f(4, 6), ints(6, 4, 3), 1),
    case(aten.index.Tensor, f(6, 5, 4), [ints(6, 3)]),
    case(aten.index.Tensor, f(6, 5, 4), [None, ints(5, 3, 2)]),
    case(aten.index.Tensor, f(6, 5, 4), [ints(6, 3, 1), ints(5, 4)]),
    case(aten.index.Tensor, f(6, 5, 4), [ints(6, 3), None, ints(4, 3)]),
    case(aten.index.Tensor, f(6, 5, 4), [None, ints(5, 3), ints(4, 1)]),
    case(aten.index.Tensor, f(2, 5), [None, flags(5)]),
]

UPDATES = [
    case(aten.scatter.src, f(4, 6, 5), 1, ints(6, 4, 3, 5).sort(1).indices, f(4, 3, 5)),
    case(aten.scatter.src, ints(9, 4, 6, 5), 1, ints(6, 3, 3, 5).sort(1).indices, ints(9, 4, 3, 5)),
    case(aten.scatter.src, f(4, 6), 1, torch.tensor([[2, 0, 5]]), f(1, 3)),
    case(aten.scatter.value, f(4, 6, 5), 1, ints(6, 4, 3, 5), 2.0),
    case(aten.scatter_add, f(4, 6, 5), 1, ints(6, 4, 3, 5), f(4, 3, 5)),
    case(aten.scatter_add, ints(9, 4, 6, 5), 0, ints(4, 3, 6, 4), ints(9, 5, 6, 5)),
    case(aten.index_reduce, f(4, 6, 5), 1, ints(6, 3), f(4, 3, 5), "amax"),
    case(aten.scatter_reduce.two, f(4, 6, 5), 1, ints(6, 4, 3, 5), f(4, 3, 5), "amax"),
    case(aten.scatter_reduce.two, f(4, 6, 5), 1, ints(6, 4, 3, 5), f(4, 3, 5), "mean", include_self=False),
    case(aten.index_add, f(4, 6, 5), 1, ints(6, 8), f(4, 8, 5), alpha=2),
    case(aten.index_copy, f(4, 6, 5), 1, torch.tensor([3, 1]), f(4, 2, 5)),
    case(aten.index_fill.int_Scalar, f(4, 6, 5), 1, torch.tensor([3, 1]), 2.0),
    case(aten.index_fill.int_Tensor, f(4, 6, 5), 1, torch.tensor([3, 1]), f()),
    case(aten.index_put, f(6, 5, 4), [torch.tensor([3, 1, 0])], f(3, 5, 4)),
    case(aten.index_put, f(6, 5, 4), [None, torch.tensor([3, 1, 0])], f(6, 1, 4)),
    case(aten.index_put, f(6, 5, 4), [None, torch.tensor([3, 1, 0])], f()),
    case(aten.index_put, f(6, 5, 4), [ints(6, 4, 3)], f(4, 3, 5, 4), True),
    case(aten.index_put, f(6, 5, 4), [ints(6, 4), ints(5, 4)], f(4, 4), True),
    case(aten.index_put, f(6, 5, 4), [ints(6, 4), None, ints(4, 4)], f(4, 5), True),
    case(aten.index_put, f(6, 5, 4), [ints(6, 4)], f(5, 4), True),
    case(aten.index_put, f(6, 5, 4), [flags(6, 5)], f()),
    case(aten.index_put, f(6, 5), [None, flags(5)], f()),
    case(aten.index_put, f(6, 5), [torch.tensor([True, False] * 3)], f(3, 5)),
    case(aten.masked_scatter, f(4, 6), flags(4, 1), f(3, 2, 6)),
    case(aten.masked_scatter, f(2, 4, 6), flags(4, 1), f(8, 6)),
    case(aten.masked_scatter, f(4, 6), flags(4, 6), f(4, 6)),
    case(aten.masked_scatter, f(4, 6), flags(4, 1), f(24, 1)),
    case(aten.slice_scatter, f(4, 6, 5), f(4, 2, 5), 1, 1, 3),
    case(aten.select_scatter, f(4, 6, 5), f(4, 5), 1, 2),
    case(aten.diagonal_scatter, f(4, 6, 6), f(4, 5), 1, 1, 2),
]
