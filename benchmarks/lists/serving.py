"""What serving costs on local gloo ranks: `python -m benchmarks.lists.serving [--write] [--resume FILE]`.

Two processes of one thread each hold the Llama of `benchmarks.decode`, unsharded on the first, under transformers'
`tp_plan`, and sharded by autotp, and answer requests by transformers' engine of continuous batching: sixteen at once,
and one alone. Then `autotp serve` answers requests by HTTP, and the memory of its ranks is looked at.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from autotp.runtime.module import ShardedModule
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import Times, interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.decode_legs import ours
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.performance import made_now, table, write_section
from benchmarks.helpers.together import joined, ratio
from benchmarks.lists.hand_plans import theirs
from benchmarks.step_time import transformed
from tests.helpers.processes.serving import example, ranks_of, started

HEADING = "Serving"
SHAPE, RANKS, ROUNDS = Shape(), 2, 5
MANY, FEW, NEW, PROMPT = 16, 1, 64, 32  # requests at once, alone; tokens of each, and of its prompt
FIRST, LAST, SHORT, CLIENTS = 500, 2000, 4, 16  # requests by HTTP before each look at memory; tokens; clients
WHOLE, THEIRS, OURS = "unsharded", "transformers' tp_plan", "autotp"


class Engine:
    """A manager of one module, which answers the same requests again and again.

    Attributes:
        tokens: that requests gave last; all_tokens: that all did.
    """

    def __init__(self, module: Any) -> None:
        torch.manual_seed(0)
        self.prompts = torch.randint(3, 30_000, (MANY, PROMPT)).tolist()
        options = ContinuousBatchingConfig(
            page_size=32, num_blocks=128, max_batch_tokens=256, allow_block_sharing=False
        )
        generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
        self.module, self.tokens, self.all_tokens = module, [], []
        self.manager = module.init_continuous_batching(generation, options)

    def __call__(self, prompts: Sequence[list[int]]) -> None:
        """Answer prompts at once."""
        for prompt in prompts:
            self.manager.add_request(prompt)
        results: dict[str, Any] = {}
        while len(results) < len(prompts):
            if (result := self.manager.get_result(timeout=1)) is not None and result.is_finished():
                results[result.request_id] = result
        self.tokens = [x.generated_tokens for _, x in sorted(results.items(), key=lambda pair: int(pair[0][4:]))]

    def ready(self) -> None:
        """Start the thread."""
        self.manager.start()

    def over(self) -> None:
        """End it, and keep the pools."""
        self.manager.stop(keep_for_next_session=True)

    def many(self) -> None:
        """Answer all requests at once."""
        self(self.prompts)
        self.all_tokens = self.tokens
        self.over()

    def few(self) -> None:
        """Answer one request alone."""
        self(self.prompts[:FEW])
        self.over()


class Step:
    """A step for `interleaved`, before which its engine's thread is started."""

    def __init__(self, engine: Engine | None, run: Callable[[Engine], None]) -> None:
        self.engine, self.run = engine, run

    def ready(self) -> None:
        """Start the thread."""
        if self.engine is not None:
            self.engine.ready()

    def __call__(self) -> None:
        if self.engine is not None:
            self.run(self.engine)


@torch.no_grad()
def measured(rounds: int) -> Record:
    """This rank's times of every way, and what lies around the model in a batch."""
    torch.set_num_threads(1)
    model = untouched(SHAPE).eval()
    made: dict[str, Callable[[], Any]] = {
        WHOLE: lambda: transformed(model, SHAPE).eval() if not dist.get_rank() else None,
        THEIRS: lambda: theirs(transformed(model, SHAPE).eval(), {}, RANKS),
        OURS: lambda: ours(transformed(model, SHAPE).eval(), SHAPE, torch.ones(1, 9, dtype=torch.int64), "eager"),
    }
    engines: dict[str, Engine | None] = {}
    for name, make in made.items():
        module = make()
        engines[name] = Engine(module) if module is not None else None
    steps: dict[str, Any] = {}
    for name, engine in engines.items():
        steps[f"{name}, {MANY}"] = Step(engine, Engine.many)
        steps[f"{name}, {FEW}"] = Step(engine, Engine.few)
    times = {k: t._asdict() for k, t in interleaved(steps, rounds, before=dist.barrier).items()}
    tokens = {name: engine.all_tokens for name, engine in engines.items() if engine is not None}
    every = [{n: around(e) for n, e in engines.items()} for _ in range(rounds)]
    return {"times": times, "tokens": tokens, "around": {n: statistics.median(x[n] for x in every) for n in engines}}


def around(engine: Engine | None) -> float:
    """CPU milliseconds of a batch of sixteen requests without the model, in the thread that runs it."""
    dist.barrier()
    if engine is None:
        dist.barrier()
        return 0.0
    kind: Any = ShardedModule if isinstance(engine.module, ShardedModule) else type(engine.module)
    name = "_run" if kind is ShardedModule else "forward"
    inner, body = getattr(kind, name), ContinuousBatchingManager._generation_loop_body
    within: list[float] = []
    spent: list[float] = []
    batch = timed(body, spent)
    with (
        patch.object(kind, name, timed(inner, within)),
        patch.object(ContinuousBatchingManager, "_generation_loop_body", batch),
    ):
        engine.ready()
        engine.many()
    dist.barrier()
    return 1e3 * (sum(spent) - sum(within)) / len(within)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, each of whose calls adds its thread's CPU seconds to a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.thread_time() - began)

    return call


