"""The table of operator calls on which the rules are proved: small sizes, some divisible by the ranks and some not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers its grouped matrix product
from torch import Tensor

from tests.rule_proof import Case

aten: Any = torch.ops.aten
_draw = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    """Random float64."""
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def pos(*shape: int) -> Tensor:
    """Random float64 in (0.1, 0.9)."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=_draw)


def cplx(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_draw)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_draw) < 0.5


def whole(*shape: int) -> Tensor:
    """-1, 0 and 1 as bfloat16: sums up to 256 are exact."""
    return (ints(3, *shape) - 1).bfloat16()


def case(target: Any, *args: Any, **kwargs: Any) -> Case:
    """A case of an overload, or of a packet's default overload."""
    return Case(target if hasattr(target, "_schema") else target.default, args, kwargs)


def frozen(target: Any, *args: Any, **kwargs: Any) -> Case:
    """A case whose last two tensors are statistics, which have no gradient."""
    return replace(case(target, *args, **kwargs), frozen=2)


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    abs acosh asinh atan ceil cos cosh deg2rad digamma elu celu erf erfc exp exp2 expm1 floor frac gelu
    hardshrink.default hardsigmoid hardtanh leaky_relu lgamma logical_not nan_to_num neg positive rad2deg
    reciprocal relu round sgn sigmoid sign signbit silu sin sinc sinh softshrink tan tanh trunc isnan isinf
    isfinite relu6 selu softplus hardswish log_sigmoid mish square alias detach clone contiguous lift_fresh_copy
    lift_fresh negative absolute detach_ zeros_like ones_like real
    """
)
POSITIVE = words(
    """
    acos asin atanh erfinv log log10 log1p log2 logit rsqrt sqrt
    """
)
BINARY = words(
    """
    add.Tensor sub.Tensor mul.Tensor div.Tensor true_divide.Tensor multiply.Tensor divide.Tensor subtract.Tensor
    atan2 copysign.Tensor eq.Tensor ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor fmax fmin fmod.Tensor hypot
    logaddexp logaddexp2 maximum minimum remainder.Tensor logical_and logical_or logical_xor rsub.Tensor
    xlogy.Tensor max.other min.other clamp_min.Tensor clamp_max.Tensor nextafter
    """
)
BITWISE = words(
    """
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor gcd lcm __and__.Tensor
    __or__.Tensor __xor__.Tensor ldexp.Tensor
    """
)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


POINTWISE = [
    *(case(_op(name), f(4, 3)) for name in UNARY),
    *(case(_op(name), pos(4, 3)) for name in POSITIVE),
    *(case(_op(name), f(4, 1, 3), f(6, 1)) for name in BINARY),
    *(case(_op(name), ints(5, 4, 3), ints(5, 3)) for name in BITWISE),
    case(aten.add.Tensor, f(4, 3), 2.0),
    case(aten.add.Tensor, f(4, 3), f(4, 3), alpha=3),
    case(aten.add.Tensor, f(4, 3), f()),
    case(aten.add.Scalar, f(4, 3), 2),
    case(aten.sub.Tensor, f(4, 3), f(4, 3), alpha=3),
    case(aten.rsub.Scalar, f(4, 3), 2),
    case(aten.mul.Tensor, f(4, 3), 2.0),
    case(aten.mul.Tensor, f(4, 3), f(1)),
    case(aten.mul.Tensor, f(4, 3), f()),
    case(aten.mul.Tensor, ints(5, 4, 3), ints(5, 3)),
    case(aten.mul.Tensor, f(4, 3), flags(4, 3)),
    case(aten.mul.Tensor, flags(4, 3), flags(4, 3)),
    case(aten.add.Tensor, flags(4, 3), flags(4, 3)),
    case(aten.mul.Scalar, f(4, 3), 2),
    case(aten.mul.Tensor, cplx(4, 3), cplx(3)),
    case(aten.div.Scalar, f(4, 3), 2),
    case(aten.div.Tensor, ints(5, 4, 3), 2),
    case(aten.div.Tensor_mode, f(4, 3), pos(3), rounding_mode="floor"),
    case(aten.div.Tensor_mode, f(4, 3), pos(3), rounding_mode="trunc"),
    case(aten.div.Tensor_mode, f(4, 3), pos(3), rounding_mode=None),
    case(aten.div.Scalar_mode, f(4, 3), 0.3, rounding_mode="floor"),
    case(aten.reciprocal, pos(4, 3)),
    case(aten.pow.Tensor_Scalar, f(4, 3), 2),
    case(aten.pow.Tensor_Tensor, pos(4, 3), f(3)),
    case(aten.pow.Scalar, 2, f(4, 3)),
    case(aten.float_power.Tensor_Scalar, f(4, 3), 2),
    case(aten.clamp, f(4, 3), -0.5, 0.5),
    case(aten.clamp.Tensor, f(4, 3), f(3), None),
    case(aten.clip, f(4, 3), -0.5, 0.5),
    case(aten.clamp_min, f(4, 3), 0),
    case(aten.gelu, f(4, 3), approximate="tanh"),
    case(aten.threshold, f(4, 3), 0.1, 0.2),
    case(aten.lerp.Scalar, f(4, 3), f(3), 0.3),
    case(aten.lerp.Tensor, f(4, 3), f(3), f(4, 1)),
    case(aten.addcmul, f(4, 3), f(3), f(4, 1), value=2),
    case(aten.addcdiv, f(4, 3), f(3), pos(4, 1), value=2),
    case(aten.eq.Scalar, ints(3, 4, 3), 1),
    case(aten.bitwise_not, flags(4, 3)),
    case(aten.frexp.Tensor, f(4, 3)),
    case(aten.complex, f(4, 3), f(3)),
    case(aten.polar, pos(4, 3), f(3)),
    *(case(op, cplx(4, 3)) for op in (aten.conj, aten._conj, aten.conj_physical, aten.resolve_conj, aten.resolve_neg)),
    replace(case(aten.copy, f(4, 3), f(3)), reference=lambda x, src: src.expand_as(x).clone()),
    case(aten.copy, ints(5, 4, 3), f(3)),
    case(aten.bucketize.Tensor, f(4, 3), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
    case(aten.masked_fill.Scalar, f(4, 3), flags(3), 0),
    case(aten.masked_fill.Scalar, f(4, 3), flags(4, 1), -1e9),
    case(aten.masked_fill.Tensor, f(4, 3), flags(4, 3), f()),
    case(aten.where.self, flags(4, 1), f(4, 3), f(3)),
    case(aten.where.self, flags(4, 1), flags(4, 3), flags(3)),
    case(aten.where.ScalarOther, flags(4, 1), f(4, 3), 0.0),
    case(aten.where.ScalarSelf, flags(4, 1), 0.0, f(4, 3)),
    case(aten.where.Scalar, flags(4, 3), 1.0, 0.0),
    case(aten.prelu, f(2, 4, 3), f(4)),
    case(aten.prelu, f(2, 4), f(1)),
    case(aten.to.other, f(4, 3), f(3, 2).to(torch.complex128)),
    case(aten.to.other, f(4, 3), ints(3, 3, 2)),
    case(aten.type_as, f(4, 3), cplx(3, 2)),
    case(aten.to.dtype, f(4, 3), torch.int64),
    case(aten.to.dtype, ints(3, 4, 3), torch.bool),
    case(aten.to.dtype, ints(3, 4, 3), torch.float64),
    case(aten.to.dtype, flags(4, 3), torch.float64),
    case(aten.to.dtype, f(4, 3), torch.complex128),
    case(aten._to_copy, f(4, 3), dtype=torch.complex128),
    case(aten._to_copy, f(4, 3), dtype=torch.int64),
    case(aten.real, cplx(4, 3)),
    case(aten.imag, cplx(4, 3)),
    case(aten.abs, cplx(4, 3)),
    case(aten.full_like, f(4, 3), 2.0),
    case(aten.fill.Scalar, f(4, 3), 2.0),
    case(aten.fill.Tensor, f(4, 3), f()),
    case(aten.floor_divide, ints(9, 4, 3), 2),
    case(aten.floor_divide, ints(9, 4, 3), ints(3, 3) + 1),
    Case(aten.empty_like.default, (f(4, 3),), values=False),
    case(aten.dropout, f(4, 3), 0.5, False),
    case(aten.dropout, f(4, 3), 0.0, True),
    case(aten.alpha_dropout, f(4, 3), 0.5, False),
    case(aten.feature_dropout, f(4, 3), 0.5, False),
    case(aten.native_dropout, f(4, 3), 0.5, False),
]

MATMUL = [
    case(aten.linear, f(2, 3, 6), f(4, 6), f(4)),
    case(aten.linear, f(2, 3, 6), f(4, 6)),
    case(aten.linear, f(6), f(4, 6), f(4)),
    case(aten.mm, f(4, 6), f(6, 5)),
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

IMAGES = [
    case(aten.conv1d, f(2, 4, 8), f(6, 4, 3), f(6), [2], [1]),
    case(aten.conv1d, f(4, 8), f(6, 4, 3)),
    case(aten.conv1d.padding, f(2, 4, 8), f(6, 4, 3), f(6), [1], "same"),
    case(aten.conv1d, f(2, 6, 8), f(6, 1, 3), f(6), [1], [1], [1], 6),
    case(aten.conv1d, f(2, 6, 8), f(9, 2, 3), None, [1], [0], [1], 3),
    case(aten.conv2d, f(2, 4, 5, 5), f(3, 4, 2, 2), f(3)),
    case(aten.conv2d, f(2, 4, 5, 5), f(8, 2, 2, 2), f(8), [1, 1], [0, 0], [1, 1], 2),
    case(aten.conv3d, f(1, 4, 3, 3, 3), f(4, 4, 2, 2, 2), f(4)),
    case(aten.conv_transpose1d, f(2, 4, 5), f(4, 6, 3), f(6), [2], [1]),
    case(aten.conv_transpose1d, f(2, 8, 5), f(8, 3, 3), f(12), [2], [1], [0], 4),
    case(aten.conv_transpose2d.input, f(2, 4, 3, 3), f(4, 3, 2, 2)),
    case(aten.conv_transpose3d.input, f(2, 4, 2, 2, 2), f(4, 3, 2, 2, 2), f(3)),
    case(aten.convolution, f(2, 4, 8), f(6, 4, 3), f(6), [1], [0], [1], False, [0], 1),
    case(aten.convolution, f(2, 8, 5), f(8, 3, 3), None, [1], [0], [1], True, [0], 4),
    case(aten.max_pool1d, f(2, 4, 6), [2]),
    case(aten.max_pool1d, f(4, 6), [2]),
    case(aten.max_pool2d, f(2, 4, 6, 6), [2, 2]),
    case(aten.max_pool2d, f(4, 6, 6), [2, 2]),
    case(aten.max_pool3d, f(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.avg_pool1d, f(2, 4, 6), [2]),
    case(aten.avg_pool2d, f(2, 4, 6, 6), [2, 2]),
    case(aten.avg_pool2d, f(4, 6, 6), [2, 2]),
    case(aten.avg_pool3d, f(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.max_pool1d_with_indices, f(2, 4, 6), [2]),
    case(aten.max_pool2d_with_indices, f(2, 4, 6, 6), [2, 2]),
    case(aten.max_pool3d_with_indices, f(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.adaptive_avg_pool1d, f(2, 4, 6), [2]),
    case(aten.adaptive_avg_pool2d, f(2, 4, 6, 6), [2, 3]),
    case(aten.adaptive_avg_pool3d, f(2, 4, 4, 4, 4), [2, 2, 1]),
    case(aten.adaptive_max_pool1d, f(2, 4, 6), [2]),
    case(aten.adaptive_max_pool2d, f(2, 4, 6, 6), [2, 3]),
    case(aten.adaptive_max_pool3d, f(2, 4, 4, 4, 4), [2, 2, 1]),
    case(aten.upsample_bilinear2d.vec, f(2, 4, 3, 3), [5, 5], False, None),
    case(aten.upsample_bilinear2d, f(2, 4, 3, 3), [5, 5], False),
    case(aten.upsample_nearest2d.vec, f(2, 4, 3, 3), [5, 5], None),
    case(aten.upsample_bicubic2d.vec, f(2, 4, 3, 3), None, True, [2.0, 2.0]),
    case(aten.upsample_linear1d.vec, f(2, 4, 3), [5], False, None),
    case(aten.upsample_nearest1d.vec, f(2, 4, 3), [5], None),
    case(aten.upsample_nearest3d.vec, f(2, 4, 2, 2, 2), [3, 3, 3], None),
    case(aten.upsample_trilinear3d.vec, f(2, 4, 2, 2, 2), [3, 3, 3], False, None),
    case(aten.pixel_shuffle, f(2, 12, 3, 4), 2),
    case(aten.pixel_shuffle, f(8, 3, 4), 2),
    case(aten.pixel_unshuffle, f(2, 3, 6, 8), 2),
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

NORM = {"training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
REDUCTIONS = [
    case(aten.sum, f(4, 3)),
    case(aten.sum, flags(4, 3)),
    case(aten.sum.dim_IntList, f(4, 3, 5), [1]),
    case(aten.sum.dim_IntList, f(4, 3, 5), [0, -1], True),
    case(aten.sum.dim_IntList, f(4, 3, 5), None),
    case(aten.sum.dim_IntList, ints(5, 4, 3), [0]),
    case(aten.mean, f(4, 3)),
    case(aten.mean, ints(5, 4, 3), dtype=torch.float64),
    case(aten.mean.dim, ints(5, 4, 3), [0], dtype=torch.float64),
    case(aten.sum.dim_IntList, ints(5, 4, 3), [0], dtype=torch.float64),
    case(aten.mean.dim, f(4, 3, 5), [1]),
    case(aten.mean.dim, f(4, 3, 5), [0, -1], True),
    *(case(op, f(4, 3, 5), [1]) for op in (aten.amax, aten.amin, aten.logsumexp)),
    *(case(op, f(4, 3, 5), [0, 2], True) for op in (aten.amax, aten.amin, aten.logsumexp)),
    *(case(op, f(4, 3, 5), 1) for op in (aten.max.dim, aten.min.dim, aten.median.dim, aten.prod.dim_int)),
    *(case(op, f(4, 3, 5), 1, True) for op in (aten.max.dim, aten.argmax, aten.argmin)),
    case(aten.argmax, f(4, 3)),
    *(case(op, f(4, 3, 5), [1], correction=0) for op in (aten.var.correction, aten.std.correction)),
    case(aten.var.dim, f(4, 3, 5), [1], True, True),
    case(aten.var_mean.correction, f(4, 3, 5), [1], correction=1, keepdim=True),
    *(case(op, flags(4, 3, 5), 1) for op in (aten.any.dim, aten.all.dim)),
    *(case(op, flags(4, 3, 5), [1]) for op in (aten.any.dims, aten.all.dims)),
    case(aten.linalg_vector_norm, f(4, 3, 5), 2, [1]),
    case(aten.linalg_vector_norm, f(4, 3)),
    case(aten.norm.ScalarOpt_dim, f(4, 3, 5), 2, [1], True),
    case(aten.norm.Scalar, f(4, 3)),
    *(case(op, f(4, 3, 5), 1) for op in (aten.softmax.int, aten.log_softmax.int, aten._safe_softmax, aten.cumsum)),
    *(case(op, f(4, 3, 5), -1, False) for op in (aten._softmax, aten._log_softmax)),
    *(case(op, f(4, 3, 5), 1) for op in (aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin, aten.sort)),
    case(aten.softmax.int, f(4), 0),
    case(aten.sort.stable, f(4, 3, 5), stable=True, dim=0),
    case(aten.argsort, f(4, 3, 5)),
    case(aten.topk, f(4, 3, 5), 2),
    case(aten.topk, f(4, 6), 2, 0),
    case(aten.glu, f(4, 3, 6)),
    case(aten.glu, f(4, 12, 3), 1),
    case(aten.layer_norm, f(2, 3, 4), [4], f(4), f(4)),
    case(aten.layer_norm, f(2, 3, 4), [3, 4], f(3, 4)),
    case(aten.layer_norm, f(2, 3, 4), [4]),
    case(aten.rms_norm, f(2, 3, 4), [4], f(4)),
    case(aten.native_layer_norm, f(2, 3, 4), [4], f(4), f(4), 1e-5),
    case(aten.group_norm, f(2, 6, 5), 3, f(6), f(6)),
    case(aten.group_norm, f(2, 8, 3, 3), 4),
    frozen(aten.batch_norm, f(4, 6, 5), f(6), f(6), f(6), pos(6), **NORM),
    frozen(aten.batch_norm, f(4, 6), None, None, f(6), pos(6), **NORM),
    case(aten.instance_norm, f(2, 6, 5), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    case(aten.instance_norm, f(2, 6, 3, 3), None, None, None, None, True, 0.1, 1e-5, False),
    case(aten._weight_norm, f(6, 4, 3), pos(6, 1, 1)),
    case(aten._weight_norm, f(4, 3, 6), pos(1, 1, 6), 2),
    *(case(op, f(4, 6)) for op in (aten.fft_fft, aten.fft_rfft)),
    *(case(op, f(4, 6, 5)) for op in (aten.fft_fft2, aten.fft_rfft2)),
    *(case(op, f(4, 6, 5), None, [1]) for op in (aten.fft_fftn, aten.fft_rfftn)),
    *(case(op, cplx(4, 6)) for op in (aten.fft_ifft, aten.fft_irfft)),
    *(case(op, cplx(4, 6, 5)) for op in (aten.fft_ifft2, aten.fft_irfft2)),
    *(case(op, cplx(4, 6, 5), None, [1]) for op in (aten.fft_ifftn, aten.fft_irfftn)),
    case(aten.fft_fftn, f(4, 6)),
    case(aten.kthvalue, f(4, 3, 5), 2, 1),
    case(aten.diff, f(4, 6)),
    case(aten.diff, f(4, 6), 1, 0, f(1, 6)),
]


VIEWS = [
    *(
        case(aten.view, f(*a), list(b))
        for a, b in [
            ((2, 3, 36), (2, 3, 3, 6, 2)),  # fused q, k, v as [3, heads, head size]: heads are repeated segments
            ((2, 3, 36), (2, 3, 6, 6)),  # GPT-NeoX: [heads, 3 * head size], interleaved
            ((4, 6, 5), (24, 5)),  # batch and sequence flattened: the sequence is repeated
            ((24, 5), (4, 6, 5)),
            ((5, 12, 2), (5, 2, 6, 2)),  # torch's MultiheadAttention: (s, b * h, d)
            ((4, 6), (-1,)),
            ((4, 6), (6, 4)),  # no common loop but twos
            ((5, 4, 3), (10, 6)),
            ((4, 1, 6), (4, 6, 1)),
            ((1, 6), (6,)),
            ((0, 6), (3, 0, 2)),
            ((6,), (1, 6, 1)),
        ]
    ),
    case(aten.reshape, f(4, 6).t(), [4, 6]),
    case(aten._unsafe_view, f(4, 6), [24]),
    case(aten._reshape_copy, f(4, 6), [24]),
    case(aten.view_copy, f(4, 6), [24]),
    case(aten.flatten.using_ints, f(4, 6, 5), 0, 1),
    case(aten.unflatten.int, f(4, 12), 1, [3, -1]),
    case(aten.view_as, f(4, 6), f(24)),
    case(aten.reshape_as, f(4, 6), f(24)),
    case(aten.squeeze.dim, f(4, 1, 6), 1),
    case(aten.squeeze, f(4, 1, 6)),
    case(aten.squeeze.dims, f(4, 1, 6), [0, 1]),
    case(aten.unsqueeze, f(4, 6), -1),
    case(aten.expand, f(4, 1, 6), [3, 4, 5, -1]),
    case(aten.expand, f(2, 3, 1, 4), [2, 3, 5, 4]),
    case(aten.expand_as, f(4, 1), f(4, 6)),
    case(aten.broadcast_to, f(4, 1), [4, 6]),
    case(aten.permute, f(4, 6, 5), [2, 0, -2]),
    case(aten.transpose.int, f(4, 6, 5), 0, -1),
    case(aten.t, f(4, 6)),
    case(aten.t, f(4)),
    case(aten.movedim.int, f(4, 6, 5), 0, -1),
    case(aten.movedim.intlist, f(4, 6, 5), [0, 1], [-1, 0]),
    case(aten.swapaxes, f(4, 6, 5), 0, -1),
    case(aten.swapdims, f(4, 6, 5), 0, -1),
    case(aten.numpy_T, f(4, 6)),
    case(aten.numpy_T, f(4, 6, 5)),
    case(aten.adjoint, f(4, 6, 5)),
    case(aten.mT, f(4, 6, 5)),
    case(aten.view_as_real, cplx(4, 6)),
    case(aten.view_as_complex, f(4, 6, 2)),
    case(aten.one_hot, ints(5, 4, 3), 5),
    case(aten.diagonal, f(4, 6, 6), 1, -2, -1),
    case(aten.diagonal, f(4, 6, 4), 0, 2, 0),
    case(aten.unfold, f(4, 6, 5), 1, 2, 2),
    case(aten.ravel, f(4, 6)),
    case(aten.select.int, f(4, 6, 5), 1, -2),
    case(aten.unbind.int, f(4, 3, 5), 1),
    case(aten.flip, f(4, 6, 5), [1]),
    case(aten.roll, f(4, 6, 5), [1, 2], [0, -1]),
    case(aten.roll, f(4, 6), [2]),
    case(aten.slice.Tensor, f(4, 8), 1, 2, 6),
    case(aten.slice.Tensor, f(4, 8), 1, -4),
    case(aten.slice.Tensor, f(4, 8), 1, 0, 6),
    case(aten.slice.Tensor, f(4, 8), 1, -100, 4),
    case(aten.slice.Tensor, f(4, 8), 1, 0, 9223372036854775807, 2),
    case(aten.slice.Tensor, f(4, 8), 0),
    case(aten.slice.Tensor, f(4, 8), 1, -8, 8),
    case(aten.slice.Tensor, f(4, 8), 1, 6, 2),
    case(aten.narrow, f(4, 8), 1, 2, 4),
    case(aten.narrow, f(4, 8), 1, 0, 8),
    case(aten.split.Tensor, f(4, 7), 3, -1),
    case(aten.split.sizes, f(12, 3), [6, 4, 2]),
    case(aten.split_with_sizes, f(3, 12), [6, 4, 2], 1),
    case(aten.split_with_sizes, f(3, 6), [4, 0, 2], 1),
    case(aten.chunk, f(3, 12), 2, 1),
    case(aten.tensor_split.sections, f(3, 7), 2, 1),
    case(aten.cat, [f(4, 6), f(4, 3), f(4, 4)], 1),
    case(aten.cat, [f(4, 6)], -1),
    case(aten.cat, [f(0), f(4, 6), f(4, 3)], 1),
    case(aten.concat, [f(4, 3), f(2, 3)]),
    case(aten.hstack, [f(4, 6), f(4, 3)]),
    case(aten.hstack, [f(4), f(3)]),
    case(aten.vstack, [f(4, 3), f(2, 3)]),
    case(aten.vstack, [f(4), f(4)]),
    case(aten.concatenate, [f(4, 3), f(2, 3)]),
    case(aten.stack, [f(4, 6), f(4, 6)], -1),
    case(aten.stack, [f(4, 6), f(4, 6)]),
    case(aten.repeat, f(4, 3), [2, 1, 3]),
    case(aten.repeat_interleave.self_int, f(4, 3), 2, 1),
    case(aten.repeat_interleave.self_int, f(4, 3), 2, 0, output_size=8),
    case(aten.repeat_interleave.self_int, f(4, 3), 2),
    case(aten.constant_pad_nd, f(4, 6), [1, 2]),
    case(aten.constant_pad_nd, f(4, 6), [0, 0, 1, 0], 2.0),
    case(aten.pad, f(4, 6), [1, 2]),
    case(aten.pad, f(2, 4, 6), [1, 2], "reflect"),
    case(aten.tril, f(4, 6, 6), 1),
    case(aten.triu, f(4, 6, 6)),
]

LOOKUP = [
    case(aten.embedding, f(7, 6), ints(7, 4, 3)),
    case(aten.embedding, f(8, 6), ints(8, 4, 3), 2),
    case(aten.embedding, f(4, 6), ints(4, 5), -1, True),
    case(aten.index_select, f(4, 6, 5), 1, ints(6, 3)),
    case(aten.gather, f(4, 6, 5), 1, ints(6, 4, 3, 2)),
    case(aten.gather, f(4, 6), -1, ints(6, 4, 6)),
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
    case(aten.scatter.value, f(4, 6, 5), 1, ints(6, 4, 3, 5), 2.0),
    case(aten.scatter_add, f(4, 6, 5), 1, ints(6, 4, 3, 5), f(4, 3, 5)),
    case(aten.scatter_add, ints(9, 4, 6, 5), 0, ints(4, 3, 6, 4), ints(9, 5, 6, 5)),
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
    case(aten.slice_scatter, f(4, 6, 5), f(4, 2, 5), 1, 1, 3),
    case(aten.select_scatter, f(4, 6, 5), f(4, 5), 1, 2),
    case(aten.diagonal_scatter, f(4, 6, 6), f(4, 5), 1, 1, 2),
]

CASES: list[Case] = [*POINTWISE, *MATMUL, *ATTENTION, *EXPERTS, *IMAGES, *REDUCTIONS, *VIEWS, *LOOKUP, *UPDATES]
