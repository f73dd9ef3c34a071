"""Uses of a sharded module or of stages, each done on one device too; they give the largest difference."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments

import autotp
from autotp.integrations.accelerator import ShardedAccelerator
from autotp.integrations.trainer import ShardedTrainer
from benchmarks.helpers.lists.generated import doubled

STEPS, RATE, MOST_NORM, TOKENS = 2, 0.1, 1.0, 4
SIMULATED = ("certify", "verify")  # uses of the plan, without ranks


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (found.shape, wanted.shape)
    assert bool(found.isfinite().all()), "not finite"
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor], names: Iterable[str]) -> float:
    """The largest difference of these tensors, as a part of the largest value of all."""
    largest = max(float(wanted[n].abs().max()) for n in names)
    return max(float((found[n] - wanted[n]).detach().abs().max()) for n in names) / largest


def optimizer_of(side: Any) -> torch.optim.Optimizer:
    """Of all its parameters; one that amplifies no rounding."""
    return torch.optim.SGD(side.parameters(), lr=RATE, momentum=0.9)


def stepped(side: Any, optimizer: Any, step: int, **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A step with clipping: loss, norm and gradients."""
    loss = side.loss(step, **more)
    gradients = {n: g.clone() for n, g in side.gradients().items()}
    norm = side.clip(MOST_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm, gradients


def both(run: Any, optimizers: list[Any], step: int) -> tuple[float, list[str]]:
    """A step of each side: how far they are apart, and which weights have gradients."""
    ours, theirs = (stepped(s, o, step) for s, o in zip((run.subject, run.alone), optimizers, strict=True))
    part = run.axes["pp"] > 1  # a rank has the gradients of its stages
    assert ours[2].keys() <= theirs[2].keys() if part else ours[2].keys() == theirs[2].keys(), "other gradients"
    return max(gap(ours[0], theirs[0]), gap(ours[1], theirs[1]), apart(ours[2], theirs[2], ours[2])), list(ours[2])


def weights(run: Any, names: Iterable[str]) -> float:
    """How far these weights are apart."""
    return apart(run.subject.weights(), run.alone.weights(), names)


def train(run: Any) -> float:
    """Steps of SGD with clipping: losses, norms, gradients, weights. Of a module that takes a cache: calls."""
    if run.cached:
        return carry(run)
    optimizers = [optimizer_of(side) for side in (run.subject, run.alone)]
    steps = [both(run, optimizers, step) for step in range(STEPS)]
    return max(weights(run, steps[0][1]), *(far for far, _ in steps))


def carry(run: Any) -> float:
    """A prefill and decoded tokens whose cache comes back by name."""
    return carried(run, run.subject.module, run.mine()["input_ids"])


def carried(run: Any, module: Any, ids: Tensor) -> float:
    """How far logits are from one device's, for these rows."""
    states = [run.past(len(ids)), run.past(len(ids))]
    far = 0.0
    with torch.no_grad():
        for part in ids.tensor_split([8, 9, 10], 1)[:3]:
            pairs = zip((module, run.alone.module), states, strict=True)
            results = [called(input_ids=part, **past) for called, past in pairs]
            far = max(far, gap(results[0][0], results[1][0]))
            states = [dict(zip(states[0], out[1:], strict=True)) for out in results]
    return far


def generate(run: Any, **options: Any) -> float:
    """Greedy decoding of prompts of which one is padded: the same tokens, and logits."""
    ids = run.mine()["input_ids"][:2, :6].clone()
    mask = torch.ones_like(ids)
    ids[0, :2] = mask[0, :2] = 0
    made = []
    torch.storage._storage_type_to_dtype_map()  # which torch makes once, and not of doubled types
    for side in (run.subject, run.alone):
        side.saver.eval()
        # transformers gives logits in float32; the names of types that Inductor knows stay as they are.
        with contextlib.nullcontext() if "Inductor" in run.names else doubled():
            made.append(
                side.module.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=TOKENS,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                    eos_token_id=None,
                    output_logits=True,
                    return_dict_in_generate=True,
                    **options,
                )  # fmt: skip
            )
        side.saver.train()
    assert torch.equal(made[0].sequences, made[1].sequences), "other tokens"
    return max(gap(a, b) for a, b in zip(made[0].logits, made[1].logits, strict=True))


def generate_static(run: Any) -> float:
    """The same with a cache of fixed length."""
    return generate(run, cache_implementation="static")


def reload(run: Any) -> float:
    """A checkpoint with its optimizer after a step, read by another mesh, which makes the next step."""
    sides = (run.subject, run.alone)
    optimizers = [optimizer_of(side) for side in sides]
    far = 0.0 if run.cached else both(run, optimizers, 0)[0]
    run.subject.saver.save_checkpoint(run.folder / "saved", optimizer=optimizers[0])
    other = run.other()
    own = optimizer_of(other)
    other.saver.load_checkpoint(run.folder / "saved", optimizer=own)
    if run.cached:
        return carried(run, other.module, run.batch()["input_ids"])
    ours, theirs = stepped(other, own, 1), stepped(run.alone, optimizers[1], 1, whole=True)
    stepped(run.subject, optimizers[0], 1)  # what is done next begins with these weights
    far = max(far, gap(ours[0], theirs[0]), gap(ours[1], theirs[1]), apart(ours[2], theirs[2], ours[2]))
    return max(far, apart(other.weights(), run.alone.weights(), ours[2]))


