"""The plan: the placement of each parameter, the way each operator runs, and the costs. Immutable, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.cost.terms import Memory
from autotp.errors import PlanError
from autotp.ir.decisions import Decision
from autotp.ir.files import read_text
from autotp.ir.layouts import Layout, Layouts
from autotp.ir.sizes import UnitsBy
from autotp.plans.show.document import report
from autotp.plans.show.overview import overview
from autotp.plans.show.terminal import Printed, Sheet

from .estimates import ALONE, Axes, Decoding, Degree, Layer, Sublayer, Totals, decoding
from .pieces import BUCKET
from .share_choice import ShareChoice

if TYPE_CHECKING:
    from autotp.passes.shard.planner import Builder
    from autotp.plans.export.styles import Styles

    from .explain import Comparison, Explanation
    from .transfers import Transfer


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: its first name in the model; `aliases`: further names of the same tensor.
        shape: whole shape; `local`: the shape that the fullest rank holds.
        layout: Invariant (whole) or Shard.
        role: "column-parallel", "row-parallel", "vocabulary-parallel", "expert-parallel", "elementwise", or "whole".
        reason: for a whole parameter, the operator and the cause that kept it whole.
        first: name of the equal parameter in the first of the repeated blocks; its own name where there is none.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str
    layout: Layout
    role: str = "whole"
    reason: str | None = None
    aliases: tuple[str, ...] = ()
    first: str = ""


@dataclass(frozen=True)
class Collective:
    """One inserted conversion that communicates, forward or backward.

    Attributes:
        name: f, f_star, g, g_star, ... (`autotp.comm.conversions.KINDS`); `change`: the layouts, such as "S(1) -> R".
        module: path of the module in which it runs; `block`: index of the plan's block, None outside all.
        value: name of the graph's value that is converted; `op`: the operator that made it, or "parameter";
            `source`: path of the module that made it, or the parameter's name.
        forward, backward: the primitive of each direction (`all_reduce`, ...), None where there is none.
        bytes: whole size of the value; `forward_bytes`, `backward_bytes`: what one rank sends.
        first: name of the equal value in the first of the repeated blocks.
    """

    name: str
    change: str
    module: str
    block: int | None
    value: str
    op: str
    source: str
    forward: str | None
    backward: str | None
    bytes: float
    forward_bytes: float
    backward_bytes: float
    first: str

    @property
    def ways(self) -> tuple[tuple[str, str | None, float], ...]:
        """Each direction, its primitive and the bytes that one rank sends."""
        return ("forward", self.forward, self.forward_bytes), ("backward", self.backward, self.backward_bytes)


@dataclass(frozen=True)
class Block:
    """A named part of the model, as the patterns found it.

    Attributes:
        kind: "attention", "mlp", "norm", "embedding", "head", "experts", "adapter", "other".
        module: module path.
        detail: what it is, such as "8 heads, 4 kv heads, 64 wide"; `local`: what one rank has of that.
        parameters: names of its parameters; a tied one is in several blocks.
        first: index of the equal block in the first repeated layer; its own index where there is none.
        limit: what the number of heads forbids at this degree; empty where nothing.
    """

    kind: str
    module: str
    detail: str
    local: str
    parameters: tuple[str, ...]
    first: int
    limit: str = ""


@dataclass(frozen=True)
class Plan(Printed):
    """A layout for every parameter and a way to run every operator over `tp` ranks. `print` shows the most important,
    `report()` is all of it.

    Attributes:
        model: class name of the model; `digest`: of the captured graph that it was made for.
        tp: number of ranks.
        cluster: name of the cluster that it was priced on; `objective`: "training" and so on.
        parameters, collectives, blocks: what is split, what is sent, what the parts are.
        totals, memory: what it comes to, and what a rank holds.
        decisions: node name of the captured graph -> how it runs.
        notes: what the user should know of the capture.
        degrees: with tp="auto", what every degree that was tried comes to.
        layer: the times of one repeated block, operator by operator; None where it was not timed.
        tables: weights in buffers that are split: name -> layout.
        states: what is carried from call to call, such as a cached key, by its name -> layout, in every program.
        batch: the data-parallel axis of the mesh beside tp, and what it costs.
        machines: the numbers of the cluster where it is no preset, by field.
        shares: of the work, one for each rank; () for equal ones. share_choice: of unlike ranks what each does and
            holds, and units of families of values, which go before shares.
        fired: of a running module, what became of each optimisation and of the backend; not saved.
        builder: what solved it, which `explain` and the exports ask; None in a plan that was loaded or came from
            another process.
    """

    model: str
    tp: int
    digest: str
    cluster: str
    objective: str
    parameters: tuple[Parameter, ...]
    collectives: tuple[Collective, ...]
    blocks: tuple[Block, ...]
    totals: Totals
    memory: Memory = field(default_factory=Memory)
    decisions: Mapping[str, Decision] = field(repr=False, default_factory=dict)
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    degrees: tuple[Degree, ...] = ()
    layer: Layer | None = None
    states: Layouts = field(repr=False, default_factory=dict)
    tables: Layouts = field(repr=False, default_factory=dict)
    batch: Axes = ALONE
    machines: Mapping[str, Any] = field(repr=False, default_factory=dict)
    shares: tuple[int, ...] = ()
    share_choice: ShareChoice | None = None
    fired: tuple[str, ...] = field(compare=False, default=())
    builder: Builder | None = field(default=None, repr=False, compare=False)

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Compute and communication of one layer's attention, feed-forward block, and rest, with the share of each."""
        return self.layer.sublayers if self.layer is not None else ()

    @property
    def decoding(self) -> Decoding | None:
        """Tokens a second and the share of the limit, of a plan for decoding; None where it is for something else."""
        return decoding(self)

    @property
    def units(self) -> UnitsBy:
        """Lengths of dimensions, and the units of each rank, which go before its share."""
        return self.share_choice.units if self.share_choice is not None else ()

    @property
    def placements(self) -> dict[str, Layout]:
        """Name of a parameter, or of a buffer that is split -> layout."""
        return {p.name: p.layout for p in self.parameters} | dict(self.tables)

    def running(self, fired: tuple[str, ...]) -> Plan:
        """Return this plan with the outcome of each optimisation when a module was made by it."""
        return replace(self, fired=fired)

    def explain(self, name: str) -> Explanation:
        """Explain a parameter's layout: the alternatives with their costs, the binding constraint, and changes.

        The model is solved again with the parameter in each place that its operators know; its equals in repeated
        blocks move with it.

        Args:
            name: of the parameter, or another name of the same tensor.

        Raises:
            InputError: there is no such parameter. PlanError: the plan was not made in this process.
        """
        from .explain import explain  # noqa: PLC0415  it needs the planner, which makes plans

        return explain(self, name)

    def compare(self, other: Plan) -> Comparison:
        """Compare with another plan: totals, collectives, and the parameters whose placements differ.

        Args:
            other: a plan for the same model, or one that shares names with it; loaded ones too.
        """
        from .explain import compare  # noqa: PLC0415

        return compare(self, other)

    def transfer(self, other: Plan, first: int = 0, bucket: int = BUCKET) -> Transfer:
        """Plan the transfer of the parameters to another plan's placements: which rank sends which block to which.

        Each byte that a rank lacks is sent once, by a rank that has it; bytes that it has are not sent. Print it, or
        take it as JSON (`to_json()`) or as a drawing (`to_svg(path)`). `autotp.move` sends so.

        Args:
            other: a plan for the same model, on ranks of its own axes. first: this plan's ranks are counted from 0, the
                other's from here.
            bucket: bytes that a rank packs and unpacks at once.

        Raises:
            InputError: the plans are for different models, or the bucket is smaller than an element.
        """
        from .transfers import between  # noqa: PLC0415  it reads plans too, and so needs this class

        return between(self, other, first, bucket)

    def to_parallelize_plan(self) -> Styles:
        """Export the plan as torch's styles for `parallelize_module`: a dict whose `cannot` lists the rest.

        Raises:
            PlanError: the plan was not made in this process.
        """
        from autotp.plans.export.styles import to_parallelize_plan  # noqa: PLC0415  it reads the graph that plans are made from

        return to_parallelize_plan(self)

    def to_tp_plan(self) -> Styles:
        """Export the plan as a `tp_plan` of transformers for its `DistributedConfig`: a dict with `cannot`."""
        from autotp.plans.export.styles import to_tp_plan  # noqa: PLC0415

        return to_tp_plan(self)

    def to_spmd_types(self) -> dict[str, dict[str, Any]]:
        """Export the layouts as annotations of meta-pytorch's spmd_types: name of a parameter, split buffer or state ->
        the argument of `assert_type`, such as `{"tp": S(0)}`.

        Raises:
            InputError: spmd_types is not installed (`pip install 'autotp[certify]'`).
        """
        from autotp.plans.export.styles import to_spmd_types  # noqa: PLC0415  it is an extra

        return to_spmd_types(self)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one self-contained page: blocks, totals, the predicted timeline of one layer."""
        from autotp.plans.show.html import write_html  # noqa: PLC0415  jinja2 is read only where it is wanted

        write_html(self, path)

    def to_svg(self, path: str | Path) -> None:
        """Draw the weights of each block before, rank 0's parts after, and the collectives."""
        from autotp.plans.show.picture import write_picture  # noqa: PLC0415  as above

        write_picture(self, path)

    def to_trace(self, path: str | Path) -> None:
        """Write the predicted timeline of one layer as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

        Args:
            path: of the JSON file.

        Raises:
            PlanError: the plan holds no times.
        """
        from autotp.plans.show.timeline import write_trace  # noqa: PLC0415

        write_trace(self, path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "builder": None}  # the builder holds graphs, which stay in their process

    def report(self) -> str:
        """Write all of the plan as text: blocks, collectives, whole parameters with reasons. `print` shows less."""
        return str(Sheet(report(self)))

    def __rich__(self) -> Sheet:
        return overview(self)

    def to_json(self) -> str:
        """Write the plan as JSON text, with the number of its format."""
        from .saved import write_plan  # noqa: PLC0415  it reads plans too, and so needs this class

        return write_plan(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: the text is not a plan, was changed or damaged, or is a plan in another format.
        """
        from .saved import read_plan  # noqa: PLC0415

        return read_plan(text)

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file, which holds a digest of itself: `load` refuses it once it was changed."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: there is no such file, or it is not a plan, was changed or damaged, or is a plan in another
                format.
        """
        from .saved import MAX_FILE_BYTES, read_plan  # noqa: PLC0415

        return read_plan(read_text(Path(path), MAX_FILE_BYTES, error=PlanError), str(Path(path)))
