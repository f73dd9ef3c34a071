"""What architectures that generate import and set up, once: their processes are forked from one that has it."""

from __future__ import annotations

import gc
import logging
import warnings

import torch
import torch.distributed.tensor
import torch.export
import transformers
from torch import nn

import autotp
from benchmarks.helpers.lists.generated import generated

torch.set_num_threads(1)
logging.disable()
transformers.logging.set_verbosity_error()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    autotp.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 1, example_inputs=torch.zeros(4, 8))
assert generated
gc.freeze()  # what is shared by fork is not touched by the collections of each
