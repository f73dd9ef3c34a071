"""Requests and their answers, which transformers' handlers put into events, from the manager of a sharded module."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from openai.types.chat.chat_completion_chunk import ChoiceLogprobs
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    CBStreamer,
    Modality,
    ToolCall,
    _StreamError,
    get_response_template,
    response_events_to_chunks,
)

from autotp.errors import StateError
from autotp.runtime.generation.batch_manager import Manager
from autotp.runtime.module import ShardedModule

from .bodies import Body, Chat, Refusal


@dataclass(eq=False)
class Answers:
    """The served models.

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

    @property
    def failure(self) -> str | None:
        """Reason that requests are no longer answered; None while they are."""
        status = self.manager.background_thread_status
        return status.fatal_error and str(status.fatal_error) or status.can_accept_new_requests()


class Cut:
    """Text up to the first stop string, piece by piece: a possible beginning of one is kept back.

    Attributes:
        over: whether one has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.rest, self.over = stops, "", False

    def add(self, text: str) -> str:
        """Return the text that is surely no part of a stop string, after this piece."""
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
        output: what the engine has sent of it. over: whether nothing more comes. calls: of tools.
        index: of the answer among those to one request. reported: tokens that events have; None before the first.
    """

    output: Any = None
    over, calls = False, 0
    reported: int | None = None

    def __init__(self, exchange: Exchange, queue: asyncio.Queue[Any], name: str, parser: Any) -> None:
        self.exchange, self.queue, self.cut = exchange, queue, Cut(exchange.stop)
        self.index, self.answers = len(exchange.streams), exchange.answers
        tokenizer: Any = self.answers.tokenizer
        # Itself in the place of the queue, so that it gets each item.
        super().__init__(self.answers.manager, name, tokenizer._tokenizer, asyncio.get_running_loop(), self, parser)  # type: ignore[arg-type]
        exchange.streams.append(self)

    def take(self, output: Any) -> None:
        """Take an output of the engine, on the loop of the server."""
        # The engine had sent it when the answer was cut.
        if self.over:
            return
        # A request that failed has no text; its reason stands in JSON that a handler writes as it is.
        if output.error is not None:
            self._leave()
            self.exchange.error = output.error
            self.queue.put_nowait(_StreamError(json.dumps(output.error)[1:-1]))
            return self.exchange.cancel()
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
        """Count as over and take nothing more: the engine reports no cancelled request."""
        self.over, self.answers.running = True, self.answers.running - 1
        self._cb.output_router.result_handlers.pop(self._request_id, None)

    def _say(self, text: str) -> None:
        items = [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text))
        for item in filter(None, items):
            self.put_nowait(item)

    def put_nowait(self, item: Any) -> None:
        """Hand on an item; None at the end, which for the handler is that of the last answer."""
        self.calls += isinstance(item, ToolCall)
        reason = None
        if item is None:
            last = self.output.generated_tokens[self.total_tokens - 1]
            reason = "stop" if self.cut.over or last in self.exchange.eos else "length"
            reason = "tool_calls" if self.calls else reason
            running = [stream for stream in self.exchange.streams if not stream.over]
            item = "" if running else None
        self.exchange.marks.append((self, self.total_tokens, self.calls, reason))
        self.queue.put_nowait(item)

    def logprobs(self, tokens: int) -> dict[str, Any]:
        """Return log-probabilities of the new ones among the first tokens, and of the likeliest tokens there."""

        def entry(token: int, value: float, **extra: Any) -> dict[str, Any]:
            text: Any = self.answers.tokenizer.decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode()), **extra}

        content, new = [], slice(self.reported, tokens)
        for token, (value, likeliest) in zip(self.output.generated_tokens[new], self.output.logprobs[new], strict=True):
            content.append(entry(token, value, top_logprobs=[entry(*pair) for pair in likeliest.items()]))
        return {"content": content}


