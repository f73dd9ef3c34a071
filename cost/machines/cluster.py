"""The machines a plan is made for: devices, nodes and links, as plain validated data."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import methodcaller
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from autotp.errors import InputError
from autotp.ir.files import parse_json, parse_toml, read_text

from .presets import PRESETS

FilePath = str | PathLike[str]

DEFAULT_PRESET = "h100"
SUFFIXES = (".json", ".toml")
MAX_FILE_BYTES = 1 << 16  # bytes: a description has about one thousand
NotNegative = float
GIVEN: Any = None  # default of a field that is given, or that unlike ranks say
HIGH = {
    "memory_bandwidth", "memory_size", "devices_per_node", "intra_bandwidth", "inter_bandwidth", "switch", "overlaps",
    "attention_rate",
}  # fields of which the least is the worst  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Devices in equal nodes, all alike or rank by rank. Every number must be finite and positive.

    `Cluster(ranks=["rtx4090", "rtx3090"])` has unlike devices: `rank` gives the machine of each. Its own fields, where
    they are not given, are then the worst of theirs: what equal parts of the work are done with.

    Args:
        name: what plans call this cluster.
        device: the device's full name.
        peak_flops: dense peak rate by dtype name ("float32", "bfloat16", ...), FLOP/s; "float32" must be there and
            stands for dtypes that are not.
        memory_bandwidth: of one device's memory, B/s.
        memory_size: of one device, B.
        devices_per_node: so many ranks that follow each other use intra-node links only.
        intra_latency, inter_latency: of one step between two devices in a node, or in two nodes, s.
        intra_bandwidth, inter_bandwidth: what one device sends in one direction, B/s.
        switch: whether every device of a node reaches every other at full bandwidth; otherwise they form a ring.
        launch_overhead: of one kernel, s.
        source: where the numbers come from.
        matmul_tile: columns that a matrix product computes together: fewer take as long as so many.
        collective_overhead: of one collective before its first step, s.
        overlaps: whether ranks compute while they communicate.
        packing: times that a product moves its operands besides its arithmetic. With 0 memory traffic runs behind
            arithmetic and the longer of the two counts, as in the roofline model; a processor's products pack their
            operands first (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
        product_launches: times `launch_overhead` that an operator with arithmetic to count (a matrix product, a
            convolution) takes: eager execution starts its views, the sum of its bias and its gradients besides.
        attention_rate: part of the peak rate that fused attention reaches.
        ranks: of unlike devices each rank's: a cluster, a preset's name, a file, or the fields of one. () where all
            are alike, as it is where the same is said of each.

    Raises:
        InputError: a field is not what it must be; the message says which, and its value.
    """

    name: str = GIVEN
    device: str = GIVEN
    peak_flops: Mapping[str, float] = field(default=GIVEN, hash=False)
    memory_bandwidth: float = GIVEN
    memory_size: float = GIVEN
    devices_per_node: int = GIVEN
    intra_latency: float = GIVEN
    intra_bandwidth: float = GIVEN
    inter_latency: float = GIVEN
    inter_bandwidth: float = GIVEN
    switch: bool = GIVEN
    launch_overhead: float = GIVEN
    source: str = GIVEN
    matmul_tile: int = 64
    collective_overhead: float = 8.4e-6
    overlaps: bool = True
    packing: NotNegative = 0.0
    product_launches: float = 1.0
    attention_rate: float = 1.0
    ranks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if isinstance(self.ranks, str) or not isinstance(self.ranks, Sequence):
            raise _refuse("Cluster.ranks", self.ranks, "a list of presets, files or clusters, one for each rank")
        members = list(map(_member, self.ranks))
        if any(m.ranks for m in members):
            raise _refuse("Cluster.ranks", [m.name for m in members], "of single devices, and one of these has ranks")
        object.__setattr__(self, "ranks", tuple(members) if len({*members}) > 1 else ())
        for f in fields(self)[:-1]:
            if members and getattr(self, f.name) == f.default:
                object.__setattr__(self, f.name, _worst(f.name, members))
            _check(f"Cluster.{f.name}", getattr(self, f.name), str(f.type))
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))  # the caller's mapping may change later

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """The cluster of that name: h100, h200, b200, a100 (SXM), a100-pcie, l40s, cards of the RTX 3060, 3090, 4060 Ti
        (16 GB), 4080, 4090 and 5090 (rtx3060, ...), or local (CPU processes with gloo).

        Raises:
            InputError: there is no such preset.
        """
        if name not in PRESETS:
            raise InputError(
                f"cluster {name!r} is not a preset. Presets: {', '.join(PRESETS)}. "
                "Name one of them, several with commas for unlike ranks, a .json or .toml file, or describe your "
                "machines with autotp.Cluster(...)."
            )
        return cls(name=name, **PRESETS[name])

    @classmethod
    def resolve(cls, cluster: Cluster | str | PathLike[str] | None) -> Cluster:
        """The cluster itself, the preset of that name, the one in that .json or .toml file; for None, h100. Names or
        files with commas between them are unlike ranks: "rtx4090,rtx3090".

        Args:
            cluster: as the public functions take it.

        Raises:
            InputError: it is none of these.
        """
        if cluster is None:
            return cls.preset(DEFAULT_PRESET)
        if isinstance(cluster, str) and "," in cluster:
            return cls(ranks=[name.strip() for name in cluster.split(",")])
        if isinstance(cluster, PathLike) or isinstance(cluster, str) and cluster.endswith(SUFFIXES):
            return cls.load(cluster)
        if isinstance(cluster, str):
            return cls.preset(cluster)
        if isinstance(cluster, Cluster):
            return cluster
        raise InputError(
            "cluster must be an autotp.Cluster, a preset's name, a .json or .toml file or None, "
            f"not {type(cluster).__name__}: {cluster!r}"
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Cluster:
        """The cluster that a .json or .toml file describes.

        The file has the fields of `Cluster`; or `preset = "a100"` and the fields that differ from that preset. Without
        a `name` the cluster is called like the file.

        Raises:
            InputError: the file cannot be read, or a field is missing, unknown or not what it must be; the message
                names the file and the field.
        """
        file, suffix = Path(path), _suffix(path)
        text = read_text(file, MAX_FILE_BYTES, error=InputError)
        data = (parse_json if suffix == ".json" else parse_toml)(text, str(file), error=InputError)
        if not isinstance(data, dict):
            raise InputError(f"{file} holds a {type(data).__name__}: it must hold the fields of one cluster.")
        try:
            return cls.from_dict(_filled(data, path))
        except InputError as error:
            raise InputError(f"{fspath(path)}: {error}") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the cluster to a .json or .toml file, which `load` reads.

        Raises:
            InputError: the path has another suffix, or cannot be written.
        """
        file, suffix, data = Path(path), _suffix(path), self.to_dict()
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n" if suffix == ".json" else _toml(data)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror or error}. Check the path.") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`.

        Raises:
            InputError: a field is missing, unknown or not what it must be.
        """
        required = {f.name: f.default is GIVEN and not data.get("ranks") for f in fields(cls)}
        missing_fields = sorted({n for n in required if required[n]} - set(data))
        unknown_fields = sorted(set(data) - set(required))
        if missing_fields or unknown_fields:
            raise InputError(
                f"a cluster description must have the fields of autotp.Cluster: missing {missing_fields}, "
                f"unknown {unknown_fields}. Start from Cluster.preset('{DEFAULT_PRESET}').to_dict()."
            )
        return cls(**data)

    @property
    def known(self) -> bool:
        """True where its name says all: it is the preset of that name, or of those names, unchanged."""
        return all(name in PRESETS for name in self.name.split(",")) and self == Cluster.resolve(self.name)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data that JSON can hold; `ranks` where they are unlike."""
        data = asdict(self)
        del data["ranks"]
        if self.ranks:
            data["ranks"] = [m.known and m.name or m.to_dict() for m in self.ranks]
        return data

    def rank(self, rank: int) -> Cluster:
        """The machine of a rank: its peak rates, memory, bandwidth and links; this one where all are alike."""
        return self.ranks[rank] if self.ranks else self

    def ratio(self, dtype_name: str = "float32") -> tuple[int, ...]:
        """The ranks' products in equal time, as the least whole numbers within 5% of it; (1,) where all are alike.

        Args:
            dtype_name: of the products.
        """
        rates = [m.peak(dtype_name) for m in self.ranks or [self]]
        exact = [rate / min(rates) for rate in rates]
        parts = 1
        while any(abs(parts * x - round(parts * x)) > 0.05 * parts * x for x in exact):  # with ten none is
            parts += 1
        return tuple([round(parts * x) for x in exact])

    def over(self, tp: int) -> Cluster:
        """The machines of a degree, a rank of `tp` each, which follow each other: of several groups of them the worst.

        Raises:
            InputError: the ranks are unlike and no whole number of groups.
        """
        if not self.ranks or tp == len(self.ranks):
            return self
        if len(self.ranks) % tp:
            raise InputError(
                f"tp={tp} on the cluster {self.name!r}, which says {len(self.ranks)} ranks: take a degree that divides "
                "them, or name the devices of as many ranks (ranks=)."
            )
        places = (Cluster(ranks=self.ranks[rank::tp]) for rank in range(tp))
        return Cluster(ranks=[replace(worst, ranks=()) for worst in places])

    def places(self, pp: int) -> list[Cluster]:
        """The machines of each place of a pipeline, which follow each other.

        Raises:
            InputError: the ranks are unlike and no whole number for each place.
        """
        size, remainder = divmod(len(self.ranks), pp)
        if remainder:
            raise InputError(f"pp={pp} does not divide the {len(self.ranks)} ranks of the cluster {self.name!r}.")
        starts = range(0, len(self.ranks), size or 1)
        return [Cluster(ranks=self.ranks[at : at + size]) for at in starts] or [self] * pp

    def peak(self, dtype_name: str) -> float:
        """Peak rate in FLOP/s for a dtype named as torch does ("bfloat16" or "torch.bfloat16")."""
        return self.peak_flops.get(dtype_name.removeprefix("torch."), self.peak_flops["float32"])

    def per_node(self, n: int, stride: int = 1) -> int:
        """Return how many of a group of `n` ranks, each `stride` after the one before, a node holds."""
        return min(n, max(1, self.devices_per_node // stride))

    def spans_nodes(self, n: int, stride: int = 1) -> bool:
        """Return whether a group of `n` ranks, each `stride` after the one before, leaves the node."""
        return n > self.per_node(n, stride)


def _member(rank: Any) -> Cluster:
    """A rank's machine, as `ranks` names it."""
    return Cluster.from_dict(rank) if isinstance(rank, Mapping) else Cluster.resolve(rank)


def _worst(name: str, members: Sequence[Cluster]) -> Any:
    """A field of a cluster of unlike ranks: their slowest rates and their least memory, and a text of all."""
    values = [getattr(m, name) for m in members]
    if name == "peak_flops":
        dtypes = dict(ChainMap(*reversed(values)))
        return {dtype: min(map(methodcaller("peak", dtype), members)) for dtype in dtypes}
    if isinstance(values[0], str):
        texts = values if len({*members}) > 1 else values[:1]
        return ("," if name == "name" else "; ").join(texts)
    return min(values) if name in HIGH else max(values)


def _filled(data: Mapping[str, Any], path: FilePath) -> dict[str, Any]:
    """A file's fields, on top of those of the preset that it names."""
    fields = {"name": Path(path).stem, **data}
    preset = fields.pop("preset", None)
    if preset is None:
        return fields
    base = Cluster.preset(preset).to_dict() if isinstance(preset, str) else None
    if base is None:
        raise _refuse("preset", preset, f"one of {', '.join(PRESETS)}")
    names = ", ".join(sorted(set(fields) - {"name", "source"})) or "nothing"
    return {**base, "source": f"preset {preset}; changed: {names}", **fields}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda x: isinstance(x, str), "a string"),
    "float": (_positive, "a finite number greater than 0"),
    "NotNegative": (lambda x: x == 0.0 or _positive(x), "a finite number greater than 0"),
    "int": (lambda x: _positive(x) and isinstance(x, int), "an int of at least 1"),
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "Mapping[str, float]": (
        lambda x: isinstance(x, Mapping) and "float32" in x,
        "a mapping from dtype names to FLOP/s that has at least 'float32'",
    ),
}  # annotation of a field -> what holds for its value, and in words


