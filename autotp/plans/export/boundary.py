"""What one module does at its boundary, as the styles of other tools can say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """What a module does with its parameters, its input and its output.

    Attributes:
        module: its path.
        kind: "column" or "row": the weight is split so; "whole": parameters are whole, activations split; "input": what
            modules within read is made whole once.
        lookup: whether it is an embedding.
        in_dim, out_dim: dimension along which the input comes, and the output leaves, split; None for whole.
        spread: whether those are dimensions of the batch or sequence, so that code reads sizes off them.
        place: of an "input", its name, or its number and that of all positional arguments.
    """

    module: str
    kind: str
    lookup: bool = False
    in_dim: int | None = None
    out_dim: int | None = None
    spread: tuple[bool, bool] = (False, False)
    place: str | tuple[int, int] = ""
