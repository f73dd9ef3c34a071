"""Continuous batching on ranks gives the tokens and scores of the unsharded model's engine, from pools of own heads."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import autotp
from autotp.ir.layouts import Partition, dealt_by
from autotp.runtime.generation import paged
from benchmarks.helpers.lists.batched import NEW, answers, options, requests
from benchmarks.helpers.lists.generated import doubled
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of, message_of

EXACT = 1e-9
IDS = torch.arange(3, 11).view(2, 4)


def llama() -> Any:
    """Two layers, with weights large enough that tokens change."""
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    counts: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **counts, max_position_embeddings=128, pad_token_id=0, eos_token_id=None)
    model: Any = LlamaForCausalLM(config).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def sampling() -> dict[str, Any]:
    return {"generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=2.0, pad_token_id=0)}


def gap(wanted: Any, got: Any) -> float:
    """Largest difference of a score in all batches."""
    return max(float((a - b).abs().max()) for a, b in zip(wanted[1], got[1], strict=True))


def batching(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Greedy answers, with what is held of the pools: on three ranks of two heads one, one and none."""
    with torch.no_grad(), doubled():
        model = llama()
        sharded: Any = autotp.compile(model, example_inputs=IDS, mesh=mesh_of(group), check_capture=False)
        if world == 3:
            states = [f"past_key_values.layers.{i}.{side}" for i in range(2) for side in ("keys", "values")]
            sharded._carriers.layouts |= dict.fromkeys(states, dealt_by(1, Partition.plain(2, world)))
        wanted, got = answers(model), answers(sharded)
        found = {
            "wanted": wanted[0],
            "got": got[0],
            "gap": gap(wanted, got),
            "alone": [own(model, x) for x in requests()],
        }
        found["programs"] = sharded._programs_made.total
        found["heads"] = sharded._carriers.cut("past_key_values.layers.0.keys")
        return found | (more_of(sharded, model) if world == 2 else wrong_of(sharded, rank))


def more_of(sharded: Any, model: Any) -> dict[str, Any]:
    """Sampled and cancelled requests."""
    found: dict[str, Any] = {"sampled": answers(model, **sampling())[0], "drawn": answers(sharded, **sampling())[0]}
    found |= managed(sharded, model) | {"programs after": sharded._programs_made.total}
    return found | {"writing": writing(sharded, sharded._shards.ranks.rank)}


def wrong_of(sharded: Any, rank: int) -> dict[str, Any]:
    """Answers of wrong places, of a rank that fails, and those that come after."""
    with patch.object(paged, "_slots", lambda allocator, index: index % 8):  # requests write over each other's
        found: dict[str, Any] = {"control": answers(sharded)[0]}
    found["failing"] = failing(sharded, rank)
    return found | {"after": answers(sharded)[0], "programs after": sharded._programs_made.total}


def managed(sharded: Any, model: Any) -> dict[str, Any]:
    """What a manager answers where one of three requests is cancelled, with two answers to each."""
    given = options()
    given["generation_config"].num_return_sequences = 2
    with sharded.continuous_batching_context_manager(**given) as manager:
        manager.add_request([5, 6, 7], request_id="kept")
        manager.add_request([8, 9], request_id="cancelled", max_new_tokens=10_000)
        manager.cancel_request("cancelled")
        manager.add_request([5, 6, 7, 8], request_id="last")
        results: dict[str, Any] = {}
        while len([x for x in results if not x.startswith("cancelled")]) < 4:
            if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
                results[result.request_id] = result.generated_tokens
    wanted = {"kept": own(model, [5, 6, 7]), "last": own(model, [5, 6, 7, 8])}
    same = [results[name] == wanted[name.split("__")[0]] for name in results if not name.startswith("cancelled")]
    return {"managed": all(same), "results": sorted(results)}


