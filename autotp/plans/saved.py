"""A plan as JSON text and back, in a numbered format: a file in another one, or one that was changed, is refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from autotp.cost.rank_memory import Memory
from autotp.errors import PlanError
from autotp.ir.decisions import Decision
from autotp.ir.files import parse_json, read_text
from autotp.ir.serial import plain, read_layout, read_loop

from .estimates import Axis, Degree, Layer, Sublayer, Timed, Totals
from .plan import Block, Collective, Parameter, Plan

# Raise it with every change of what is saved, or of what a field means; tests/golden/plan-format.txt has the fields.
FORMAT = 10
UNSAVED = ("fired", "builder")  # they say something of one process alone
SAVED = tuple(f.name for f in fields(Plan) if f.name not in UNSAVED)
MAX_FILE_BYTES = 100_000_000  # bytes of a file; the plan of a model with hundreds of layers has a few million
FOLDED = ("parameters", "collectives", "blocks", "decisions", "states", "tables")  # as `alike` writes them
MAX_RANKS = 1 << 20  # on an axis
# A file's names for fields that have another one here: to rename a field needs no new format.
FILE_NAMES = {"Totals": {"parameter_bytes": "stored", "least_parameter_bytes": "least_stored"}}


def write_plan(plan: Plan) -> str:
    """The plan as JSON text, with the number of the format and a digest of all of it."""
    data = plain(_fields(plan))
    return sealed({"format": FORMAT, **data, **{key: fold(data[key]) for key in FOLDED}})


def sealed(data: Mapping[str, Any]) -> str:
    """The text of a plan's fields, with the digest by which a changed file is noticed: it is no signature."""
    return json.dumps({**data, "seal": _seal(data)}, indent=1, sort_keys=True)


