"""Values that several modules read: converted once, where the module around them takes them in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autotp.ir.graph import Value, read
from autotp.ir.scopes import module_path

from .boundaries import Boundaries, Boundary
from .fakerun import FakeRun


def once(of: Boundaries, found: list[Boundary], trial: FakeRun | None) -> list[Boundary]:
    """The boundaries, with one conversion for modules that read the same input of the module around them.

    Args:
        of: where the boundaries were read; of its `readers` those stay that convert by themselves.
        found: the boundaries. trial: the model, whose calls tell how that module gets its input; None changes nothing.
    """
    by = {b.module: b for b in found}
    groups = dict(_groups(of, by))
    places = trial.places({parent: modules for parent, (_, modules) in groups.items()}) if trial and groups else {}
    out, around = dict(by), []
    for parent, place in places.items():
        value, modules = groups[parent]
        first = by[modules[0]]
        around.append(Boundary(parent, "input", given=first.given, spread=first.spread, place=place))
        for m in modules:
            out[m] = replace(by[m], given=None, spread=(False, by[m].spread[1]))
        left = [m for m in of.readers[value] if m not in modules]
        of.readers[value] = [parent, *left] if left else []
    return [*around, *out.values()]


def _groups(of: Boundaries, by: Mapping[str, Boundary]) -> Iterator[tuple[str, tuple[Value, list[str]]]]:
    """Parent -> a value and its modules that read it, where nothing else within the parent does."""
    seen: dict[str, list[tuple[Value, list[str]]]] = defaultdict(list)
    for value, modules in of.readers.items():
        parents: dict[str, list[str]] = defaultdict(list)
        for m in modules:
            parents[m.rpartition(".")[0]].append(m)
        users = {user for user, _, _ in read(value[0], of.builder.ops)}
        for parent, mine in parents.items():
            inside = {of.sites[n][0] if n in of.sites else "" for n in users if parent in module_path(n)}
            same = len({(by[m].given, by[m].spread[0]) for m in mine}) == 1
            if parent and parent not in by and len(mine) > 1 and same and inside == set(mine):
                seen[parent].append((value, mine))
    yield from ((parent, groups[0]) for parent, groups in seen.items() if len(groups) == 1)
