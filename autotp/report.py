"""Plans and per-rank programs as text to read."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import fx

from .graph import module_path, short_name
from .layouts import Layout, Shard
from .problem import amount

if TYPE_CHECKING:
    from .figures import Degree, Memory, Sublayer
    from .plan import Block, Collective, Parameter, Plan

WIDTH = 110
MARKS = {"f_star": "f*", "g_star": "g*"}


def render(plan: Plan) -> str:
    """The plan as plain text, `WIDTH` columns wide, the same for the same plan."""
    return plain(renderable(plan))


def plain(content: RenderableType) -> str:
    """What rich draws, without colours and trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def renderable(plan: Plan) -> RenderableType:
    """The plan for a rich console: a headline, the blocks, the totals, what was left whole, and the notes."""
    head = Text(f"{plan.model} over {plan.tp} ranks ({plan.cluster}, {plan.objective})", style="bold")
    parts: list[RenderableType] = [head, *(Text(f"captured with {x}", style="dim") for x in plan.inputs)]
    parts += [*_blocks(plan), Text(), _totals(plan), *_layer(plan), *_left_whole(plan)]
    if plan.degrees:
        parts += [Text(), sweep_table(plan.degrees, "Degrees")]
    if plan.notes:
        parts += [Text(), Text("Notes", style="bold"), *(Padding(Text(n), (0, 0, 0, 2)) for n in plan.notes)]
    return Group(*parts)


def _table(*columns: tuple[int | None, str]) -> Table:
    """A table without lines, of columns given as (width, justification)."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for width, justify in columns:
        table.add_column(width=width, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _blocks(plan: Plan) -> Iterator[RenderableType]:
    parameters, shown = {p.name: p for p in plan.parameters}, set()
    for i, block in enumerate(plan.blocks):
        if block.first != i:
            continue
        members = [j for j, b in enumerate(plan.blocks) if b.first == i]
        yield from (Text(), _heading(block, len(members)))
        if block.limit:
            yield Padding(Text(f"limit: {block.limit}", style="yellow"), (0, 0, 0, 2))
        yield _weights([parameters[n] for n in block.parameters], block.module, shown)
        yield from _sent([c for c in plan.collectives if c.block in members], len(members))
        shown.update(block.parameters)
    inside = {n for b in plan.blocks for n in b.parameters}
    left = [p for p in plan.parameters if p.name not in inside]
    outside = [c for c in plan.collectives if c.block is None]
    if left or outside:
        yield from (Text(), Text("elsewhere", style="bold"), _weights(left, "", shown), *_sent(outside, 1))


def _heading(block: Block, count: int) -> Text:
    kind = {"mlp": "MLP"}.get(block.kind, block.kind)
    times = f" x {count}" if count > 1 else ""
    local = f"; per rank {block.local}" if block.local else ""
    text = Text.assemble((" ".join(filter(None, [kind, block.module])) + times, "bold"), f"  {block.detail}{local}")
    text.overflow = "fold"
    return text


def _weights(parameters: Sequence[Parameter], module: str, shown: set[str]) -> Table:
    table = _table((44, "left"), (36, "left"), (13, "right"), (13, "right"))
    for p in parameters:
        name = p.name.removeprefix(module + ".") if module else p.name
        where = f", dim {p.layout.dim}{_pieces(p.layout)}" if isinstance(p.layout, Shard) else ""
        tied = " (tied)" if p.name in shown or p.aliases else ""
        row = (f"  {name}{tied}", f"{p.role}{where}", _shape(p.shape), _shape(p.local))
        table.add_row(*map(Text, row))
    return table


def _pieces(layout: Shard) -> str:
    """How many pieces of one dimension are dealt separately, as those of a fused weight."""
    repeat, segments = layout.partition.repeat, len(layout.partition.segments)
    pieces = repeat * segments if isinstance(repeat, int) else repeat
    return "" if pieces == 1 else f" in {pieces} pieces"


def _sent(collectives: Sequence[Collective], members: int) -> Iterator[Table]:
    """The collectives of a block and its equals: one line for each place, with its number where some lack it."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.name, c.change, c.first, c.bytes), []).append(c)
    table = _table((12, "left"), (12, "left"), (32, "left"), (25, "left"), (25, "left"))
    for (name, change, *_), equal in groups.items():
        c = equal[0]
        times = f" ({len(equal)} of {members})" if len(equal) != members else ""
        row = (f"  {MARKS.get(name, name)}", change, f"{_operator(c.op)} ({_short(c.source)}){times}")
        ways = (_way("forward", c.forward, c.forward_bytes), _way("backward", c.backward, c.backward_bytes))
        table.add_row(*(Text(x, style="cyan") for x in (*row, *ways)))
    if groups:
        yield table