def compare(run: Any) -> float:
    """Training, of which every call and backward is compared on the ranks."""
    far = train(run)
    assert len(run.subject.module.compared) >= STEPS, run.subject.module.compared
    return far


def planned(run: Any) -> dict[str, Any]:
    """Options of planning and capture."""
    return {k: v for k, v in run.options.items() if k in ("sequence_parallel", "precision", "carried")}


def certify(run: Any) -> float:
    """A type checker that others wrote; it has no figure."""
    options, axes = planned(run), run.axes
    beside = {k: v for k, v in axes.items() if k in ("dp", "cp") and v > 1}
    beside |= {k: v for k, v in run.options.items() if k in ("fully_shard", "ep")}
    model, example = run.model(), run.example()
    if axes["pp"] > 1:
        plan = run.subject.pipe.plan
    else:
        plan = autotp.plan(model, axes["tp"], example_inputs=example, **beside, **options)
    options.pop("sequence_parallel", None)
    certificate = autotp.certify(model, plan, example, **options)
    assert certificate, certificate
    return 0.0


def verify(run: Any) -> float:
    """Every value and gradient on simulated ranks, with decoded tokens where something generates."""
    options, axes = planned(run), run.axes
    options |= {k: v for k, v in axes.items() if k in ("dp", "cp") and v > 1}
    experts = {k: v for k, v in run.options.items() if k == "ep"}
    if "fully_shard" in run.options:
        options["plan"] = autotp.plan(
            run.model(), axes["tp"], example_inputs=run.example(), dp=axes["dp"], fully_shard=True, **experts
        )
    else:
        options |= experts
    if run.cached or any(n.startswith("generate") for n in run.names):
        options["generate"] = TOKENS
    if axes["pp"] > 1:
        options = {k: v for k, v in options.items() if k != "sequence_parallel"} | {"plan": run.subject.pipe.plan}
    example = run.batch() if axes["dp"] > 1 else run.example()
    report = autotp.verify(run.model(), axes["tp"], example, certify="certify" in run.names, **options)
    assert report, report
    far = [report.output_error, report.gradient_error]
    return max([*far, report.decoded.error] if report.decoded is not None else far)


def profile(run: Any) -> float:
    """A measured step, which changes nothing of what is trained then."""
    found = run.subject.module.profile(run.example())
    assert found.rows["step"], found
    return train(run)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment of torchrun, and a state of accelerate's own."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    try:
        with patch.dict(os.environ, told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
            yield
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def rows_of(run: Any) -> list[dict[str, Tensor]]:
    """The rows of all steps."""
    return [{k: v[i] for k, v in run.batch(s).items()} for s in range(STEPS) for i in range(len(run.batch()["labels"]))]


class Seeded(TrainerCallback):
    """Every step begins with a seed of its own."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step)


def trainer(run: Any) -> float:
    """transformers' Trainer beside a loop by hand: the weights."""
    with launched():
        arguments = TrainingArguments(
            output_dir=str(run.folder / "trainer"), max_steps=STEPS, max_grad_norm=MOST_NORM, save_strategy="no",
            per_device_train_batch_size=len(run.mine()["labels"]), use_cpu=True, report_to=[], disable_tqdm=True,
            train_sampling_strategy="sequential", logging_strategy="no",
        )  # fmt: skip
        optimizer = optimizer_of(run.subject)
        loop = ShardedTrainer(
            model=run.subject.module, args=arguments, train_dataset=rows_of(run), callbacks=[Seeded()],
            optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
        )  # fmt: skip
        loop.train()
    return weights(run, by_hand(run))


def accelerate(run: Any) -> float:
    """A loop with accelerate beside one without: losses and weights."""
    module = run.subject.module
    with launched():
        accelerator = ShardedAccelerator(module)
        loader = DataLoader(rows_of(run), len(run.mine()["labels"]))  # type: ignore[arg-type]
        module, optimizer, loader = accelerator.prepare(module, optimizer_of(run.subject), loader)
        for step, batch in enumerate(loader):
            torch.manual_seed(step)
            accelerator.backward(module(**batch).loss)
            accelerator.clip_grad_norm_(module.parameters(), MOST_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return weights(run, by_hand(run))


def by_hand(run: Any) -> list[str]:
    """The same steps on one device; which weights have gradients."""
    optimizer = optimizer_of(run.alone)
    return [list(stepped(run.alone, optimizer, step)[2]) for step in range(STEPS)][0]
