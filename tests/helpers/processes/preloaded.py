"""What nearly every worker imports, imported once: the pool's workers are forked from a process that has it.

Four processes that each import torch and transformers spend as long at it as most tests take.
"""

# ruff: noqa: E402 (what is imported comes after what must be set before)

from __future__ import annotations

import gc
import warnings

gc.disable()  # while libraries are imported

import pytest  # noqa: F401 (for every file of tests imports it)
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers

import autotp
from tests.helpers.models import FAMILIES, build
from tests.helpers.processes.cpu import collect_rarely

torch.set_num_threads(1)
# Before a capture: that pretends eight CUDA devices where torch is built for CUDA and there is none, and the first
# backward starts a thread for each device that there is. No backward runs in a fork of a process with these.
torch.ones((), requires_grad=True).backward()
for kind, _ in FAMILIES.values():
    getattr(transformers, kind)  # the library imports a family when it is named
for public in autotp.__all__:
    getattr(autotp, public)  # and so does autotp
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model, inputs = build("gpt2")
    autotp.verify(model, tp=2, example_inputs=inputs)
collect_rarely()  # what is shared by fork is not touched by the workers' collections
