"""A random module: what it is made of, as data that can be drawn and made smaller, and its source."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import attention, calls, writes
from .pieces import KINDS, Sizes

__all__ = ["Module", "Piece", "attention", "drawn", "writes"]

HEAD = """import torch
import torch.nn.functional as F
from torch import nn
"""
# What comes out of an operator as one vector of floats, whatever it is.
VECTOR = """

def vector(y):
    ys = [y] if isinstance(y, torch.Tensor) else [t for t in y if t is not None]
    ys = [torch.view_as_real(t) if t.is_complex() else t for t in ys]
    return torch.cat([t.reshape(-1).to(torch.get_default_dtype()) for t in ys])
"""
INPUTS = {
    "floats": ("", "", "torch.randn({b}, {t}, {w})"),
    "tokens": ("self.embed = nn.Embedding({n}, {w})", "x = self.embed(x)", "torch.randint({n}, ({b}, {t}))"),
}
OUTPUTS = {
    "x": ("", "return x"),
    "pooled": ("", "return x.mean(1)"),
    "pair": ("", "return x, x.sum((0, 1))"),
    "head": ("self.head = nn.Linear({w}, {n}, bias=False)", "return self.head(x)"),
    "tied": ("self.head = nn.Linear({w}, {n}, bias=False)", "return self.head(x)"),
    "loss": (
        "self.head = nn.Linear({w}, {n}, bias=False)",
        "y = self.head(x); return F.cross_entropy(y.flatten(0, 1), torch.arange(y.shape[0] * y.shape[1]) % {n})",
    ),
}
OFTEN = ("attention", "attention", "experts", "viewed", "written")  # they have most ways to be written
# Options of the whole module, the simplest first.
WHOLE: dict[str, tuple[Any, ...]] = {
    "batch": (2, 1, 3),
    "length": (4, 5, 6, 3),
    "heads": (2, 4, 1, 3, 6),
    "size": (4, 2, 3),
    "vocabulary": (16, 11),
    "inputs": tuple(INPUTS),
    "outputs": tuple(OUTPUTS),
    "training": (False, True),
    "frozen": (0, 1, 2),
    "sequence": (None, True, False),
    "plan": ("cheapest", "any"),
}


@dataclass(frozen=True)
class Piece:
    """One piece: its prefix for names, its kind and the values of its options."""

    name: str
    kind: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Module:
    """A module: its pieces in order, options of the whole, and the degrees that it is verified at.

    Attributes:
        seed: of the weights and the inputs.
    """

    seed: int
    pieces: tuple[Piece, ...]
    whole: tuple[tuple[str, Any], ...]
    degrees: tuple[int, ...] = (2, 3, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return dict(self.__dict__["whole"])[name]
        except KeyError:
            raise AttributeError(name) from None

    def source(self) -> str:
        """The class, `build()` and `inputs()` as Python that needs torch alone."""
        s = Sizes(self.batch, self.length, self.heads, self.size)
        sizes = {"b": s.batch, "t": s.length, "w": s.width, "n": self.vocabulary}
        made, embedded, inputs = (text.format(**sizes) for text in INPUTS[self.inputs])
        head, returned = (text.format(**sizes) for text in OUTPUTS[self.outputs])
        written = [KINDS[piece.kind].write(piece.name, s, **dict(piece.options)) for piece in self.pieces]
        tied = "self.head.weight = self.embed.weight" if self.outputs == "tied" and self.inputs == "tokens" else ""
        init = ["super().__init__()", made, *(line for one in written for line in one.init), head, tied]
        forward = [embedded, *(line for one in written for line in one.forward), returned]
        every = [line for text in (init, forward) for line in text]
        text = HEAD + (VECTOR if any("vector(" in line for line in every) else "")
        text += f"\n\nclass Model(nn.Module):\n    def __init__(self):\n{_indented(init)}"
        text += f"\n    def forward(self, x):\n{_indented(forward)}"
        return text + self._built(inputs)

    def _built(self, inputs: str) -> str:
        """The functions that make the model, with weights that hide nothing, and one call's inputs."""
        frozen = f"    for p in list(model.parameters())[::{self.frozen + 1}]:\n        p.requires_grad_(False)\n"
        return (
            f"\n\ndef build():\n    torch.manual_seed({self.seed})\n    model = Model().train({self.training})\n"
            "    with torch.no_grad():\n        for p in model.parameters():\n"
            "            p.add_(torch.randn_like(p) * 0.1)\n"
            f"{frozen if self.frozen else ''}    return model\n"
            f"\n\ndef inputs():\n    torch.manual_seed({self.seed + 1})\n    return {inputs}\n"
        )

    def smaller(self) -> Iterator[Module]:
        """Modules with less in them, the boldest first: fewer pieces, one degree, simpler values."""
        count = len(self.pieces)
        for size in (count // 2, 1):
            for at in range(0, count, size) if size else ():
                yield replace(self, pieces=self.pieces[:at] + self.pieces[at + size :])
        if len(self.degrees) > 1:
            yield from (replace(self, degrees=(degree,)) for degree in self.degrees)
        elif max(self.degrees) > 2:
            yield replace(self, degrees=(2,))
        for whole in _simpler(self.whole, WHOLE):
            yield replace(self, whole=whole)
        for i, piece in enumerate(self.pieces):
            for options in _simpler(piece.options, KINDS[piece.kind].options) if piece.kind != "call" else ():
                yield replace(self, pieces=(*self.pieces[:i], replace(piece, options=options), *self.pieces[i + 1 :]))


def _simpler(chosen: Any, values: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The options with one of them at its first value, or at one nearer to it."""
    for i, (name, value) in enumerate(chosen):
        at = list(values[name]).index(value)
        for nearer in dict.fromkeys((0, at // 2) if at else ()):
            yield (*chosen[:i], (name, list(values[name])[nearer]), *chosen[i + 1 :])


def _indented(text: list[str]) -> str:
    return "".join(f"        {line.replace('____', '    ')}\n" for line in text if line)


def drawn(seed: int, number: int) -> Module:
    """The module of this number: the same for a seed, whatever was drawn before. Every rule has its turn in `call`."""
    draw = random.Random(f"{seed}:{number}")
    kinds = [*OFTEN, *(k for k in KINDS if k != "call")]
    pieces = [_piece(draw, f"p{i}", draw.choice(kinds)) for i in range(draw.randint(1, 5))]
    turn = dict(_piece(draw, "call", "call").options) | {"rule": calls.RULES[number % len(calls.RULES)]}
    pieces.insert(draw.randint(0, len(pieces)), Piece("call", "call", tuple(turn.items())))
    whole = {name: draw.choice(values) for name, values in WHOLE.items()}
    whole["training"], whole["plan"] = draw.random() < 0.3, draw.choice(("cheapest", "any", "any"))
    return Module(seed * 1_000_003 + number, tuple(pieces), tuple(whole.items()))


def _piece(draw: random.Random, name: str, kind: str) -> Piece:
    return Piece(name, kind, tuple((name, draw.choice(tuple(values))) for name, values in KINDS[kind].options.items()))