def _check(what: str, value: Any, kind: str) -> None:
    holds, must = _RULES[kind]
    if not holds(value):
        raise _refuse(what, value, must)
    if isinstance(value, Mapping):
        for dtype, rate in value.items():
            if not isinstance(dtype, str):
                raise _refuse(f"a key of {what}", dtype, "a dtype's name, such as 'bfloat16'")
            _check(f"{what}[{dtype!r}]", rate, "float")


def _refuse(what: str, value: Any, must: str) -> InputError:
    return InputError(f"{what} is {value!r}: it must be {must}. Correct the cluster's description.")


# ---- files --------------------------------------------------------------------------------------------------


def _suffix(path: FilePath) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise InputError(f"{Path(path)} must end in {' or '.join(SUFFIXES)}: the suffix says the format.")
    return suffix


def _toml(data: Mapping[str, Any]) -> str:
    """Plain fields first, as TOML wants it, then a table for each mapping. JSON's scalars are TOML's."""
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping)}
    lines = [f"{k} = {_inline(v)}" for k, v in data.items() if k not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_scalar(k)} = {_scalar(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _inline(x: Any) -> str:
    """A value on one line."""
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{_scalar(k)} = {_inline(v)}" for k, v in x.items()) + "}"
    return f"[{', '.join(map(_inline, x))}]" if isinstance(x, list) else _scalar(x)


def _scalar(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that only TOML escapes