def _way(direction: str, primitive: str | None, nbytes: float) -> str:
    return f"{_primitive(primitive)} {amount(nbytes)}" if primitive else f"no {direction}"


def _operator(name: str) -> str:
    """`mul` of `aten.mul.Tensor`."""
    return name.removeprefix("aten.").split(".")[0]


def _short(path: str) -> str:
    """The last part of a module path, with the one before it where that is only a number."""
    parts = path.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _primitive(name: str | None) -> str:
    return (name or "").replace("_", "-")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _number(x: float) -> str:
    """A count with a decimal unit."""
    for unit, step in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= step:
            return f"{x / step:.2f}{unit}"
    return f"{x:.0f}"


def _seconds(x: float) -> str:
    return f"{1e3 * x:.3f} ms" if x >= 1e-4 else f"{1e6 * x:.1f} us"


def _totals(plan: Plan) -> Table:
    t, table = plan.totals, _table((24, "left"), (None, "left"))
    rows = [
        ("parameters per rank", _part(t.local_parameters, t.parameters)),
        ("forward flops per rank", _part(t.local_flops, t.flops)),
        ("sent per rank and step", f"{amount(t.forward_bytes)} forward, {amount(t.backward_bytes)} backward"),
    ]
    if t.seconds:
        gap = max(t.seconds - t.bound, 0.0) / t.seconds
        proof = f"{'optimal: ' if gap < 1e-6 else ''}bound = {_seconds(t.bound)}, gap = {gap:.1%}"
        rows.append(("predicted step", f"{_seconds(t.seconds)} ({proof})"))
    if t.megatron_bytes:
        sent = t.forward_bytes + (t.backward_bytes if plan.objective == "training" else 0.0)
        ratios = sent / t.megatron_bytes, t.communication / t.megatron_seconds
        rows.append(
            ("against Megatron's plan", "{:.2f} of its bytes, {:.2f} of its communication time".format(*ratios))
        )
    for row in (*rows, *_memory(plan.memory)):
        table.add_row(*map(Text, row))
    return table


def _memory(m: Memory) -> Iterator[tuple[str, str]]:
    """What the fullest rank holds, the parts that are there, and where the peak is."""
    parts = [
        ("parameters", m.parameters), ("buffers", m.buffers), ("gradients", m.gradients), (m.optimizer, m.states),
        ("kept activations", m.activations), ("keys and values", m.cache), ("working set", m.working),
    ]  # fmt: skip
    yield "memory per rank", f"{amount(m.peak)} at the peak, {m.phase} of {m.at}"
    held = [f"{name} {amount(size)}" for name, size in parts if size]
    for line in (held[:4], held[4:]):
        if line:
            yield "", ", ".join(line)


def _layer(plan: Plan) -> Iterator[RenderableType]:
    """What the sublayers of one of the repeated blocks take, and everything outside of those."""
    if plan.layer is None or plan.layer.count == 1:
        return
    table = _table((24, "left"), (None, "left"))
    table.add_row(f"one of {plan.layer.count} blocks", Text(plan.layer.module))
    for part in plan.sublayers:
        table.add_row(f"  {part.name}", _spent(part))
    if plan.layer.outside.seconds:
        table.add_row("outside of these blocks", _spent(plan.layer.outside))
    yield from (Text(), table)


