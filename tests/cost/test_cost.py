"""The cost model against published formulas, hand values, and torch's own flop counter."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autotp.cost import Cluster, compute
from autotp.cost.collective_costs import PRIMITIVES, collective_bytes, collective_seconds
from autotp.cost.compute import node_flops, op_seconds, size_hint, tensor_bytes
from autotp.cost.machines.presets import PRESETS
from autotp.errors import InputError
from tests.helpers.clusters import ROUND

# Round numbers, so that values can be worked out by hand: alpha 1 us, 100 B/us in a node; 10 us, 10 B/us outside.
NUMBERS = [f.name for f in dataclasses.fields(Cluster) if f.type == "float"]


@pytest.mark.parametrize(
    ("primitive", "n", "sent", "microseconds"),
    [
        ("all_reduce", 4, 1200, 6 + 12),  # 2 * 3 * 1 us + 2 * 3/4 * 800 B / 100 B/us
        ("all_gather", 4, 600, 3 + 6),
        ("reduce_scatter", 4, 600, 3 + 6),
        ("all_to_all", 4, 150, 3 + 1.5),
        ("all_reduce", 8, 1400, (3 + 6) + (2 * 10 + 20) + (3 + 6)),  # leaves the node of 4: in it, between, in it
        ("all_gather", 8, 700, (1 * 10 + 10) + (3 + 6)),
        ("reduce_scatter", 8, 700, (3 + 6) + (1 * 10 + 10)),
        ("all_to_all", 8, 87.5, (3 + 0.75) + (1 * 10 + 5)),
        ("all_reduce", 1, 0, 0),
        ("all_to_all", 1, 0, 0),
        ("none", 4, 0, 0),
        ("local", 4, 0, 2 + 0.8),  # launch + 800 B / 1000 B/us
    ],
)
def test_collectives_by_hand(primitive, n, sent, microseconds):
    assert collective_bytes(primitive, 800, n) == pytest.approx(sent)
    assert collective_seconds(primitive, 800, n, ROUND) == pytest.approx(microseconds * 1e-6)


def test_all_to_all_on_a_ring_forwards():
    ring = dataclasses.replace(ROUND, switch=False)
    # Of each rank's 200 B, 50 go one hop, 50 two and 50 three: 300 B pass every link.
    assert collective_seconds("all_to_all", 800, 4, ring) == pytest.approx(3e-6 + 300 / 1e8)
    # over two nodes: of the 400 B in each, 3/16 is sent and passes twice as many links
    assert collective_seconds("all_to_all", 800, 8, ring) == pytest.approx(3e-6 + 150 / 1e8 + 1e-5 + 50 / 1e7)
    assert collective_seconds("all_reduce", 800, 4, ring) == collective_seconds("all_reduce", 800, 4, ROUND)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("n", [2, 8, 32, 128])
def test_all_gather_and_reduce_scatter_are_an_all_reduce(preset, n):
    cluster = Cluster.preset(preset)
    for size in (1e3, 1e6, 1e10):  # between nodes short all-reduces go by tree, which has no halves
        halves = sum(collective_seconds(p, size, n, cluster) for p in ("all_gather", "reduce_scatter"))
        whole = collective_seconds("all_reduce", size, n, cluster)
        assert halves == pytest.approx(whole) or cluster.spans_nodes(n) and size < 1e10 and whole < halves


@pytest.mark.parametrize("n", [2, 4, 8])
def test_megatron_sends_4bsh_elements_per_layer_forward(n):
    """Korthikanti et al. 2022, section 4.2.2: sequence parallelism sends what plain tensor parallelism does."""
    b, s, h, itemsize = 2, 1024, 4096, 2
    plain = 2 * collective_bytes("all_reduce", b * s * h * itemsize, n)
    sequence = sum(2 * collective_bytes(p, b * s * h * itemsize, n) for p in ("all_gather", "reduce_scatter"))
    assert plain == sequence == 4 * b * s * h * (n - 1) / n * itemsize


@pytest.mark.parametrize("primitive", [p for p in PRIMITIVES if p != "none"])
@pytest.mark.parametrize("preset", PRESETS)
def test_time_grows_with_bytes_and_falls_with_bandwidth(primitive, preset):
    cluster = Cluster.preset(preset)
    times = [collective_seconds(primitive, size, 8, cluster) for size in (0, 1e3, 1e6, 1e9)]
    assert times == sorted(set(times)) and times[0] > 0
    names = ["memory_bandwidth"] if primitive == "local" else ["intra_bandwidth", "inter_bandwidth"]
    for n, name in zip((8, 2 * cluster.devices_per_node), names, strict=False):
        slow = dataclasses.replace(cluster, **{name: getattr(cluster, name) / 2})
        assert collective_seconds(primitive, 1e6, n, slow) > collective_seconds(primitive, 1e6, n, cluster)


def test_time_grows_with_the_group_and_jumps_at_the_node():
    times = [collective_seconds("all_reduce", 1e9, n, Cluster.preset("h100")) for n in (2, 4, 8, 16, 32)]
    steps = [b / a for a, b in zip(times, times[1:], strict=False)]
    assert min(steps) > 1 and steps[2] > 1.5 > steps[1]


@pytest.mark.parametrize(
    ("primitive", "size", "n"),
    [("broadcast", 1, 2), ("all_reduce", -1, 2), ("all_reduce", math.nan, 2), ("none", math.inf, 2), ("local", 1, 0)],
)
def test_bad_collectives_are_refused(primitive, size, n):
    with pytest.raises(InputError):
        collective_seconds(primitive, size, n, ROUND)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1e9", None])
def test_bad_numbers_are_refused(name, value):
    with pytest.raises(InputError) as error:
        dataclasses.replace(ROUND, **{name: value})
    assert f"Cluster.{name}" in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peak_flops", {}),
        ("peak_flops", {"bfloat16": 1e12}),
        ("peak_flops", {"float32": 0}),
        ("peak_flops", {"float32": 1e12, "bfloat16": math.nan}),
        ("peak_flops", {"float32": 1e12, 16: 1e12}),
        ("peak_flops", 1e12),
        ("devices_per_node", 0),
        ("devices_per_node", 8.0),
        ("switch", 1),
        ("name", None),
    ],
)
def test_bad_fields_are_refused(name, value):
    with pytest.raises(InputError, match=f"Cluster.{name}"):
        dataclasses.replace(ROUND, **{name: value})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_and_survive_json(name):
    cluster = Cluster.preset(name)
    assert cluster.name == name and cluster.source and cluster.peak("torch.bfloat16") > cluster.peak("float32")
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert copy.deepcopy(cluster) == pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(copy.deepcopy(cluster)) == hash(cluster)


def test_resolve():
    assert Cluster.resolve(None) == Cluster.resolve("h100") == Cluster.preset("h100")
    assert Cluster.resolve(ROUND) is ROUND
    with pytest.raises(InputError, match="h100, h200, b200, a100, a100-pcie, l40s, rtx3060, .*, rtx5090, local"):
        Cluster.resolve("tpu")
    with pytest.raises(InputError, match="dict"):
        Cluster.resolve({})  # pyright: ignore[reportArgumentType]


def test_descriptions_with_wrong_fields_are_refused():
    data = ROUND.to_dict()
    del data["switch"]
    with pytest.raises(InputError, match="missing .'switch'., unknown .'nodes'."):
        Cluster.from_dict(data | {"nodes": 2})


def test_a_cluster_keeps_its_own_rates():
    rates = {"float32": 1e12}
    cluster = dataclasses.replace(ROUND, peak_flops=rates)
    rates["float32"] = 0
    assert cluster.peak("float32") == 1e12


def test_roofline():
    assert op_seconds(4e6, 1, "float32", ROUND) == pytest.approx(4e-6 + 2e-6)  # bound by arithmetic
    assert op_seconds(4e6, 1, "torch.bfloat16", ROUND) == pytest.approx(1e-6 + 2e-6)
    assert op_seconds(4e6, 1, "complex64", ROUND) == op_seconds(4e6, 1, "float32", ROUND)
    assert op_seconds(1, 5e3, "float32", ROUND) == pytest.approx(5e-6 + 2e-6)  # bound by memory
    assert op_seconds(0, 0, "float32", ROUND) == 0  # a view


def randn(*shapes):
    return tuple(torch.randn(shape) for shape in shapes)


def attend(gqa, **kwargs):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa, **kwargs)


def einsum(equation):
    return lambda *operands: torch.einsum(equation, *operands)


FLOPS = {
    "linear": (F.linear, randn((2, 5, 8), (6, 8), (6,))),
    "matmul 2d": (torch.matmul, randn((5, 8), (8, 3))),
    "matmul 4d": (torch.matmul, randn((2, 3, 5, 8), (2, 3, 8, 4))),
    "matmul folded": (torch.matmul, randn((2, 5, 8), (8, 4))),
    "matmul broadcast": (torch.matmul, randn((2, 1, 5, 8), (3, 8, 4))),
    "mm": (torch.mm, randn((5, 8), (8, 3))),
    "bmm": (torch.bmm, randn((2, 5, 8), (2, 8, 3))),
    "addmm": (torch.addmm, randn((3,), (5, 8), (8, 3))),
    "baddbmm": (torch.baddbmm, randn((2, 5, 3), (2, 5, 8), (2, 8, 3))),
    "attention": (attend(False), randn((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6))),
    "attention causal": (attend(False, is_causal=True), randn(*[(2, 4, 5, 8)] * 3)),
    "attention grouped": (attend(True), randn((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))),
    "conv1d": (F.conv1d, randn((2, 4, 9), (6, 4, 3), (6,))),
    "conv1d same": (lambda x, w: F.conv1d(x, w, padding="same"), randn((2, 4, 9), (6, 4, 3))),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2), randn((2, 4, 9, 7), (6, 2, 3, 3))),
    "conv2d unbatched": (F.conv2d, randn((4, 9, 7), (6, 4, 3, 2))),
    "conv3d": (F.conv3d, randn((2, 4, 5, 5, 5), (6, 4, 3, 3, 3))),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2),
        randn((2, 4, 5, 5), (4, 3, 3, 3)),
    ),
    "einsum": (einsum("bsk,kn->bsn"), randn((2, 5, 8), (8, 3))),
    "einsum heads": (einsum("bqhd,bkhd->bhqk"), randn((2, 5, 3, 8), (2, 7, 3, 8))),
    "einsum ellipsis": (einsum("...k,nk->...n"), randn((2, 5, 8), (3, 8))),
    "einsum implied": (einsum("ij,jk"), randn((5, 8), (8, 3))),
    "einsum sums first": (einsum("ijz,jk->ik"), randn((5, 8, 4), (8, 3))),
    "einsum elementwise": (einsum("i,j->ij"), randn((5,), (8,))),
    "elementwise": (lambda x, y: F.gelu(x) * y, randn((5, 8), (5, 8))),
}


def exported(function, args, dynamic=False):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    shapes = (tuple({0: Dim.AUTO} if x.dim() > 2 else None for x in args),) if dynamic else None
    return torch.export.export(Module(), args, dynamic_shapes=shapes, strict=False).graph.nodes


def counted(function, args):
    """Flops by torch, attention taken apart: the fused CPU kernel is not in its registry."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        function(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_of_the_flop_counter(name, dynamic):
    function, args = FLOPS[name]
    truth = counted(function, args)
    assert sum(map(node_flops, exported(function, args, dynamic))) == truth
    assert (truth > 0) == ("elementwise" not in name)


