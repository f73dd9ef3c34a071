"""Step and bytes of plans of full-size models beside those of Megatron's plan: writes a section of docs/performance.md.

    python -m benchmarks.predicted.against_megatron                      # what has no result yet
    python -m benchmarks.predicted.against_megatron --only Llama-8B --tp 8 # a part; --again: anew
    python -m benchmarks.predicted.against_megatron --render               # the page from the results that are there

Models are built on the meta device, at full depth, and captured once. Megatron's plan is the one that the same solver
finds with heads, feed-forward width and vocabulary split, and heads of keys that are fewer than the ranks each on a
group of these; of a mixture of experts with the experts dealt out, and with each expert split, of which the better one
counts. A plan is asked to take no longer and to send at most 1.05 of its bytes; or to be faster by more than the band,
by operators that are named.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from autotp.cost.solver.problem import Problem, conversions_of
from autotp.driver.compile import Staged, capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from benchmarks.helpers.command import made
from benchmarks.helpers.performance import table, write_section

TITLE = "Step and bytes against Megatron's plan"
RESULTS = Path(__file__).parents[1] / "results" / "against_megatron.json"
ROWS, LENGTH = 8, 2048
BYTES = 1.05  # times Megatron's: what a plan may send that is not faster by more than the band
ROUNDED = 1e-6
GOALS = ("training", "prefill", "decode")
DEGREES = (2, 4, 8, 16, 32)
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-8B": ("Llama", {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                           "num_attention_heads": 32}),
    "Llama-70B": ("Llama", {**LLAMA, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
                            "num_attention_heads": 64}),
    "Llama-405B": ("Llama", {**LLAMA, "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
                             "num_attention_heads": 128}),
    "GPT-2 XL": ("GPT2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "BERT-large": ("Bert", {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096,
                            "num_attention_heads": 16}),
    "Mixtral": ("Mixtral", {}),
    "DeepSeek-V3": ("DeepseekV3", {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {
        "vocab_size": 151936, "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    }),
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    """A model on the meta device, in bfloat16; BERT with its head for masked tokens."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    suffix = "ForMaskedLM" if kind == "Bert" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config.use_cache = False
    with torch.device("meta"):
        return getattr(transformers, f"{kind}{suffix}")._from_config(config, dtype=torch.bfloat16).eval()


def measure(name: str, cells: Sequence[tuple[str, int]]) -> Any:
    """(goal, degree, figures) of one model, captured once."""
    model = build(name)
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", LENGTH))
    captured, notes = capture_model(
        model, Inputs(torch.ones(ROWS, length, dtype=torch.long)), torch.device("cpu"), False
    )
    for goal, tp in cells:
        yield goal, tp, figures(plan_stages(captured, notes, Options.read(tp, Steering(objective=goal)), name))


def figures(staged: Staged) -> dict[str, Any]:
    """Step and bytes over Megatron's, and the operators by which a plan is faster; nothing where Megatron has none."""
    solution = staged.planned.solution
    if solution is None or solution.rival is None:
        return {}
    rival = solution.rival
    step = solution.seconds / rival.seconds
    sent = solution.sent_bytes / rival.sent_bytes if rival.sent_bytes else 1.0
    out = {"seconds": solution.seconds, "step": step, "bytes": sent, "band": staged.plan.totals.band}
    return out if sent <= BYTES else {**out, "won": won(staged, solution.choices, rival.choices)}


def won(staged: Staged, own: Sequence[int], theirs: Sequence[int], most: int = 2) -> list[str]:
    """The operators, and conversions of what operators make, that save most seconds over another plan, as its share.

    Args:
        staged: the plan. own, theirs: choices of the items of both. most: how many to name.
    """
    saved = savings(staged.builder.build()[0], own, theirs)
    solution = staged.planned.solution
    assert solution is not None and solution.rival is not None
    ranked = sorted(saved.items(), key=lambda x: -x[1])[:most]
    return [f"{name} {gain / solution.rival.seconds:.1%}" for name, gain in ranked if gain > 0]


