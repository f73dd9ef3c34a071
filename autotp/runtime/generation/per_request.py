"""Requests of continuous batching, each by itself: how its tokens are chosen, and when its prompt is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

CHOSEN = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")  # of a generation config, by a choice
# The number of seeds; the differences between those of successive tokens, and of successive answers.
SEEDS, STRIDE, APART = 2**63, 1_000_003, 998_244_353_000_003
BATCHES = 4  # of one adapter, after which another has its turn


@dataclass(frozen=True)
class Choice:
    """Choice of the tokens of one request.

    Attributes:
        temperature: 0 for the likeliest token. top_k, top_p: how many tokens, and how much of the probability, are
            drawn from; 0 and 1 for all. seed: of what is drawn; whatever else is in a batch changes nothing.
        repetition: divides the scores above zero of tokens that the prompt or the answer has, and multiplies others.
        presence, frequency: taken off a token's score that was generated before, once and for each time.
        top: of how many tokens log-probabilities are kept beside the chosen one's; None for none at all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top: int | None = None

    @property
    def plain(self) -> bool:
        """True where only the likeliest token is asked for."""
        penalties = self.presence or self.frequency or self.repetition != 1
        return not (self.temperature or penalties) and self.top is None

    def nth(self, i: int) -> Choice:
        """Return the choice of the answer with this number, of several to one request."""
        return replace(self, seed=(self.seed + i * APART) % SEEDS)

    def token(self, scores: Tensor, before: Sequence[int], prompt: Sequence[int] = ()) -> int:
        """Choose a token.

        Args:
            scores: of all tokens, [vocabulary], which are changed. before: tokens that were generated.
            prompt: those before them.
        """
        if self.repetition != 1:
            ids = torch.tensor([[*prompt, *before]], device=scores.device)
            scores = RepetitionPenaltyLogitsProcessor(self.repetition)(ids, scores[None])[0]  # type: ignore[arg-type]
        if self.presence or self.frequency:
            for token, count in Counter(before).items():
                scores[token] -= self.presence + self.frequency * count
        if not self.temperature:
            return int(scores.argmax())
        scores = scores[None] / self.temperature
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(None, scores)  # type: ignore[arg-type]
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(None, scores)  # type: ignore[arg-type]
        draw = torch.Generator(scores.device).manual_seed((self.seed + STRIDE * len(before)) % SEEDS)
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=draw))


class Choices(ContinuousBatchingLogitsProcessor):
    """The engine's processor by which each request has its own `Choice`; the chosen token alone keeps its score.

    Log-probabilities, of the model itself, are kept as the request's own: (chosen, {token: of the likeliest}).
    """

    supported_kwargs, ignored_kwargs = {"choice": Choice, "adapter": str}, ()
    states: Sequence[Any] = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Do nothing: choices are no numbers."""

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Note the requests of the next scores."""
        self.states = [request.state for request in requests_with_new_token]
        return torch.zeros(0, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Leave the chosen tokens alone among these scores, [requests, vocabulary]."""
        for row, state in zip(scores, self.states, strict=False):
            choice = state.logit_processor_kwargs.get("choice", Choice())
            if choice.plain:
                continue
            scored = row.log_softmax(-1) if choice.top is not None else row
            # Of a request that gave up its pages the tokens are a part of its prompt now.
            begun = state._true_initial_tokens or len(state.initial_tokens)
            prompt, earlier = state.initial_tokens[:begun], state.initial_tokens[begun:]
            token = choice.token(row.clone(), earlier + state.generated_tokens, prompt)
            if choice.top is not None:
                values, tokens = scored.topk(choice.top)
                likeliest = dict(zip(tokens.tolist(), values.tolist(), strict=True))
                state.logprobs.append((float(scored[token]), likeliest))
            row.fill_(-torch.inf)
            row[token] = 0
        return scores


class Fair(FIFOScheduler):
    """A scheduler in which a long prompt keeps no short one waiting: every other batch reads the shortest first.

    Requests of one adapter make up a batch; where others wait, those of the next one have their turn after a few.

    Attributes:
        adapter: of the batch.
    """

    turns, adapter = 0, ""

    def _process_candidates(self, candidates: list[Any], *budgets: Any, **options: Any) -> Any:
        self.turns += 1
        if self.turns % 2:
            candidates = sorted(candidates, key=_unread)
        waiting = sorted({*map(adapter_of, candidates), self.adapter})
        at = waiting.index(self.adapter) + (self.turns % BATCHES == 0)
        full, result = False, (None, False)
        for self.adapter in waiting[at:] + waiting[:at]:  # until one is found that there is room for
            states = [state for state in candidates if adapter_of(state) == self.adapter]
            result = super()._process_candidates(states, *budgets, **options)
            full |= result[1]
            if result[0]:
                break
        return result[0], full, *result[2:]


def adapter_of(state: Any) -> str:
    """Return the adapter that a request asks for; empty for none."""
    return state.logit_processor_kwargs.get("adapter", "")


def _unread(state: Any) -> int:
    """Return the tokens of a prompt that are not read yet; 0 for a request that generates."""
    return 0 if state.status == RequestStatus.DECODING else len(state.remaining_prefill_tokens)
