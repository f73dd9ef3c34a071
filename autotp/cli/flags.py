"""Options that commands share, each declared once, the reading of their text, and the kinds of models.

Needs no torch: help, and a saved plan, are there at once.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autotp.errors import InputError
from autotp.ir import files

MESH = re.compile(r"[1-9]\d*([x*][1-9]\d*){1,2}")
PLACEMENT = re.compile(r"(?:shard|s)\s*[:(]\s*(-?\d+)\s*\)?|(replicate|r)\s*(?:\(\s*\))?", re.IGNORECASE)
MAX_FILE_BYTES = 100_000_000  # of the plan of a large model; a config has thousands
CONFIG = "config.json"
SHAPES = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True)
class ModelOptions:
    """Model

    Attributes:
        batch: Examples in the batch. Default: the example's; of a known shape 8.
        seq: Length of the sequence. Default: the example's; of a known shape at most 4096.
        dtype: Of the weights, such as bfloat16. Default: the config's.
        set: FIELD=VALUE, another value for a field of the config, such as num_hidden_layers=2. Repeatable.
    """

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    set: list[str] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, by name; values are JSON where they can be read so, otherwise text."""
        values = {}
        for text in self.set or []:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise InputError(f"--set {text}: give FIELD=VALUE, such as num_hidden_layers=2.")
            try:
                values[name] = json.loads(value)
            except (ValueError, RecursionError):
                values[name] = value
        return values


@dataclass(frozen=True)
class SteeringOptions:
    """Purpose and limits

    Attributes:
        cluster: A preset, or a .json or .toml file; of unlike ranks each one's, with commas. Default: h100.
        objective: training, prefill or decode; of plan and sweep also serve.
        optimizer: Whose states count in the memory of training.
        memory: What a rank may hold, such as 80GB.
        pin: PARAMETER=shard:0 or PARAMETER=replicate, such as '*.up_proj.weight=shard:0'. Repeatable.
        band: Of the step: longer it may take to send less.
        seconds: Of the CPU, after which the best plan so far is taken.
        precision: Of large products: float8, float8-rowwise or float8-delayed. Default: the model's.
        sequence_parallel: Force or forbid it. Default: the cost decides.
        shares: What each rank does of the work, such as 2:1, or auto. Default: auto.
    """

    cluster: str | None = None
    objective: str = "training"
    optimizer: str = "adamw"
    memory: str | None = None
    pin: list[str] | None = None
    band: float = 0.02
    seconds: int = 60
    precision: str | None = None
    sequence_parallel: bool | None = None
    shares: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the equal arguments of `autotp.plan`."""
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pin", "precision", "shares")}
        precise = {} if self.precision is None else {"precision": self.precision}
        return {**same, "pins": read_pins(self.pin or []) or None, "shares": read_ratio(self.shares), **precise}


@dataclass(frozen=True)
class DegreeOptions:
    """Ranks

    Attributes:
        tp: Ranks that share the model, or a product such as 8x2, or auto. Default: auto; verify: 2.
        mesh: DPxTP or DPxCPxTP, the axes at once, such as 2x4.
        cp: Ranks that each sequence is sharded over, beside tp.
        ep: A divisor of dp, to shard experts over its ranks too, or auto.
        imbalance: Rows of the rank that gets most for its experts, over the mean.
        pp: Pipeline stages (verify alone; plan --devices chooses them).
        fully_shard: Split weights over dp or cp too.
        within_node: Refuse a degree that leaves the node.
    """

    tp: str | None = None
    mesh: str | None = None
    cp: int | None = None
    ep: str | None = None
    imbalance: float = 1.0
    pp: int = 1
    fully_shard: bool = False
    within_node: bool = False

    def arguments(self, default: int | str = "auto") -> dict[str, Any]:
        """Return `tp`, `within_node`, and where asked for `dp`, `cp`, `ep`, `imbalance`, `pp` and `fully_shard`."""
        alone = {"tp": read_degree(self.tp) if self.tp is not None else None, "cp": self.cp}
        degrees = {name: n for name, n in alone.items() if n is not None}
        mesh = read_mesh(self.mesh) if self.mesh is not None else {}
        for name in degrees.keys() & mesh.keys():
            if mesh[name] != degrees[name]:
                raise InputError(
                    f"--mesh {self.mesh} says {name}={mesh[name]}, and --{name} says {degrees[name]}. Leave one out."
                )
        axes: dict[str, Any] = {name: n for name, n in {**mesh, **degrees}.items() if name == "tp" or n != 1}
        axes |= {"fully_shard": True} if self.fully_shard else {}
        axes |= {"ep": read_degree(self.ep, "ep")} if self.ep is not None else {}
        axes |= {"imbalance": self.imbalance} if self.imbalance != 1 else {}
        axes |= {"pp": self.pp} if self.pp != 1 else {}
        return {"tp": default, "within_node": self.within_node, **axes}


def read_degree(text: str, option: str = "tp") -> int | str | tuple[int, ...]:
    """Read `auto`, a number of ranks, or a product of them.

    Args:
        text: of the option.
    """
    if text == "auto":
        return text
    factors = re.split("[x*]", text.strip().lower())
    if not all(part.isdecimal() and int(part) for part in factors):
        raise InputError(f"--{option} {text}: give a number of ranks, such as 4, a product, such as 8x2, or auto.")
    return int(factors[0]) if len(factors) == 1 else tuple(map(int, factors))


def read_degrees(text: str) -> list[Any]:
    """Read `1,2,4,8x2` as numbers and products."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or "auto" in parts:
        raise InputError(f"--tp {text}: give numbers of ranks, such as 1,2,4,8.")
    return list(dict.fromkeys(map(read_degree, parts)))