def savings(problem: Problem, own: Sequence[int], theirs: Sequence[int]) -> dict[str, float]:
    """Seconds that one assignment takes less than another, by operator and by what is converted.

    Args:
        problem: of both. own, theirs: choices of its items.
    """
    saved: defaultdict[str, float] = defaultdict(float)
    makers: dict[Any, str] = {}
    for item, a, b in zip(problem.items, own, theirs, strict=True):
        name = item.label.removeprefix("activations of ") or item.name
        saved[name] += (item.choices[b].seconds - item.choices[a].seconds) * item.count
        makers |= dict.fromkeys(item.outs, name)
    for chosen, sign in ((own, -1.0), (theirs, 1.0)):
        for _, use, (a, b) in conversions_of(problem, chosen):
            saved[f"conversion of {makers[use.value]}"] += sign * (problem.convert(use.value, a, b) or 0.0) * use.count
    return dict(saved)


def verdict(cell: Mapping[str, Any]) -> str:
    """A cell of the table: step and bytes over Megatron's; what is missed is in bold."""
    if not cell:
        return "-"
    text = f"{cell['step']:.2f} / {cell['bytes']:.2f}"
    return text if reached(cell) else f"**{text}**"


def reached(cell: Mapping[str, Any]) -> bool:
    """Whether a plan is what is asked for: see the head of the file."""
    if not cell:
        return True
    faster = cell["step"] * (1 + cell["band"]) <= 1 + ROUNDED and bool(cell.get("won"))
    return cell["step"] <= 1 + ROUNDED and cell["bytes"] <= BYTES or faster


def section(results: Mapping[str, Any]) -> str:
    """The section of the page."""
    rows, notes, missed, counted = [], [], 0, 0
    for name, cells in results["models"].items():
        for goal in GOALS:
            row = [cells.get(f"{goal} {tp}") for tp in DEGREES]
            rows.append((name, goal, *("" if cell is None else verdict(cell) for cell in row)))
            for tp, cell in zip(DEGREES, row, strict=True):
                counted, missed = counted + bool(cell), missed + (cell is not None and not reached(cell))
                if cell and cell.get("won"):
                    notes.append(
                        f"- {name}, {goal}, tp={tp}: {cell['step']:.3f} of the step by {'; '.join(cell['won'])}"
                    )
    about = results["made"]
    head = ("model", "goal", *(f"tp={tp}" for tp in DEGREES))
    return (
        "`python -m benchmarks.predicted.against_megatron`: predicted step / bytes sent, each over those of Megatron's "
        f"plan. {ROWS} sequences of {LENGTH} tokens (or as long as the model takes), bfloat16, full depth, whole "
        "outputs, h100 presets. Asked: a step of at most 1.00 and bytes of at most 1.05, or a step that is better by "
        f"more than the band of 2%. Missed, in bold: {missed} of {counted}. A dash: tp does not divide "
        "the heads; nothing: not measured yet.\n\n"
        f"{table(head, rows)}\n"
        + (
            "What wins where more is sent, as shares of Megatron's step:\n\n" + "\n".join(notes) + "\n\n"
            if notes
            else ""
        )
        + f"autotp {about['autotp']}, torch {about['torch']}, transformers {about['transformers']}, {about['date']}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="these models")
    parser.add_argument("--tp", type=int, nargs="+", choices=DEGREES, default=DEGREES, help="degrees")
    parser.add_argument("--goal", nargs="+", choices=GOALS, default=GOALS, help="what a step is")
    parser.add_argument("--again", action="store_true", help="also where there is a result")
    parser.add_argument("--render", action="store_true", help="write the page from the results that are there")
    given = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"made": {}, "models": {}}
    known = {name: results["models"].get(name, {}) for name in MODELS}
    wanted = [(goal, tp) for goal in given.goal for tp in given.tp]
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        names = [] if given.render else given.only
        task = progress.add_task("plans", total=len(names) * len(wanted))
        for name in names:
            cells = [(goal, tp) for goal, tp in wanted if given.again or f"{goal} {tp}" not in known[name]]
            progress.advance(task, len(wanted) - len(cells))
            for goal, tp, found in measure(name, cells) if cells else ():
                known[name][f"{goal} {tp}"] = found
                results = {"made": made("benchmarks.predicted.against_megatron", arguments), "models": known}
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                console.print(f"{name:14} {goal:9} tp={tp:<3} {verdict(found)}", markup=False)
                progress.advance(task)
    write_section(TITLE, section(results))


if __name__ == "__main__":
    main()
