"""Published meshes of large runs, and where each ranks among those that the cost model chooses from.

    python -m benchmarks.predicted.meshes           # prices what results/meshes.json lacks, and prints the tables
    python -m benchmarks.predicted.meshes --write   # and their sections of docs/performance.md

Nothing runs: models are on the meta device, and every figure is predicted. Each case is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import nn

import autotp
from autotp.plans.choices import MeshChoice, MeshRow
from autotp.text import seconds
from benchmarks.helpers import isolate
from benchmarks.helpers.command import made, versions
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.performance import table, write_section
from benchmarks.plan_time import MODELS, build

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs/performance.md", ROOT / "benchmarks/results/meshes.json"
DRAWING = ROOT / "docs/assets/mesh-llama-70b.svg"
LIMIT, CHOSEN = 1800.0, "Llama-70B on 512"
Degrees = tuple[int, int, int, int]  # pp, dp, cp, tp


@dataclass(frozen=True)
class Case:
    """A published run, or devices to choose a mesh for.

    Attributes:
        name, section: of the row and its table. model: a name of `plan_time.MODELS`, or a GPT's layers, hidden size and
            heads. devices, examples, length: of a step. mesh: the published one; None where there is none.
        cluster: the machines. tflops: published, a device. again: whether these count what is computed again.
    """

    name: str
    section: str
    model: str | tuple[int, int, int]
    devices: int
    examples: int
    length: int
    mesh: Degrees | None = None
    cluster: str = "h100"
    tflops: float | None = None
    again: bool = False


HERD, MEGATRON, PLAYBOOK = "Llama 3 405B", "Megatron-LM", "The Ultra-Scale Playbook"
RECIPE = (
    "https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100.llama31.html"
)
SOURCES = {
    HERD: f"""\
[The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), table 4: bfloat16, 16M tokens a step, weights
split over dp and not gathered again for the backward. NVIDIA's recipe for 1,024 H100 ([Megatron
Bridge]({RECIPE})) gives tp, pp and cp; 1,024 sequences a step are ours.""",
    MEGATRON: """\
[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1: A100 of 80 GB, a vocabulary of 51,200,
sequences of 2048 tokens, blocks computed again, nothing split over dp. Its TFLOP/s count what is computed
again, and so do the predicted ones where the variant does so.""",
    PLAYBOOK: """\
[The Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), from measurements on up
to 512 H100: below 10B one technique, such as ZeRO-3 on 8 devices; from 10B to 100B tp 8 with pp or with ZeRO-3,
or ZeRO-3 alone; from 512 devices on no pure data parallelism; from 1,024 on tp 8 with pp and ZeRO-2. Models,
batches and degrees of these rows are ours.""",
}
# Narayanan et al. 2021, table 1: parameters, layers, hidden size, heads, tp, pp, devices, batch, TFLOP/s a device
TABLE = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142),
    ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135),
    ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 138),
    ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 140),
    ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 155),
    ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 163),
    ("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 163),
)
CASES = (
    Case(CHOSEN, "", "Llama-70B", 512, 512, 8192),
    Case("8,192 H100, 8192 tokens", HERD, "Llama-405B", 8192, 2048, 8192, (16, 64, 1, 8), tflops=430),
    Case("16,384 H100, 8192 tokens", HERD, "Llama-405B", 16384, 2048, 8192, (16, 128, 1, 8), tflops=400),
    Case("16,384 H100, 131072 tokens", HERD, "Llama-405B", 16384, 128, 131072, (16, 8, 16, 8), tflops=380),
    Case("1,024 H100, 8192 tokens", HERD, "Llama-405B", 1024, 1024, 8192, (8, 8, 2, 8)),
    *(
        Case(name, MEGATRON, (layers, hidden, heads), n, batch, 2048, (pp, n // (tp * pp), 1, tp), "a100", rate, True)
        for name, layers, hidden, heads, tp, pp, n, batch, rate in TABLE
    ),
    Case("8B on 8: ZeRO-3", PLAYBOOK, "Llama-8B", 8, 128, 4096, (1, 8, 1, 1)),
    Case("70B on 64: ZeRO-3", PLAYBOOK, "Llama-70B", 64, 256, 4096, (1, 64, 1, 1)),
    Case("70B on 64: tp 8, dp 8", PLAYBOOK, "Llama-70B", 64, 256, 4096, (1, 8, 1, 8)),
    Case("70B on 1,024: ZeRO-3", PLAYBOOK, "Llama-70B", 1024, 1024, 4096, (1, 1024, 1, 1)),
    Case("70B on 1,024: tp 8, pp 4, dp 32", PLAYBOOK, "Llama-70B", 1024, 1024, 4096, (4, 32, 1, 8)),
)


def model_of(case: Case) -> nn.Module:
    """The case's model on the meta device, bfloat16."""
    if isinstance(case.model, str):
        assert case.model in MODELS
        return build(case.model).train()
    layers, hidden, heads = case.model
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=case.length, vocab_size=51200, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16).train()


def choose(case: Case) -> MeshChoice:
    """The meshes of a case, ranked."""
    ids = torch.zeros(1, case.length, dtype=torch.long)
    return autotp.plan(
        model_of(case), devices=case.devices, global_batch=case.examples, cluster=case.cluster, outputs="loss",
        example_inputs={"input_ids": ids, "labels": ids}, check_capture=False,
    )  # fmt: skip


