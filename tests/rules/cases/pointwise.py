"""Pointwise operators, casts and copies."""

from __future__ import annotations

from typing import Any

import torch

from autotp.kernels.operators import OPS
from autotp.proof.case import Case
from tests.rules.cases.draw import aten, case, cplx, f, flags, frozen, ints, pos, since


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    abs acosh asinh atan ceil cos cosh deg2rad digamma elu celu erf erfc exp exp2 expm1 floor frac gelu
    hardshrink.default hardsigmoid hardtanh leaky_relu lgamma logical_not nan_to_num neg positive rad2deg
    reciprocal relu round sgn sigmoid sign signbit silu sin sinc sinh softshrink tan tanh trunc isnan isinf
    isfinite relu6 selu softplus hardswish log_sigmoid mish square alias detach clone contiguous lift_fresh_copy
    lift_fresh negative absolute detach_ zeros_like ones_like real angle i0 isneginf isposinf fix isreal arctan
    arcsinh special_expit special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    """
)
POSITIVE = words(
    """
    acos asin atanh erfinv log log10 log1p log2 logit rsqrt sqrt arccos arcsin arctanh special_ndtri
    """
)
BINARY = words(
    """
    add.Tensor sub.Tensor mul.Tensor div.Tensor true_divide.Tensor multiply.Tensor divide.Tensor subtract.Tensor
    atan2 copysign.Tensor eq.Tensor ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor fmax fmin fmod.Tensor hypot
    logaddexp logaddexp2 maximum minimum remainder.Tensor logical_and logical_or logical_xor rsub.Tensor
    xlogy.Tensor max.other min.other clamp_min.Tensor clamp_max.Tensor arctan2 greater.Tensor
    greater_equal.Tensor less.Tensor less_equal.Tensor not_equal.Tensor isclose special_xlog1py gelu_backward
    sigmoid_backward tanh_backward
    """
)
BITWISE = words(
    """
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor gcd lcm __and__.Tensor
    __or__.Tensor __xor__.Tensor ldexp.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor
    """
)
UNDERIVED_UNARY = words(
    """
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    """
)
UNDERIVED_BINARY = words(
    """
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_zeta igamma igammac heaviside logit_backward
    silu_backward
    """
)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


NEXT = f(4, 1, 3), f(6, 1)
POINTWISE = [
    *(case(_op(name), f(4, 3)) for name in UNARY),
    *(case(_op(name), pos(4, 3)) for name in POSITIVE),
    *(case(_op(name), f(4, 1, 3), f(6, 1)) for name in BINARY),
    *(case(_op(name), ints(5, 4, 3), ints(5, 3)) for name in BITWISE),
    *(since((2, 13), case(aten.nextafter, *NEXT)) or [frozen(2, aten.nextafter, *NEXT)]),  # its derivative
    *(frozen(1, _op(name), pos(4, 3)) for name in UNDERIVED_UNARY),
    *(frozen(2, _op(name), 1 + pos(4, 1, 3), 1 + pos(6, 1)) for name in UNDERIVED_BINARY),
    case(aten.arccosh, 1 + pos(4, 3)),
    case(aten.mvlgamma, 3 + pos(4, 3), 2),
    case(aten.polygamma, 1, pos(4, 3)),
    case(aten.threshold_backward, f(4, 3), f(3), 0.1),
    case(aten.native_dropout_backward, f(4, 3), flags(4, 3), 2.0),
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
    *(case(op, cplx(4, 3)) for op in (aten.conj, aten._conj, aten.conj_physical, aten._conj_physical)),
    *(case(op, cplx(4, 3)) for op in (aten.resolve_conj, aten.resolve_neg)),
    case(aten.copy, f(4, 3), f(3)),
    case(aten.copy, ints(5, 4, 3), f(3)),
    case(aten.bucketize.Tensor, f(4, 3), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
    case(aten.searchsorted.Tensor, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), f(4, 3)),
    case(aten.isin.Tensor_Tensor, ints(9, 4, 3), ints(9, 4)),
    case(aten.masked_fill.Scalar, f(4, 3), flags(3), 0),
    case(aten.masked_fill.Scalar, f(4, 3), flags(4, 1), -1e9),
    case(aten.masked_fill.Tensor, f(4, 3), flags(4, 3), f()),
    case(aten.where.self, flags(4, 1), f(4, 3), f(3)),
    case(aten.where.self, flags(4, 1), flags(4, 3), flags(3)),
    case(aten.where.ScalarOther, flags(4, 1), f(4, 3), 0.0),
    case(aten.where.ScalarOther, flags(4, 1), f(4, 3), 2.0),
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
    frozen(1, OPS.counter_dropout, f(4, 6), torch.tensor(7), None, 0, [4, 6], 0.5),
    frozen(1, OPS.counter_uniform, [4, 6], torch.tensor(7), None, 0, [4, 6], torch.float64),
]
