"""Records that are alike but for numbers, as those of equal blocks are, written once: a pattern and where it recurs.

`model.layers.0.mlp.up_proj.weight` and its equals are one pattern with `#` for the number, and the numbers as runs:
`[0, 1, 80]` is 80 numbers from 0 in steps of 1, `[[3, 4], 9, 80]` 80 pairs from 3 and 4 in steps of 9. What has no
equal is a pattern of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

HOLE = "#"
NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,14})(?!\d)")
GREATEST = 1 << 63  # as `autotp.ir.files` bounds what a file says itself
MOST = 1 << 20  # records of a list
LARGEST = 400_000_000  # characters of all of them
LONGEST = 24  # numbers that recur in a run: those of one block


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
    room = LARGEST
    for entry in data:
        pattern, places = entry["like"], _numbers(entry["at"])
        columns = [_numbers(column) for column in entry.get("numbers", ())]
        room -= len(json.dumps(pattern)) * len(places)
        if room < 0 or len(records) + len(places) > MOST:
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
    for period in range(1, min(LONGEST, (len(numbers) - at) // 2) + 1):
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
        if not whole or not first or not 0 < times * len(first) <= MOST - len(out):
            raise ValueError(f"{str(run)[:40]} is no run of numbers")
        if max(map(abs, first)) + abs(step) * times > GREATEST:
            raise ValueError(f"{str(run)[:40]} are numbers that are no size of anything")
        out += [x + step * i for i in range(times) for x in first]
    return out
