"""The machines a plan is made for: devices, nodes and links, as plain validated data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from autotp.errors import InputError

from . import files
from .presets import PRESETS

DEFAULT_PRESET = "h100"
NotNegative = float


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes. Every number must be finite and positive.

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

    Raises:
        InputError: a field is not what it must be; the message says which, and its value.
    """

    name: str
    device: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_size: float
    devices_per_node: int
    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    inter_bandwidth: float
    switch: bool
    launch_overhead: float
    source: str
    matmul_tile: int = 64
    collective_overhead: float = 8.4e-6
    overlaps: bool = True
    packing: NotNegative = 0.0
    product_launches: float = 1.0
    attention_rate: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            _CHECKS[str(f.type)](f"Cluster.{f.name}", getattr(self, f.name))
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))  # the caller's mapping may change later

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """The cluster of that name: h100, h200, b200, a100 (SXM), a100-pcie, l40s, or local (CPU processes with gloo).

        Raises:
            InputError: there is no such preset.
        """
        if name not in PRESETS:
            raise InputError(
                f"cluster {name!r} is not a preset. Presets: {', '.join(PRESETS)}. "
                "Name one of them, a .json or .toml file, or describe your machines with autotp.Cluster(...)."
            )
        return cls(name=name, **PRESETS[name])

    @classmethod
    def resolve(cls, cluster: Cluster | str | PathLike[str] | None) -> Cluster:
        """The cluster itself, the preset of that name, the one in that .json or .toml file; for None, h100.

        Args:
            cluster: as the public functions take it.

        Raises:
            InputError: it is none of these.
        """
        if cluster is None:
            return cls.preset(DEFAULT_PRESET)
        if isinstance(cluster, PathLike) or isinstance(cluster, str) and cluster.endswith(files.SUFFIXES):
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
        data = files.read(path)
        try:
            return cls.from_dict(_filled(data, path))
        except InputError as error:
            raise InputError(f"{fspath(path)}: {error}") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the cluster to a .json or .toml file, which `load` reads.

        Raises:
            InputError: the path has another suffix, or cannot be written.
        """
        files.write(path, self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`.

        Raises:
            InputError: a field is missing, unknown or not what it must be.
        """
        required = {f.name: f.default is MISSING for f in fields(cls)}
        missing_fields, unknown_fields = (
            sorted({n for n in required if required[n]} - set(data)),
            sorted(set(data) - set(required)),
        )
        if missing_fields or unknown_fields:
            raise InputError(
                f"a cluster description must have the fields of autotp.Cluster: missing {missing_fields}, "
                f"unknown {unknown_fields}. Start from Cluster.preset('{DEFAULT_PRESET}').to_dict()."
            )
        return cls(**data)

    @property
    def known(self) -> bool:
        """Whether its name says all: it is the preset of that name, unchanged."""
        return self.name in PRESETS and self == Cluster.preset(self.name)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data that JSON can hold."""
        return asdict(self)

    def peak(self, dtype_name: str) -> float:
        """Peak rate in FLOP/s for a dtype named as torch does ("bfloat16" or "torch.bfloat16")."""
        return self.peak_flops.get(dtype_name.removeprefix("torch."), self.peak_flops["float32"])

    def per_node(self, n: int, stride: int = 1) -> int:
        """How many of a group of `n` ranks, each `stride` after the one before, a node holds."""
        return min(n, max(1, self.devices_per_node // stride))

    def spans_nodes(self, n: int, stride: int = 1) -> bool:
        """Whether a group of `n` ranks, each `stride` after the one before, leaves the node."""
        return n > self.per_node(n, stride)


def _filled(data: Mapping[str, Any], path: str | PathLike[str]) -> dict[str, Any]:
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


def _refuse(what: str, value: Any, must: str) -> InputError:
    return InputError(f"{what} is {value!r}: it must be {must}. Correct the cluster's description.")


def _check_number(what: str, value: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not good:
        raise _refuse(what, value, "a finite number greater than 0")


def _check_amount(what: str, value: Any) -> None:
    if value != 0.0:
        _check_number(what, value)


def _check_rates(what: str, value: Any) -> None:
    if not isinstance(value, Mapping) or "float32" not in value:
        raise _refuse(what, value, "a mapping from dtype names to FLOP/s that has at least 'float32'")
    for dtype, rate in value.items():
        if not isinstance(dtype, str):
            raise _refuse(f"a key of {what}", dtype, "a dtype's name, such as 'bfloat16'")
        _check_number(f"{what}[{dtype!r}]", rate)


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(what, value, "an int of at least 1")


def _check_flag(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(what, value, "True or False")


def _check_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _refuse(what, value, "a string")


_CHECKS = {
    "str": _check_text,
    "float": _check_number,
    "NotNegative": _check_amount,
    "int": _check_count,
    "bool": _check_flag,
    "Mapping[str, float]": _check_rates,
}
