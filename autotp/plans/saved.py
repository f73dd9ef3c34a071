"""A plan as JSON text and back, in a numbered format: a file in another one, or one that was changed, is refused.

`axes` are the axes of the mesh in order, the outermost first, each with its size: dp, cp and tp, of which tp is always
there and has its layouts in the records. With the first of those beside tp stands what all of these cost, with tp the
`shares` of its ranks where they are unlike, and the `share_choice` of these. A later format's fields of an axis
(`layouts` of a further one by name, `virtual` ranks) may be absent, and are refused where they are not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from autotp.errors import PlanError
from autotp.ir.decisions import Decision, plain, read_layout, read_loop
from autotp.ir.files import parse_json
from autotp.ir.layouts import Distribution, Layout
from autotp.text import BESIDE, message_of

from .estimates import ALONE, Axes
from .plan import Plan

# Raise it with every change of what is saved, or of what a field means; tests/golden/plan-format.txt has the fields.
FORMAT = 11
UNSAVED = ("fired", "builder")  # they say something of one process alone
MESH = ("tp", "batch", "shares", "share_choice")  # fields that a file has as axes
UNSAID: dict[str, Any] = {"ep": 1, "imbalance": 1.0, "experts": []}  # of an axis, where a file leaves it out
SAVED = tuple(f.name for f in fields(Plan) if f.name not in (*UNSAVED, *MESH))
MAX_FILE_BYTES = 100_000_000  # the plan of a model with hundreds of layers has a few million
FOLDED = ("parameters", "collectives", "blocks", "decisions", "states", "tables")  # written once where they are equal
PAIRS = ("decisions", "states", "tables")  # mappings, whose order a file keeps
MAX_RANKS = 1 << 20  # on an axis
# A file's names for fields that have another one here: to rename a field needs no new format.
FILE_NAMES = {"Totals": {"parameter_bytes": "stored", "least_parameter_bytes": "least_stored"}}
READERS: dict[Any, Callable[[Any], Any]] = {Any: lambda x: x, Layout: read_layout, Distribution | None: read_loop}
ALLOWED: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (int, float),
    NoneType: (NoneType,),
}


def write_plan(plan: Plan) -> str:
    """Write the plan as JSON text, with the number of the format and a digest of all of it."""
    data = {name: _plain(getattr(plan, name)) for name in SAVED}
    data["decisions"] = [[name, *how.values()] for name, how in data["decisions"].items()]
    data |= {key: list(data[key].items()) for key in ("states", "tables")}
    axes = [[name, {"size": n}] for name, n in {**plan.batch.degrees, "tp": plan.tp}.items()]
    axes[-1][1] |= {"shares": list(plan.shares)} if plan.shares else {}
    axes[-1][1] |= {"share_choice": _plain(plan.share_choice)} if plan.share_choice is not None else {}
    if plan.batch.degrees:
        axes[0][1] |= {key: x for key, x in _plain(plan.batch).items() if key not in BESIDE and x != UNSAID.get(key)}
    return sealed({"format": FORMAT, "axes": axes, **data, **{key: fold(data[key]) for key in FOLDED}})


def _plain(x: Any) -> Any:
    """Convert records, layouts and sequences of them to data that JSON can hold."""
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return [_plain(v) for v in x]
    if is_dataclass(x) and not isinstance(x, Layout | Distribution):
        return {file_name(type(x), f.name): _plain(getattr(x, f.name)) for f in fields(x)}
    return plain(x)


def sealed(data: Mapping[str, Any]) -> str:
    """Write a plan's fields as text, with the digest by which a changed file is noticed: it is no signature."""
    return json.dumps({**data, "seal": _seal(data)}, indent=1, sort_keys=True)


