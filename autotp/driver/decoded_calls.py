"""Calls that a model generates by: of a prompt, then of a token each, with the tokens given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.errors import InputError
from autotp.inputs import CACHES, Inputs, bind
from autotp.ir.named_states import Names, follow
from autotp.runtime.generation.generate_methods import calling

NO_CACHE = (
    "autotp.verify(generate={count}): {name} carries nothing from call to call that could be compared. Its class has "
    "no generate(), and carried= names no output that comes back as an input. Leave generate out, or give carried, "
    "such as {{1: 'past_k', 2: 'past_v'}}."
)
SPOILT = (*CACHES, "use_cache", "return_dict", "labels", "output_attentions", "output_hidden_states")
Call = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]  # of the module at this path


@dataclass
class Forced:
    """Selects given tokens, whatever the scores are: what `generate` of transformers calls a logits processor."""

    tokens: Tensor  # [batch, new]
    at: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave the next token only."""
        tokens = self.tokens[:, min(self.at, self.tokens.shape[1] - 1)].to(scores.device)
        self.at += 1
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


@dataclass
class Generated:
    """The calls of a model whose class has `generate()`.

    Attributes:
        bare: the model without weights. inputs: the prompt, by name. count: of tokens after it.
    """

    bare: nn.Module
    inputs: dict[str, Any]
    count: int

    def __post_init__(self) -> None:
        self.inputs = {name: x for name, x in self.inputs.items() if name not in SPOILT and x is not None}
        decodes = getattr(getattr(self.bare, "config", None), "is_encoder_decoder", False)
        self.prompt = "decoder_input_ids" if decodes else getattr(self.bare, "main_input_name", "input_ids")
        self.tokens = _others(self._ids(), self._ends(), self.count + 1)

    @property
    def total(self) -> int:
        """Positions of all tokens; after `decode`."""
        return self.sequence.shape[1]

    def decode(self, call: Call) -> None:
        """Prefill and decode."""
        sequence = self._generate(call, self.inputs, self.count + 1)
        self.sequence = sequence[:, :-1]

    def forward(self, call: Call) -> None:
        """One call with all tokens; after `decode`."""
        length = self.sequence.shape[1]
        ids = self._ids()
        inputs = {name: self._longer(name, x, ids, length) for name, x in self.inputs.items()}
        self._generate(call, {**inputs, self.prompt: self.sequence}, 1)

    def token_positions(self) -> Tensor | None:
        """Return which positions are no padding, [batch, all positions]; None where all are."""
        mask = self.inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != self._ids().shape:
            return None
        return self._longer("attention_mask", mask, mask, self.sequence.shape[1]).bool()

    def rows(self, outputs: Any) -> list[Tensor]:
        """Return what is compared of a call's outputs."""
        logits = getattr(outputs, "logits", None)
        if isinstance(logits, Tensor):
            return [logits]
        return [x for x in compat.tree_leaves(outputs) if isinstance(x, Tensor)]

    def _generate(self, call: Call, inputs: dict[str, Any], new: int) -> Tensor:
        keeps: dict[str, Any] = {"logits_to_keep": 0} if self._keeps() else {}
        generator = calling(self.bare, call)
        return generator.generate(
            **inputs, **keeps, max_new_tokens=new, min_new_tokens=new, do_sample=False, num_beams=1, use_cache=True,
            logits_processor=[Forced(self.tokens)], return_dict_in_generate=False,
        )  # fmt: skip

    def _keeps(self) -> bool:
        supports = getattr(self.bare, "_supports_logits_to_keep", None)
        return supports is not None and supports()

    def _ids(self) -> Tensor:
        names = (self.prompt, "input_ids")
        ids = next((x for n in names if isinstance(x := self.inputs.get(n), Tensor)), None)
        if ids is not None and not ids.is_floating_point():
            return ids
        batch = next(x.shape[0] for x in compat.tree_leaves(self.inputs) if isinstance(x, Tensor))
        return torch.arange(2, 12).expand(batch, -1)

    def _ends(self) -> list[int]:
        end = getattr(getattr(self.bare, "generation_config", None), "eos_token_id", None)
        if isinstance(end, list):
            return end
        return [] if end is None else [end]

    def _longer(self, name: str, x: Any, ids: Tensor, length: int) -> Any:
        """An input that has a number for each token, as `generate` goes on with it."""
        if not isinstance(x, Tensor) or x.shape != ids.shape or x.shape[1] >= length or name == self.prompt:
            return x
        if self.prompt == "decoder_input_ids" and not name.startswith("decoder_"):
            return x
        more = x[:, -1:].expand(-1, length - x.shape[1])
        return torch.cat([x, torch.ones_like(more) if "attention_mask" in name else more], 1)


