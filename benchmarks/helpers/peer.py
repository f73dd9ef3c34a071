"""CPU seconds that a peer, meta-pytorch/autoparallel, needs for the same model, where it is installed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotp.inputs import for_model

from .isolate import Send
from .measure import reason

MISSING = "not installed"


def plan(build: Callable[[], Any], tp: int, send: Send) -> None:
    """Measure it from module to sharded module, as its own `examples/example_hf.py` calls it; for `isolate.run`.

    Sends {"peer": seconds}, or why there are none: `MISSING`, or its error.
    """
    try:
        found: Any = importlib.import_module("autoparallel.api").AutoParallel
    except ImportError:
        return send({"peer": MISSING})
    model = build()
    ids: Any = for_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        mesh = init_device_mesh(device, (tp,), mesh_dim_names=("tp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shape = ids.kwargs["input_ids"].shape
        began = time.process_time()
        with found(model, lambda: torch.zeros(shape, dtype=torch.long, device=device), mesh, policy) as run:
            run.add_input_constraints([(Replicate(),)])
            run.add_parameter_memory_constraint(low=None, high=None)
            run.apply_placement(run.optimize_placement())
        send({"peer": time.process_time() - began})
    except Exception as error:
        send({"peer": reason(error)})
    finally:
        dist.destroy_process_group()
    return None