def priced(case: Case, drawing: str, send: Send) -> None:
    """The figures of a case; for `isolate.run`."""
    began = time.process_time()
    choice = choose(case)
    record: Record = {"cpu": time.process_time() - began, "considered": choice.considered, "fitting": choice.fitting}
    record |= {"meshes": len(choice.ranked), "best": figures(choice.rows[0], case)}
    if case.mesh in {row.mesh.degrees for row in choice.ranked}:  # published ones beyond these autotp does not run
        place, row = choice.place(*case.mesh)
        whole = [x for x in choice.ranked if x.mesh.cp == 1]
        record |= {"place": place, "published": figures(row, case), "whole": len(whole)}
        record["place_whole"] = 1 + whole.index(row) if row in whole else None
        record["best_whole"] = figures(whole[0], case)
    if drawing:
        choice.to_svg(drawing)
        record["text"] = str(choice)
    send(record)


def figures(row: MeshRow, case: Case) -> Record:
    """What the tables hold of a row; operations a second and device as the publication counts them."""
    more = row.share("again") * row.seconds / row.times["compute"] if case.again and row.mesh.keep == "inputs" else 0.0
    how = {
        "chunks": row.mesh.chunks,
        "batch": row.mesh.batch,
        "shard": "weights" if row.mesh.fully_shard else "",
        "keep": row.mesh.keep,
    }
    shares = {name: row.share(name) for name in row.times}
    return {
        "mesh": list(row.mesh.degrees), **how, "seconds": row.seconds, "memory": row.memory, "fits": row.fits,
        "why": row.reason, "tflops": row.flops * (1 + more) / 1e12, "shares": shares,
    }  # fmt: skip


def words(mesh: Sequence[int]) -> str:
    """Degrees, without those of 1."""
    named = zip(("pp", "dp", "cp", "tp"), mesh, strict=True)
    return " ".join(f"{name} {n}" for name, n in named if n > 1) or "one device"


def how(figure: Mapping[str, Any]) -> str:
    """What else a step does."""
    parts = [f"split {figure['shard']}" if figure["shard"] else "", f"interleaved {figure['chunks']}"]
    keeps = "" if figure["keep"] == "all" else f"keeps {figure['keep']}"
    return ", ".join(x for x in (parts[0], parts[1] if figure["chunks"] > 1 else "", keeps) if x)


def rows(section: str, found: Mapping[str, Record]) -> list[list[str]]:
    """The rows of a table: those of its cases that are there."""
    out = []
    for case in CASES:
        record: Any = found.get(case.name) or {}
        if case.section != section or case.mesh is None or "published" not in record:
            continue
        own, best, whole = record["published"], record["best"], record["best_whole"]
        slower = own["seconds"] / best["seconds"] - 1
        alone = "-" if record["place_whole"] is None else f"{record['place_whole']} of {record['whole']}"
        than = "" if record["place_whole"] in (None, 1) else f", {own['seconds'] / whole['seconds'] - 1:.0%} slower"
        rates = f"{'-' if case.tflops is None else f'{case.tflops:.0f}'} / {own['tflops']:.0f}"
        cells = [case.name, words(case.mesh), how(own), rates, f"{record['place']} of {record['meshes']}, {slower:.0%}"]
        out.append([*cells, alone + than, f"{words(best['mesh'])} ({how(best)})", own["why"] or "it is the first"])
    return out


def shown(section: str, found: Mapping[str, Record]) -> str:
    """A table of published meshes."""
    head = ("", "published", "its best variant", "TFLOP/s, published / predicted", "rank, slower than the first",
            "rank with cp 1", "the first", "the difference, says the model")  # fmt: skip
    return f"{SOURCES[section]}\n\n{table(head, rows(section, found))}"


def chosen(found: Mapping[str, Record]) -> str:
    """The choice that is shown whole."""
    record = found[CHOSEN]
    return (
        f"{record['considered']:,} variants of {record['meshes']} meshes in {record['cpu']:.0f} s of CPU time, capture "
        f"and plans included.\n\n```\n{record['text']}```\n\n![The same as bars](assets/{DRAWING.name})\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the sections of docs/performance.md")
    parser.add_argument("--anew", action="store_true", help="price again what is there")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases, by the beginnings of their names")
    given = parser.parse_args(arguments)
    found: dict[str, Record] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [c for c in CASES if not given.only or c.name.startswith(tuple(given.only))]
    left = [c for c in wanted if given.anew or c.name not in found]
    for case in track(left, "pricing", console=Console(stderr=True), transient=True):
        record, why = isolate.run(priced, case, str(DRAWING) if case.name == CHOSEN else "", limit=LIMIT)
        if why:
            raise RuntimeError(f"{case.name}: {why}")
        told = made("benchmarks.predicted.meshes", [])
        found[case.name] = record | {"made": f"{told['date']}, {versions(told)}"}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        best = record["best"]
        print(f"{case.name}: {words(best['mesh'])} {how(best)} {seconds(best['seconds'])}, {record['cpu']:.0f} s")
    sections = {section: shown(section, found) for section in (HERD, MEGATRON, PLAYBOOK)}
    if CHOSEN in found:
        sections[CHOSEN] = chosen(found)
    for title, text in sections.items():
        print(f"{title}\n\n{text}")
        if given.write:
            made_with = next(iter(found.values()))["made"]
            section = f"`python -m benchmarks.predicted.meshes`: {made_with}.\n\n{text}"
            write_section(f"{title}, predicted", section, PAGE)


if __name__ == "__main__":
    main()
