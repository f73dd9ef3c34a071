"""Times of one repeated block of a plan, operator by operator, by the cost model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from autotp.cost.units import Work
from autotp.ir.program import GraphPart
from autotp.ir.scopes import module_path, moved_to
from autotp.plans.estimates import OUTSIDE, PARTS, REST, Layer, Timed, sublayer

BlockIndex = Callable[[fx.Node], int | None]  # a conversion in the program of one rank -> index of its block
Placed = tuple[Timed, tuple[str, ...]]  # a step, and the modules that it runs in, outermost first


def layer(steps: Sequence[Placed], container: Mapping[str, str]) -> Layer:
    """Return the times of the kind of repeated blocks in which a step spends most, and what is outside of it.

    Of that kind the times are those that most of its blocks have; kinds of which no two blocks take equal times come
    last. Where nothing repeats it is the whole model.

    Args:
        steps: of the whole model, as `timed` gives them. container: path of a block -> the list that it is in.
    """
    # A step is in every indexed module around it: layers of experts repeat within layers of the model.
    inside: dict[str, list[Timed]] = defaultdict(list)
    for step, paths in steps:
        for path in paths:
            if path in container:
                inside[path].append(step)
    # Blocks of one kind run the same operators; conversions may differ, as they do in the first and the last block.
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path, own in inside.items():
        kinds[container[path], tuple(step.name for step in own if not step.converts)].append(path)
    repeated = []
    for paths in kinds.values():
        times = []
        for path in paths:
            times.append(tuple((step.name, step.forward, step.backward) for step in inside[path]))
        # The times that most of them have speak for all; `alike` says for how many that is true.
        common, alike = Counter(times).most_common(1)[0]
        total = sum(step.seconds for path in paths for step in inside[path])
        repeated += [(alike > 1, total, alike, paths[times.index(common)], paths)] if len(paths) > 1 else []
    if not repeated:
        whole = tuple(step for step, _ in steps)
        return Layer("", whole, 1, 1, sum(step.seconds for step in whole), sublayer(OUTSIDE, ()))
    _, total, alike, typical, paths = max(repeated, key=lambda kind: kind[:2])  # of equals the first, the outermost
    apart = set(paths)
    outside = sublayer(OUTSIDE, (step for step, paths in steps if apart.isdisjoint(paths)))
    return Layer(typical, tuple(inside[typical]), len(paths), alike, total, outside)


def timed(
    works: Iterable[tuple[fx.Node | None, fx.Node, Work]],
    parts: Sequence[GraphPart],
    block: Mapping[fx.Node, int],
    place: BlockIndex,
) -> Iterator[Placed]:
    """Give those works that take time, with the module and the part of a layer that they are in.

    Args:
        works: of the program of one rank, as `autotp.cost.units.Works.walk` gives them.
        parts: the blocks by pattern; `block`: operator -> index of its block; `place`: the same of a conversion.
    """
    for node, origin, work in works:
        if not work.seconds:
            continue
        if work.change and node is not None:
            index, path = place(node), moved_to(node)
            home = _home(parts[index]) if index is not None else ()
        else:
            index, path, home = block.get(origin), module_path(origin), ()
        part = PARTS.get(parts[index].kind, REST) if index is not None else REST
        there, back = (getattr(call, "primitive", None) for _, call in work.directions)
        module = path[-1] if path else ""
        step = Timed(work.name, module, part, work.forward, work.backward, there, back, work.change, work.bytes)
        yield step, home or path


def _home(part: GraphPart) -> tuple[str, ...]:
    """Return the modules that hold a block: a sum of partials is taken where it is read, in the next layer maybe."""
    paths = (module_path(n) for n in part.nodes)
    return next((path[: path.index(part.module) + 1] for path in paths if part.module in path), ())
