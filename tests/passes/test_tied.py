"""A weight under four names is one parameter, with one gradient and one optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import autotp
from tests.helpers.models import inputs_of, transformer
from tests.helpers.processes.pool import Pool

NAMES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


def step(model: Any, inputs: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    optimizer.step()
    return optimizer


def trained(rank: int, world: int, group: Any) -> dict[str, Any]:
    model: Any = transformer("t5", num_layers=1).double()
    inputs = inputs_of(model)
    sharded: Any = autotp.compile(model, mesh=DeviceMesh.from_group(group, "cpu"), example_inputs=inputs)
    optimizers = step(sharded, inputs), step(model, inputs)
    grad, wanted = sharded.full_grad_dict()["shared.weight"], model.shared.weight.grad
    states = [dict(m.items()) for m in (sharded.full_state_dict(), model.state_dict())]
    return {
        "one": len({id(sharded.get_submodule(n).weight) for n in NAMES}) == 1,
        "parameters": len(list(sharded.parameters())) == len(list(model.parameters())),
        "states": len(optimizers[0].state) == len(optimizers[1].state),
        "held": sharded.shared.weight.to_local().shape[0] * 2 == model.shared.weight.shape[0],
        "gradient": float((grad - wanted).abs().max() / wanted.abs().max()),
        "step": max(float((states[0][n] - t).abs().max()) for n, t in states[1].items()),
        "names": set(states[0]) == set(states[1]),
    }


def test_tied_four_ways(pool: Pool):
    for found in pool.run(trained, world=2):
        assert found["one"] and found["parameters"] and found["states"] and found["held"] and found["names"], found
        assert found["gradient"] < 1e-10 and found["step"] < 1e-8, found
