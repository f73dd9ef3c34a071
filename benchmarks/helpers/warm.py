"""What ranks that train a moment import and set up, once: they are forked from a process that has it."""

from __future__ import annotations

import gc

import torch
import torch.distributed.tensor

import autotp

from .faulty import BATCH, WIDTH, made

torch.set_num_threads(1)
autotp.compile(made(), 1, example_inputs=torch.zeros(BATCH, WIDTH, dtype=torch.float64))
gc.freeze()  # what is shared by fork is not touched by the collections of each
