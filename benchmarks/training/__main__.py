"""A training for real over each mesh, one after the other: `python -m benchmarks.training [--write]`.

The same 4.9 million weights, batches and learning rates in every run; what is compared is the loss and the norm of all
gradients, step by step, with those of one process of plain torch. A run is a part: it goes on from its last checkpoint,
and is not repeated once it is done on the same code. The model of one run is then served, and says something.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.helpers.command import made
from benchmarks.helpers.curves import Panel, drawing
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.performance import LOAD, ROOT, table, write_section
from benchmarks.results import parts_of

from .runs import BITS, LENGTH, ONE, ROWS, RUNS, Text, model_of, trained

HEADING, PICTURE = "A training, over each mesh", ROOT / "docs" / "assets" / "training.svg"
FIGURE = "a-training-over-each-mesh"
STEPS, SERVED, PROMPT, WORDS = 2000, "tp=2", "class LlamaAttention(nn.Module):\n", 200
LAST = 100  # steps whose losses' mean is printed


def part(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run one of the parts, or read what it found before.

    Returns: losses and norms of all steps, the mean over the ranks where each has rows of its own; seconds a step, of
    the processors of all ranks and by the clock; and what they were measured with.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    done = folder / f"{slug}-{steps}.json"
    if not done.exists():
        served = folder / "served" if name == SERVED else None
        work = functools.partial(trained, name, steps, folder / f"{slug}-{steps}", served)
        everyone = on_ranks(work, RUNS[name].ranks)
        losses = [math.fsum(row) / len(row) for row in zip(*(found["losses"] for found in everyone), strict=True)]
        found = {"losses": losses, "norms": everyone[0]["norms"], "load": LOAD}
        found |= {"cpu_s": sum(f["cpu_s"] for f in everyone) / steps}
        if served is not None:
            tokenizer().save_pretrained(served)
        done.write_text(json.dumps(found | made("benchmarks.training", None)))
    return json.loads(done.read_text())


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are bytes, numbered as the training's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    numbers = {letter: number for number, letter in enumerate(letters(alphabet))}
    tokens = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokens.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=tokens)
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def letters(alphabet: Sequence[str]) -> list[str]:
    """Return the letter that stands for each byte: itself where it prints, the next ones after 255 for the others."""
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


def said(folder: Path) -> str:
    """Serve the trained model by `autotp serve` over two ranks, and return how it goes on from a prompt."""
    script = ROOT / "examples" / "serve_client.py"
    options = ["--folder", str(folder / "served"), "--say", PROMPT, "--tokens", str(WORDS), "--tp", "2"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=True, cwd=ROOT)
    *_, text, _, right = done.stdout.strip().splitlines()
    if right != "Right":
        raise RuntimeError(f"a stream and a whole answer differ:\n{done.stdout}")
    return ast.literal_eval(text)


def apart(runs: Mapping[str, Any], key: str) -> dict[str, list[float]]:
    """By run, how far each step's value is off that of one process, as a part of it."""
    one = runs[ONE][key]
    return {name: [abs(x / y - 1) for x, y in zip(run[key], one, strict=True)] for name, run in runs.items()}


