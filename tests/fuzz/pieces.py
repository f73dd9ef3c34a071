"""What random modules are made of: pieces that write a few lines of Python, by options whose first values are the
simplest ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Of the value that passes through all pieces, [batch, length, heads * size]."""

    batch: int
    length: int
    heads: int
    size: int

    @property
    def width(self) -> int:
        """Of the last dimension."""
        return self.heads * self.size


@dataclass(frozen=True)
class Lines:
    """What a piece writes: into `__init__`, and into `forward`, where `x` comes in and goes out in one shape."""

    init: tuple[str, ...]
    forward: tuple[str, ...]


Writer = Callable[..., Lines]


@dataclass(frozen=True)
class Kind:
    """A kind of piece: its options with all their values, the simplest first, and what writes its lines."""

    options: Mapping[str, tuple[Any, ...]]
    write: Writer


KINDS: dict[str, Kind] = {}
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "elu", "mish")


def piece(**options: tuple[Any, ...]) -> Callable[[Writer], Writer]:
    """Enter a kind of piece; its function takes a prefix for names, the sizes, and a value for every option."""

    def enter(write: Writer) -> Writer:
        KINDS[write.__name__] = Kind(options, write)
        return write

    return enter


def lines(init: str, forward: str) -> Lines:
    """Two texts as lines, without what they are indented by here."""
    first, second = ([line.strip() for line in text.strip().splitlines()] for text in (init, forward))
    return Lines(tuple(filter(None, first)), tuple(filter(None, second)))


@piece(wide=(8, 7, 12, 5), bias=(True, False), act=ACTIVATIONS)
def mlp(p: str, s: Sizes, wide: int, bias: bool, act: str) -> Lines:
    return lines(
        f"""self.{p}_up = nn.Linear({s.width}, {wide}, bias={bias})
        self.{p}_down = nn.Linear({wide}, {s.width}, bias={bias})""",
        f"x = x + self.{p}_down(F.{act}(self.{p}_up(x)))",
    )


GATES = {
    "two": "g, u = self.{p}_gate(x), self.{p}_up(x)",
    "chunk": "g, u = self.{p}_both(x).chunk(2, -1)",
    "split": "g, u = self.{p}_both(x).split({w}, -1)",
    "slices": "h = self.{p}_both(x); g, u = h[..., :{w}], h[..., {w}:]",
    "strided": "h = self.{p}_both(x); g, u = h[..., ::2], h[..., 1::2]",
    "view": "g, u = self.{p}_both(x).view(*x.shape[:2], 2, {w}).unbind(2)",
    "uneven": "g, u, r = self.{p}_both(x).split([{w}, {w} - 1, 1], -1); u = torch.cat([u, r], -1)",
    "glu": "h = self.{p}_both(x); g, u = F.glu(h, -1), h[..., :{w}]",
}


@piece(form=tuple(GATES), wide=(8, 6, 7), act=ACTIVATIONS, bias=(False, True))
def gated(p: str, s: Sizes, form: str, wide: int, act: str, bias: bool) -> Lines:
    both = f"self.{p}_both = nn.Linear({s.width}, {2 * wide}, bias={bias})"
    two = "\n".join(f"self.{p}_{n} = nn.Linear({s.width}, {wide}, bias={bias})" for n in ("gate", "up"))
    return lines(
        f"""{two if form == "two" else both}
        self.{p}_down = nn.Linear({wide}, {s.width}, bias={bias})""",
        f"""{GATES[form].format(p=p, w=wide)}
        x = x + self.{p}_down(F.{act}(g) * u)""",
    )


NORMS = {
    "layer": ("nn.LayerNorm({w})", "self.{p}_norm(x)"),
    "rms": ("nn.RMSNorm({w})", "self.{p}_norm(x)"),
    "hand": ("nn.Parameter(torch.ones({w}))", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1) * self.{p}_norm"),
    "heads": ("nn.RMSNorm({d})", "self.{p}_norm(x.view(*x.shape[:2], {h}, {d})).flatten(2)"),
    "group": ("nn.GroupNorm({h}, {w})", "self.{p}_norm(x.transpose(1, 2)).transpose(1, 2)"),
    "batch": ("nn.BatchNorm1d({w})", "self.{p}_norm(x.transpose(1, 2)).transpose(1, 2)"),
    "instance": (
        "nn.InstanceNorm1d({w}, affine=True)",
        "self.{p}_norm(F.pad(x, (0, 0, 0, 2)).transpose(1, 2)).transpose(1, 2)[:, :-2]",
    ),
    "softmax": ("nn.Identity()", "x.softmax(-1) * {w}"),
    "over tokens": ("nn.Identity()", "x - x.mean(1, keepdim=True) + x.softmax(1)"),
    "unit": ("nn.Identity()", "F.normalize(x, dim=-1) * 2"),
    "weight": (
        "nn.utils.parametrizations.weight_norm(nn.Linear({w}, {w}))",
        "x + self.{p}_norm(x)",
    ),
}


