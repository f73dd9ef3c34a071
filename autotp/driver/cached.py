"""Captures and plans from the cache on disk, so that a second process makes neither again.

What a file depends on is its key. A plan is JSON; a capture is torch's own pickle of a graph, which is why only the
user's own files are read (`disk_cache.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autotp.capture.capture import skeleton
from autotp.capture.model_key import Untold
from autotp.capture.packing import Unpackable, pack, unpack
from autotp.errors import PlanError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture
from autotp.log import log
from autotp.passes.shard.planner import Builder
from autotp.plans.plan import Plan
from autotp.rules.register import users_rules

from .disk_cache import Folder, own_folder
from .options import CaptureRequest
from .pipeline import capture_key
from .source_key import source_key, tensor_digest

LARGEST = 4096  # elements of a tensor that is an attribute, whose numbers a program may hold


@dataclass(frozen=True)
class Cached:
    """What the cache has of one model, inputs and request. Without a folder or a key everything is made.

    Attributes:
        folder, key: of the files. model, inputs, device: what a capture is of.
    """

    folder: Folder | None
    key: str
    model: nn.Module
    inputs: Inputs
    device: torch.device

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None, request: CaptureRequest
    ) -> Cached:
        """The cache for what `capture_model` with these arguments gives.

        Args:
            model, inputs, device, check, request: see `capture_model`.
        """
        folder, key = own_folder(), ""
        if folder is not None:
            key, why = _key(model, inputs, device, check, request)
            if why:
                log.warning("nothing is read from or kept in %s: %s", folder.path, why)
                folder = None
        return cls(folder, key, model, inputs, device)

    def capture(self, make: Callable[[], tuple[Capture, list[str]]]) -> tuple[Capture, list[str]]:
        """The capture and its notes, from the cache or made and kept there."""
        if self.folder is None:
            return make()
        earlier = self._read()
        if earlier is not None:
            log.info("the capture comes from %s", self.folder.path)
            return earlier
        captured, notes = make()
        try:
            self.folder.write(f"capture {self.key}", json.dumps(notes).encode() + b"\n" + pack(captured))
        except Unpackable as odd:
            log.warning("the capture is not kept in %s: %s", self.folder.path, odd)
        return captured, notes

    def _read(self) -> tuple[Capture, list[str]] | None:
        assert self.folder is not None
        data = self.folder.read(f"capture {self.key}")
        if data is None:
            return None
        notes, _, packed = data.partition(b"\n")
        try:
            captured = unpack(packed, self.device)
            captured.origin = skeleton(self.model, self.device), without_cache(self.model, self.inputs)[0]
            return captured, json.loads(notes)
        except (Unpackable, ValueError) as odd:
            log.warning("a capture in the cache is ignored: %s", odd)
            return None

    def plan(
        self, question: Any, capture: Callable[[], tuple[Capture, list[str]]], solve: Callable[..., Plan],
        digest: str | None = None,
    ) -> Plan:  # fmt: skip
        """The plan, likewise; one from the cache is as one that was loaded from a file, but can be explained.

        Args:
            question: what else it depends on, which `repr` says alike in every process.
            capture, solve: the captured model and its notes, and the plan of those.
            digest: of the captured graph that it must be for; None for any.
        """
        words = repr(question)
        if self.folder is None or " at 0x" in words:
            return solve(*capture())
        name = f"plan {hashlib.sha256(f'{self.key} {words}'.encode()).hexdigest()}"
        data = self.folder.read(name)
        try:
            plan = None if data is None else Plan.from_json(data.decode())
        except (PlanError, UnicodeDecodeError) as odd:
            log.warning("a plan in the cache is ignored: %s", odd)
            plan = None
        if plan is not None and digest in (None, plan.digest):
            log.info("the plan comes from %s", self.folder.path)
            bare = replace(self, model=skeleton(self.model, self.device))  # the plan must not keep weights
            return replace(plan, origin=partial(bare._builder, solve))
        plan = solve(*capture())
        self.folder.write(name, plan.to_json().encode())
        return plan

    def _builder(self, solve: Callable[..., Plan]) -> Builder | None:
        """What a plan of the capture in the cache is solved by; None where that is gone."""
        capture = self._read()
        return None if capture is None else solve(*capture).builder


def _key(
    model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None, request: CaptureRequest
) -> tuple[str, str]:
    """The key of what is kept, or why there is none."""
    if users_rules():
        return "", "rules that were registered are known in this process alone"
    key, why = capture_key(model, inputs, device, check, request)
    if key is None:
        return "", why
    try:
        return source_key(model, f"{key} {device.type} {_numbers(model)}"), ""
    except Untold as odd:
        return "", str(odd)
    except Exception as error:  # whatever a user's object may raise in being read: there is no cache then
        return "", f"{type(error).__name__}: {error}"


def _numbers(model: nn.Module) -> list[Any]:
    """The numbers of tensors that are plain attributes: a program holds them, unlike those of weights."""
    return [
        (path, name, tensor_digest(x))
        for path, module in model.named_modules()
        for name, x in sorted(vars(module).items())
        if isinstance(x, torch.Tensor) and not x.is_meta and x.numel() <= LARGEST
    ]
