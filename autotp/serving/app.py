"""The app: chat and plain completions, models, and health, on transformers' own handlers."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from autotp.errors import StateError

from .answers import Answers, Chats, Texts
from .bodies import Chat, Refusal, Text, read

MAX_BODY, BODY_SECONDS, WATCH_SECONDS = 1 << 20, 30.0, 0.1  # bytes; seconds to send one; between looks at a client
LOCAL = ["localhost", "127.0.0.1", "[::1]"]


async def _body(request: Request) -> bytes:
    """Return the body of a request, within bounds of size and time."""
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


async def _while_connected(request: Request, call: Any) -> Any:
    """Return the result of a call, which is cancelled where the client disconnects."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([task], timeout=WATCH_SECONDS))[0]:
            if await request.is_disconnected():
                raise Refusal(499, "the client has gone.")
        return task.result()
    finally:
        task.cancel()


def _failed(request: Request, error: Any) -> JSONResponse:
    status = getattr(error, "status", 503 if isinstance(error, StateError) else 400)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": None}
    return JSONResponse({"error": body}, status, {"Retry-After": "1"} if status in (429, 503) else None)


def app_of(answers: Answers, key: str, origins: Sequence[str], local: bool) -> FastAPI:
    """Make the app.

    Args:
        answers: the models. key: that clients show, or empty. origins: of pages whose scripts may ask.
        local: whether it is for this machine alone.
    """
    app, since = FastAPI(openapi_url=None), int(time.time())
    for kind in (Refusal, StateError, TemplateError):
        app.add_exception_handler(kind, _failed)
    # A page of another name that leads here has no business here.
    if local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)
    # Else browsers let no page ask.
    if origins:
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)

    def admit(request: Request) -> None:
        # A comparison that ends at the first letter that differs would tell how many are right.
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(token.encode(), key.encode()):
            raise Refusal(401, "show the key of this server: Authorization: Bearer KEY.")

    async def answer(request: Request) -> Any:
        # Other types any page's script may send.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "send JSON, with content-type: application/json.")
        exchange, kind = (Chats, Chat) if "chat" in request.url.path else (Texts, Text)
        body = read(await _body(request), kind, answers.models, answers.limit)
        return await _while_connected(request, exchange(answers, body).answer())

    async def models() -> Any:
        one = {"object": "model", "created": since, "owned_by": "autotp"}
        return {"object": "list", "data": [{"id": name, **one} for name in answers.models]}

    async def health() -> JSONResponse:
        failure = answers.failure
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    guards = [Depends(admit)]
    app.post("/v1/chat/completions", dependencies=guards)(answer)
    app.post("/v1/completions", dependencies=guards)(answer)
    app.get("/v1/models", dependencies=guards)(models)
    app.get("/health")(health)
    return app