@piece(form=tuple(NORMS))
def norm(p: str, s: Sizes, form: str) -> Lines:
    made, used = (t.format(p=p, w=s.width, h=s.heads, d=s.size) for t in NORMS[form])
    return lines(f"self.{p}_norm = {made}", f"x = {used}")


@piece(kernel=(2, 3), depthwise=(True, False), bias=(True, False))
def convolution(p: str, s: Sizes, kernel: int, depthwise: bool, bias: bool) -> Lines:
    groups = s.width if depthwise else 1
    return lines(
        f"self.{p}_conv = nn.Conv1d({s.width}, {s.width}, {kernel}, groups={groups}, bias={bias})",
        f"""h = F.pad(x.transpose(1, 2), ({kernel - 1}, 0))
        x = x + F.silu(self.{p}_conv(h)).transpose(1, 2)""",
    )


@piece(form=("twice", "transposed", "sum", "both biases", "moved"))
def shared(p: str, s: Sizes, form: str) -> Lines:
    """One weight that is read in two places."""
    used = {
        "twice": f"x = x + self.{p}_one(torch.tanh(self.{p}_one(x)))",
        "transposed": f"x = x + torch.tanh(self.{p}_one(x)) @ self.{p}_one.weight",
        "sum": f"x = x + torch.tanh(self.{p}_one(x) * self.{p}_one.weight.sum(1))",
        "both biases": f"x = x + torch.tanh(self.{p}_one(x) + self.{p}_one.bias)",
        "moved": f"x = x + torch.tanh(self.{p}_one(x)) + self.{p}_other(x.flip(1))",
    }[form]
    tied = f"self.{p}_other = nn.Linear({s.width}, {s.width})\nself.{p}_other.weight = self.{p}_one.weight"
    return lines(f"self.{p}_one = nn.Linear({s.width}, {s.width})\n{tied if form == 'moved' else ''}", used)


@piece(form=("decay", "gates", "cumsum", "scan"))
def recurrence(p: str, s: Sizes, form: str) -> Lines:
    """A state over the positions, step by step or by a sum over all before."""
    step = {
        "decay": f"""state = x[:, 0] * 0
        for t in range({s.length}):
        ____state = state * torch.sigmoid(self.{p}_decay) + h[:, t]
        ____steps.append(state)
        x = x + torch.stack(steps, 1)""",
        "gates": f"""state = x[:, 0] * 0
        for t in range({s.length}):
        ____state = torch.tanh(self.{p}_in(state)) + h[:, t]
        ____steps.append(state)
        x = x + torch.stack(steps, dim=1)""",
        "cumsum": f"x = x + torch.tanh(h.cumsum(1) * self.{p}_decay)",
        "scan": f"""state = torch.einsum('bti,btj->bij', h, x) / {s.length}
        x = x + torch.einsum('bti,bij->btj', h, state)""",
    }[form]
    return lines(
        f"""self.{p}_in = nn.Linear({s.width}, {s.width})
        self.{p}_decay = nn.Parameter(torch.ones({s.width}))""",
        f"h, steps = torch.tanh(self.{p}_in(x)), []\n{step}",
    )


@piece(p=(0.1, 0.5), place=("inside", "after", "noise"))
def dropout(name: str, s: Sizes, p: float, place: str) -> Lines:
    """Masks in training, or noise."""
    if place == "noise":
        return lines(
            f"self.{name}_up = nn.Parameter(torch.ones({s.width}))", f"x = x + torch.rand(x.shape) * self.{name}_up"
        )
    inside, after = (f"F.dropout({{}}, {p}, self.training)" if place == at else "{}" for at in ("inside", "after"))
    hidden = inside.format(f"torch.relu(self.{name}_up(x))")
    return lines(
        f"""self.{name}_up = nn.Linear({s.width}, 8)
        self.{name}_down = nn.Linear(8, {s.width})""",
        f"x = x + {after.format(f'self.{name}_down({hidden})')}",
    )


@piece(wide=(8, 12), rows=(False, True))
def integers(p: str, s: Sizes, wide: int, rows: bool) -> Lines:
    """A product of bytes, with a scale of the whole weight or of each of its rows."""
    scales = f"torch.rand({wide}) * 0.001 + 0.001" if rows else "torch.tensor(0.002)"
    return lines(
        f"""self.register_buffer('{p}_bytes', torch.randint(-127, 128, ({s.width}, {wide}), dtype=torch.int8))
        self.register_buffer('{p}_scale', {scales})
        self.{p}_down = nn.Linear({wide}, {s.width})""",
        f"""h = (torch.tanh(x.detach()) * 100).round().to(torch.int8).flatten(0, 1)
        h = (torch._int_mm(h, self.{p}_bytes) * self.{p}_scale / {s.width}).view(*x.shape[:2], {wide})
        x = x + self.{p}_down(h.to(x.dtype))""",
    )
