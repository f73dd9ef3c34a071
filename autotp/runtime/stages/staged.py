"""Part of one rank of a pipeline: one sharded module with the parameters of all its stages, and their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autotp.capture.copies import copied
from autotp.errors import StateError
from autotp.passes.stages.cut import Piece
from autotp.runtime import state
from autotp.runtime.module import ShardedModule
from autotp.runtime.program_search import install
from autotp.runtime.programs import Program

ALONE = (
    "this module holds the stages of one rank of a pipeline, which needs what other ranks make: it cannot be called by "
    "itself. Run it by a schedule: pipe.step(pipe.schedule(...), ...)."
)


class StagedModule(ShardedModule):
    """The stages of one rank under the original's names; made by `autotp.stages`, and run by its schedules.

    Parameters, hooks, `train()` and `eval()` are as of a `ShardedModule`. It is not called by itself.
    """

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused: stages run by a schedule."""
        raise StateError(ALONE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move to a device; refused to another type, for stages send each other values of those they have."""
        for dtype in {p.dtype for p in self.parameters()}:
            to = fn(torch.empty(0, dtype=dtype, device=self._shards.device)).dtype
            if to != dtype:
                raise StateError(f"the stages were made for {dtype}: convert the model to {to}, and make them of that.")
        return super()._apply(fn, recurse)

    def by_itself(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, likewise of a part."""
        raise StateError(ALONE)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused likewise: no schedule has a cache."""
        raise StateError(f"generate(): {ALONE} To decode load pipe.save_checkpoint's folder into autotp.compile's.")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused: all stages are one checkpoint."""
        raise StateError("this module holds the stages of one rank: pipe.save_checkpoint(folder) saves all stages.")

    def apply(self, fn: Callable[[nn.Module], Any]) -> StagedModule:
        """Apply as on the whole model: what modules of other stages draw is drawn here too, and dropped.

        So each block gets numbers of its own, and a tied weight the same ones on every stage that holds it.
        """
        assert self._source.whole is not None
        self._visit(self._source.whole, "", fn)
        return self

    def _visit(self, original: nn.Module, path: str, fn: Callable[[nn.Module], Any]) -> None:
        part = self._shards.parts.get(path)
        if part is None:
            copied(original, self._memory).apply(fn)
            return
        for name, child in original.named_children():
            self._visit(child, f"{path}.{name}" if path else name, fn)
        fn(part)

    def _memory(self, like: Tensor) -> Tensor:
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._shards.device)
        return nn.Parameter(empty, like.requires_grad) if isinstance(like, nn.Parameter) else empty

    def _install(self, *args: Any, **kwargs: Any) -> None:
        """Install nothing in a copy: its weights are for averages and the like, and no stage runs it."""

    def install(self, piece: Piece) -> Program:
        """Make one stage's program runnable on this rank."""
        return install(self, piece.capture, piece.sharded, called=False)

    def run(self, program: Program, values: Sequence[Tensor], base: int) -> list[Any]:
        """A stage's outputs, without what it writes to buffers.

        Args:
            values: of its inputs. base: the number that its random numbers are made from.
        """
        cast = program.capture.state[-1] is not None
        plain = torch.autocast(self._shards.device.type, enabled=False) if cast else nullcontext()
        with plain:
            results = self._programs[program.key](*values, *program.random(self._shards, base))
        outputs = []
        for i, value in enumerate(results):
            taker = program.capture.mutations.get(i)
            if isinstance(taker, str):
                state.write(self._shards, taker, value)
            else:
                outputs.append(value)
        return outputs

    def own(self, names: Mapping[str, Any] | set[str]) -> list[tuple[str, nn.Parameter]]:
        """The parameters, by name, that hold these of the original's."""
        shards, out = self._shards, []
        for name in shards.storages:
            if name in names:
                out += [(name, p) for p in state.pieces(shards, name)]
        return out
