"""Run autotp over models of other libraries; writes results/libraries.json and its part of docs/models.md.

python -m benchmarks.lists.libraries --install FOLDER        # the pinned packages, without their dependencies
python -m benchmarks.lists.libraries --folder FOLDER         # the models that have no result as new as the code
python -m benchmarks.lists.libraries --folder FOLDER --only timm monai/ViT  # libraries or models, again
python -m benchmarks.lists.libraries --render                # the page from the results that are there

Each model is built at a width of 512 or more with random weights, in eval mode, in a process of its own: whether
torch.export.export takes it with static shapes, its plan at tp=2, proved, and its plan at tp=4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.helpers import isolate
from benchmarks.helpers.command import made, stamped
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.lists.library import Listed, examine, listed
from benchmarks.helpers.lists.page import PAGE, load, render
from benchmarks.results import fresh

COMMAND = "benchmarks.lists.libraries"
RESULTS = Path(__file__).parents[1] / "results" / "libraries.json"
LIMIT = 300.0  # seconds for one model
OWN = ("torch==", "transformers==", "numpy==")  # packages of the environment, which no list may replace


def install(folder: Path) -> None:
    """Install the packages of the list into a folder of their own, without their dependencies."""
    packages = sorted({package for model in listed() for package in model.packages})
    assert not [package for package in packages if package.startswith(OWN)]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, *packages], check=True)


def measure(model: Listed, folder: str, limit: float = LIMIT) -> Record:
    """The record of one model, from a process that is ended when it takes too long."""
    record, why = isolate.run(examine, model, folder, limit=limit, preload="benchmarks.helpers.lists.library")
    listed_as = {"library": model.library, "recurrent": model.recurrent}
    if why and "weights" not in record:
        record["failed"] = why
    elif why:
        tp = "4" if "2" in record.get("tp", {}) else "2"
        record = isolate.merge(record, {"tp": {tp: {"ok": False, "why": why} if tp == "2" else {"failed": why}}})
    text = json.dumps(stamped({**listed_as, "tp": {}, **record}))
    return json.loads(text.replace(f"{folder.rstrip('/')}/", "") if folder else text)  # reasons name no folder


def line(record: Record) -> str:
    """One result, for the terminal."""
    if "failed" in record:
        return f"not built: {record['failed']}"
    parts = ["exports" if record.get("export", "") is None else "no export"]
    for tp, result in record["tp"].items():
        numbers = f" {result['parameters']:.3f} {result['flops']:.3f}" if "flops" in result else ""
        why = result.get("why") or result.get("failed")
        parts.append(f"tp={tp}{numbers}{f' FAILED {why}' if why else ''}")
    return "  ".join(parts)


def choose(names: Sequence[str], known: Collection[str]) -> list[Listed]:
    """The models of the list that are named, by library or whole name; without names those that are not known."""
    models = listed()
    unknown = set(names) - {name for m in models for name in (m.library, m.key)}
    if unknown:
        raise SystemExit(f"not in benchmarks/libraries.toml: {', '.join(sorted(unknown))}")
    if names:
        return [m for m in models if m.library in names or m.key in names]
    return [m for m in models if m.key not in known]


def write(results: Record) -> None:
    """Keep the results, in the order of the list."""
    order = {m.key: i for i, m in enumerate(listed())}
    results["listed"], results["libraries"] = len(order), len({m.library for m in listed()})
    results["models"] = {
        k: results["models"][k] for k in sorted(results["models"].keys() & order, key=order.__getitem__)
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="install the packages there, and nothing else")
    parser.add_argument("--folder", default="", help="where they are installed")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these libraries or models")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one model")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no model is begun")
    parser.add_argument("--render", action="store_true", help="write docs/models.md from the results that are there")
    given = parser.parse_args(arguments)
    if given.install:
        return install(given.install)
    results, began = load(RESULTS.name), time.monotonic()
    if not given.render:
        results["made"] = {**made(COMMAND, arguments), "command": f"python -m {COMMAND}"}
    write(results)
    for model in [] if given.render else choose(given.only, fresh(results["models"], "modules-of-libraries")):
        if time.monotonic() - began > given.budget:
            break
        results["models"][model.key] = record = measure(model, given.folder, given.limit)
        write(results)
        print(f"{model.key:48} {line(record)}", flush=True)
    PAGE.write_text(render())
    return None


if __name__ == "__main__":
    main()
