"""transformers' Trainer on two ranks beside one process: losses, evaluation, checkpoints, resuming, the best model."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autotp
from autotp.integrations.accelerator import ShardedParallelism
from autotp.integrations.trainer import ShardedTrainer
from autotp.runtime.interop.ownership import LOADED
from tests.helpers.errors import error_of
from tests.helpers.modules.stacked import kept_bytes
from tests.helpers.processes import own_world

pytestmark = pytest.mark.ranks
STEPS, HALF = 4, 2


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    pieces = torch.randint(0, 32, (count, 8), generator=draw)
    return [{"input_ids": piece, "labels": piece, "of no use": piece} for piece in pieces]


def gpt2(seed: int = 0) -> Any:
    """With fused and tied weights, and norms whose names do not say so."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def settings(folder: str, batch: int = 2, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, max_steps=STEPS, save_steps=HALF, eval_steps=HALF, eval_strategy="steps", logging_steps=1,
        load_best_model_at_end=True, per_device_train_batch_size=batch, per_device_eval_batch_size=3, max_grad_norm=0.3,
        gradient_accumulation_steps=2, learning_rate=3e-2, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=1,
        use_cpu=True, include_num_input_tokens_seen="all", report_to=[], disable_tqdm=True, **more,
    )  # fmt: skip


def trainer_of(model: Any, folder: str, seed: int = 0, stock: bool = False, **more: Any) -> Trainer:
    kind = ShardedTrainer if isinstance(model, autotp.ShardedModule) and not stock else Trainer
    return kind(
        model=model, args=settings(folder, **more), train_dataset=rows(20, seed), eval_dataset=rows(5, 99),
        compute_metrics=right,
    )  # fmt: skip


def right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def history(trainer: Trainer) -> dict[str, list[float]]:
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")
    return {name: [e[name] for e in trainer.state.log_history if name in e] for name in wanted}


def trained(rank: int, folder: str, world: int) -> dict[str, Any]:
    example = {n: torch.stack([row[n] for row in rows(2, 0)]) for n in ("input_ids", "labels")}
    own = gpt2() if world == 1 else autotp.compile(gpt2(), tp=world, example_inputs=example)
    trainer = trainer_of(own, folder)
    trainer.train()
    best = str(trainer.state.best_model_checkpoint)
    predicted = trainer.predict(rows(5, 99))  # type: ignore[arg-type]
    trainer.save_model(folder)
    found: dict[str, Any] = {
        "history": history(trainer), "best": Path(best).name, "predictions": predicted.predictions,
        "flos": trainer.state.total_flos, "tokens": trainer.state.num_input_tokens_seen,
        "decayed": sorted(_decayed(trainer)),
    }  # fmt: skip
    if world > 1:
        found |= {"shown": shown(own), "loaded": loads(own, folder)}
        found["parted"] = error_of(lambda: trainer_of(own, f"{folder}-parted", seed=rank).train())[:2]
        own.load_state_dict(gpt2(1).state_dict())
        again = trainer_of(own, folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}")
        found["resumed"] = history(again)
        found["stock"] = stock(own, f"{folder}-stock")
    AcceleratorState._reset_state()
    own.load_state_dict(gpt2().state_dict())
    low = trainer_of(own, f"{folder}-bf16", bf16=True)
    low.train()
    found["bf16"] = history(low)
    return found


def _decayed(trainer: Any) -> set[str]:
    return {n.partition("_part")[0] for n in trainer.get_decay_parameter_names(trainer.model)}


def shown(model: Any) -> dict[str, Any]:
    whole = gpt2()
    both = [(str(getattr(m, n)) for n in ("device", "dtype", "main_input_name", "loss_type")) for m in (model, whole)]
    counts = [
        [m.num_parameters(), m.num_parameters(only_trainable=True), m.num_parameters(exclude_embeddings=True)]
        for m in (model, whole)
    ]
    plain: Any = nn.Linear(4, 4)
    return {
        "attributes": list(both[0]) == list(both[1]),
        "counts": counts[0] == counts[1],
        "forward": inspect.signature(model.forward) == inspect.signature(whole.forward),
        "of the class": inspect.signature(type(model).forward) == inspect.signature(type(whole).forward),
        "generation_config": model.generation_config.to_dict() == whole.generation_config.to_dict(),
        "not a plain one's": not hasattr(autotp.compile(plain, 1, example_inputs=torch.zeros(2, 4)), "dtype"),
    }


