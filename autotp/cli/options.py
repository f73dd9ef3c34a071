"""The options that commands share, each declared once, and what their text says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from autotp.errors import InputError

MODEL, STEERING, SEQUENCE = "Model", "What it is planned for", "Sequence parallelism"
MESH = re.compile(r"([1-9]\d*)[x*]([1-9]\d*)")
PLACEMENT = re.compile(r"(?:shard|s)\s*[:(]\s*(-?\d+)\s*\)?|(replicate|r)\s*(?:\(\s*\))?", re.IGNORECASE)

MODEL_HELP = "A folder or config.json of transformers (no weights needed), or package.module:factory."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOrPlan = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a saved plan.json.", show_default=False)
]


@dataclass(frozen=True)
class ModelOptions:
    """How the model is built and what it is called with."""

    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Examples in the batch. Default: the example's.", rich_help_panel=MODEL),
    ] = None
    seq: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Length of the sequence. Default: the example's.", rich_help_panel=MODEL),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of the weights, such as bfloat16. Default: the config's.", rich_help_panel=MODEL
        ),
    ] = None

    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Another value for a field of the config, such as num_hidden_layers=2. Repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = field(default=None)

    def fields(self) -> dict[str, Any]:
        """The fields that are set, by name; values are JSON where they can be read so, otherwise text."""
        fields: dict[str, Any] = {}
        for text in self.set or []:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise InputError(f"--set {text}: give FIELD=VALUE, such as num_hidden_layers=2.")
            try:
                fields[name] = json.loads(value)
            except (ValueError, RecursionError):
                fields[name] = value
        return fields


@dataclass(frozen=True)
class SteeringOptions:
    """What steers planning, as text."""

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A preset, or a .json or .toml file. Default: h100.", rich_help_panel=STEERING
        ),
    ] = None
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="training, prefill or decode.", rich_help_panel=STEERING)
    ] = "training"
    optimizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose states count in the memory of training.", rich_help_panel=STEERING),
    ] = "adamw"
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a rank may hold, such as 80GB.", rich_help_panel=STEERING)
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PIN",
            help="NAME=shard:0 or NAME=replicate, such as '*.up_proj.weight=shard:0'. Repeatable.",
            rich_help_panel=STEERING,
        ),
    ] = field(default=None)
    band: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Of the step: longer it may take to send less.",
            rich_help_panel=STEERING,
        ),
    ] = 0.02
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of large products: float8, float8-rowwise or float8-delayed. Default: the model's.",
            rich_help_panel=STEERING,
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Force or forbid it. Default: the cost decides.",
            show_default=False,
            metavar="",
            rich_help_panel=SEQUENCE,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `autotp.plan` that say the same."""
        precise = {} if self.precision is None else {"precision": self.precision}
        return {
            "cluster": self.cluster, "objective": self.objective, "optimizer": self.optimizer, "memory": self.memory,
            "sequence_parallel": self.sequence_parallel, "pins": read_pins(self.pin or []) or None,
            "band": self.band, **precise,
        }  # fmt: skip


@dataclass(frozen=True)
class DegreeOptions:
    """Over how many ranks."""

    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto", help="Ranks that share the model. Default: auto; verify: 2.", rich_help_panel=STEERING
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(metavar="DPxTP", help="Batch and tensor axis at once, such as 2x4.", rich_help_panel=STEERING),
    ] = None
    cp: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Ranks that deal out each sequence, beside tp.", rich_help_panel=STEERING
        ),
    ] = 1
    fully_shard: Annotated[
        bool,
        typer.Option("--fully-shard", metavar="", help="Split weights over dp or cp too.", rich_help_panel=STEERING),
    ] = False
    within_node: Annotated[
        bool,
        typer.Option(
            "--within-node", metavar="", help="Refuse a degree that leaves the node.", rich_help_panel=STEERING
        ),
    ] = False

    def arguments(self, default: int | str = "auto") -> dict[str, Any]:
        """`tp`, `within_node`, and where they are asked for `dp`, `cp` and `fully_shard`."""
        dp, tp = read_mesh(self.mesh) if self.mesh is not None else (1, None)
        tp_option = read_degree(self.tp) if self.tp is not None else None
        if tp is not None and tp_option not in (None, tp):
            raise InputError(f"--mesh {self.mesh} says tp={tp}, and --tp says {tp_option}. Leave one out.")
        degree = tp or tp_option or default
        two_axes = {"dp": dp} if dp > 1 else {}
        two_axes |= {"cp": self.cp} if self.cp > 1 else {}
        two_axes |= {"fully_shard": True} if self.fully_shard else {}
        return {"tp": degree, "within_node": self.within_node, **two_axes}


def read_degree(text: str) -> int | str:
    """`auto`, or a number of ranks."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--tp {text}: give a number of ranks, such as 4, or auto.")
    return int(text)


def read_degrees(text: str) -> list[int]:
    """`1,2,4` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--tp {text}: give numbers of ranks, such as 1,2,4,8.")
    return list(dict.fromkeys(map(int, parts)))


def read_mesh(text: str) -> tuple[int, int]:
    """`2x4` as (dp, tp)."""
    match = MESH.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"--mesh {text}: give dp x tp, such as 2x4 for two groups of four ranks.")
    return int(match[1]), int(match[2])


def read_pins(texts: list[str]) -> dict[str, Any]:
    """`NAME=shard:0` and `NAME=replicate` as pins with torch's placements.

    Args:
        texts: each `name=placement`.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415  only where there are pins

    pins: dict[str, Any] = {}
    for text in texts:
        name, _, placement = text.rpartition("=")
        match = PLACEMENT.fullmatch(placement.strip())
        if not name.strip() or match is None:
            raise InputError(
                f"--pin {text}: give NAME=PLACEMENT, such as '*.up_proj.weight=shard:0' or 'lm_head.weight=replicate'."
            )
        if name.strip() in pins:
            raise InputError(f"--pin {name.strip()} is given twice. Leave one out.")
        pins[name.strip()] = Shard(int(match[1])) if match[1] is not None else Replicate()
    return pins


def writable(*paths: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.absolute().parent}. Make it first.")
        if path is not None and path.is_dir():
            raise InputError(f"{path} cannot be written: it is a folder. Name a file in it.")
