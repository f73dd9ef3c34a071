"""The Llama of `.megatron`, made tensor-parallel by each of those who can, all by Megatron's plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autotp
from benchmarks.lists.hand_plans import Counted

from .megatron import Llama, Shape, by_hand, megatron_pins
from .ways import Plain, Sequence

WAYS = {False: Plain, True: Sequence}  # sequence parallelism -> the hand-written one


def ours(model: nn.Module, ids: Tensor, sequence: bool, shape: Shape | None = None, **options: Any) -> nn.Module:
    """autotp's; with a shape by Megatron's plan, without one by the plan that autotp finds."""
    tp = dist.get_world_size()
    pins = None if shape is None else megatron_pins(shape)
    plan = autotp.plan(model, tp, example_inputs=ids, sequence_parallel=sequence, pins=pins, check_capture=False)
    return autotp.parallelize(model, plan, example_inputs=ids, **options)


def hand(model: nn.Module, shape: Shape, sequence: bool) -> Llama:
    """The hand-written one, with its slices of the model's weights."""
    group = dist.group.WORLD
    assert group is not None
    way = WAYS[sequence](dist.get_rank(), dist.get_world_size(), group.group_name)
    return by_hand(shape, way, model.state_dict())


def dtensor(model: nn.Module, shape: Shape, sequence: bool) -> nn.Module:
    """torch's `parallelize_module` of a copy, with the usual column- and row-parallel styles."""
    group: Any = dist.new_group()  # DTensors over a sharded module's own group are taken for that module's
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(copy.deepcopy(model), mesh, styles(shape, sequence))


def styles(shape: Shape, sequence: bool) -> dict[str, ParallelStyle]:
    """Those styles, as in torch's tutorial of tensor parallelism."""
    between = Shard(1) if sequence else Replicate()
    found: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for layer in (f"model.layers.{i}" for i in range(shape.layers)):
        found |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        found |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        found |= {
            f"{layer}.{name}_proj": RowwiseParallel(output_layouts=between) for name in ("self_attn.o", "mlp.down")
        }
        if sequence:
            whole = Replicate()
            found[f"{layer}.self_attn"] = PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(whole, None, None)
            )
            found[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,))
            names = "input_layernorm", "post_attention_layernorm"
            found |= {f"{layer}.{name}": SequenceParallel() for name in names}
    return found | ({"model.norm": SequenceParallel()} if sequence else {})


def local_gradients(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every gradient, by the parameter's name; what is a summand of it, summed."""
    found = {}
    for name, p in module.named_parameters():
        grad = p.grad
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=p.placements).to_local() if isinstance(p, DTensor) else grad.to_local()
        if grad is not None:
            found[name] = grad
    return found


def difference(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, each relative to the largest number of the other one."""
    if mine.keys() != other.keys():
        raise ValueError(f"tensors of other names: {sorted(mine.keys() ^ other.keys())}")
    return max(float((mine[k] - x).abs().max() / x.abs().max()) for k, x in other.items())


def sent(step: Callable[[], Any], tp: int) -> tuple[dict[str, int], float]:
    """The collectives that a step calls, by primitive and shape, and the bytes that a rank sends by them."""
    with Counted(tp) as counted:
        step()
    return dict(counted.calls), counted.bytes


def training_step(module: nn.Module, ids: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """A step: forward, cross entropy of the whole logits on every rank, backward; gradients are made anew."""
    parameters = list(module.parameters())

    def step() -> Tensor:
        for p in parameters:
            p.grad = None
        found: Any = module(ids)
        logits = found if isinstance(found, Tensor) else found.logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss

    return step
