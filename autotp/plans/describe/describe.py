"""Description of a planned and rewritten graph as a `Plan`: parameters and reasons, collectives and bytes, blocks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import fx

from autotp.cost.cache import Cache, cache_of, guessed
from autotp.cost.collective_costs import call_seconds, collective_bytes
from autotp.cost.decode import weights_read
from autotp.cost.memory import measure
from autotp.cost.overlap import hidden_seconds
from autotp.cost.prices import lengths, sizer
from autotp.cost.terms import Cost
from autotp.cost.units import Call, Work, Works
from autotp.ir.graph import TABLE, resolve, shape_of, short_name, size_hint
from autotp.ir.layouts import Layout, Size
from autotp.ir.marks import conversion_of
from autotp.ir.op import dtype_name
from autotp.ir.program import GraphPart, HeadDims, Planned, Sharded
from autotp.ir.scopes import module_name, module_path, moved_to
from autotp.passes.optimise.overlap_products import too_large
from autotp.passes.optimise.products import groups
from autotp.passes.shard.planner import Builder
from autotp.plans.estimates import OUTSIDE, PARTS, REST, Layer, Timed, Totals, sublayer
from autotp.plans.plan import Block, Collective, Parameter, Plan
from autotp.text import counted

from .dp_costs import lengthened
from .reasons import reason, role

Placed = tuple[Timed, tuple[str, ...]]  # a step, and the modules that it runs in, outermost first


def describe(
    planned: Planned, sharded: Sharded, builder: Builder, model_name: str, objective: str, inputs: tuple[str, ...],
    notes: Sequence[str], own_cache: Cache | None = None,
) -> Plan:  # fmt: skip
    """Describe a solved and rewritten graph as a plan.

    Args:
        planned: the decisions; `sharded`: the program of one rank, in which the collectives are counted.
        builder: made the problem, and prices it.
        model_name: class name of the model; `objective`, `inputs`, `notes`: as the plan holds them.
        own_cache: the cache that the model makes by itself, where that is known.
    """
    parts = builder.parts
    parameters = _parameters(planned, builder)
    tables = {x.name: planned.decisions[x.node].outs[0] for x in planned.program.leaves if x.kind is TABLE}
    reader = _Reader(planned, sharded, parts)
    works = list(Works(planned, builder.prices).walk(sharded))
    collectives = []
    for node, origin, work in works:
        if node is not None and any(way.call for way in work.directions):
            collectives.append(reader.collective(node, origin, work))
    communication = sum(t for *_, work in works for t, call in work.directions if call is not None)
    cache = cache_of(planned, builder.prices.hints) or own_cache
    if cache is None:
        cache = Cache() if builder.objective.training else guessed(parts, planned, planned.program.hints)
    memory = measure(planned, sharded, builder.objective, builder.prices.hints, cache)
    return Plan(
        model=model_name,
        tp=planned.tp,
        digest=builder.reading.digest,
        cluster=builder.cluster.name,
        objective=objective,
        parameters=parameters,
        collectives=tuple(collectives),
        blocks=_blocks(planned, parts),
        totals=_totals(planned, builder, parameters, collectives, communication),
        memory=memory,
        decisions={n.name: d for n, d in planned.decisions.items()},
        inputs=tuple(inputs),
        notes=tuple(notes),
        layer=layer([*reader.timed(works)], planned.program.blocks.containers),
        states=planned.states,
        tables={n: x for n, x in tables.items() if x.sharded_dim is not None},
        machines={} if builder.cluster.known else builder.cluster.to_dict(),
        shares=builder.shares,
    )


def _blocks(planned: Planned, parts: Sequence[GraphPart]) -> tuple[Block, ...]:
    names, blocks = planned.program.names, []
    for f in parts:
        local, limit = _heads(f, planned)
        blocks.append(Block(f.kind, f.module, f.detail, local, tuple(names[p] for p in f.parameters), f.first, limit))
    return tuple(blocks)


def _parameters(planned: Planned, builder: Builder) -> tuple[Parameter, ...]:
    aliases = defaultdict(list)
    for name, first in planned.program.aliases.items():
        aliases[first] += [name] if name != first else []
    names = planned.program.names
    out = []
    for leaf in planned.program.leaves:
        if not leaf.kind.trained:
            continue
        val, layout = leaf.node.meta["val"], planned.decisions[leaf.node].outs[0]
        owners = planned.program.owned.get(leaf.name, 1)
        dim = layout.sharded_dim
        pinned = leaf.name in builder.pinned or leaf.name in builder.user.parameters
        out.append(
            Parameter(
                leaf.name,
                (*(n * owners for n in val.shape[:1]), *val.shape[1:]),
                layout.local_shape([*map(int, val.shape)], planned.tp),
                dtype_name(val.dtype),
                layout,
                role(planned, leaf.node, dim) if dim is not None else "whole",
                None if dim is not None else reason(planned, leaf.node, builder.candidates, pinned),
                tuple(aliases[leaf.name]),
                names[planned.same[leaf.node]],
            )  # fmt: skip
        )
    return tuple(out)


def _heads(part: GraphPart, planned: Planned) -> tuple[str, str]:
    """Describe a rank's part of an attention's heads, and the limit that their number sets: a head stays whole."""
    heads, tp = part.heads, planned.tp
    if heads is None:
        return "", ""
    count, mine, kv = heads.count, _local_count(heads.count, heads.at, planned), heads.kv
    my_kv = _local_count(kv, heads.kv_at, planned)
    local = counted(mine, "head") + ("" if kv == count else f", {counted(my_kv, 'kv head')}")
    copies = _layout(heads.kv_at, planned).copies
    if copies > 1:
        local += f", each whole on {copies} ranks"
    if not isinstance(count, int) or not isinstance(kv, int):
        return local, ""
    most, every = math.ceil(count / tp), f"{counted(count, 'head')} over {tp} ranks"
    if mine == count and most * (tp - 1) >= count:
        without = counted(tp - math.ceil(count / most), "rank")
        return local, f"{every}: whole heads, at most {most} each, leave {without} without any; every rank computes all"
    uneven = [f"{every}: the fullest has {mine}"] if count % tp else []
    shared = [f"{counted(kv, 'kv head')} for {tp} ranks: each has all of k and v in its attention"]
    limits = uneven + (shared if my_kv == kv < tp else [])
    return local, "" if mine >= count else "; ".join(limits)


def _local_count(count: Size, place: HeadDims, planned: Planned) -> Size:
    """Return how many of the heads in these dimensions of an operand the fullest rank has."""
    layout = _layout(place, planned)
    if layout.sharded_dim not in place[2] or not isinstance(count, int):
        return count
    return math.ceil(count * layout.share(planned.tp, sizer(planned.program.hints)))


def _layout(place: HeadDims, planned: Planned) -> Layout:
    """Return the layout of the operand in which heads are seen."""
    node, slot, _ = place
    return planned.decisions[node].ins[slot]


@dataclass
class _Reader:
    """Reader of the conversions that communicate, and of times, off the program of one rank."""

    planned: Planned
    sharded: Sharded
    parts: Sequence[GraphPart]

    def __post_init__(self) -> None:
        self.names = self.planned.program.names
        self.block: dict[fx.Node, int] = {}
        for i, f in enumerate(self.parts):
            for n in (*f.nodes, *f.parameters):
                self.block.setdefault(n, i)

    def collective(self, node: fx.Node, origin: fx.Node, work: Work) -> Collective:
        """Return the record of a conversion that communicates in one direction at least."""
        operator = origin.op == "call_function"
        (forward, traffic), (backward, traffic_back) = (_traffic(way.call, self.planned.tp) for way in work.directions)
        return Collective(
            work.name,
            work.change,
            ("", *moved_to(node))[-1],
            self.place(node),
            origin.name,
            short_name(origin.target) if operator else "parameter",
            module_name(origin) if operator else self.names[origin],
            forward,
            backward,
            work.bytes,
            traffic,
            traffic_back,
            self.planned.same[origin].name,
        )

    def place(self, node: fx.Node) -> int | None:
        """Return the block that reads a converted value; its maker for a partial, or where several read it."""
        (src, _), (origin, _) = conversion_of(node), self.sharded.origin[node]
        maker = self._maker(origin) if src.partial else self.block.get(origin)
        readers = list(dict.fromkeys(self.block.get(n) for n in _readers(node, self.sharded)))
        if src.partial or len(readers) != 1 or origin.op == "placeholder":
            first = next((b for b in readers if b is not None), None)
            return maker if maker is not None else first
        return readers[0] if readers[0] is not None else maker

    def _maker(self, origin: fx.Node) -> int | None:
        """Return the block whose contraction left the partial sums, through the additions that delay the reduction."""
        if origin in self.block or origin not in self.planned.ops:
            return self.block.get(origin)
        operands = [resolve(s) for s in self.planned.ops[origin].slots]
        partial = [n for n, i in operands if self.planned.decisions[n].outs[i].partial]
        makers = [self._maker(n) for n in sorted(partial, reverse=True)]
        blocks = [b for b in makers if b is not None]
        # A frozen product and an adapter beside it are summed by one reduction: the product's.
        return next((b for b in blocks if self.parts[b].kind != "adapter"), next(iter(blocks), None))

    def timed(self, works: Iterable[tuple[fx.Node | None, fx.Node, Work]]) -> Iterator[Placed]:
        """Yield the works that take time, with the part of a layer and the modules that they are in.

        Args:
            works: of the program of one rank, as `autotp.cost.units.Works.walk` gives them.
        """
        for node, origin, work in works:
            if not work.seconds:
                continue
            if work.change and node is not None:
                index, path = self.place(node), moved_to(node)
                home = _home(self.parts[index]) if index is not None else ()
            else:
                index, path, home = self.block.get(origin), module_path(origin), ()
            part = PARTS.get(self.parts[index].kind, REST) if index is not None else REST
            forward, backward = work.directions
            step = Timed(
                work.name, ("", *path)[-1], part, forward.seconds, backward.seconds, forward.primitive,
                backward.primitive, work.change, work.bytes,
            )  # fmt: skip
            yield step, home or path


def _traffic(call: Call | None, tp: int) -> tuple[str | None, float]:
    """Return a collective's primitive, and the bytes that a rank sends for it."""
    return (None, 0.0) if call is None else (call.primitive, collective_bytes(*call[:2], call.ranks or tp))


