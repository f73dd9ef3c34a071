"""Requests of transformers' handlers, answered by the manager of continuous batching of a sharded module."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBStreamer,
    Modality,
    _StreamError,
    get_response_template,
    response_events_to_chunks,
)

from autotp.errors import StateError
from autotp.runtime.generation.batch_manager import Manager
from autotp.runtime.module import ShardedModule

from .bodies import Body, Chat, Refusal, Terms


class Cut:
    """Text up to the first of some strings, as it comes: what may be the beginning of one is kept back.

    Attributes:
        over: whether one has come.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.rest, self.over = stops, "", False

    def add(self, text: str) -> str:
        """Return what is surely no part of a stop string, after this text has come."""
        text = self.rest + text
        ends = [at for at in map(text.find, self.stops) if at >= 0]
        self.over = bool(ends)
        begun = [n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        at = min(ends) if ends else len(text) - max(begun, default=0)
        self.rest = "" if ends else text[at:]
        return text[:at]


class Stream(CBStreamer):
    """One answer as it comes.

    Attributes:
        output: what the engine has sent of it. over: whether nothing more comes.
    """

    output: Any = None
    over = False

    def __init__(self, terms: Terms, answers: Answers, *args: Any) -> None:
        super().__init__(*args)
        self.terms, self.answers, self.cut = terms, answers, Cut(terms.stop)

    def take(self, output: Any) -> None:
        """Take what the engine sends, on the loop of the server."""
        # What the engine had sent on its way when the answer was cut.
        if self.over:
            return
        # A request that failed has no text; its reason stands in JSON that a handler writes as it is.
        if output.error is not None:
            self._leave()
            self._queue.put_nowait(_StreamError(json.dumps(output.error)[1:-1]))
            return
        new = output.generated_tokens[self._prev_len :]
        self._prev_len, self.output = len(output.generated_tokens), output
        self.answers.tokens += len(new)
        for token in new:
            self.total_tokens += 1
            self._say(self.cut.add(self._decode_stream.step(self._tokenizer, token) or ""))
            if self.cut.over:
                break
        if self.cut.over or output.is_finished():
            (self._leave if output.is_finished() else self.cancel)()
            self._say(self.cut.rest)
            # By the limit the handler tells why it ended: one that ended at its last token by itself was not cut off.
            if self.cut.over or output.generated_tokens[-1] in self.terms.eos:
                self.terms.max_new_tokens = None
            self.end()

    def cancel(self) -> None:
        """End the answer; the engine, where it is not at its end, leaves it before the next batch."""
        super().cancel()
        self._leave()

    def _leave(self) -> None:
        """Count as over, once, and take nothing more: of a request that is cancelled the engine says nothing."""
        if not self.over:
            self.over, self.answers.running = True, self.answers.running - 1
            self._cb.output_router.result_handlers.pop(self._request_id, None)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer, up to the one that ends a stop string."""
        return self.output.generated_tokens[: self.total_tokens]

    def _say(self, text: str) -> None:
        items: list[Any] = [text]
        if self._parser is not None:
            items = response_events_to_chunks(self._parser.feed(text))
        for item in filter(None, items):
            self._queue.put_nowait(item)


@dataclass(eq=False)
class Answers(BaseGenerateManager):
    """The models that are served, in all the parts that the handlers of transformers ask for.

    Attributes:
        models: by name the adapter that each is the module with, or empty. module: the sharded module.
        tokenizer: of its folder. manager: of its requests.
        context: tokens that a prompt and its answer may have together. limit: tokens of an answer.
        most: answers at once; more are told to come again.
        tokens: generated so far. running: answers that are not over.
    """

    models: Mapping[str, str]
    module: ShardedModule
    tokenizer: PreTrainedTokenizerBase
    manager: Manager
    context: int
    limit: int
    most: int
    tokens: int = 0
    running: int = 0

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Return that it is a language model."""
        return Modality.LLM

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Return that it always is."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = True) -> Answers:
        """Return this."""
        return self

    @property
    def failure(self) -> str | None:
        """Reason that nothing is answered any more; None while it is."""
        status = self.manager.background_thread_status
        return status.fatal_error and str(status.fatal_error) or status.can_accept_new_requests()

    def terms(self, body: Body) -> Terms:
        """Read what each answer to a request is to be.

        Raises:
            Refusal: this model cannot do it.
        """
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        if isinstance(body, Chat) and not template:
            raise Refusal(400, "messages: the folder has no chat template. Use /v1/completions.", "messages")
        model: Any = self.module
        tools = "tools" in template and get_response_template(self.tokenizer, model)
        if getattr(body, "tools", None) and not tools:
            raise Refusal(400, "tools: not followed, for this model's chat template has none.", "tools")
        generation, stop = self.module.generation_config, body.stop or []
        eos = generation.eos_token_id
        ends = (eos,) if isinstance(eos, int) else tuple(eos or ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Terms(
            body.choice(generation), stops, ends, body.limit, bool(body.stream), body.n, self.models[body.model]
        )

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Stream]:
        """Begin an answer; what it says comes in the queue.

        Args:
            model, processor: of the folder. inputs: with the prompt's tokens. gen_config: the `Terms`.
            request_id: its name. response_parser: of messages, or None.

        Raises:
            Refusal: it is too long, or there are too many. StateError: nothing is answered any more.
        """
        ids, terms = inputs["input_ids"], gen_config  # `Terms`, in the place that the handlers have for it
        room = self.context - len(ids)
        if room < (terms.max_new_tokens or 1):
            need = f"max_tokens: a prompt of {len(ids)} tokens and {terms.max_new_tokens or 1} more"
            raise Refusal(400, f"{need} are more than the {self.context} that there is room for.", "max_tokens")
        if self.running >= self.most:
            raise Refusal(429, f"{self.running} answers are under way, as many as there may be at once. Come again.")
        terms.max_new_tokens = terms.max_new_tokens or min(room, self.limit)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tokenizer, loop = processor._tokenizer, asyncio.get_running_loop()
        stream = Stream(terms, self, self.manager, request_id, tokenizer, loop, queue, response_parser)
        terms.stream = stream
        self.manager.register_result_handler(request_id, stream.take)  # before it can have a result
        self.manager.add_request(
            ids, request_id, terms.max_new_tokens, streaming=terms.streamed or bool(terms.stop),
            eos_token_id=list(terms.eos), choice=terms.choice, adapter=terms.adapter,
        )  # fmt: skip
        self.running += 1
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text of an answer, how long the prompt is, and the answer's tokens; see `generate_streaming`."""
        queue, stream = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        text = ""
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, _StreamError):
                    raise StateError(item.msg) if self.failure else Refusal(500, item.msg)
                text += item
        except asyncio.CancelledError:  # the client has gone
            stream.cancel()
            raise
        return text, len(inputs["input_ids"]), stream.tokens

    def stop(self) -> None:
        """Do nothing: the ranks stop their managers."""
