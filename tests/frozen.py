"""Write sixty plans as files, so that two checkouts can be compared byte for byte: `python -m tests.frozen FOLDER`.

Twenty architectures, each for training at tp=2, for training at dp=2 x tp=4, and for prefill at tp=3: the saved plan,
what `print` shows, the report and the page. A change that keeps plans leaves `diff -r` of the two folders empty;
`--against OLDER` plans nothing, and lists those plans of two folders that differ, with bytes and step of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autotp
from autotp.inputs import for_model
from benchmarks.helpers.build import architectures, build
from tests.helpers.models import TWELVE, inputs_of, transformer

OTHERS = ("mixtral", "deepseek_v3", "gpt_oss", "mamba2", "whisper", "clip", "swin", "falcon")
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"tp": 2}, "train-dp": {"tp": 4, "dp": 2}, "prefill": {"tp": 3, "objective": "prefill"},
}  # fmt: skip


def models(only: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, model and example inputs of all, or of these only."""
    for name in (name for name in TWELVE if not only or name in only):
        model = transformer(name)
        yield name, model, inputs_of(model)
    by_name = {architecture.name: architecture for architecture in architectures()}
    for name in (name for name in OTHERS if not only or name in only):
        model = build(by_name[name])
        yield name, model, for_model(model)


def changes(older: Path, newer: Path) -> Iterator[str]:
    """A line for each plan that differs in two folders, with the bytes that a rank sends and the step."""
    for path in sorted(newer.glob("*.json")):
        texts = [(folder / path.name).read_text() for folder in (older, newer)]
        if texts[0] != texts[1]:
            totals = [json.loads(text)["totals"] for text in texts]
            sent = [f"{t['forward_bytes'] + t['backward_bytes']:.0f}" for t in totals]
            steps = [f"{1e3 * t['seconds']:.4f}" for t in totals]
            yield f"{path.stem}: {' to '.join(sent)} bytes, {' to '.join(steps)} ms"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these architectures")
    parser.add_argument("--against", type=Path, metavar="OLDER", help="list what differs from this folder")
    asked = parser.parse_args()
    if asked.against is not None:
        print("\n".join(changes(asked.against, asked.folder)))
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, model, inputs in models(asked.only):
        for setting, options in SETTINGS.items():
            plan = autotp.plan(model, example_inputs=inputs, check_capture=False, **options)
            texts = {"json": plan.to_json(), "txt": str(plan), "report": plan.report()}
            plan.to_html(asked.folder / f"{name}-{setting}.html")
            for kind, text in texts.items():
                (asked.folder / f"{name}-{setting}.{kind}").write_text(text)
            print(name, setting, len(texts["json"]), flush=True)


if __name__ == "__main__":
    main()
