"""Rows: biases, gradients that are still sums, experts and routers, weights that are shared."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Shard as Split

from autotp.ir.layouts import I, R

from .modules import VOCABULARY, Balanced, Experts, Loss, Mlp, Sorted, Tied, Twice
from .mutants import becomes, changed, detached, drop, gradient_twice, halved, instead
from .row import BATCH, LENGTH, WIDTH, Row, hidden

PAIR: dict[str, Any] = {"up.weight": Split(0), "down.weight": Split(1)}
WITHIN: dict[str, Any] = {"up": Split(2), "down": Split(1)}
HEAD: dict[str, Any] = {"head.weight": Split(0)}


def ids() -> torch.Tensor:
    """Token ids."""
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 % VOCABULARY


def sorted_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by expert, of which the second gets none."""
    return hidden(8, WIDTH), torch.tensor([3, 0, 4, 1])


ROWS = [
    Row(1, "TGI#1036", "a row-parallel bias is added tp times", Mlp,
        drop("keep_first_i", "p_down_bias"), "every rank adds the bias", "linear_1|p_down_bias", PAIR),
    Row(2, "torchtitan#4245", "the experts' output bias counts tp times", Experts,
        drop("keep_first_i", "p_bias"), "every rank adds the experts' biases", "^baddbmm$|p_bias", WITHIN),
    Row(3, "torchtitan#4332", "a bias scaled by 1/tp: its gradient is 1/tp too small", Mlp,
        instead("keep_first_i", "p_down_bias", halved), "every rank adds a part of the bias", "^p_down_bias$", PAIR,
        degrees=(2,)),
    Row(4, "torchtitan#1878", "the experts' input gradient is not all-reduced", Experts,
        drop("f", "layer_norm|reshape|expand"), "f left out before the experts", "layer_norm|reshape|expand", WITHIN),
    Row(5, "torchtitan#4054", "the router's gradient is a rank's part; forward and loss are right", Experts,
        becomes("g", "^linear$", I), "the gathered scores' gradient is taken for whole", "^linear$", WITHIN),
    Row(6, "torchtitan#2416", "scores applied after the experts: the gate's partial gradient is taken for whole",
        partial(Experts, before=False), drop("f", "p_router_weight"), "f left out of the gate's weight",
        "p_router_weight", {"up": Split(2), "down": Split(1)}, seed=1),
    Row(7, "torchtitan#4154", "the load balance's update is not summed over the ranks",
        Balanced, drop("all_reduce", "mean"), "a rank's own counts are taken for all", "mean|sub|sign", seed=0),
    Row(8, "transformers#48205", "score gradients of the experts of other ranks are never summed", Sorted,
        drop("group_i", "sigmoid"), "the scores' gradient is left a rank's part", "sigmoid",
        {"up": Split(0)}, sequence=True, inputs=sorted_rows),
    Row(9, "torchtitan#3412", "a loss in chunks accumulates a partial gradient as a whole one", Loss,
        drop("f", "layer_norm|flatten|chunk|getitem"), "f left out before the head",
        "layer_norm|flatten|chunk|getitem", HEAD),
    Row(10, "torchtitan#3827", "gathered logits are typed R and should be I: gradients wrong by tp",
        partial(Loss, chunks=1), becomes("gather", "^linear$", R), "the gathered logits count on every rank",
        "^linear$", HEAD),
    Row(11, "torchtitan#3174", "a tied weight's whole gradient comes back twice", Tied,
        changed("p_embed_weight", gradient_twice), "the weight's gradient counts twice", "p_embed_weight",
        {"embed.weight": Split(0)}, inputs=ids),
    Row(12, "Megatron 3479e6f", "of a shared weight's two gradients only one is accumulated", Twice,
        changed("p_one_weight", detached, "_1$"), "one use without a gradient", "p_one_weight|linear|tanh",
        {"one.weight": Split(0)}),
    Row(19, "Megatron#5047", "the gradient of an auxiliary loss is wrong by tp where tokens are split",
        partial(Experts, before=False, aux=True), becomes("f_star", "mean", R), "the loss counts on every rank",
        "mean", {"up": Split(2), "down": Split(1)}, sequence=True),
    Row(20, "Automodel#2995", "the router is detached: its gradient is none", Experts,
        changed("softmax", detached), "the scores are without a gradient", "softmax|linear_1|unsqueeze", WITHIN),
    Row(38, "pytorch#58005", "a differentiable all-reduce multiplies gradients by tp", Mlp,
        becomes("f_star", "linear_1", R), "the backward of the all-reduce is an all-reduce", "linear_1", PAIR),
]  # fmt: skip