def read_ratio(text: str | None) -> tuple[int, ...] | str | None:
    """Read `2:1` as numbers; auto as it is."""
    if text is None or text == "auto":
        return text
    parts = text.split(":")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--shares {text}: give a whole number for each rank, such as 2:1.")
    return tuple(map(int, parts))


def read_mesh(text: str) -> dict[str, int]:
    """Read `2x4` as degrees of dp and tp, `2x2x4` of dp, cp and tp."""
    match = MESH.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"--mesh {text}: give dp x tp, such as 2x4 for two groups of four ranks, or dp x cp x tp.")
    degrees = [*map(int, re.split("[x*]", match[0]))]
    return dict(zip(("dp", "tp") if len(degrees) == 2 else ("dp", "cp", "tp"), degrees, strict=True))


def read_pins(texts: list[str]) -> dict[str, Any]:
    """Read `NAME=shard:0` and `NAME=replicate` as pins with torch's placements.

    Args:
        texts: each `name=placement`.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415  only where there are pins

    pins = {}
    for text in texts:
        name, _, placement = map(str.strip, text.rpartition("="))
        match = PLACEMENT.fullmatch(placement)
        if not name or match is None:
            raise InputError(
                f"--pin {text}: give NAME=PLACEMENT, such as '*.up_proj.weight=shard:0' or 'lm_head.weight=replicate'."
            )
        if name in pins:
            raise InputError(f"--pin {name} is given twice. Leave one out.")
        pins[name] = Shard(int(match[1])) if match[1] is not None else Replicate()
    return pins


def writable(*paths: Path | None) -> None:
    """Refuse paths that cannot be written, before the work."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.absolute().parent}. Make it first.")
        if path.is_dir():
            raise InputError(f"{path} cannot be written: it is a folder. Name a file in it.")


# ---- models by name --------------------------------------------------------------------------------------------------


def config_path(text: str) -> Path | None:
    """Return the config.json that the text names; None where it names a known shape or a factory."""
    path = Path(text)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise InputError(f"{text} holds no {CONFIG}. Name a folder or {CONFIG} of transformers.")
        return path / CONFIG
    if path.is_file():
        return path
    if text in known_shapes() or ":" in text and os.sep not in text:
        return None
    near = difflib.get_close_matches(text.lower(), known_shapes(), 3)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    raise InputError(
        f"{text}: no such file or folder.{guess} Name a folder or {CONFIG} of transformers (nothing is downloaded), "
        f"package.module:factory, or a known shape: {', '.join(known_shapes())}."
    )


@functools.cache
def known_shapes() -> Mapping[str, Any]:
    """Return the public configs that come with autotp, by name: source, number of parameters, and fields."""
    return read_json(SHAPES)


def is_plan(text: str) -> bool:
    """Return whether the text names the file of a saved plan."""
    path = Path(text)
    if path.suffix != ".json" or path.name == CONFIG or not path.is_file():
        return False
    keys = read_json(path).keys()
    return "decisions" in keys and ("format" in keys or "schema" in keys)  # schema: of formats 1 and 2, refused by name


def read_json(path: Path) -> Mapping[str, Any]:
    """Read the fields of a JSON file.

    Raises:
        InputError: it holds no such thing.
    """
    data = files.read_json(path, MAX_FILE_BYTES, error=InputError)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}: it must hold a config or a saved plan.")
    return data
