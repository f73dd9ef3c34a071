"""Bodies of requests: fields that are followed, within bounds. Another one is refused by its name."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotp.runtime.generation.per_request import SEEDS, Choice

Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=2**31)]
SAMPLING = ("temperature", "top_k", "top_p")
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Refusal(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP. param: the field that is to blame.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class Strict(BaseModel):
    """Fields of JSON, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Strict):
    """A part of a message, which is text."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Streamed(Strict):
    """Options of a stream."""

    include_usage: bool = False


class Body(Strict):
    """Fields of both kinds of requests."""

    model: str
    stream: bool | None = None
    stream_options: Streamed | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    max_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def top(self) -> int | None:
        """Number of tokens whose log-probabilities are asked for beside the chosen one's; None for none at all."""
        return None

    @property
    def limit(self) -> int | None:
        """New tokens at most, where the request says how many."""
        return self.max_tokens

    def choice(self, generation: Any) -> Choice:
        """Return the choice of tokens: as the body says, else as the folder's generation config does."""
        request = self.model_dump(include={*SAMPLING}, exclude_none=True)
        defaults = {name: getattr(generation, name) for name in SAMPLING if generation.do_sample}
        sampling: Any = (
            {"temperature": float(bool(defaults or request))} | {n: x for n, x in defaults.items() if x} | request
        )
        return Choice(
            **sampling, seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS, top=self.top,
            repetition=generation.repetition_penalty or 1.0, presence=self.presence_penalty or 0.0,
            frequency=self.frequency_penalty or 0.0,
        )  # fmt: skip


class Text(Body):
    """A request to go on from a text."""

    prompt: Annotated[str, Field(min_length=1)]


class Chat(Body):
    """A request to answer messages."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int | None:
        """See `Body`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """See `Body`."""
        return self.max_completion_tokens or self.max_tokens


def read(raw: bytes, kind: type[Body], models: Collection[str], limit: int) -> Body:
    """Read a body.

    Args:
        raw: the body. kind: of request. models: that are served. limit: of new tokens of an answer.

    Raises:
        Refusal: a field is missing, not followed or out of bounds; it has the name.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(x) for x in first["loc"])
        text = "this server does not follow it; leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        raise Refusal(400, f"{name or 'the body'}: {text}.", name or None) from None
    if body.model not in models:
        raise Refusal(404, f"model: {body.model!r} is not served; {', '.join(models)} is.", "model")
    if (body.limit or 0) > limit:
        raise Refusal(400, f"max_tokens: at most {limit} tokens are generated (--max-tokens).", "max_tokens")
    return body