def loads(model: Any, folder: str) -> bool:
    """Whether transformers loads what was saved, with the best weights; nothing else in the folder is lost."""
    state = model.full_state_dict()
    same = all(torch.equal(t, state[n]) for n, t in GPT2LMHeadModel.from_pretrained(folder).state_dict().items())
    kept = {p.name for p in Path(folder).iterdir()}
    return same and {"config.json", f"checkpoint-{HALF}", f"checkpoint-{STEPS}", "training_args.bin"} <= kept


def stock(model: Any, folder: str) -> dict[str, Any]:
    """transformers' own class: what it says of a sharded module by itself, and what it does when it is told of tp."""
    vars(model).pop(LOADED)  # as before anybody told a trainer of it
    found: dict[str, Any] = {"untold": error_of(lambda: trainer_of(model, folder, stock=True))[:2]}
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="save_only_model=True"):  # transformers' own, of every sharded model
        trainer_of(model, folder, stock=True, parallelism_config=ShardedParallelism(model))
    AcceleratorState._reset_state()
    model.load_state_dict(gpt2().state_dict())
    data: Any = {"train_dataset": rows(20, 0), "eval_dataset": rows(5, 99)}
    arguments = settings(folder, save_only_model=True, parallelism_config=ShardedParallelism(model))
    told = Trainer(model=model, args=arguments, compute_metrics=right, **data)
    told.train()
    told.save_model(folder)
    predicted: Any = told.predict(rows(5, 99))  # type: ignore[arg-type]
    found |= {"history": history(told), "best": Path(str(told.state.best_model_checkpoint)).name}
    arguments = torch.load(f"{folder}/training_args.bin", weights_only=False)
    return found | {
        "predictions": predicted.predictions,
        "loaded": loads(model, folder),
        "tp": arguments.parallelism_config.tp_size,
    }


def test_all_of_the_trainer_is_that_of_one_process(tmp_path):
    (one,) = own_world.run(trained, str(tmp_path / "one"), 1, world=1)
    for rank, found in enumerate(own_world.run(trained, str(tmp_path / "two"), 2, world=2)):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right") if rank == 0 else ():
            assert found["history"][name] == pytest.approx(one["history"][name], abs=1e-4), name
            assert len(found["history"][name]) == (2 if name.startswith("eval") else STEPS)
        assert found["best"] == one["best"] and found["decayed"] == one["decayed"]
        assert found["predictions"].shape == one["predictions"].shape == (5, 8, 32)
        assert np.abs(found["predictions"] - one["predictions"]).max() < 1e-3
        assert (found["flos"], found["tokens"]) == (one["flos"], one["tokens"])
        assert all(found["shown"].values()), found["shown"]
        assert found["loaded"]
        plain = found["stock"]
        assert plain["untold"][0] == "StateError" and "ShardedParallelism" in plain["untold"][1], plain["untold"]
        for name in one["history"] if rank == 0 else ():
            assert plain["history"][name] == pytest.approx(one["history"][name], abs=1e-4), name
        assert plain["best"] == one["best"] and plain["loaded"] and plain["tp"] == 2
        assert np.abs(plain["predictions"] - one["predictions"]).max() < 1e-3
        assert found["parted"][0] == "RankError", found["parted"]
        if rank == 0:
            assert found["resumed"] == found["history"]  # to the bit, from other weights
            spread = max(abs(a - b) for a, b in zip(one["bf16"]["loss"], one["history"]["loss"], strict=True))
            apart = [abs(a - b) for a, b in zip(found["bf16"]["loss"], one["bf16"]["loss"], strict=True)]
            assert 0 < max(apart) <= spread, (apart, spread)