def own(model: Any, prompt: list[int]) -> list[int]:
    """What the unsharded model generates from one prompt."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


def failing(sharded: Any, rank: int) -> str:
    """The error where a batch fails on one rank."""
    update = ContinuousBatchProcessor.update_batch

    def fails(self: Any) -> None:
        if rank == 1:
            raise ValueError("no more")
        update(self)

    with patch.object(ContinuousBatchProcessor, "update_batch", fails):
        return "{}: {}".format(*error_of(lambda: answers(sharded))[:2])


def writing(sharded: Any, rank: int) -> str:
    """The error where one rank alone writes to a weight, amid batches that are compared with those before."""
    update, lengths = ContinuousBatchProcessor.update_batch, []

    def writes(self: Any) -> None:
        update(self)
        lengths.append(self.distributed_helper.calls.agreed)
        if rank == 1 and len(lengths) == 3:
            with torch.no_grad():
                next(sharded.parameters()).to_local().mul_(1)

    with patch.object(ContinuousBatchProcessor, "update_batch", writes):
        text = "{}: {}".format(*error_of(lambda: answers(sharded))[:2])
    return f"{lengths} {text}"


def decoding(rank: int, world: int, group: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Answers under a plan for decoding: both heads of keys are on every rank, and what is written is copied."""
    with torch.no_grad(), doubled():
        model, mesh = llama(), mesh_of(group)
        sharded = autotp.compile(model, example_inputs=IDS, mesh=mesh, objective="decode", check_capture=False)
        return answers(model)[0], answers(sharded)[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "mine"), [(2, [1, 1]), (3, [1, 1, 0])])
def test_llama_answers_many_requests_at_once(pool, world, mine):
    on_ranks = pool.run(batching, world=world)
    for found in on_ranks:
        assert found["got"] == found["wanted"] == found["alone"] and found["gap"] < EXACT
        assert found["programs"] == found["programs after"] == 2  # compile's own, and one for every batch
        if world == 2:
            assert found["drawn"] == on_ranks[0]["sampled"]  # rank 0 is whom the engine seeds as without ranks
            assert found["writing"].startswith("[False, True, True] StateError") and "weights" in found["writing"]
            assert found["managed"] and found["results"][-2:] == ["last", "last__child#0"]
        else:
            assert found["control"] != found["wanted"] == found["after"]
            assert found["failing"].startswith("StateError: continuous batching: ")
    assert [found["heads"].mine for found in on_ranks] == mine


@pytest.mark.ranks
def test_states_that_are_whole_on_three_ranks_hold_what_is_written(pool):
    for wanted, got in pool.run(decoding, world=3):
        assert got == wanted


def test_what_the_engine_would_leave_out_is_refused_by_name():
    model = llama()
    sharded: Any = autotp.compile(model, 1, example_inputs=IDS, check_capture=False)
    given = {"generation_config": GenerationConfig(max_new_tokens=2, pad_token_id=0)}
    for more in ({"stop_strings": ["a"]}, {"num_beams": 2}, {"repetition_penalty": 1.5}, {"min_new_tokens": 2}):
        config = GenerationConfig(max_new_tokens=2, pad_token_id=0, **more)
        text = message_of(lambda config=config: sharded.generate_batch([[3]], generation_config=config))
        assert next(iter(more)) in text, text
    assert "use_cuda_graph" in message_of(
        lambda: sharded.generate_batch([[3]], continuous_batching_config=_graphs(), **given)
    )
    assert "temperature" in message_of(lambda: sharded.generate_batch([[3]], temperature=2.0, **given))
    assert "no tokens" in message_of(lambda: sharded.generate_batch([[3], []], **given))
    assert "max_new_tokens" in message_of(lambda: sharded.generate_batch([[3]]))
    small = given | {"continuous_batching_config": options()["continuous_batching_config"]}
    given["generation_config"].use_cache = False  # as a model is saved after training: the engine keeps the past anyhow
    assert len(sharded.generate_batch([[3]], **small)) == 1
    hosted: Any = autotp.compile(model, 1, example_inputs=IDS, check_capture=False, tp_invariant=2)
    assert "tp alone: this module has tp_invariant" in message_of(lambda: hosted.generate_batch([[3]], **given))


def _graphs() -> Any:
    return options()["continuous_batching_config"].__class__(use_cuda_graph=True)