@pytest.mark.parametrize(
    ("operator", "name"),
    [("linear", "linear"), ("einsum", "einsum"), ("scaled_dot_product_attention", "attention"), ("conv2d", "conv2d")],
)
def test_a_missing_formula_is_noticed(operator, name, monkeypatch):
    monkeypatch.delitem(compute._FORMULAS, f"aten.{operator}")
    function, args = FLOPS[name]
    assert sum(map(node_flops, exported(function, args))) != counted(function, args)


@pytest.mark.parametrize("names", [(), ("b_ih", "b_hh"), ("w_ih", "w_hh", "b_ih", "b_hh")])
def test_flops_of_a_cell_count_weights_however_they_are_passed(names):
    shapes = {"w_ih": (12, 8), "w_hh": (12, 4), "b_ih": (12,), "b_hh": (12,)}
    graph, values = fx.Graph(), {}
    for name, shape in {"x": (3, 8), "hx": (3, 4), **shapes}.items():
        values[name] = graph.placeholder(name)
        values[name].meta["val"] = torch.empty(shape, device="meta")
    args = tuple(node for name, node in values.items() if name not in names)
    node = graph.call_function(torch.ops.aten.gru_cell.default, args, {name: values[name] for name in names})
    node.meta["val"] = torch.empty(3, 4, device="meta")
    assert node_flops(node) == 2 * 3 * (12 * 8 + 12 * 4)


def test_flops_of_a_graph_without_shapes_are_refused():
    nodes = exported(*FLOPS["linear"])
    for node in nodes:
        node.meta.pop("val", None)
    with pytest.raises(InputError, match="no meta"):
        sum(map(node_flops, nodes))


def test_bytes_and_hints_of_symbolic_sizes():
    nodes = exported(lambda x: (x.flatten(0, 1), x.half(), x.nonzero()), randn((3, 5, 8)), dynamic=True)
    vals = {str(n.target): n.meta["val"] for n in nodes if "val" in n.meta}
    flat, half = vals["aten.flatten.using_ints"], vals["aten.to.dtype"]
    assert isinstance(flat.shape[0], torch.SymInt)
    assert [size_hint(s) for s in flat.shape] == [15, 8]
    assert tensor_bytes(flat) == 15 * 8 * 4 and tensor_bytes(half) == 15 * 8 * 2
    assert tensor_bytes([flat, (half, None), 3]) == 15 * 8 * 6
    assert size_hint(vals["aten.nonzero.default"].shape[0]) == 1  # only the data can tell
