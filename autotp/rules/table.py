"""The table of notations: the rule of most operators is an einsum string, and which operands may be partial sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autotp import compat
from autotp.ir.op import Op, Rule, aten
from autotp.kernels import float8 as _operators  # noqa: F401  defines them
from autotp.kernels.attention import dealt_attention

from .core import RULES, targets_of
from .creation import coordinates, local_factory, local_part
from .local import local_count
from .lookup import local_bags, local_embedding
from .losses import local_classes, local_mean
from .notation import attempt, einsum
from .recurrent import local_cell
from .views import local_copy, local_repeat

When = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Line:
    """A line of the table: the notation, a condition on the arguments of a call, and further arguments of `einsum`."""

    notation: str
    when: When | None
    fields: dict[str, Any]


class Row:
    """Rule function of operators in the table: by the first line that fits a call; without one it runs whole."""

    def __init__(self, lines: tuple[Line, ...]) -> None:
        self.__name__, self.lines = lines[0].notation, lines

    def __call__(self, op: Op) -> Rule:
        for line in self.lines:
            if line.when is None or line.when(op.args):
                rule = attempt(op, line.notation, **line.fields)
                if rule is not None:
                    return rule
        return Rule()


def row(operators: str, notation: str, when: When | None = None, **fields: Any) -> None:
    """Enter a line for these operators, behind the lines that they have.

    Args:
        operators: names within `torch.ops.aten`, or with their namespace.
        notation, fields: as `einsum` takes them.
        when: for which arguments of a call, by name.
    """
    rows: dict[Any, Row] = {}
    for target in targets_of(operators):
        before = RULES.get(target)
        lines = before.lines if isinstance(before, Row) else ()
        RULES[target] = rows.setdefault(before, Row((*lines, Line(notation, when, fields))))


# Pointwise: every dimension of the result is a loop. Summands may stay summands only where f(a + b) = f(a) + f(b) for
# certain: what is chosen by a mask must have zero, or a further summand, in the other places.
row(
    "square absolute __and__ __or__ __xor__ arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip empty_like fill "
    "fix float_power floor_divide full_like greater greater_equal hardswish isclose isreal ldexp leaky_relu.default "
    "less less_equal lift_fresh log_sigmoid mish not_equal ones_like polar relu6 selu softplus special_expit "
    "zeros_like",
    "...->...",
)
RULES["pointwise"] = RULES[aten.square.default]  # of all that torch tags so
row(
    "contiguous clone alias detach detach_.default _to_copy to.dtype to.dtype_layout to.device lift_fresh_copy neg "
    "negative real imag conj _conj conj_physical _conj_physical resolve_conj resolve_neg",
    "...->...", linear="self", exact=True,
)  # fmt: skip
row("to.other type_as", "...,*->...", linear="self", exact=True)
row("copy.default", "...->...", linear="src", exact=True, localise=local_copy)
row("add sub rsub subtract complex", "...->...", linear="self + other or real + imag")
row("mul multiply", "...->...", linear="self or other")
row("div divide true_divide", "...->...", lambda a: not a.get("rounding_mode"), linear="self", exact=True)
row("div divide", "...->...")
row("where.self where.ScalarOther where.ScalarSelf where.Scalar", "...->...", linear="self=0 + other=0")
row("masked_fill", "...->...", linear="self + value=0")
row("prelu", "...,->... | ...,1->... | bc...,c->bc...")
row("bucketize.Tensor isin.Tensor_Tensor", "...,*->...")
row("searchsorted.Tensor", "_,...,_->...")
# The identity outside of training; in training it must draw the same mask on every rank, so it runs whole.
row("dropout alpha_dropout feature_dropout", "...->...", lambda a: not a["train"] or not a["p"], linear="input")
row("native_dropout", "...->...", lambda a: a["train"] is False or not a["p"], linear="input", empty=False)

# Values without operands, of which each rank makes its part; every rank makes all of what depends on the position.
row("zeros.default ones.default full.default empty.memory_format", "->...", localise=local_factory)
row("arange eye.default eye.m linspace.default tril_indices triu_indices", "->*")
row("autotp::counter_uniform", ",_,_->...", localise=local_part)
row("autotp::counter_dropout", "...,,_,_->...", linear="x", localise=local_part)
coordinates.rule = lambda op: Rule()  # type: ignore[attr-defined]  # of an axis that was sharded before: whole here

# Contractions.
row("linear", "...k,nk,n->...n", linear="input + bias", addends="bias")
row("mm", "mk,kn->mn", linear="self or mat2")
row("bmm", "bmk,bkn->bmn", linear="self or mat2")
row("addmm", "m?n?,mk,kn->mn", linear="self + mat1 or self + mat2", addends="self")
row("baddbmm", "b?m?n?,bmk,bkn->bmn", linear="self + batch1 or self + batch2", addends="self")
row("addbmm", "m?n?,bmk,bkn->mn", linear="self + batch1 or self + batch2", addends="self")
row("addmv", "1,mk,k->m | ,mk,k->m", linear="self + mat or self + vec", addends="self", empty=False)
row("addmv", "m,mk,k->m", linear="self + mat or self + vec", addends="self")
row("mv", "mk,k->m", linear="self or vec")
row("dot", "k,k->", linear="self or tensor")
row("matmul", "k,k-> | ...mk,k->...m | k,...kn->...n | ...mk,...kn->...mn", linear="self or other")
row("outer", "m,n->mn", linear="self or vec2")
row("linalg_vecdot vdot", "...->...[]", linear="x or y or self or other")
row("bilinear", "...i,...j,oij,o->...o", addends="bias", empty=False)
row("cdist", "...m_,...n_->...mn", empty=False)
# Sums of products of bytes are exact in any order; bytes are no summands, for their sum may be no byte. Scales are of
# the whole operand, or of its rows and columns, and not of what is summed over.
row("_int_mm.default", "mk,kn->mn", empty=False)
row(
    "_scaled_mm.default",
    "mk,kn,11,11,n,->mn | mk,kn,m1,1n,n,->mn | mk,kn,,,n,->mn | mk,kn,1,1,n,->mn",
    lambda a: a["scale_result"] is None, addends="bias", empty=False,
)  # fmt: skip
row("matrix_exp linalg_matrix_exp linalg_inv.default linalg_cholesky.default", "...__->...__", empty=False)
row("linalg_inv_ex.default linalg_cholesky_ex.default", "...__->...__,...", empty=False)
row("linalg_qr.default", "...__->...__", empty=False)
row("linalg_det.default linalg_slogdet.default", "...__->...", empty=False)
row("linalg_householder_product.default", "...__,..._->...__", empty=False)
row("tril triu", "...__->...__", linear="self")

# softmax(q kᵀ) v: batch, heads, query positions (unless causal by index) and the width of values split, keys do not. A
# key head goes with its group of query heads (Ainslie et al. 2023), or one with all.
ATTENTION = (
    "...nq_,...1__,...1_v,...n?q?_->...nqv | bq_,b__,b_v,b?q?_->bqv | q_,__,_v,q?_->qv | "
    "...(h_)q_,...h__,...h_v,...(h_)?q?_->...(h_)qv"
)
CAUSAL = ATTENTION.replace("q", "_")
sdpa = partial(row, "scaled_dot_product_attention.default", last="h")
sdpa(CAUSAL, lambda a: a["dropout_p"] == 0 and a["is_causal"], empty=compat.ATTENDS_WITHOUT_HEADS)
sdpa(ATTENTION, lambda a: a["dropout_p"] == 0 and a["attn_mask"] is None, empty=compat.ATTENDS_WITHOUT_HEADS)
FLAGS = {"empty": ("n", "h") if compat.ATTENDS_WITHOUT_HEADS else False}  # heads, where they are fewer than ranks
sdpa(ATTENTION, lambda a: a["dropout_p"] == 0 and a["attn_mask"].meta["val"].dtype == torch.bool, **FLAGS)
# A learnt mask gets no gradient from an empty shard: torch skips the whole backward there.
sdpa(ATTENTION, lambda a: a["dropout_p"] == 0, empty=False)
dealt_attention.rule = partial(  # type: ignore[attr-defined]
    einsum, notation=CAUSAL, last="h", empty=compat.ATTENDS_WITHOUT_HEADS
)

# Images. Input channels are contracted; with groups, whole groups split, and so does each group's own convolution.
CONVOLUTION = " | ".join(f"b?(gi){x},(go)i{x},(go)->b?(go){x}" for x in ("_", "__", "___"))
TRANSPOSED = CONVOLUTION.replace("(go)i", "(gi)o")
convolution = {
    "linear": "input + bias", "addends": "bias", "empty": False, "sizes": {"g": "groups"},
    "localise": local_count("groups"),
}  # fmt: skip
row("conv1d conv2d conv3d", CONVOLUTION, **convolution)
row("conv_transpose1d conv_transpose2d conv_transpose3d", TRANSPOSED, **convolution)
row("convolution", CONVOLUTION, lambda a: not a["transposed"], **convolution)
row("convolution", TRANSPOSED, **convolution)
POOLS = "avg_pool{0} adaptive_avg_pool{0}", "max_pool{0} adaptive_max_pool{0} max_pool{0}_with_indices"
for n, resized in enumerate(
    (
        "upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d",
        "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa",
        "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d",
    ),
    1,
):
    positions, (averages, largest) = "..." + "_" * n, (names.format(f"{n}d") for names in POOLS)
    row(f"{averages} {resized}", f"{positions}->{positions}", linear="self or input", empty=False)
    row(largest, f"{positions}->{positions}", empty=False)
row("grid_sampler.default", "bc__,bxy_->bcxy | bc___,bxyz_->bcxyz", linear="input", empty=False)
row("im2col.default", "b?c__->b?(c_)_", linear="self", empty=False)  # every channel becomes a window of rows
row("col2im.default", "b?(c_)_->b?c__", linear="self", empty=False)
row("pixel_shuffle", "...(c_)hw->...c(h_)(w_)", linear="self", empty=False)  # a pixel is a square of channels
row("pixel_unshuffle", "...c(h_)(w_)->...(c_)hw", linear="self", empty=False)

# Reductions: what is reduced by a sum is contracted, a maximum is one of the parts' maxima, all else must stay whole.
row("sum.default sum.dim_IntList", "...->...[]", linear="self")
row("nansum count_nonzero", "...->...[]")
row("mean.default mean.dim", "...->...[]", linear="self", localise=local_mean)
row("amax max.default", "...->...[]", factor_fields={"reduction": "max"}, empty=False)
row("autotp::float8_amax", "...->...[]", factor_fields={"reduction": "max"})
row("histc.default", "...->_", lambda a: a["min"] != a["max"])  # between ends that do not depend on the data
row(
    "all.dim all.dims amin aminmax any.dim any.dims argmax argmin kthvalue linalg_norm linalg_vector_norm logsumexp "
    "max.dim median.dim min.dim mode nanmean nanmedian.dim norm prod.dim_int std std_mean var var_mean",
    "...[_]->...[]",
)
row("quantile.scalar nanquantile.scalar", "...[_]->...[]", empty=False)
row(
    "softmax _softmax log_softmax _log_softmax _safe_softmax argsort cummax cummin cumprod logcumsumexp sort topk",
    "...[_]->...[_]",
)
row("cumsum", "...[_]->...[_]", linear="self")
row("linalg_cross", "...[_]->...[_]", linear="self or other")
row("cosine_similarity", "...[_]->...[]")
row("diff.default", "...[_]->...[_]", linear="self + prepend + append")
row(
    "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 "
    "fft_rfftn",
    "...[_]->...[_]", linear="self", empty=False,
)  # fmt: skip
row("stft", "..._,_->...__ | ..._,_->...___", linear="self", empty=False)  # a frequency needs all of its window
row("glu.default", "...[(2a)]->...[a]")  # the dimension holds the loop twice: values, then gates

# Norms. With running statistics every channel is on its own; in training they are shared state, so it runs whole.
for n in (1, 2, 3):
    normed = "_" * n
    row(
        "layer_norm.default rms_norm.default native_layer_norm.default",
        f"...{normed},{normed},{normed}->...{normed}", lambda a, n=n: len(a["normalized_shape"]) == n,
    )  # fmt: skip
row("group_norm.default", "b(g_)*,(g_),(g_)->b(g_)*", empty=False, sizes={"g": "num_groups"},
    localise=local_count("num_groups"))  # fmt: skip
row("instance_norm.default", "bc*,c,c->bc*", lambda a: a["use_input_stats"] and a["running_mean"] is None, empty=False)
row("batch_norm.default", "bc...,c,c,c,c->bc...", lambda a: not a["training"], empty=False)
row("batch_norm.default", "_c*,c,c,c,c->_c*", lambda a: a["running_mean"] is a["running_var"] is None, empty=False)
row("_native_batch_norm_legit.no_stats", "_c*,c,c->_c*,c,c", lambda a: a["training"], empty=False)
row("autotp::batch_norm", "_c*,c,c,c,c->_c*,c,c", empty=False)
row("_native_batch_norm_legit_functional", "_c*,c,c,c,c->_c*,c,c,c,c", lambda a: a["training"], empty=False)
row("_weight_norm.default", "*[a]->*[a]", empty=False)  # every slice has its length (Salimans and Kingma 2016)

# Losses.
row("autotp::class_sums", "nc,n,n->_n", localise=local_classes, empty=False)
row("autotp::checked_classes", "*->*")  # whole, so that every rank refuses what is no class

# Recurrent networks: the examples of whole sequences, for a cell reads all units of the state before; of a single cell
# the hidden units with all their gates. The last state has, under torch 2.12, a dimension more before the others.
for batch, first in ("b__", True), ("_b_", False):
    for names, terms in (
        ("lstm.input", "_b_,*->{},*b_,*b_"),
        ("gru.input rnn_tanh.input rnn_relu.input", "_b_,*->{},*b_"),
    ):
        row(
            names, f"{batch},{terms.format(batch)}",
            lambda a, first=first: a["batch_first"] == first and not (a["dropout"] and a["train"]), empty=False,
        )  # fmt: skip
row("lstm_cell", "b_,b_;bn,(4n)_,(4n)_,(4n),(4n)->bn", localise=local_cell, empty=False)
row("gru_cell", "b_,b_,(3n)_,(3n)_,(3n),(3n)->bn", localise=local_cell, empty=False)
row("rnn_tanh_cell rnn_relu_cell", "b_,b_,n_,n_,n,n->bn", localise=local_cell, empty=False)

# Looking up along a dimension: ids, columns, or the rows of a table (Shoeybi et al. 2019, section 3: mask, look up,
# sum); not where the backward counts how often each id occurs among all.
row("embedding.default", "vh,...->...h", lambda a: not a["scale_grad_by_freq"], localise=local_embedding, last="v")
bags = {"localise": local_bags, "empty": False, "last": "v"}
row("embedding_bag", "_h,_,_,_->_h,_,_,_h", lambda a: a["mode"] == 2, **bags)  # the largest: a place in each column
row("embedding_bag", "vh,_,_,_->_h,_,_,_", lambda a: not a["scale_grad_by_freq"] and not a["sparse"], **bags)
row("embedding_bag", "_h,_,_,_->_h,_,_,_", **bags)
row("index_select.default", "...[_],i->...[i]", linear="self")
row("repeat_interleave.self_Tensor", "...[_],_->...[_]", lambda a: a["dim"] is not None, linear="self")
row("gather.default take_along_dim.default", "...[_],...->...", linear="self", strict=True)

# Writing into a part: what is written along stays whole; what is added may be added in parts.
row("scatter.src scatter.value", "...[_]->...[_]", linear="self + src + value", strict=True)
row("scatter_add.default", "...[_],...[k],...[k]->...[_]", linear="self + src", addends="self", strict=True)
row("scatter_reduce.two", "...[_]->...[_]", strict=True)
row("index_add.default", "...[_],k,...[k]->...[_]", linear="self + source", addends="self")
row("index_copy.default", "...[_],_,...[_]->...[_]", linear="self + source")
row("index_reduce.default", "...[_],_,...[_]->...[_]")
row("index_fill.int_Scalar index_fill.int_Tensor", "...[_],_,->...[_]")
row("slice_scatter", "...[_],...[_]->...[_]", linear="self + src")
row("select_scatter", "...[_],...[]->...[_]", linear="self + src")
row("diagonal_scatter", "...[_],...[]_->...[_]", linear="self + src")
# Which element goes where is data; a last dimension over which the mask is broadcast moves in whole rows.
row("masked_scatter.default", "*h,*1,*h->*h | *,*,*->*", linear="self + source", strict=True)

# Views.
row("view_as_real", "...->..._", linear="self", empty=False)  # neither does as it should of a tensor without elements
row("view_as_complex", "..._->...", linear="self", empty=False)  # whose last stride is not 1
row("one_hot", "...->..._", lambda a: a["num_classes"] > 0)
row("diagonal", "...[_]->...[]_", linear="self")
row("unfold", "...[_]->...[_]_", linear="self")
row("select.int unbind.int", "...[_]->...[]", linear="self")
row("flip roll", "...[_]->...[_]", linear="self")
row("stack", "...[]->...[_]", linear="tensors")
row("broadcast_tensors", "...->...", linear="tensors")
row("pad_sequence", "_...->__...", linear="sequences + padding_value=0")
row(
    "repeat_interleave.self_int", "...[a]->...[(a_)]", lambda a: a["dim"] is not None,
    linear="self", localise=local_repeat,
)  # fmt: skip

# Float8: a scale is one more operand, and the largest value of a gradient is one more result. Rounded gradients are
# never given as summands; results behind the first are zeros that every rank has, gradients of operands behind the
# first are maxima over the loop that these lack.
narrow: dict[str, Any] = {"summed": False, "factor_fields": {"alike": frozenset({1, 2})}}
maxima: dict[str, Any] = {"summed": False, "factor_fields": {"maxima": frozenset({1, 2})}}
row("autotp::float8_cast", "...,->...")
row("autotp::float8_linear", "...k,nk,,->...n,", **narrow)
row("autotp::float8_delayed", "...k,nk,,_,->...n,", **narrow)
row("autotp::float8_before", "__,->_")
row("autotp::float8_record", "__,,,->__")
row("autotp::float8_rows", "...k,nk,..._,n_,k,k->...n,..._,n", **narrow)
row("autotp::float8_rows_hp", "...k,nk,..._,n_,->...n,..._", **narrow)
row("autotp::float8_seen", "...,->...", linear="y + zero", **maxima)
row("autotp::float8_row_seen", "...n,..._->...n", linear="y + rows", **maxima)
row("autotp::float8_rows_seen", "...n,..._,n->...n", linear="y + rows + columns", **maxima)
