"""Answers of spmd_types to one architecture, and of the mutants of one program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from autotp import compat
from autotp.comm import conversions
from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.layouts import Layout
from autotp.ir.program import Planned, Sharded
from autotp.proof.certificate import RefusedError, Typing, certificate
from autotp.proof.equality import compare
from autotp.proof.run import Env, Values
from benchmarks.helpers.build import Architecture, architectures, build
from benchmarks.helpers.isolate import Send
from benchmarks.helpers.measure import example, reason
from benchmarks.results import clean
from tests.history.modules import Sorted
from tests.history.row import WIDTH

from .mutants import mutants

TP = 2
BY_EXPERT = {name: Shard(0) for name in ("*.gate_up_proj", "*.down_proj")}


@dataclass(frozen=True)
class Case:
    """A program whose mutants are judged.

    Attributes:
        model: type of the list. steering: options of the plan.
    """

    model: str
    steering: Mapping[str, Any] = field(default_factory=dict)

    def built(self) -> tuple[nn.Module, Any]:
        """The model and its inputs by name."""
        model = build(next(a for a in architectures() if a.name == self.model))
        return model, example(model)


@dataclass(frozen=True)
class SortedRows(Case):
    """Rows sorted by expert and the product of each with its own, of which one has no rows."""

    def built(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return Sorted(), {"x": torch.randn(8, WIDTH, requires_grad=True), "sizes": torch.tensor([3, 0, 4, 1])}


PROGRAMS: dict[str, Case] = {
    "Llama": Case("llama"),
    "Llama, sequence parallel": Case("llama", {"sequence_parallel": True}),
    "GPT-2": Case("gpt2"),
    "BERT": Case("bert"),
    "BERT, sequence parallel": Case("bert", {"sequence_parallel": True}),
    "Mixtral": Case("mixtral"),
    "Qwen3": Case("qwen3"),
    "GPT-NeoX": Case("gpt_neox"),
    "T5": Case("t5"),
    "ViT": Case("vit"),
    "ConvNeXt": Case("convnext"),
    "Mamba": Case("mamba"),
    "Mixtral, by expert, sequence parallel": Case("mixtral", {"pins": BY_EXPERT, "sequence_parallel": True}),
    "Rows sorted by expert": SortedRows("", {"pins": {"up": Shard(0)}, "sequence_parallel": True}),
}


def programs(model: nn.Module, inputs: Any, tp: int = TP, **steering: Any) -> tuple[Planned, Sharded, Values]:
    """A model's planned graph, the program of its ranks, and values for its leaves.

    Args:
        model: with its weights. inputs: by name. tp: number of ranks.
        steering: what `autotp.plan` takes beside.
    """
    given = Inputs(**inputs)
    captured, notes = capture_model(model, given, torch.device("cpu"), check=False)
    options = Options.read(tp, Steering(**steering))
    plan = solve_plan(captured, notes, options, type(model).__name__)
    return *apply_plan(captured, plan, options), Values.of(captured, model, given)


def certified(architecture: Architecture, send: Send) -> None:
    """Certify one architecture at `TP`."""
    try:
        model = build(architecture)
        planned, sharded, _ = programs(model, example(model))
    except Exception as error:
        return send({"failed": reason(error)})
    began = time.process_time()
    found = certificate(planned, sharded)
    spent = {"cpu_seconds": round(time.process_time() - began, 2)}
    at = found.refusal
    refusal = at and {"kind": at.direction, "value": at.value, "op": at.op, "module": at.module, "detail": at.detail}
    return send({**asdict(found), "refusal": refusal, "ok": found.ok, "said": clean(str(found)), **spent})


def tried(name: str, send: Send) -> None:
    """Count what becomes of every mutant of one program."""
    model, inputs = PROGRAMS[name].built()
    planned, sharded, values = programs(model, inputs, **PROGRAMS[name].steering)
    assert certificate(planned, sharded), str(certificate(planned, sharded))
    shapes = outputs(planned, sharded)
    found: Counter[str] = Counter()
    left: list[str] = []
    for mutant in mutants(planned, sharded):
        verdict = judged(planned, mutant.program, shapes, values)
        found[verdict] += 1
        left += [f"{mutant}: {verdict}"] if verdict in ("verify", "nobody") else []
    send({"found": dict(found), "left": left})


def judged(planned: Planned, mutant: Sharded, shapes: list[Any], values: Values) -> str:
    """Who refuses a mutant first: shapes alone, the types of the certificate, `verify`, or nobody.

    Args:
        planned: of the right program, whose outputs have these `shapes`. mutant: the wrong one.
        values: of its leaves.
    """
    try:
        if outputs(planned, mutant) != shapes:
            return "shapes"
    except RefusedError:
        return "shapes"
    refusal = certificate(planned, mutant).refusal
    if refusal is not None:
        return refusal.direction
    return "nobody" if compare(planned, mutant, values) else "verify"


class Untyped(Typing):
    """The program run on meta tensors alone, so that a refusal is one of shapes."""

    def run(self) -> Values:
        return self.walk()

    def _assert(self, x: Tensor, letter: str) -> Tensor:
        return x

    def _convert(self, node: fx.Node, env: Env) -> list[Tensor]:
        return conversions.simulate(env[node.args[0]], *self._at(node.args[1:3], env, 0))  # type: ignore[index]

    def _typed_call(self, node: fx.Node, args: Any, kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _of_split_loop(self, node: fx.Node, xs: list[Any]) -> list[Any]:
        return xs

    def _output(self, node: fx.Node, name: str, x: Tensor, state: Layout | None) -> None:
        pass


def outputs(planned: Planned, sharded: Sharded) -> list[Any]:
    """The shapes of what every rank returns, without any types.

    Raises:
        RefusedError: the program does not run.
    """
    values = Untyped(planned, sharded).run().nodes
    nodes = compat.tree_leaves(sharded.graph.output_node().args[0])
    return [[getattr(x, "shape", x) for x in values[n]] for n in nodes if n in values]