def over_both(rank: int, folder: str, dp: int) -> dict[str, Any]:
    """Batches of 4 rows, dealt out to dp groups, with the state of the trainer after a resume."""
    example = {n: torch.stack([row[n] for row in rows(4 // dp, 0)]) for n in ("input_ids", "labels")}
    own = gpt2() if dp == 1 else autotp.compile(gpt2(), tp=2, dp=dp, example_inputs=example)
    kind, data = (Trainer if dp == 1 else ShardedTrainer), {"train_dataset": rows(40, 0), "eval_dataset": rows(6, 99)}

    def make() -> Trainer:
        return kind(model=own, args=settings(folder, 4 // dp), compute_metrics=right, **data)  # type: ignore[arg-type]

    trainer = make()
    trainer.train()
    own.load_state_dict(gpt2(1).state_dict())
    again = make()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}")
    return {"history": history(trainer), "resumed": history(again), "tokens": trainer.state.num_input_tokens_seen}


def test_with_dp_the_losses_are_those_of_one_process_with_all_rows(tmp_path):
    (one,) = own_world.run(over_both, str(tmp_path / "one"), 1, world=1)
    found = own_world.run(over_both, str(tmp_path / "four"), 2, world=4)
    assert {each["tokens"] for each in found} == {one["tokens"]}
    for name, wanted in one["history"].items():
        assert found[0]["history"][name] == pytest.approx(wanted, abs=1e-4), name
    assert found[0]["resumed"] == found[0]["history"]  # to the bit, from other weights


def with_adapters(rank: int, folder: str, world: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by peft (transformers 5.23)
    example = {n: torch.stack([row[n] for row in rows(2, 0)]) for n in ("input_ids", "labels")}
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    own: Any = peft.get_peft_model(gpt2(), lora)
    own = own if world == 1 else autotp.compile(own, tp=world, example_inputs=example)
    start = {n: t.clone() for n, t in own.state_dict().items() if "lora_" in n}
    trainer = trainer_of(own, folder)
    trainer.train()
    if world > 1:
        own.load_state_dict(start, strict=False)
        again = trainer_of(own, folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}")
        return {"history": history(trainer), "resumed": history(again)}
    return {"history": history(trainer)}


def test_adapters_are_trained_and_resumed(tmp_path):
    (one,) = own_world.run(with_adapters, str(tmp_path / "one"), 1, world=1)
    found = own_world.run(with_adapters, str(tmp_path / "two"), 2, world=2)[0]
    for name, wanted in one["history"].items():
        assert found["history"][name] == pytest.approx(wanted, abs=1e-4), name
    assert found["resumed"] == found["history"]  # to the bit, from the adapters as they were at first
    files = {p.name for p in (tmp_path / "two" / f"checkpoint-{STEPS}").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files


def recomputing(rank: int, folder: str, world: int) -> dict[str, Any]:
    """Losses with the trainer's switch; what a forward keeps before and after it; and how often a layer then runs."""
    batch = {n: torch.stack([row[n] for row in rows(2, 0)]) for n in ("input_ids", "labels")}
    own: Any = gpt2().train() if world == 1 else autotp.compile(gpt2().train(), tp=world, example_inputs=batch)
    kept = [kept_bytes(own, **batch)]
    more: dict[str, Any] = {} if world == 1 else {"parallelism_config": ShardedParallelism(own)}
    arguments = TrainingArguments(
        output_dir=folder, max_steps=2, logging_steps=1, per_device_train_batch_size=2, learning_rate=3e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", save_only_model=True,
        gradient_checkpointing=True, **more,
    )  # fmt: skip
    trainer = Trainer(model=own, args=arguments, train_dataset=rows(4, 0))  # type: ignore[arg-type]
    trainer.train()
    kept.append(kept_bytes(own, **batch))
    calls: list[int] = []
    own.transformer.h[1].ln_1.register_forward_pre_hook(lambda *_: calls.append(1))
    own(**batch).loss.backward()
    return {"loss": history(trainer)["loss"], "kept": kept, "calls": len(calls)}


def test_the_trainers_checkpointing_computes_layers_again(tmp_path):
    (one,) = own_world.run(recomputing, str(tmp_path / "one"), 1, world=1)
    first, second = own_world.run(recomputing, str(tmp_path / "two"), 2, world=2)
    assert first["loss"] == pytest.approx(one["loss"], abs=1e-5) and len(one["loss"]) == 2
    for found in (first, second):
        assert found["calls"] == one["calls"] == 2
        assert found["kept"][1] < 0.2 * found["kept"][0] and found["kept"][1] < 1.1 * one["kept"][1], (found, one)