def memory() -> dict[str, list[int]]:
    """Bytes that each rank of `autotp serve` holds after so many requests."""
    held: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "small"
        example().small_model(folder)
        with started(folder, "--tp", str(RANKS), "--pool", "8192") as (address, process, _):
            for last, first in ((FIRST, 0), (LAST, FIRST)):
                with ThreadPoolExecutor(CLIENTS) as threads:
                    statuses = list(threads.map(functools.partial(_ask, address), range(first, last)))
                assert {*statuses} == {200}
                lines = [Path(f"/proc/{pid}/status").read_text() for pid in ranks_of(process)[:RANKS]]
                held[str(last)] = [1024 * int(text.split("VmRSS:")[1].split()[0]) for text in lines]
    return held


def _ask(address: str, i: int) -> int:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=100)
    prompt = f"request {i}: " + "abcdefgh"[: i % 8]
    body = {"model": "small", "prompt": prompt, "max_tokens": SHORT, "stream": i % 3 == 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def measured_once(file: Path | None, part: str, measure: Callable[[], Any]) -> Any:
    """A part of the figures: what a file has of it from a run that ended early, else measured, and written there."""
    parts = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    if part not in parts:
        parts[part] = measure()
        if file is not None:
            file.write_text(json.dumps(parts))
    return parts[part]


def run(rounds: int, file: Path | None = None) -> Record:
    """All figures.

    Args:
        rounds: of times. file: of parts that are measured already.

    Raises:
        RuntimeError: a way gives other tokens.
    """
    everyone = measured_once(file, f"{rounds} rounds", lambda: on_ranks(functools.partial(measured, rounds), RANKS))
    tokens = everyone[0]["tokens"]
    # In float32 sums in another order part two tokens of nearly equal scores, and all that follow.
    for name, answers in tokens.items():
        same = sum(a[0] == b[0] for a, b in zip(answers, tokens[WHOLE], strict=True))
        if same < MANY - 1:
            raise RuntimeError(f"{name}: {MANY - same} of {MANY} first tokens are others than the unsharded module's")
    times = {name: joined([Times(**x["times"][name]) for x in everyone]) for name in everyone[0]["times"]}
    return {"times": times, "around": [x["around"] for x in everyone], "memory": measured_once(file, "memory", memory)}


def page(found: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    times, rows = found["times"], []
    gains = {}
    for name in (WHOLE, THEIRS, OURS):
        many, few = times[f"{name}, {MANY}"].cpu, times[f"{name}, {FEW}"].cpu
        gains[name] = [MANY / FEW * b / a for a, b in zip(many, few, strict=True)]
        middle = [statistics.median(x) for x in (many, few, gains[name])]
        row = [MANY * NEW / middle[0], FEW * NEW / middle[1], middle[2], ratio(gains[name], gains[WHOLE])]
        row += [ratio(times[f"{THEIRS}, {MANY}"].cpu, many), max(x[name] for x in found["around"])]
        rows.append([name, *(f"{x:.2f}" for x in row)])
    head = ["", "tokens/CPU s, 16 at once", "one by one", "gain", "of whole", "of tp_plan", "around the model, ms"]
    held, grown = found["memory"], []
    for i, (a, b) in enumerate(zip(held[str(FIRST)], held[str(LAST)], strict=True)):
        grown.append([f"rank {i}", f"{a / 1e6:.1f}", f"{b / 1e6:.1f}", f"{b / a:.3f}"])
    made, s = made_now(), SHAPE
    return f"""\
`{made["command"]}`: a Llama (hidden {s.hidden}, {s.layers} layers, {s.heads} heads, {s.kv_heads} of keys and values,
feed-forward {s.wide}, {s.vocabulary} words), float32, over {RANKS} gloo processes of one thread each, answers {MANY}
requests of {PROMPT} tokens with {NEW} new ones at once, and one of them alone, by transformers' engine;
first tokens are compared. CPU seconds of both ranks together: medians of {found["rounds"]} interleaved rounds, and of
ratios of the same round. *gain*: all at once over one by one, as the one alone; *of whole*: of the unsharded gain;
*of tp_plan*: throughput of all at once over that of transformers' plan. *around the model*: CPU time of the thread that
runs batches but in the model's forward (of autotp: in its program), for a batch of {MANY}, on the slower rank: medians
of as many interleaved rounds.
{made["machine"]}; torch {made["torch"]}, transformers {made["transformers"]}, Python {made["python"]}, {made["date"]},
load average {made["load"]} before.

{table(head, rows)}
`autotp serve` with {RANKS} ranks of a small model and {CLIENTS} clients: resident memory in MB after requests by HTTP.

{table(["", f"after {FIRST}", f"after {LAST}", "ratio"], grown)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lists.serving", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is measured here, and go on from it")
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    text = page({**run(given.rounds, given.resume), "rounds": given.rounds})
    print(text)
    if given.write:
        write_section(HEADING, text)


if __name__ == "__main__":
    main()