def _seal(data: Mapping[str, Any]) -> str:
    fields_of_plan = {k: v for k, v in data.items() if k != "seal"}
    return hashlib.sha256(json.dumps(fields_of_plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_plan(path: Path) -> Plan:
    """Read the file that `Plan.save` wrote; errors are those of `read_plan`, or say that there is no such file."""
    return read_plan(read_text(path, MAX_FILE_BYTES, error=PlanError), str(path))


def read_plan(text: str, name: str = "the text") -> Plan:
    """Read what `write_plan` wrote.

    Args:
        text: of the file. name: what errors call it.

    Raises:
        PlanError: it is not a plan, was changed or damaged since it was saved, or is a plan in another format.
    """
    try:
        data = parse_json(text, name, error=PlanError)
    except PlanError as e:
        raise PlanError(f"{name} is not a saved plan: {e} Give the file that `Plan.save` wrote.") from e
    number = _format_of(data)
    if number is None:
        raise PlanError(f"{name} is not a saved plan: it has no format number. Give the file that `Plan.save` wrote.")
    if number != FORMAT:
        raise PlanError(
            f"{name} is a plan in format {number!r}, and this version of autotp reads format {FORMAT} only. Plan again "
            "with autotp.plan(...) and save that, or read it with the version of autotp that saved it."
        )
    if data.get("seal") != _seal(data):
        raise PlanError(
            f"{name} was changed after it was saved: its digest is not that of what it holds. Give the file as "
            "`Plan.save` wrote it, or plan again; what a plan should do otherwise is said by pins."
        )
    try:
        return _checked(_plan(data))
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as e:
        raise PlanError(f"{name} is a damaged plan: {type(e).__name__}: {e}. Plan again.") from e


def _checked(plan: Plan) -> Plan:
    """The plan, where every field of its records is of the type that it is declared with, and degrees are."""
    parts = (plan.parameters, plan.collectives, plan.blocks, plan.degrees, plan.layer.steps if plan.layer else ())
    alone = [plan, plan.totals, plan.memory, plan.batch, *((plan.layer, plan.layer.outside) if plan.layer else ())]
    for record in [*alone, *(r for part in parts for r in part)]:
        for f in fields(record):
            allowed, value = TYPES.get(str(f.type)), getattr(record, f.name)
            flag = isinstance(value, bool) and bool not in (allowed or ())
            if allowed is not None and (flag or not isinstance(value, allowed)):
                raise TypeError(f"{type(record).__name__}.{f.name} is {value!r}, which is no {f.type}")
    for axis, size in (("tp", plan.tp), (plan.batch.name, plan.batch.size)):
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{axis} is {size}, which is no number of ranks")
    return plan


# By what the records' annotations say; what else they say is made by the readers below.
TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "str | None": (str, type(None)),
    "int | None": (int, type(None)), "Mapping[str, Any]": (Mapping,), "tuple[str, ...]": (tuple,),
    "Mapping[str, float]": (Mapping,),
    "tuple[int, ...]": (tuple,),
}  # fmt: skip


def _format_of(data: Any) -> Any:
    """The number that a file gives for its format, which formats 1 and 2 called its schema; None where it has none."""
    return data.get("format", data.get("schema")) if isinstance(data, dict) else None


def _fields(plan: Plan) -> dict[str, Any]:
    """The plan's fields with its records as dicts and its layouts as they are."""
    out = {k: getattr(plan, k) for k in SAVED}
    for key in ("totals", "memory", "batch"):
        out[key] = {file_name(type(out[key]), k): v for k, v in asdict(out[key]).items()}
    for key in ("parameters", "collectives", "blocks", "degrees"):
        records = []
        for r in out[key]:
            records.append({k: getattr(r, k) for k in r.__dataclass_fields__})
        out[key] = records
    out["decisions"] = [[n, list(d.ins), list(d.outs), d.factor, d.loop] for n, d in plan.decisions.items()]
    out["states"], out["tables"] = list(plan.states.items()), list(plan.tables.items())
    out["layer"] = plan.layer and asdict(plan.layer)
    return out


def _plan(data: dict[str, Any]) -> Plan:
    data = {**data, **{key: unfold(data[key]) for key in FOLDED}}
    decisions = {
        name: Decision(
            tuple(map(read_layout, ins)),
            tuple(map(read_layout, outs)),
            factor,
            read_loop(loop),
        )
        for name, ins, outs, factor, loop in data["decisions"]
    }
    parameters = [Parameter(**{**_tuples(p), "layout": read_layout(p["layout"])}) for p in data["parameters"]]
    return Plan(
        **{k: data[k] for k in ("model", "tp", "digest", "cluster", "objective")},
        parameters=tuple(parameters),
        collectives=tuple(Collective(**_tuples(r)) for r in data["collectives"]),
        blocks=tuple(Block(**_tuples(r)) for r in data["blocks"]),
        totals=_read_totals(data["totals"]),
        memory=Memory(**data["memory"]),
        decisions=decisions,
        inputs=tuple(data["inputs"]),
        notes=tuple(data["notes"]),
        degrees=tuple(Degree(**r) for r in data["degrees"]),
        layer=_read_layer(data["layer"]),
        states={name: read_layout(layout) for name, layout in data["states"]},
        tables={name: read_layout(layout) for name, layout in data["tables"]},
        batch=Axis(**data["batch"]),
        machines=data["machines"],
    )


def file_name(record: type, name: str) -> str:
    """The name of a record's field in a file."""
    return FILE_NAMES.get(record.__name__, {}).get(name, name)


def _read_totals(data: dict[str, Any]) -> Totals:
    names = {file_name(Totals, f.name): f.name for f in fields(Totals)}
    return Totals(**{names[k]: v for k, v in data.items()})


def _read_layer(data: dict[str, Any] | None) -> Layer | None:
    if data is None:
        return None
    steps = tuple(Timed(**step) for step in data["steps"])
    return Layer(**{**data, "steps": steps, "outside": Sublayer(**data["outside"])})


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return record | {k: tuple(v) for k, v in record.items() if isinstance(v, list)}


# equal records once

HOLE = "#"
NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,14})(?!\d)")
MAX_SIZE = 1 << 63  # as `autotp.ir.files` bounds what a file says itself
MAX_RECORDS = 1 << 20  # records of a list
MAX_CHARACTERS = 400_000_000  # characters of all of them
MAX_PERIOD = 24  # numbers that recur in a run: those of one block


