"""DeepSeek-V3 on 64 and 512 devices, with rows that travel and without.

`python -m benchmarks.predicted.experts [--write]`. Nothing runs: the model is on the meta device, and every figure is
predicted. Meshes that autotp does not run, such as stages whose weights are split over dp, are priced by the same
arithmetic and marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

import autotp
from autotp.capture.request import CaptureRequest
from autotp.cost.meshes import KEEPS, Mesh, factorisations, variants
from autotp.driver.compile import capture_model
from autotp.driver.mesh_prices import Priced
from autotp.driver.mesh_search import BATCH_FACTORS, _Search
from autotp.driver.options import Options
from autotp.ir.graph import Capture
from autotp.plans.choices import call_of
from autotp.plans.estimates import Axes
from autotp.text import amount
from benchmarks.helpers.performance import command, table

HEADING = "DeepSeek-V3 with experts over ranks, predicted"
LENGTH, EXAMPLES = 4096, 8  # of a sequence; of a step for each device
WORLDS = (("b200", 64), ("h100", 512))
DEGREES = [(1, ep) for ep in (1, 8, 32, 64)] + [(2, ep) for ep in (1, 4, 32)] + [(8, ep) for ep in (1, 8)]
BRIDGE = "https://docs.nvidia.com/nemo/megatron-bridge/0.1.0/apidocs/bridge/bridge.recipes.deepseek.deepseek_v3.html"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/deepseek_v3"
REPORT = "https://arxiv.org/abs/2412.19437"


@dataclass(frozen=True)
class Row:
    """A choice of meshes: of its degrees (None: any) the fastest variant that fits, or else holds least.

    Attributes:
        name: of the row. pp, tp: degrees. ep: of experts; "many" for any but 1. runs: those alone that autotp runs.
    """

    name: str
    pp: int | None = None
    tp: int | None = None
    ep: int | str | None = None
    runs: bool = False

    def has(self, mesh: Mesh) -> bool:
        """Say whether a mesh is one of them."""
        experts = self.ep is None or (mesh.ep > 1 if self.ep == "many" else mesh.ep == self.ep)
        degrees = self.pp in (None, mesh.pp) and self.tp in (None, mesh.tp)
        return experts and degrees and (not self.runs or runs(mesh))


def runs(mesh: Mesh) -> bool:
    """Say whether autotp runs a mesh with as many parts of experts as ranks that hold them."""
    return bool(call_of(mesh)) and (mesh.ep == 1 or transformers.DeepseekV3Config().n_routed_experts % mesh.dp == 0)


ROWS = {
    64: (
        Row("autotp, experts whole on each rank", ep=1, runs=True),
        Row("autotp, rows travel", ep="many", runs=True),
        Row("Megatron Bridge: tp 2, pp 8, ep as dp", 8, 2, 4),
        Row("any mesh, rows travel", ep="many"),
        Row("torchtitan: tp 1, pp 1, ep 1, weights split", 1, 1, 1),
        Row("torchtitan: the same with ep 8", 1, 1, 8),
    ),
    512: (
        Row("autotp, experts whole on each rank", ep=1, runs=True),
        Row("one stage, rows travel", 1, ep="many"),
        Row("Megatron Bridge: tp 2, pp 8, ep 32", 8, 2, 32),
        Row("DeepSeek's report: tp 1, pp 16, ep as dp", 16, 1, 32),
        Row("its ep of 64, with pp 8", 8, 1, 64),
        Row("any mesh, rows travel", ep="many"),
        Row("torchtitan: tp 1, pp 1, ep 1, weights split", 1, 1, 1),
        Row("torchtitan: the same with ep 8", 1, 1, 8),
    ),
}


def deepseek() -> nn.Module:
    """The model by its class's own config, on the meta device in bfloat16."""
    config: Any = transformers.DeepseekV3Config(use_cache=False)
    with torch.device("meta"):
        return transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).train()


def priced(search: _Search, devices: int) -> Iterator[tuple[Mesh, Priced]]:
    """Every variant of every mesh of the degrees that were planned."""
    units = len(next(iter(search.pricers.values())).terms.units)
    for mesh in factorisations(devices, list(search.pricers), units):
        for each in variants(mesh, search.batch, search.examples, units, BATCH_FACTORS):
            for keep in KEEPS:
                for split in (False, True):
                    variant = replace(each, fully_shard=split, keep=keep)
                    yield variant, search.pricers[mesh.inner].price(variant)


