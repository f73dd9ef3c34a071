"""Rows: norms, attention, fused weights, views, and conversions of partial values."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Split

from autotp.ir.layouts import Partition, Shard

from .gradients import PAIR
from .modules import (
    Adapted,
    Attention,
    Capacity,
    Einsum,
    Fused,
    Gated,
    Largest,
    Latent,
    Masked,
    Mlp,
    Normed,
    Permuted,
    Residual,
    Transposed,
    Viewed,
)
from .mutants import as_first_rank, becomes, drop, first_slice, redealt, twice
from .row import EXPERTS, WIDTH, Row, hidden

HEADS: dict[str, Any] = {"q.weight": Split(0), "o.weight": Split(1)}
NORMED: dict[str, Any] = {"up.weight": Split(0), "down.weight": Split(1)}

ROWS = [
    Row(13, "Megatron 20b7a54", "a norm's weight is not marked for sequence parallelism", Normed,
        drop("f", "p_norm_weight"), "f left out of the norm's weight", "p_norm_weight", NORMED, sequence=True),
    Row(14, "Megatron !2632", "gradients of q and k norms are not reduced where all else is frozen",
        partial(Attention, "heads", frozen=True), drop("f", "p_q_norm"), "f left out of the norm's weight", "p_q_norm",
        HEADS),
    Row(15, "Megatron#7452", "a norm that heads share is summed with sequence parallelism alone",
        partial(Attention, "heads"), drop("f", "p_q_norm"), "f left out of the norm's weight", "p_q_norm", HEADS),
    Row(16, "transformers#42448, vllm#47187", "a norm over the width of all heads is computed of a rank's",
        partial(Attention, "whole"), drop("g", "pow_1"), "the mean is of a rank's heads", "pow_1|mean", HEADS),
    Row(17, "Megatron 5fffdfc", "the input gradient of a frozen weight is not all-reduced", partial(Mlp, frozen=True),
        drop("f", "layer_norm"), "f left out before the frozen layer", "layer_norm", PAIR),
    Row(18, "Megatron#5338", "the reduction of a tensor that is not contiguous is left out", Transposed,
        drop("f_star|all_reduce", "mul|transpose|linear_1"), "the sum is left out", "mul|transpose|linear_1", PAIR),
    Row(21, "DeepSpeed#8195", "the width is sliced instead of the capacity", Capacity,
        becomes("f", "view|^x$", Shard(2, Partition.plain(WIDTH, 2))), "a rank reads a slice of the width",
        "view|^x$|linear", NORMED, inputs=partial(hidden, EXPERTS, WIDTH, WIDTH), degrees=(2,)),
    Row(22, "Megatron#3575", "the output gate is not sliced where there are fewer kv heads than ranks",
        partial(Attention, gated=True, kv=2), first_slice("sigmoid"), "every rank reads the first rank's gate",
        "mul|sigmoid", {**HEADS, "gate.weight": Split(0)}),
    Row(23, "Megatron#5383", "a fused down-projection is split by sizes of the whole", Latent,
        redealt("p_both_weight"), "the fused weight is dealt in one piece", "^linear$|p_both_weight",
        {"both.weight": Split(0)}),
    Row(24, "vllm#3775", "a fused gate and up are split in one piece", Gated,
        redealt("p_both_weight"), "the fused weight is dealt in one piece", "^linear$|p_both_weight",
        {"both.weight": Split(0)},
        degrees=(2,)),
    Row(25, "diffusers#13718, Automodel#1324, pytorch#149701",
        "a contiguous split of fused q, k, v and MLP mixes heads", Fused,
        redealt("p_qkvm_weight"), "the fused weight is dealt in one piece", "^linear$|p_qkvm_weight",
        {"qkvm.weight": Split(0), "o.weight": Split(1), "m.weight": Split(1)}, degrees=(2,)),
    Row(26, "DeepSpeed#4654, DeepSpeed#4712", "kv heads of a name that no list has are split wrongly",
        partial(Attention, kv=2), redealt("p_k_weight", repeat=2), "rows of all kv heads on every rank", "linear_1",
        {**HEADS, "k.weight": Split(0), "v.weight": Split(0)}, degrees=(2,)),
    Row(27, "transformers#48307", "with fewer kv heads than ranks the forward dies in a view",
        partial(Attention, kv=2), redealt("p_k_weight"), "k is dealt in parts of a head", "linear_1|view",
        {**HEADS, "k.weight": Replicate(), "v.weight": Replicate()}, degrees=(4,)),
    Row(33, "pytorch#165962", "a maximum is taken of summands", Largest,
        drop("f_star|all_reduce", "linear_1"), "the sum is left out before the maximum", "linear_1|amax", PAIR),
    Row(34, "pytorch#167686, pytorch#170147", "a conversion's backward skips what it should do to a partial gradient",
        Residual, drop("as_invariant", "^linear$"), "the skip's gradient counts on every rank", "^linear$", PAIR),
    Row(35, "pytorch#162460", "the backward of an einsum copies a partial gradient", Einsum,
        drop("f", "layer_norm"), "f left out before the einsum", "layer_norm",
        {"up": Split(1), "down": Split(0)}),
    Row(36, "pytorch#179502", "a view of a split value passes where it must be gathered", Viewed,
        drop("g", "relu"), "the value is viewed as it is split", "relu|reshape",
        {"up.weight": Split(0), "down.weight": Split(0)}, inputs=partial(hidden, 12, WIDTH)),
    Row(37, "autoparallel#517", "a partial gradient that is whole already is reduced again", Permuted,
        twice("f|all_reduce", "sum_1"), "the sum is taken twice", "sum_1", NORMED),
    Row(39, "pytorch#168058", "masks of dropout are equal on all ranks", Masked,
        as_first_rank("coordinates"), "every rank draws the first one's mask", "dropout", PAIR),
    Row(46, "mcore-bridge#173, Megatron-Bridge#5634, ART#619",
        "the whole factor of a low-rank pair has a part of its gradient", Adapted,
        drop("f", "linear_1"), "f left out between the factors", "linear_1",
        {**NORMED, "a.weight": Replicate(), "b.weight": Split(0)}),
]  # fmt: skip