def fold(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records as patterns.

    Args:
        records: plain data, as JSON holds it.

    Returns: each pattern, the places of its records in the list and, where records differ, their numbers.
    """
    groups: dict[str, tuple[Any, list[int], list[list[int]]]] = {}
    for place, record in enumerate(records):
        pattern, numbers = record, []
        if HOLE not in json.dumps(record):
            pattern = _pierced(record, numbers)
        key = json.dumps(pattern, sort_keys=True) if numbers else f"{HOLE}{place}"
        _, places, rows = groups.setdefault(key, (pattern, [], []))
        places.append(place)
        rows.append(numbers)
    return [_entry(*group) for group in groups.values()]


def unfold(data: Any) -> list[Any]:
    """The records that `fold` wrote so.

    Raises:
        TypeError, ValueError, KeyError: it did not, or they are too many.
    """
    records: dict[int, Any] = {}
    room = MAX_CHARACTERS
    for entry in data:
        pattern, places = entry["like"], _numbers(entry["at"])
        columns = [_numbers(column) for column in entry.get("numbers", ())]
        room -= len(json.dumps(pattern)) * len(places)
        if room < 0 or len(records) + len(places) > MAX_RECORDS:
            raise ValueError("more records than a plan has")
        for place, row in zip(places, zip(*columns, strict=True) if columns else [()] * len(places), strict=True):
            if place in records:
                raise ValueError(f"record {place} is there twice")
            values = iter(row)
            records[place] = _filled(pattern, values) if columns else pattern
            if next(values, None) is not None:
                raise ValueError(f"more numbers than {str(pattern)[:40]!r} has places for")
    if sorted(records) != list(range(len(records))):
        raise ValueError("a record is missing")
    return [records[i] for i in range(len(records))]


def _entry(pattern: Any, places: list[int], rows: list[list[int]]) -> dict[str, Any]:
    """A pattern with what differs between its records; numbers that are the same in all stand in it."""
    columns = list(zip(*rows, strict=True))
    same, varying = [], []
    for column in columns:
        equal = len(set(column)) == 1
        same.append(column[0] if equal else HOLE)
        varying += [] if equal else [_runs(column)]
    entry = {"like": _filled(pattern, iter(same)) if columns else pattern, "at": _runs(places)}
    return {**entry, "numbers": varying} if varying else entry


def _pierced(x: Any, numbers: list[int]) -> Any:
    """Plain data with a hole for every whole number, in text too, which go to `numbers`."""
    if isinstance(x, str):
        if x.isdecimal():  # a hole alone stands for a number, not for its text
            return x
        numbers += map(int, NUMBER.findall(x))
        return NUMBER.sub(HOLE, x)
    if isinstance(x, int) and not isinstance(x, bool):
        numbers.append(x)
        return HOLE
    if isinstance(x, dict):
        return {key: _pierced(x[key], numbers) for key in sorted(x)}
    if isinstance(x, list | tuple):
        return [_pierced(y, numbers) for y in x]
    return x


def _filled(x: Any, numbers: Iterator[Any]) -> Any:
    """The inverse of `_pierced`; a hole among the numbers stays one."""
    if isinstance(x, str):
        return _next(numbers) if x == HOLE else re.sub(HOLE, lambda _: str(_next(numbers)), x)
    if isinstance(x, dict):
        return {key: _filled(x[key], numbers) for key in sorted(x)}
    if isinstance(x, list):
        return [_filled(y, numbers) for y in x]
    return x


def _next(numbers: Iterator[Any]) -> Any:
    number = next(numbers, None)
    if number is None:
        raise ValueError("fewer numbers than places for them")
    return number


def _runs(numbers: Sequence[int]) -> list[Any]:
    """Numbers as runs, each the one that writes most of them for its length; as themselves where none is shorter."""
    out: list[Any] = []
    at = 0
    while at < len(numbers):
        period, times = max(_runs_at(numbers, at), key=lambda run: run[0] * run[1] / (run[0] + 2), default=(1, 1))
        if period * times < period + 2:
            out.append(numbers[at])
            at += 1
            continue
        first = list(numbers[at : at + period])
        out.append([first if period > 1 else first[0], numbers[at + period] - numbers[at], times])
        at += period * times
    return out


def _runs_at(numbers: Sequence[int], at: int) -> Iterator[tuple[int, int]]:
    """Of every run that begins here: how many numbers recur, and how often they are there."""
    for period in range(1, min(MAX_PERIOD, (len(numbers) - at) // 2) + 1):
        step, end = numbers[at + period] - numbers[at], at + period
        while end < len(numbers) and numbers[end] - numbers[end - period] == step:
            end += 1
        if (times := (end - at) // period) > 1:
            yield period, times
            if end == len(numbers):
                return


def _numbers(runs: Any) -> list[int]:
    """The inverse of `_runs`."""
    out: list[int] = []
    for run in runs:
        first, step, times = run if isinstance(run, list) else (run, 0, 1)
        first = first if isinstance(first, list) else [first]
        whole = all(type(x) is int for x in (step, times, *first))
        if not whole or not first or not 0 < times * len(first) <= MAX_RECORDS - len(out):
            raise ValueError(f"{str(run)[:40]} is no run of numbers")
        if max(map(abs, first)) + abs(step) * times > MAX_SIZE:
            raise ValueError(f"{str(run)[:40]} are numbers that are no size of anything")
        out += [x + step * i for i in range(times) for x in first]
    return out