def order(price: Priced) -> tuple[bool, float, float]:
    """Return what is less for the better of two: the fastest of what fits, then what holds least."""
    return (not price.fits, price.seconds if price.fits else 0.0, price.memory)


def run(rounds: int) -> list[dict[str, Any]]:
    """Price the rows; a prediction has one round."""
    ids, model = torch.zeros(1, LENGTH, dtype=torch.long), deepseek()
    inputs, programs = autotp.Inputs(input_ids=ids, labels=ids), dict[Axes, tuple[Capture, list[str]]]()

    def captured(tp: int, axes: Axes, check: bool = False, dealt: bool = False) -> tuple[Capture, list[str]]:
        if axes not in programs:
            request = CaptureRequest.read(axes, outputs="loss")
            programs[axes] = capture_model(model, inputs, torch.device("cpu"), False, request)
        return programs[axes]

    rows = []
    for cluster, devices in WORLDS:
        options = Options.read(1, {"cluster": cluster})
        search = _Search(captured, 1, options, "DeepSeek-V3", devices, EXAMPLES * devices)
        for tp, ep in DEGREES:
            search._priced(tp, 1, ep)
        every = list(priced(search, devices))
        for row in ROWS[devices]:
            mesh, price = min((x for x in every if row.has(x[0])), key=lambda x: order(x[1]))
            figures = {"seconds": price.seconds, "ep": price.times["cp"] if mesh.ep > 1 else 0.0, "bytes": price.sends}
            how = {"mesh": [*mesh.degrees, mesh.ep], "split": mesh.fully_shard, "keep": mesh.keep, "batch": mesh.batch}
            rows.append({"devices": devices, "cluster": cluster, "name": row.name, "runs": runs(mesh), **how})
            rows[-1] |= {**figures, "memory": price.memory, "fits": price.fits}
    return rows


def page(record: Mapping[str, Any]) -> str:
    """Section of these rows."""
    head = ("", "pp, dp, tp, ep", "variant", "step", "over ep", "memory of a rank", "fits", "runs")
    parts = []
    for cluster, devices in WORLDS:
        cells = []
        for row in (x for x in record["rows"] if x["devices"] == devices):
            pp, dp, _, tp, ep = row["mesh"]
            variant = f"{'weights split, ' if row['split'] else ''}keeps {row['keep']}, {row['batch']} at once"
            over = f"{row['ep']:.1f} s" if row["ep"] else "-"
            figures = f"{row['seconds']:.1f} s", over, amount(row["memory"])
            answers = ["yes" if row[name] else "no" for name in ("fits", "runs")]
            cells.append([row["name"], f"{pp}, {dp}, {tp}, {ep}", variant, *figures, *answers])
        parts.append(f"{devices} {cluster.upper()}, {EXAMPLES * devices} sequences a step:\n\n{table(head, cells)}")
    degrees = ", ".join(f"tp {tp} x ep {ep}" for tp, ep in DEGREES)
    return f"""\
DeepSeek-V3 (671B, bfloat16 with AdamW's states in float32, sequences of {LENGTH} tokens), without its multi-token
prediction, routers even: of each row the fastest variant that fits, or where none does the one that holds least. Meshes
with cp are left out, and degrees are {degrees}.

Megatron's are those of [Megatron Bridge]({BRIDGE})
(tp 2, pp 8, ep 32 on 256 H100, pp 16 and ep 64 on 1,024), DeepSeek's those of [its report]({REPORT})
(pp 16, ep 64, no tp, on 2,048), torchtitan's of [its config]({TITAN})
for the 671B model (no tp, no pp, weights split over all, ep left at 1). Where devices are too few, ep is what dp
leaves. With ep below dp ranks that follow each other gather the experts that they have alike, as autotp does it. It
splits weights of stages over dp otherwise than is priced, once a step, and holds whole experts where dp does not divide
their number (256): rows of such say so, and are priced by the same arithmetic. A row of a token is sent once for
each of its 8 experts, and by every rank of tp; neither DualPipe nor an exchange that hides under products, nor a token
that goes to a node once, is in the price.

""" + "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    command("predicted.experts", HEADING, run, page, 1, __doc__, arguments)


if __name__ == "__main__":
    main()
