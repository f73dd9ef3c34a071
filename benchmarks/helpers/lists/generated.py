"""`generate()` of one architecture, unsharded and on gloo ranks: tokens must be the same, logits nearly.

One process builds the model, generates unsharded and on a single rank; the ranks are forked from it, and so begin with
the weights, the wanted results and the graphs that were captured.
"""

from __future__ import annotations

import os
import resource
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from benchmarks.helpers.build import Architecture, build
from benchmarks.helpers.isolate import Record, Send, merge
from benchmarks.helpers.measure import reason

from .captured_once import captured_once
from .forked import forked
from .prompts import planned_for, prompts

EXACT = 1e-9  # of the largest logit
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}
SECONDS = {"capture": 1200, "rank": 900}  # of CPU time, for each process


@contextmanager
def doubled() -> Iterator[None]:
    """Within this context `torch.float32` and `Tensor.float()` mean float64, as does the default dtype.

    Models that name float32 in their forward are so computed in float64 throughout: what differs is no rounding.
    """
    before = torch.get_default_dtype()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def in_float64(architecture: Architecture) -> Any:
    """Build the model of an architecture, such that all of it runs in float64 on the CPU."""
    model: Any = build(architecture).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the grouped product knows no float64 on the CPU
    return model


def generated(architecture: Architecture, tokens: int, degrees: Sequence[int], send: Send) -> None:
    """All ranks at each of the degrees generate what the whole model generates.

    Args:
        architecture: what to build. tokens: how many to generate. degrees: numbers of ranks.
        send: takes {"own": why the model itself does not, "inputs": [...], "tp": {degree: {cache: {"ok", "why",
            "gap", "same", "programs"}}}, "cpu_seconds"}, in parts.
    """
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS["capture"], resource.RLIM_INFINITY))
    with doubled(), torch.no_grad():
        try:
            model = in_float64(architecture)
            inputs = prompts(model)
            wanted = {name: _run(model, inputs, tokens, more) for name, more in CACHES.items()}
        except Exception as error:
            return send({"own": reason(error)})
        if isinstance(wanted["dynamic"], Exception):
            return send({"own": reason(wanted["dynamic"])})
        if any(bool(x.isnan().any()) for x in _steps(wanted["dynamic"])):
            return send({"own": "its own logits are nan with random weights"})
        send({"inputs": sorted(inputs)})
        wanted = {name: own for name, own in wanted.items() if not isinstance(own, Exception)}
        with captured_once():
            part = {"tp": {str(tp): {name: _not_reached() for name in wanted} for tp in degrees}}
            send(part)  # what stands where this process dies
            _compared(model, inputs, wanted, tokens, 1, lambda x: None)
            for tp in degrees:
                send({"tp": {str(tp): _on_ranks(tp, model, inputs, wanted, tokens)}})
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return send({"cpu_seconds": round(sum(u.ru_utime + u.ru_stime for u in used), 1)})


def _not_reached() -> Record:
    return {"ok": False, "why": "the process that captures ended before"}


def _on_ranks(tp: int, *work: Any) -> Record:
    """The results of forked ranks, for each cache that of the first rank on which it is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        each = forked(_rank, [(rank, tp, folder, *work) for rank in range(tp)])
    record: Record = {}
    wanted = work[2]
    for found, why in each:
        for name in wanted:
            result = found.get(name) or {"ok": False, "why": why or "nothing was sent"}
            if record.get(name, {"ok": True})["ok"]:
                record = merge(record, {name: result})
    return record


def _rank(rank: int, tp: int, folder: str, model: Any, inputs: Record, wanted: Record, tokens: int, send: Send) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS["rank"], resource.RLIM_INFINITY))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Any = dist.FileStore(f"{folder}/store", tp)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=timedelta(minutes=10))
    _compared(model, inputs, wanted, tokens, tp, send)


def _compared(model: Any, inputs: Record, wanted: Record, tokens: int, tp: int, send: Send) -> None:
    """Shard the model, generate with each cache, and send what came of it."""
    try:
        sharded = autotp.compile(model, tp, example_inputs=planned_for(model, inputs), check_capture=False)
    except Exception as error:
        return send({name: {"ok": False, "why": reason(error)} for name in wanted})
    for name, own in wanted.items():
        send({name: _result(sharded, own, _run(sharded, inputs, tokens, CACHES[name]))})
    return None


def _run(model: Any, inputs: Mapping[str, Any], tokens: int, more: Mapping[str, Any]) -> Any:
    """The results of `generate`, or its error."""
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": 1}
    given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    try:
        torch.manual_seed(0)
        return model.generate(**given, **asked, output_logits=True, return_dict_in_generate=True, **more)
    except Exception as error:
        return error


def _result(sharded: Any, own: Any, got: Any) -> Record:
    if isinstance(got, Exception):
        return {"ok": False, "why": reason(got)}
    same = own.sequences.shape == got.sequences.shape and bool((own.sequences == got.sequences).all())
    pairs = list(zip(_steps(own), _steps(got), strict=False))
    gap = max((_gap(a, b) for a, b in pairs), default=None)  # None: there are no logits, tokens alone are compared
    why = None if same else "other tokens"
    if same and gap is not None and gap > EXACT:
        why = f"logits are off by {gap:.1e} of the largest"
    ok, programs = why is None, len(sharded._programs_made)
    return {"ok": ok, "why": why, "gap": gap, "same": same, "programs": programs}


def _steps(found: Any) -> Sequence[Tensor]:
    """The logits of every step; a model that gives all tokens at once has one, and a transducer gives none."""
    logits = getattr(found, "logits", None)
    return (logits,) if isinstance(logits, Tensor) else logits or ()


def _gap(wanted: Tensor, got: Tensor) -> float:
    """The largest difference, as a part of the largest logit; suppressed ones are infinite in both."""
    finite = wanted.isfinite()
    if not bool((finite == got.isfinite()).all()):
        return float("inf")
    return float((wanted - got)[finite].abs().max() / wanted[finite].abs().max().clamp(min=1e-30))