def _readers(node: fx.Node, sharded: Sharded) -> list[fx.Node]:
    """Return the captured operators that read a value of the program of one rank."""
    out = []
    for user in node.users:
        out += [sharded.origin[user][0]] if user in sharded.origin else _readers(user, sharded)
    return out


# ---- times of one repeated block -------------------------------------------------------------------------------------


def layer(steps: Sequence[Placed], container: Mapping[str, str]) -> Layer:
    """Return the times of the kind of repeated blocks in which a step spends most, and what is outside of it.

    Of that kind the times are those that most of its blocks have; kinds of which no two blocks take equal times come
    last. Where nothing repeats it is the whole model.

    Args:
        steps: of the whole model, each with the modules that it runs in. container: path of a block -> its list.
    """
    # A step is in every indexed module around it: layers of experts repeat within layers of the model.
    inside = defaultdict(list)
    for step, paths in steps:
        for path in paths:
            if path in container:
                inside[path].append(step)
    # Blocks of one kind run the same operators; conversions may differ, as they do in the first and the last block.
    kinds = defaultdict(list)
    for path, inner in inside.items():
        kinds[container[path], tuple(step.name for step in inner if not step.converts)].append(path)
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
    blocks = set(paths)
    outside = sublayer(OUTSIDE, (step for step, around in steps if blocks.isdisjoint(around)))
    return Layer(typical, tuple(inside[typical]), len(paths), alike, total, outside)


