"""Cache bytes of the fullest rank over the degrees, beside what whole heads leave: `python -m benchmarks.lists.caches`.

Two layers of each family in its real sizes, on the meta device, planned for decoding against a cache of 4,096 tokens.
Asked is at most ceil(kv heads / tp) of them on a rank.

python -m benchmarks.lists.caches --write           # all, into results/caches.json
python -m benchmarks.lists.caches --only llama-70b  # one family, shown
python -m benchmarks.lists.caches --picture         # who holds what of 8 heads on 16 ranks, into docs/assets/heads.svg
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

import autotp
from autotp.ir.layouts import Copies, Partition
from benchmarks.helpers.command import made

RESULTS = Path(__file__).parents[1] / "results" / "caches.json"
PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "heads.svg"
CELL, LEFT, TOP = 46, 96, 64  # of the picture
INKS = ("#2a63a6", "#b04a0c", "#3d7a3a", "#7a3d78")  # of heads beside each other
DEGREES = (2, 3, 4, 6, 8, 16, 32)
TOKENS, EXAMPLES = 4096, 32
# family -> class of the transformers library; heads of queries, of keys, their width, the hidden width, and that of the
# feed-forward block.
FAMILIES: dict[str, tuple[str, int, int, int, int, int]] = {
    "llama-70b": ("Llama", 64, 8, 128, 8192, 28672),
    "llama-405b": ("Llama", 128, 8, 128, 16384, 53248),
    "llama-8b": ("Llama", 32, 8, 128, 4096, 14336),
    "llama-1b": ("Llama", 32, 8, 64, 2048, 8192),
    "llama-2-7b": ("Llama", 32, 32, 128, 4096, 11008),
    "yi-34b": ("Llama", 56, 8, 128, 7168, 20480),
    "qwen2.5-0.5b": ("Qwen2", 14, 2, 64, 896, 4864),
    "qwen2.5-1.5b": ("Qwen2", 12, 2, 128, 1536, 8960),
    "qwen2.5-3b": ("Qwen2", 16, 2, 128, 2048, 11008),
    "qwen2.5-7b": ("Qwen2", 28, 4, 128, 3584, 18944),
    "qwen2.5-32b": ("Qwen2", 40, 8, 128, 5120, 27648),
    "qwen3-0.6b": ("Qwen3", 16, 8, 128, 1024, 3072),
    "qwen3-8b": ("Qwen3", 32, 8, 128, 4096, 12288),
    "qwen3-30b-a3b": ("Qwen3Moe", 32, 4, 128, 2048, 6144),
    "qwen3-235b-a22b": ("Qwen3Moe", 64, 4, 128, 4096, 12288),
    "mistral-7b": ("Mistral", 32, 8, 128, 4096, 14336),
    "mixtral-8x7b": ("Mixtral", 32, 8, 128, 4096, 14336),
    "gemma-2b": ("Gemma", 8, 1, 256, 2048, 16384),
    "gemma-2-9b": ("Gemma2", 16, 8, 256, 3584, 14336),
    "phi-4": ("Phi3", 40, 10, 128, 5120, 17920),
    "smollm2-135m": ("Llama", 9, 3, 64, 576, 1536),
    "smollm3-3b": ("SmolLM3", 16, 4, 128, 2048, 11008),
    "starcoder2-15b": ("Starcoder2", 48, 4, 128, 6144, 24576),
    "olmo-2-13b": ("Olmo2", 40, 40, 128, 5120, 13824),
    "granite-8b": ("Granite", 32, 8, 128, 4096, 12800),
    "command-r-plus": ("Cohere", 96, 8, 128, 12288, 33792),
    "glm-4-9b": ("Glm", 32, 2, 128, 4096, 13696),
    "stablelm-12b": ("StableLm", 32, 8, 160, 5120, 13824),
    "gpt-neox-20b": ("GPTNeoX", 64, 64, 96, 6144, 24576),
    "helium-2b": ("Helium", 20, 20, 128, 2560, 7040),
}


def model_of(family: str) -> Any:
    """Make two layers in real sizes on the meta device."""
    name, heads, kv, width, hidden, inner = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForCausalLM")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": width, "hidden_size": hidden}
    experts = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 768, "num_experts_per_tok": 2}
    known = set(kind.config_class().to_dict())
    more = {k: v for k, v in (sizes | experts).items() if k in known or k in sizes}
    config = kind.config_class(
        **more, intermediate_size=inner, num_hidden_layers=2, vocab_size=32000, max_position_embeddings=2 * TOKENS,
        pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        return kind._from_config(config, dtype=torch.bfloat16).eval()


def rows_of(family: str, degrees: tuple[int, ...]) -> dict[str, Any]:
    """Return for each degree the part of the cache on the fullest rank, that of whole heads, step and largest batch."""
    kv = FAMILIES[family][2]
    inputs = {"input_ids": torch.zeros(EXAMPLES, TOKENS, dtype=torch.long)}
    options: Any = {"objective": "decode", "check_capture": False}
    sweep = autotp.sweep(model_of(family), (1, *degrees), example_inputs=inputs, **options)
    whole, rows = sweep.plans[1].memory.cache, {}
    for row in sweep.rows[1:]:
        plan = sweep.plans[row.tp]
        limits = {block.limit for block in plan.blocks if block.kind == "attention"}
        rows[str(row.tp)] = {
            "part": round(plan.memory.cache / whole, 4), "asked": round(math.ceil(kv / row.tp) / kv, 4),
            "step": plan.totals.seconds, "sent": plan.totals.sent, "largest_batch": row.largest_batch,
            "limit": "; ".join(sorted(limits)),
        }  # fmt: skip
    return rows


def shown(family: str, rows: dict[str, Any]) -> str:
    """Return a line for each degree."""
    lines = [f"{family}: {FAMILIES[family][1]} heads, {FAMILIES[family][2]} of keys and values"]
    for tp, row in rows.items():
        mark = "" if row["part"] <= row["asked"] + 1e-3 else "  over"
        batch, step = row["largest_batch"], f"{1e3 * row['step']:.3f} ms"
        lines.append(f"  tp={tp:>2}  {row['part']:.4f} of {row['asked']:.4f} asked  {step}  batch {batch}{mark}")
    return "\n".join(lines)


def picture(kv: int, queries: int, tp: int) -> str:
    """Draw as SVG which heads of keys and values, and of queries, each rank holds.

    Args:
        kv, queries: heads. tp: ranks, more than heads of keys.
    """
    (copies,), dealt = Copies.of_units(kv, tp), Partition.plain(queries, tp)
    width, parts = LEFT + tp * CELL + 20, []
    title = f"{kv} heads of keys and values, {queries} of queries, on {tp} ranks"
    for y, name in enumerate(("rank", "keys, values", "queries")):
        parts.append(f'<text x="14" y="{TOP + 40 * y + 25}">{name}</text>')
    for rank in range(tp):
        ((head, _),), ((first, n),), x = copies.spans(rank, tp), dealt.spans(rank, tp), LEFT + rank * CELL
        parts.append(f'<text x="{x + 14}" y="{TOP + 25}">{rank}</text>')
        for y, text in ((1, f"{head}"), (2, f"{first}-{first + n - 1}")):
            place = f'x="{x}" y="{TOP + 40 * y}" width="{CELL - 3}" height="34"'
            parts.append(f'<rect {place} rx="3" style="fill: {INKS[head % len(INKS)]}"/>')
            parts.append(f'<text class="in" x="{x + CELL / 2 - 1}" y="{TOP + 40 * y + 22}">{text}</text>')
    style = "text { font: 13px system-ui, sans-serif; fill: #777; } .in { fill: #fff; text-anchor: middle; }"
    head_line = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 200" role="img" aria-label="{title}">'
    return "\n".join([head_line, f"<style>{style}</style>", f'<text x="14" y="30">{title}</text>', *parts, "</svg>\n"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lists.caches", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--tp", nargs="+", type=int, default=list(DEGREES))
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--picture", action="store_true", help=f"who holds what, into docs/assets/{PICTURE.name}")
    asked = parser.parse_args()
    if asked.picture:
        PICTURE.write_text(picture(8, 64, 16))
        return
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    for family in asked.only:
        rows = rows_of(family, tuple(asked.tp))
        print(shown(family, rows), flush=True)
        results["families"][family] = rows
        if asked.write:
            every = [row for each in results["families"].values() for row in each.values()]
            over = sum(row["part"] > row["asked"] + 1e-3 for row in every)
            results |= {"made": made("benchmarks.lists.caches", None), "rows": len(every), "over": over}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
