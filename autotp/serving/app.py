"""The app: chat and plain completions, models, and health, on transformers' own handlers."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from autotp.errors import StateError

from .answers import Answers, Stream, Terms
from .bodies import Body, Chat, Refusal, Text, read

MAX_BODY, BODY_SECONDS, WATCH_SECONDS = 1 << 20, 30.0, 0.1  # bytes; seconds to send one; between looks at a client
LOCAL = ["localhost", "127.0.0.1", "[::1]"]


class Followed:
    """Parts of both handlers that are ours: fields that were read before, and several answers at once.

    Args:
        answers: the model. terms: of the answers to one request.
    """

    def __init__(self, answers: Answers, terms: Terms) -> None:
        super().__init__(answers, answers)  # type: ignore[call-arg]
        self.answers, self.terms = answers, terms

    def _validate_request(self, body: Any) -> None:
        """Do nothing: it was read."""

    def _resolve_model(self, body: Any) -> tuple[str, Any, Any]:
        return body["model"], self.answers.module, self.answers.tokenizer

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = True) -> Any:
        return self.terms

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any, terms: Terms, *args: Any,
        **kwargs: Any,
    ) -> JSONResponse:  # fmt: skip
        """The answers of one request, which are requests of the engine each."""
        own: Any = super()
        async with asyncio.TaskGroup() as group:
            before = request_id, model, processor, model_id, inputs
            calls = [own._non_streaming(*before, terms.nth(i), *args, **kwargs) for i in range(terms.n)]
            tasks = [group.create_task(call) for call in calls]
        bodies = [json.loads(task.result().body) for task in tasks]
        choices = [body["choices"][0] for body in bodies]
        for choice, stream in zip(choices, terms.streams, strict=True):
            for stop in terms.stop if "message" in choice else ():  # a parser of messages has not seen it as one
                choice["message"]["content"] = choice["message"].get("content", "").partition(stop)[0]
            choice["index"] = stream.terms.index
            if choice["finish_reason"] != "tool_calls":
                choice["finish_reason"] = stream.reason
            if terms.choice.top is not None:
                choice["logprobs"] = _logprobs(processor, stream, stream.total_tokens)
        usage = bodies[0]["usage"]
        usage["completion_tokens"] = terms.streams.total_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return JSONResponse(bodies[0] | {"choices": choices, "usage": usage})

    def chunk_to_sse(self, chunk: Any) -> str:
        """Format an event: of which answer it is, why that has ended, log-probabilities of its tokens, and usage."""
        own: Any = super()
        choice, (usage, chunk.usage) = chunk.choices[0], (chunk.usage, None)
        delta = getattr(choice, "delta", None)
        if delta is not None and delta.role:  # each answer has it in its own first event
            return ""
        stream, tokens, calls, choice.finish_reason = self.terms.said.popleft()
        choice.index = stream.terms.index
        if delta is not None:
            delta.role = "assistant" if stream.told is None else None
            for call in delta.tool_calls or ():
                call.index = calls - 1
        if self.terms.choice.top is not None:
            choice.logprobs = ChoiceLogprobs(**_logprobs(self.answers.tokenizer, stream, tokens))
        stream.told = tokens
        text = own.chunk_to_sse(chunk)
        if usage is not None and self.terms.usage:
            chunk.choices, chunk.usage = [], usage
            text += own.chunk_to_sse(chunk)
        return text


class Chats(Followed, ChatCompletionHandler):  # type: ignore[misc]
    """Answers to messages."""


class Texts(Followed, CompletionHandler):  # type: ignore[misc]
    """Continuations of a text."""


def _logprobs(tokenizer: Any, stream: Stream, tokens: int) -> dict[str, Any]:
    """Log-probabilities of an answer's tokens since those that were told, and of the likeliest in the place of each."""

    def entry(token: int, value: float, **more: Any) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode()), **more}

    content, new = [], slice(stream.told or 0, tokens)
    for token, (own, likeliest) in zip(stream.tokens[new], stream.output.logprobs[new], strict=True):
        content.append(entry(token, own, top_logprobs=[entry(*pair) for pair in likeliest.items()]))
    return {"content": content}


class Served:
    """The routes.

    Args:
        answers: the model. key: that clients show, or empty.
    """

    def __init__(self, answers: Answers, key: str) -> None:
        self.answers, self.key, self.since = answers, key, int(time.time())

    def models(self, request: Request) -> JSONResponse:
        """List the models."""
        self._admit(request)
        one = {"object": "model", "created": self.since, "owned_by": "autotp"}
        return JSONResponse({"object": "list", "data": [{"id": name, **one} for name in self.answers.models]})

    def health(self) -> JSONResponse:
        """Tell whether requests are answered."""
        why = self.answers.failure
        return JSONResponse({"status": why or "ok"}, 503 if why else 200)

    async def answer(self, request: Request, handler: type[Any], kind: type[Body]) -> Any:
        """Answer a request of either kind."""
        self._admit(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "send JSON, with content-type: application/json.")
        answers = self.answers
        body = read(await _body(request), kind, answers.models, answers.limit)
        name = f"{kind.__name__.lower()}-{uuid.uuid4().hex}"
        call = handler(answers, answers.terms(body)).handle_request(body.model_dump(exclude_none=True), name)
        response = await _while_there(request, call)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _ended(response.body_iterator)
        return response

    def _admit(self, request: Request) -> None:
        """Refuse who does not show the key."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refusal(401, "show the key of this server: Authorization: Bearer KEY.")


async def _ended(chunks: Any) -> AsyncIterator[str]:
    """The events of a stream, and the one that says that there are no more."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk
    yield "data: [DONE]\n\n"


async def _body(request: Request) -> bytes:
    """The body of a request, within bounds of size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise Refusal(413, f"a body has at most {MAX_BODY} bytes.")
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s.") from None
    return bytes(body)


async def _while_there(request: Request, call: Any) -> Any:
    """The result of a call, which is ended where the client goes."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([task], timeout=WATCH_SECONDS))[0]:
            if await request.is_disconnected():
                break
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if task.cancelled():
        raise Refusal(499, "the client has gone.")
    try:
        return task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _failed(request: Request, error: Any) -> JSONResponse:
    status = getattr(error, "status", 503 if isinstance(error, StateError) else 400)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": None}
    return JSONResponse({"error": body}, status, {"Retry-After": "1"} if status in (429, 503) else None)


def app_of(served: Served, origins: Sequence[str], local: bool) -> FastAPI:
    """The app.

    Args:
        served: its routes. origins: of pages whose scripts may ask. local: whether it is for this machine alone.
    """
    app = FastAPI(title="autotp", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (Refusal, StateError, TemplateError):
        app.add_exception_handler(kind, _failed)
    if local:  # a page of another name that leads here has no business here
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)
    if origins:
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await served.answer(request, Chats, Chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await served.answer(request, Texts, Text)

    app.get("/v1/models")(served.models)
    app.get("/health")(served.health)
    return app