def _home(part: GraphPart) -> tuple[str, ...]:
    """Return the modules that hold a block: a sum of partials is taken where it is read, in the next layer maybe."""
    paths = (module_path(n) for n in part.nodes)
    return next((path[: path.index(part.module) + 1] for path in paths if part.module in path), ())


SOLVED = ("seconds", "bound", "parameter_bytes", "least_parameter_bytes", "least_seconds")  # as the solver says them


def _totals(
    planned: Planned, builder: Builder, parameters: Sequence[Parameter], collectives: Sequence[Collective],
    communication: float,
) -> Totals:  # fmt: skip
    flops = local = 0.0
    share = cache(lambda layout: layout.share(planned.tp, sizer(planned.program.hints)))
    for node in planned.ops:
        decision, whole = planned.decisions[node], builder.prices.flops(node)
        layouts = [*decision.ins, *decision.outs] if decision.factor is not None else []
        flops += whole
        local += whole * min(map(share, layouts), default=1.0)
    solution = planned.solution
    megatron = solution.rival if solution is not None else None
    return Totals(
        parameters=sum(math.prod(p.shape) for p in parameters),
        local_parameters=sum(math.prod(p.local) for p in parameters),
        flops=flops,
        local_flops=local,
        forward_bytes=sum(c.forward_bytes for c in collectives),
        backward_bytes=sum(c.backward_bytes for c in collectives),
        **{name: getattr(solution, name, 0.0) for name in SOLVED},
        band=builder.band or 0.0,
        communication=communication,
        megatron_bytes=megatron.sent_bytes if megatron is not None else 0.0,
        megatron_step=megatron.seconds if megatron is not None else 0.0,
        weights_read=weights_read(planned, builder.prices.hint),
        terms=dict(solution.terms) if solution is not None else {},
        **_sizes(planned),
    )