def picture(runs: Mapping[str, Any]) -> str:
    """Draw losses, norms, and by how much losses are off those of one process."""
    losses, norms = ({name: run[key] for name, run in runs.items()} for key in ("losses", "norms"))
    highest, norm = math.ceil(runs[ONE]["losses"][0]), max(1, round(max(runs[ONE]["norms"])))
    log = {name: [math.log10(max(x, 1e-9)) for x in xs] for name, xs in apart(runs, "losses").items() if name != ONE}
    panels = [
        Panel("Loss", losses, {float(y): str(y) for y in range(highest + 1)}),
        Panel("Norm of all gradients", norms, {0.0: "0", norm / 2: f"{norm / 2:g}", float(norm): f"{norm}"}),
    ]
    if log:
        panels.append(Panel("Loss, off one process", log, {float(y): f"1e{y}" for y in (-9, -7, -5, -3, -1)}))
    about = f"{len(runs[ONE]['losses'])} steps of AdamW on the sources of transformers, byte by byte"
    return drawing("One training over each mesh", about, panels)


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    runs, rows = record["runs"], []
    losses, norms = apart(runs, "losses"), apart(runs, "norms")
    for name, run in runs.items():
        first = next((str(i + 1) for i, x in enumerate(losses[name]) if x), "none")
        mean = math.fsum(run["losses"][-LAST:]) / len(run["losses"][-LAST:])
        seconds = [f"{run['cpu_s']:.2f}", str(run["load"])]
        away = ["-"] * 3 if name == ONE else [first, f"{max(losses[name]):.1e}", f"{max(norms[name]):.1e}"]
        rows.append([name, str(RUNS[name].ranks), f"{mean:.4f}", *away, *seconds])
    head = [
        "run",
        "ranks",
        f"loss, last {LAST}",
        "first apart",
        "loss apart",
        "norm apart",
        "CPU, s",
        "load",
    ]
    bits = [runs[name] for name in BITS if name in runs]
    equal = all(run[key] == bits[0][key] for run in bits for key in ("losses", "norms"))
    same = f"{'Equal' if equal else 'NOT EQUAL'} to the bit in every step's loss and norm: {' and '.join(BITS)}."
    days = " and ".join(sorted({run["date"] for run in runs.values()}))
    spoken = "\n".join(f"    {line}".rstrip() for line in record["said"].splitlines())
    served = f"\nThe model of {SERVED}, served by `autotp serve` over 2 ranks, asked for {WORDS} bytes:\n\n{spoken}\n"
    return f"""\
`{record["command"]}`: {record["steps"]} steps of {ROWS} x {LENGTH} bytes on a Llama of {record["parameters"]:,}
parameters in float32, AdamW with clipping at 1, over gloo processes of one thread each. The text:
{record["files"]} files of the sources that transformers {record["transformers"]} ships (Apache-2.0),
{record["bytes"] / 1e6:.1f} MB, SHA-256 {record["digest"][:16]}. Apart: the largest difference from one process of plain
torch in a step, as a part of the value, and the first step in which a loss differs at all. "Rows backwards" is one
process, too, whose sums have another order: what rounding alone does over so many steps. CPU seconds of a step, of
all ranks together. Load: of the machine as the command began; other work ran beside some.
{record["cores"]} cores of {record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {days}.

{table(head, rows)}
{same if len(bits) > 1 else ""}

![Losses, norms, and differences](assets/training.svg)
{served if SERVED in runs else ""}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the section of docs/performance.md, and the picture"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default {STEPS})")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="RUN", default=[], help=", ".join(RUNS))
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "training", help="what is done, and checkpoints"
    )
    given = parser.parse_args(arguments)
    folder = parts_of(given.folder, FIGURE, "benchmarks/training")
    names = [name for name in RUNS if not given.only or name in (*given.only, ONE)]
    runs = {}
    for name in names:
        runs[name] = part(name, given.steps, folder)
        print(f"{name}: loss {runs[name]['losses'][-1]:.4f}, {runs[name]['cpu_s']:.2f} CPU s a step", file=sys.stderr)
    text = Text()
    record = {"benchmark": "training", **made("benchmarks.training", arguments), "cores": os.cpu_count()}
    record |= {"steps": given.steps, "files": len(text.files), "bytes": len(text.bytes), "digest": text.digest}
    record["parameters"] = sum(p.numel() for p in model_of().parameters())
    record |= {"runs": runs, "said": said(folder) if SERVED in runs else ""}
    print(page(record))
    if given.write:
        PICTURE.write_text(picture(runs), encoding="utf-8")
        write_section(HEADING, page(record))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
