"""What a way in works with: a sharded module or the original, its batches and options, and what happens amid it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autotp

ROWS, LENGTH, MICROBATCHES = 4, 8, 2
SMALLEST, LARGEST = 3, 30  # token ids: of no special meaning
Numbers = dict[str, Any]  # what a way in gives: tensors, by name


@dataclass(frozen=True)
class Mesh:
    """Ranks of several axes, of which one or two are larger than 1."""

    tp: int = 2
    dp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.cp * self.pp

    @property
    def axis(self) -> str:
        """The one beside tp; "tp" where there is none."""
        return next((name for name in ("dp", "cp", "pp") if getattr(self, name) > 1), "tp")

    def place(self, rank: int) -> int:
        """Of a rank, on the axis beside tp."""
        return rank // self.tp

    def __str__(self) -> str:
        beside = self.axis
        return f"tp={self.tp}" if beside == "tp" else f"{beside}={getattr(self, beside)} x tp={self.tp}"


@dataclass
class Context:
    """One rank's, or that of the original in one process, which `sharded` is False of.

    Attributes:
        rank: in the mesh; of the original that whose results are wanted.
        model: the sharded module, or the original. pipe, schedule: with pp, of the stages. initial: the first weights.
        folder: for what is saved; `source`: what is loaded, which has lain there before.
        data, length: of which batches, and of how many tokens. rate: of optimizers. seed: of trainers.
        options: of the call, where they are others than usual.
        use: is called amid the call, by a callback, if there is one, of those that a way in has by that named `at`.
        left_out: whether the rank goes past the call.
    """

    mesh: Mesh
    rank: int
    model: Any
    sharded: bool
    folder: Path
    source: Path
    initial: Numbers = field(default_factory=dict)
    pipe: Any = None
    schedule: Any = None
    data: int = 0
    length: int = LENGTH
    rate: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    use: Callable[[], None] | None = None
    at: str = ""
    left_out: bool = False

    # ---- batches ---------------------------------------------------------------------------------------------------

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, whole or this dp rank's rows."""
        draw = torch.Generator().manual_seed(100 * self.data + number)
        ids = torch.randint(SMALLEST, LARGEST, (2, ROWS, self.length), generator=draw)
        if self.sharded and self.mesh.dp > 1:
            ids = ids.chunk(self.mesh.dp, 1)[self.mesh.place(self.rank)]
        return ids[0], ids[1]

    def own(self, value: Tensor) -> Tensor:
        """What this rank gets of a result that has rows and tokens, where the original has it whole."""
        value = value.detach()
        if self.sharded:
            return value
        if self.mesh.cp > 1:
            return self.dealt(value)
        return value.chunk(self.mesh.dp)[self.mesh.place(self.rank)] if self.mesh.dp > 1 else value

    def dealt(self, value: Tensor) -> Tensor:
        """This cp rank's part of something that has tokens."""
        return autotp.Inputs(value).part(self.mesh.place(self.rank), self.mesh.cp).args[0]

    def option(self, name: str, usual: Any) -> Any:
        """An option of the call."""
        return self.options.get(name, usual)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def forward(self, number: int, **more: Any) -> Tensor:
        """Logits of a batch; of ranks with cp, of their tokens."""
        with self.hook():
            return self.model(input_ids=self.batch(number)[0], **more).logits

    def loss(self, number: int, **more: Any) -> Tensor:
        """The mean over the tokens of the rank, of 64 bits where the model is; dp and cp average its gradients."""
        logits, targets = self.forward(number, **more), self.batch(number)[1]
        if self.sharded and self.mesh.cp > 1:
            targets = self.dealt(targets)
        return loss_of(logits, targets) * self.option("scale", 1.0)

    @contextlib.contextmanager
    def hook(self, kind: str = "forward_hook") -> Iterator[None]:
        """Around a call: `use` is called by a hook in the first layer, on every rank."""
        if self.use is None:
            yield
            return
        handle = getattr(self.layer(), f"register_{kind}")(lambda *_: self.used())
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within it callbacks do nothing."""
        use, self.use = self.use, None
        try:
            yield
        finally:
            self.use = use

    def used(self, at: str = "") -> None:
        """To be called by a callback; `at` names it where a way in has several."""
        if self.use is not None and at in ("", self.at):
            self.use()

    def layer(self) -> nn.Module:
        """A layer that a hook amid collectives may be on."""
        return next(m for path, m in self.model.named_modules() if path.endswith("mlp"))

    # ---- what is held ----------------------------------------------------------------------------------------------

    def weights(self) -> Numbers:
        """Whole, by the original's names; of ranks with pp, of their stages."""
        if self.sharded:
            return {n: t.detach().clone() for n, t in self.model.full_state_dict().items()}
        return {n: t.detach().clone() for n, t in self.model.state_dict().items()}

    def gradients(self) -> Numbers:
        """Likewise; none that is absent."""
        if self.sharded:
            return {f"gradient of {n}": t.detach().clone() for n, t in self.model.full_grad_dict().items()}
        named = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        return {f"gradient of {n}": grad.detach().clone() for n, grad in named}

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def place(self, name: str) -> Path:
        """A path in the folder; of the original nothing is there yet."""
        if not self.sharded:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def loss_of(logits: Any, targets: Tensor) -> Tensor:
    """Without transformers' conversion to 32 bits."""
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