def _sizes(planned: Planned) -> dict[str, int]:
    """Return the number of examples of the inputs, and the length of their sequences."""
    program, token_sizes = planned.program, lengths(planned.program)
    shapes = [shape_of(leaf.node) for leaf in program.inputs]
    examples = next((size_hint(s[0], program.hints) for s in shapes if len(s)), 0)
    length = next((size_hint(s[1], program.hints) for s in shapes if len(s) > 1 and s[1] in token_sizes), 0)
    return {"examples": int(examples), "length": int(length)}


# what is gathered again

CALL = "all_gather"


def with_regathering(plan: Plan, planned: Planned, sharded: Sharded, builder: Builder) -> Plan:
    """Return the plan with gathering again in its totals: bytes, and the seconds that no product hides.

    Args:
        plan: of the decisions `planned`, made by `builder`. sharded: the program of all ranks.
    """
    if plan.tp == 1 or not too_large(builder.objective, builder.cluster, plan.memory.peak):
        return plan
    sent_bytes = exposed = 0.0
    for _, size, seconds in gathered_again(planned, sharded, builder):
        sent_bytes += collective_bytes(CALL, size, plan.tp)
        exposed += seconds
    extra = Cost(regathering=exposed, regathered_bytes=sent_bytes)
    return replace(plan, totals=lengthened(plan.totals, extra, builder.objective)) if sent_bytes else plan


def gathered_again(planned: Planned, sharded: Sharded, builder: Builder) -> Iterator[tuple[fx.Node, float, float]]:
    """Yield each conversion that `regather` gathers again, bytes of its value, and seconds that no product hides.

    Args:
        planned: the decisions, made by `builder`. sharded: the program of all ranks.
    """
    works = Works(planned, builder.prices)
    for group in groups(sharded.graph):
        if group.gathers:
            size = builder.prices.bytes(group.conversion.meta["val"])
            alone, beside = call_seconds(CALL, size, planned.tp, builder.cluster), 0.0
            # The products that make the gradient of the gathered value: each takes as long as its forward.
            products = (sharded.origin[p.node][0] for p in group.products if p.node in sharded.origin)
            if builder.cluster.overlaps:
                beside = sum(works.operator(product).directions[0].seconds for product in products)
            yield group.conversion, size, alone - hidden_seconds(alone, beside)
