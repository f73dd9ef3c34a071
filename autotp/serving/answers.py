"""Requests of transformers' handlers, answered by the manager of continuous batching of a sharded module."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBStreamer,
    Modality,
    ToolCall,
    _StreamError,
    get_response_template,
    response_events_to_chunks,
)

from autotp.errors import StateError
from autotp.runtime.generation.batch_manager import Manager
from autotp.runtime.generation.per_request import Choice
from autotp.runtime.module import ShardedModule

from .bodies import Body, Chat, Refusal


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


@dataclass
class Terms:
    """Terms of the answers to one request, of which each has a stream of its own.

    Attributes:
        choice: how tokens are chosen. stop: strings that end an answer; eos: tokens that do.
        limit: tokens at most. streamed: whether it is sent as it comes; usage: with an event of what it took.
        n: answers. adapter: that gives them, or empty. index: of the answer that these terms are of.
        streams: of the answers. said: of each item of their queue its `Said`.
    """

    choice: Choice
    stop: tuple[str, ...]
    eos: tuple[int, ...]
    limit: int
    streamed: bool
    usage: bool
    n: int
    adapter: str = ""
    index: int = 0
    streams: Streams = field(default_factory=lambda: Streams())
    said: deque[Said] = field(default_factory=deque)

    max_new_tokens = None  # a handler would tell by it why an answer ended

    def nth(self, i: int) -> Terms:
        """Return those of the answer with this number."""
        return replace(self, choice=self.choice.nth(i), index=i)


class Said(NamedTuple):
    """Circumstances of a part of an answer: how many tokens and calls of tools there were by then, and why it ended."""

    stream: Stream
    tokens: int
    calls: int
    reason: str | None


class Streams(list["Stream"]):
    """Answers that one stream of events sends."""

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all."""
        return sum(stream.total_tokens for stream in self)

    def cancel(self) -> None:
        """End those that are not over."""
        for stream in self:
            stream.cancel()


class Stream(CBStreamer):
    """One answer as it comes.

    Attributes:
        output: what the engine has sent of it. over: whether nothing more comes. calls: of tools.
        told: tokens of which log-probabilities were sent; None before its first event.
    """

    output: Any = None
    over, calls = False, 0
    told: int | None = None

    def __init__(
        self, terms: Terms, answers: Answers, queue: asyncio.Queue[Any], name: str, tokenizer: Any, parser: Any
    ) -> None:
        self.terms, self.answers, self.queue, self.cut = terms, answers, queue, Cut(terms.stop)
        own: Any = self  # in the queue's place
        super().__init__(answers.manager, name, tokenizer, asyncio.get_running_loop(), own, parser)
        terms.streams.append(self)

    def take(self, output: Any) -> None:
        """Take what the engine sends, on the loop of the server."""
        # What the engine had sent on its way when the answer was cut.
        if self.over:
            return
        # A request that failed has no text; its reason stands in JSON that a handler writes as it is.
        if output.error is not None:
            self._leave()
            self.queue.put_nowait(_StreamError(json.dumps(output.error)[1:-1]))
            return self.terms.streams.cancel()
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
            self.end()

    def cancel(self) -> None:
        """End the answer; the engine, where it is not at its end, leaves it before the next batch."""
        if not self.over:
            super().cancel()
            self._leave()

    def _leave(self) -> None:
        """Count as over, once, and take nothing more: of a request that is cancelled the engine says nothing."""
        self.over, self.answers.running = True, self.answers.running - 1
        self._cb.output_router.result_handlers.pop(self._request_id, None)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer, up to the one that ends a stop string."""
        return self.output.generated_tokens[: self.total_tokens]

    @property
    def reason(self) -> str:
        """Reason that it has ended."""
        ended = self.cut.over or self.tokens[-1] in self.terms.eos
        return "tool_calls" if self.calls else "stop" if ended else "length"

    def _say(self, text: str) -> None:
        items = [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text))
        for item in filter(None, items):
            self.put_nowait(item)

    def put_nowait(self, item: Any) -> None:
        """Hand on an item, None at the end: what comes in one queue ends with the last answer."""
        self.calls += isinstance(item, ToolCall)
        reason = self.reason if item is None else None
        if item is None and self.terms.streamed and not all(stream.over for stream in self.terms.streams):
            item = ""
        self.terms.said.append(Said(self, self.total_tokens, self.calls, reason))
        self.queue.put_nowait(item)


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
        usage = body.stream_options is not None and body.stream_options.include_usage
        return Terms(
            body.choice(generation), stops, ends, body.limit or 0, bool(body.stream), usage, body.n,
            self.models[body.model],
        )  # fmt: skip

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Begin the answers to a request; what they say comes in the queue.

        Args:
            model, processor: of the folder. inputs: with the prompt's tokens. gen_config: the `Terms`.
            request_id: its name. response_parser: of messages, or None.

        Raises:
            Refusal: they are too long, or there are too many. StateError: nothing is answered any more.
        """
        terms, queue = gen_config, asyncio.Queue[Any]()  # `Terms`, in the place that the handlers have for it
        for i in range(terms.n):
            self._begin(processor, inputs, terms.nth(i), request_id, deepcopy(response_parser), queue)
        return queue, terms.streams

    def _begin(
        self, processor: Any, inputs: Any, terms: Terms, request_id: str, parser: Any, queue: asyncio.Queue[Any]
    ) -> Stream:
        """Begin one answer."""
        ids, name = inputs["input_ids"], f"{request_id}-{terms.index}"
        room = self.context - len(ids)
        if room < (terms.limit or 1):
            need = f"max_tokens: a prompt of {len(ids)} tokens and {terms.limit or 1} more"
            raise Refusal(400, f"{need} are more than the {self.context} that there is room for.", "max_tokens")
        if self.running + terms.n - terms.index > self.most:
            raise Refusal(429, f"{self.running} answers are under way, of {self.most} at once. Come again.")
        stream = Stream(terms, self, queue, name, processor._tokenizer, parser)
        self.manager.register_result_handler(name, stream.take)  # before it can have a result
        self.manager.add_request(
            ids, name, terms.limit or min(room, self.limit), streaming=terms.streamed or bool(terms.stop),
            eos_token_id=list(terms.eos), choice=terms.choice, adapter=terms.adapter,
        )  # fmt: skip
        self.running += 1
        return stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text of an answer, how long the prompt is, and the answer's tokens; see `generate_streaming`."""
        queue, text = asyncio.Queue[Any](), ""
        stream = self._begin(processor, inputs, gen_config, request_id, None, queue)
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