class Exchange:
    """A request with its answers, each a request of the engine.

    To a handler of transformers it is a manager of generation, its config, and a streamer.

    Args:
        answers: the models. body: of the request.

    Attributes:
        choice: how tokens are chosen. stop: strings that end an answer; eos: tokens that do. streams: of the answers.
        marks: of each item in the queue its stream, the tokens and tool calls by then, and why the answer ended.
        choices, last: each answer so far, and the last event, where all is sent at once.
        error: of the engine.

    Raises:
        Refusal: this model cannot do what is asked.
    """

    max_new_tokens = error = None  # by the first a handler would tell why an answer ended
    last: dict[str, Any]

    def __init__(self, answers: Answers, body: Body) -> None:
        module: Any = answers.module
        template = str(getattr(answers.tokenizer, "chat_template", None) or "")
        if isinstance(body, Chat) and not template:
            raise Refusal(400, "messages: the folder has no chat template. Use /v1/completions.", "messages")
        self.tools = getattr(body, "tools", None)
        if self.tools and not ("tools" in template and get_response_template(answers.tokenizer, module)):
            raise Refusal(400, "tools: not followed, for this model's chat template has none.", "tools")
        self.answers, self.body, self.choice = answers, body, body.choice(module.generation_config)
        self.stop, self.eos = several(body.stop), several(module.generation_config.eos_token_id)
        self.streams, self.marks, self.choices = list[Stream](), deque[Any](), dict[int, Any]()

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(stream.total_tokens for stream in self.streams)

    def cancel(self) -> None:
        """End the answers that are not over."""
        for stream in self.streams:
            stream.cancel()

    async def answer(self) -> Response:
        """Return the answers, or their stream."""
        handler: Any = self
        answers, body, name = self.answers, self.body, f"{type(self).__name__.lower()}-{uuid.uuid4().hex}"
        response = handler._streaming(
            name, answers.module, answers.tokenizer, body.model, handler.inputs(), handler, handler, self.tools
        )
        if body.stream:
            return response
        async for _ in response.body_iterator:
            pass
        if self.error is not None:
            raise StateError(self.error) if answers.failure else Refusal(500, self.error)
        whole, choices = self.last, [choice for _, choice in sorted(self.choices.items())]
        for choice in choices if isinstance(body, Chat) else ():
            choice["message"] = {"content": ""} | choice.pop("delta")
        return JSONResponse(whole | {"choices": choices, "object": whole["object"].removesuffix(".chunk")})

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Exchange]:
        """Begin the answers; their items come in the queue.

        Args:
            model, processor: of the folder. inputs: with the prompt's tokens. gen_config: this.
            request_id: its name. response_parser: of messages, or None.

        Raises:
            Refusal: they are too long, or there are too many. StateError: requests are no longer answered.
        """
        answers, body, ids, queue = self.answers, self.body, inputs["input_ids"], asyncio.Queue[Any]()
        room = answers.context - len(ids)
        if room < (body.limit or 1):
            need = f"max_tokens: a prompt of {len(ids)} tokens and {body.limit or 1} more"
            raise Refusal(400, f"{need} are more than the {answers.context} that there is room for.", "max_tokens")
        if answers.running + body.n > answers.most:
            raise Refusal(429, f"{answers.running} answers are under way, of {answers.most} at once. Come again.")
        for i in range(body.n):
            stream = Stream(self, queue, f"{request_id}-{i}", deepcopy(response_parser))
            answers.manager.register_result_handler(stream._request_id, stream.take)  # before it can have a result
            answers.manager.add_request(
                ids, stream._request_id, body.limit or min(room, answers.limit),
                streaming=bool(body.stream or self.stop), eos_token_id=self.eos, choice=self.choice.nth(i),
                adapter=answers.models[body.model],
            )  # fmt: skip
            answers.running += 1
        return queue, self

    def chunk_to_sse(self, chunk: Any) -> str:
        """Format an event: its answer's index, why that has ended, log-probabilities of its tokens, and usage."""
        handler: Any = super()
        choice, (usage, chunk.usage) = chunk.choices[0], (chunk.usage, None)
        delta = getattr(choice, "delta", None)
        # The handler's first event has a role and nothing else: here each answer has it in its own first one.
        if delta is not None and delta.role:
            return ""
        stream, tokens, calls, choice.finish_reason = self.marks.popleft()
        choice.index = stream.index
        if delta is not None:
            delta.role = "assistant" if stream.reported is None else None
            for call in delta.tool_calls or ():
                call.index = calls - 1
        if self.choice.top is not None:
            choice.logprobs = ChoiceLogprobs(**stream.logprobs(tokens))
        stream.reported = tokens
        # All at once: what a client would put together of events.
        if not self.body.stream:
            chunk.usage = usage
            self.last = chunk.model_dump(exclude_none=True)
            add(self.choices.setdefault(stream.index, {}), *self.last["choices"])
            return ""
        text = handler.chunk_to_sse(chunk)
        # The last one; usage has an event of its own, without a choice.
        if usage is None:
            return text
        if self.body.stream_options and self.body.stream_options.include_usage:
            chunk.choices, chunk.usage = [], usage
            text += handler.chunk_to_sse(chunk)
        return text + handler.chunk_to_sse("[DONE]")


class Chats(Exchange, ChatCompletionHandler):  # type: ignore[misc]
    """Answers to messages."""

    def inputs(self) -> Any:
        """Return the prompt's tokens."""
        body: Any = self.body.model_dump(exclude_none=True)
        messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        template: Any = self.answers.tokenizer.apply_chat_template
        return template(messages, add_generation_prompt=True, tools=body.get("tools"), return_dict=True, tokenize=True)


class Texts(Exchange, CompletionHandler):  # type: ignore[misc]
    """Continuations of a text."""

    def inputs(self) -> Any:
        """Return the prompt's tokens."""
        body: Any = self.body
        return self.answers.tokenizer(body.prompt)


def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of an answer to the whole, as clients put events together."""
    for key, value in part.items():
        if isinstance(value, dict):
            add(whole.setdefault(key, {}), value)
        else:
            whole[key] = whole[key] + value if key in whole and isinstance(value, str | list) else value


def several(value: Any) -> list[Any]:
    """Return a value that may be None, single or a list as a list."""
    return value if isinstance(value, list) else [value] * (value is not None)