def _spent(part: Sublayer) -> str:
    sent = f", communication {_seconds(part.communication)} ({part.share:.1%})" if part.communication else ""
    return f"compute {_seconds(part.compute)}{sent}"


def sweep_table(rows: Sequence[Degree], heading: str) -> RenderableType:
    """What each degree comes to: a heading, and a line for each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    unit = rows[0].unit if rows else "samples"
    for name in ("tp", "step", "exposed", "sent", "memory", "", "largest batch", f"{unit}/s/device"):
        table.add_column(name, justify="right" if name else "left")
    for r in rows:
        batch = "fixed" if r.largest_batch is None else str(r.largest_batch)
        share = f"{_seconds(r.exposed)} ({r.exposed / r.seconds:.0%})" if r.seconds else "-"
        held = "" if r.fits else "too much"
        row = (str(r.tp), _seconds(r.seconds), share, amount(r.sent), amount(r.memory), held, batch)
        table.add_row(*row, _number(r.throughput))
    return Group(Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)))


def _part(local: float, whole: float) -> str:
    return f"{_number(local)} of {_number(whole)}" + (f" ({local / whole:.1%})" if whole else "")


def _left_whole(plan: Plan) -> Iterator[RenderableType]:
    """Every parameter that is whole, folded over equal blocks, under the operator to blame."""
    reasons: dict[str, dict[str, list[Parameter]]] = {}
    for p in plan.parameters:
        if p.role == "whole":
            reasons.setdefault(p.reason or "", {}).setdefault(p.first, []).append(p)
    if reasons:
        yield from (Text(), Text("Left whole, and why", style="bold"))
    for reason, groups in reasons.items():
        yield Padding(Text(reason), (0, 0, 0, 2))
        table = _table((94, "left"), (13, "right"))
        for first, equal in groups.items():
            table.add_row(Text(f"    {first}" + (f" x {len(equal)}" if len(equal) > 1 else "")), _shape(equal[0].shape))
        yield table


# the program of one rank


def render_graph(graph: fx.Graph, layouts: Mapping[fx.Node, Layout] | None = None) -> str:
    """The program of one rank: a heading for each module, and a line `name: layout [whole shape] = operator(operands)`
    for each node, with the collectives marked f, f*, g, g* and by their names.

    Args:
        graph: as `autotp.rewrite` made it.
        layouts: of its nodes; otherwise read from each node's `meta["layout"]`.
    """
    return "\n".join(_lines(graph, layouts or {})) + "\n"


def _lines(graph: fx.Graph, layouts: Mapping[fx.Node, Layout]) -> Iterator[str]:
    at = ""
    for node in graph.nodes:
        path = node.meta.get("path") or module_path(node)
        module = path[-1] if path else ""
        if node.op not in ("placeholder", "output") and module != at:
            at = module
            yield f"\n# {module or '(top)'}"
        if node.op == "output":
            yield f"\nreturn {_value(node.args[0])}"
            continue
        layout = layouts.get(node, node.meta.get("layout"))
        shape = getattr(node.meta.get("val"), "shape", None)
        where = f" [{', '.join(map(str, shape))}]" if shape is not None else ""
        typed = f"{node.name}: {layout}{where}" if layout is not None else f"{node.name}{where}"
        yield f"{typed} = {_call(node)}" if node.op == "call_function" else typed


def _call(node: fx.Node) -> str:
    name = short_name(node.target)
    if "conversion" in node.meta:
        source, target = node.meta["conversion"]
        return f"{MARKS.get(name, name)}({_value(node.args[0])}: {source} -> {target})"
    given = [_value(a) for a in node.args]
    given += [f"{k}={_value(v)}" for k, v in node.kwargs.items() if k not in ("rank", "tp", "group")]
    return f"{name}({', '.join(given)})"


def _value(x: Any) -> str:
    if isinstance(x, list | tuple):
        inner = ", ".join(map(_value, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in x.items()) + "}"
    return x.name if isinstance(x, fx.Node) else str(x)
