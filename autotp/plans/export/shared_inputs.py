"""Values that several modules read: converted once, where the module around them takes them in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autotp.ir.graph import Value, read
from autotp.ir.scopes import module_path

from .boundaries import Boundaries, Boundary
from .fakerun import FakeRun


def once(of: Boundaries, boundaries: list[Boundary], trial: FakeRun | None) -> list[Boundary]:
    """The boundaries, with one conversion for modules that read the same input of the module around them.

    Args:
        of: where the boundaries were read; of its `readers` those stay that convert by themselves.
        boundaries: of the modules, as `of` reads them.
        trial: the model, whose calls tell how that module gets its input; None changes nothing.
    """
    by = {b.module: b for b in boundaries}
    groups = dict(_groups(of, by))
    modules = {parent: readers for parent, (_, readers) in groups.items()}
    places = trial.places(modules) if trial and modules else {}
    out, around = dict(by), []
    for parent, place in places.items():
        value, modules = groups[parent]
        first = by[modules[0]]
        around.append(Boundary(parent, "input", in_dim=first.in_dim, spread=first.spread, place=place))
        for m in modules:
            out[m] = replace(by[m], in_dim=None, spread=(False, by[m].spread[1]))
        others = [m for m in of.readers[value] if m not in modules]
        of.readers[value] = [parent, *others] if others else []
    return [*around, *out.values()]


def _groups(of: Boundaries, by: Mapping[str, Boundary]) -> Iterator[tuple[str, tuple[Value, list[str]]]]:
    """Parent -> a value and its modules that read it, where nothing else within the parent does."""
    groups: dict[str, list[tuple[Value, list[str]]]] = defaultdict(list)
    for value, modules in of.readers.items():
        parents: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            parents[module.rpartition(".")[0]].append(module)
        users = {user for user, _, _ in read(value[0], of.builder.ops)}
        for parent, siblings in parents.items():
            # The parent has a style of its own already, or one reader converts as often as its parent would.
            if not parent or parent in by or len(siblings) == 1:
                continue
            layouts = {(by[m].in_dim, by[m].spread[0]) for m in siblings}
            # Code of the parent that reads the value by itself, a gate or a residual, would get it whole as well.
            own = [n for n in users if parent in module_path(n)]
            inside = {of.sites.get(n, ("", ""))[0] for n in own}
            if len(layouts) == 1 and inside == set(siblings):
                groups[parent].append((value, siblings))
    # Of two values, as queries and keys of a cross-attention, a style of the parent can convert only one.
    yield from ((parent, values[0]) for parent, values in groups.items() if len(values) == 1)