def _others(ids: Tensor, ends: Sequence[int], count: int) -> Tensor:
    """So many tokens for each row, of those in the prompt, none of which ends it."""
    words = ids.unique()
    words = words[~torch.isin(words, torch.tensor(ends, dtype=words.dtype))] if ends else words
    words = words if len(words) else ids.unique()
    rows, places = torch.arange(ids.shape[0])[:, None], torch.arange(count)[None]
    return words[(places * 7 + rows * 3 + places * places) % len(words)]


@dataclass
class NamedCalls:
    """The calls of a module some of whose outputs come back as inputs, as the user says.

    Attributes:
        inputs: by name, with the states that a sequence begins with, if any. names: of outputs and arguments.
    """

    inputs: dict[str, Any]
    count: int
    names: Names

    def __post_init__(self) -> None:
        states = {name for _, name in self.names}
        plain = {n: x for n, x in self.inputs.items() if n not in states and isinstance(x, Tensor) and x.ndim > 1}
        self.length = next((x.shape[1] for x in plain.values()), 0)
        places = torch.arange(self.length + self.count) % max(self.length, 1)
        longer = {n: x[:, places.to(x.device)] for n, x in plain.items() if x.shape[1] == self.length}
        self.longer = longer

    @property
    def total(self) -> int:
        """Positions of all tokens."""
        return self.length + self.count

    def decode(self, call: Call) -> None:
        """Prefill and decode."""
        outputs = call("", (), self.inputs)
        for at in range(self.length, self.length + self.count):
            states = {name: follow(outputs, path) for path, name in self.names}
            new = {name: x[:, at : at + 1] for name, x in self.longer.items()}
            outputs = call("", (), {**self.inputs, **states, **new})

    def forward(self, call: Call) -> None:
        """One call with all tokens."""
        call("", (), {**self.inputs, **self.longer})

    def token_positions(self) -> None:
        """No position is known as padding."""

    def rows(self, outputs: Any) -> list[Tensor]:
        """Return what is compared of a call's outputs: all that become no state."""
        states = {id(x) for path, _ in self.names for x in compat.tree_leaves(follow(outputs, path))}
        return [x for x in compat.tree_leaves(outputs) if isinstance(x, Tensor) and id(x) not in states]


def calls_of(model: nn.Module, bare: nn.Module, inputs: Inputs, count: int, names: Names) -> Generated | NamedCalls:
    """The calls of a model.

    Args:
        bare: its skeleton. inputs: the prompt. count: of tokens after it. names: of the states that a user named.

    """
    bound = bind(model.forward, inputs)
    arguments = {**bound.arguments, **inputs.kwargs}
    variadic = {n for n, p in bound.signature.parameters.items() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    arguments = {name: x for name, x in arguments.items() if name not in variadic}
    if names:
        return NamedCalls(arguments, count, names)
    return Generated(bare, arguments, count)


def check_count(model: nn.Module, count: Any, names: Names, cp: int = 1) -> None:
    """Refuse what is no number of tokens, a model that has nothing to decode with, and parts of sequences.

    Args:
        model: that decodes. count: tokens. names: of states that calls carry. cp: ranks to which sequences are dealt.

    Raises:
        InputError: it says which.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"generate={count!r}: give how many tokens to decode after the example inputs, such as 16.")
    if cp != 1:
        raise InputError("generate= with cp: a cache is not dealt along the sequence. Leave out one of them.")
    if not names and not callable(getattr(type(model), "generate", None)):
        raise InputError(NO_CACHE.format(count=count, name=type(model).__name__))