def _seal(data: Mapping[str, Any]) -> str:
    fields_of_plan = {k: v for k, v in data.items() if k != "seal"}
    return hashlib.sha256(json.dumps(fields_of_plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_plan(text: str, name: str = "the text") -> Plan:
    """Read a plan that `write_plan` wrote in this format.

    Args:
        text: of the file. name: what errors call it.

    Raises:
        PlanError: it is not a plan, was changed or damaged since it was saved, or is a plan in another format.
    """
    try:
        data = parse_json(text, name, error=PlanError)
    except PlanError as e:
        raise PlanError(f"{name} is not a saved plan: {e} Give the file that `Plan.save` wrote.") from e
    # Formats 1 and 2 called their number a schema.
    number = data.get("format", data.get("schema")) if isinstance(data, dict) else None
    if number is None:
        raise PlanError(f"{name} is not a saved plan: it has no format number. Give the file that `Plan.save` wrote.")
    if number != FORMAT:
        raise PlanError(
            f"{name} is a plan in format {number!r}, and this version of autotp reads format {FORMAT}. "
            "Plan again with autotp.plan(...) and save that, or read it with the version of autotp that saved it."
        )
    if data.get("seal") != _seal(data):
        raise PlanError(
            f"{name} was changed after it was saved: its digest is not that of what it holds. Give the file as "
            "`Plan.save` wrote it, or plan again; what a plan should do otherwise is said by pins."
        )
    try:
        return _plan(data, name)
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as e:
        raise PlanError(f"{name} is a damaged plan: {message_of(e)}. Plan again.") from e


def _plan(data: dict[str, Any], name: str) -> Plan:
    """Read the plan from the fields of a file."""
    axes = data["axes"]
    sizes = {axis: entry["size"] for axis, entry in axes}
    # A later format's fields are of an axis: what this version does not know, it does not run.
    costs = {f.name for f in fields(Axes)} - set(BESIDE)
    unknown = []
    for i, (axis, entry) in enumerate(axes):
        keys = {"size", *(costs if i == 0 and axis != "tp" else ()), *["shares", "share_choice"] * (axis == "tp")}
        unknown += [f"{key} of {axis}" for key in entry if key not in keys]
    order = [axis for axis in (*BESIDE, "tp") if axis in sizes]
    if [axis for axis, _ in axes] != order or "tp" not in order or unknown:
        raise PlanError(
            f"{name} is for the axes {', '.join(str(axis) for axis, _ in axes)}{' with ' * bool(unknown)}"
            f"{' and '.join(unknown)}, and this version of autotp runs dp, cp and tp, in this order. Read it with the "
            "version that saved it, or plan again."
        )
    mesh: dict[str, Any] = {"tp": sizes.pop("tp"), "batch": _plain(ALONE), "shares": axes[-1][1].get("shares", [])}
    mesh["share_choice"] = axes[-1][1].get("share_choice")
    if sizes:
        mesh["batch"] = {**dict.fromkeys(BESIDE, 1), **UNSAID, **sizes, **axes[0][1]}
        del mesh["batch"]["size"]
    # Records of equal blocks stand in a file once, decisions as rows without the names of their fields.
    folded = {key: unfold(data[key]) for key in FOLDED}
    names = [f.name for f in fields(Decision)]
    folded["decisions"] = [(n, dict(zip(names, how, strict=True))) for n, *how in folded["decisions"]]
    pairs = {key: dict(folded[key]) for key in PAIRS}
    plan = _reader(Plan)({**{key: data[key] for key in SAVED}, **mesh, **folded, **pairs})
    # A number that a file may hold is not yet one that ranks can be: 10**18 of them would be made later.
    for axis, size in (("tp", plan.tp), ("dp", plan.batch.dp), ("cp", plan.batch.cp)):
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{axis} is {size}, which is no number of ranks")
    deals = [s.deal for layout in plan.placements.values() if layout.stored for s in layout.stored.segments]
    for shares in (plan.shares, *deals, *(units for _, units in plan.units)):
        if isinstance(shares, tuple) and shares and (len(shares) != plan.tp or min(shares) < 0 or not any(shares)):
            raise ValueError(f"shares are {shares}, which are not of tp={plan.tp} ranks")
    return plan


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads a value of an annotated type from plain data."""
    if kind in READERS:
        return READERS[kind]
    if is_dataclass(kind):
        return _record(kind)
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        item = _reader(arguments[0])
        return lambda x: tuple(map(item, _of(x, (list,), kind)))
    if get_origin(kind) is Mapping:
        value = _reader(arguments[1])
        return lambda x: {k: value(v) for k, v in _of(x, (dict,), kind).items()}
    record = next((x for x in arguments if is_dataclass(x)), None)  # such as Layer | None
    if record is not None:
        read = _reader(record)
        return lambda x: None if x is None else read(x)
    allowed = tuple(t for x in arguments or (kind,) for t in ALLOWED[x])
    return lambda x: _of(x, allowed, kind)


def _record(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads a record from its fields."""
    hints = get_type_hints(kind, localns={"Builder": Any})
    unsaved = UNSAVED if kind is Plan else ()
    read = {file_name(kind, f.name): (f.name, _reader(hints[f.name])) for f in fields(kind) if f.name not in unsaved}

    def record(x: Any) -> Any:
        if x.keys() != read.keys():
            raise TypeError(f"{kind.__name__} has the fields {', '.join(x)}, not {', '.join(read)}")
        return kind(**{name: value(x[key]) for key, (name, value) in read.items()})

    return record


def _of(x: Any, allowed: tuple[type, ...], kind: Any) -> Any:
    """Return a value that is of an allowed type; a flag is no number."""
    if not isinstance(x, allowed) or (isinstance(x, bool) and bool not in allowed):
        raise TypeError(f"{str(x)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    return x


def file_name(record: type, name: str) -> str:
    """Return the name of a record's field in a file."""
    return FILE_NAMES.get(record.__name__, {}).get(name, name)


# equal records once

HOLE = "#"
NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,14})(?!\d)")
MAX_SIZE = 1 << 63  # as `autotp.ir.files` bounds what a file says itself
MAX_RECORDS = 1 << 20  # records of a list
MAX_CHARACTERS = 400_000_000  # characters of all of them
MAX_PERIOD = 24  # numbers that recur in a run: those of one block


def fold(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Fold records that differ in numbers alone into patterns.

    Args:
        records: plain data, as JSON holds it.

    Returns: each pattern, the places of its records in the list and, where records differ, their numbers.
    """
    groups = {}
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
    """Return the records that `fold` folded.

    Raises:
        TypeError, ValueError, KeyError: it did not, or they are too many.
    """
    records = {}
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
    """Return a pattern with the numbers that differ between its records; equal ones are put into the pattern."""
    columns = list(zip(*rows, strict=True))
    same, varying = [], []
    for column in columns:
        equal = len(set(column)) == 1
        same.append(column[0] if equal else HOLE)
        varying += [] if equal else [_runs(column)]
    entry = {"like": _filled(pattern, iter(same)) if columns else pattern, "at": _runs(places)}
    return {**entry, "numbers": varying} if varying else entry


def _pierced(x: Any, numbers: list[int]) -> Any:
    """Replace every whole number of plain data, in text too, by a hole, and append the numbers to `numbers`."""
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
    """Fill the holes of `_pierced` again; a hole among the numbers stays one."""
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
    """Write numbers as runs, each the one that says most of them for its length; as numbers where none is shorter."""
    out = []
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
    """Yield every run that begins here: how many numbers recur, and how often."""
    for period in range(1, min(MAX_PERIOD, (len(numbers) - at) // 2) + 1):
        step, end = numbers[at + period] - numbers[at], at + period
        while end < len(numbers) and numbers[end] - numbers[end - period] == step:
            end += 1
        if (times := (end - at) // period) > 1:
            yield period, times
            if end == len(numbers):
                return


def _numbers(runs: Any) -> list[int]:
    """Return the numbers that `_runs` wrote."""
    out = []
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
