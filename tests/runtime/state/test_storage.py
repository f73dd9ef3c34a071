"""How a rank holds parameters, and every state dict in the original's names."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split

import autotp
from autotp.comm.ranks import PLAIN_PROCESS
from autotp.errors import StateError
from autotp.ir.layouts import I, Layout, Partition, Segment, Shard
from autotp.runtime.call_message import few
from autotp.runtime.storage import Storage
from benchmarks.helpers.lists.generated import doubled
from tests.helpers.compare import mesh_of
from tests.helpers.models import SelfAttention, inputs_of, redrawn, transformer

CASES: list[tuple[str, tuple[int, ...], int, list[tuple[int, int]], int, int]] = [
    # what it is, shape, dim, segments, repeat, number of parameters that hold it
    ("plain", (12, 5), 0, [(12, 1)], 1, 1),
    ("plain, a column", (5, 12), 1, [(12, 1)], 1, 1),
    ("uneven vocabulary", (257, 3), 0, [(257, 1)], 1, 1),
    ("uneven, in units of two", (14, 3), 0, [(14, 1)], 1, 1),
    ("fused q, k and v", (3, 96), 1, [(4, 8), (4, 8), (4, 8)], 1, 3),
    ("fused q, k and v of unequal heads", (64, 3), 0, [(4, 8), (2, 8), (2, 8)], 1, 3),
    ("six heads", (48, 3), 0, [(6, 8)], 1, 1),
    ("six heads, fused and interleaved", (144, 3), 0, [(6, 8)], 3, 3),
    ("fewer than ranks", (2, 3), 0, [(2, 1)], 1, 1),
    ("nothing", (0, 3), 0, [(0, 1)], 1, 1),
]


def storage_of(shape: tuple[int, ...], dim: int, segments: list[tuple[int, int]], repeat: int, tp: int) -> Storage:
    partition = Partition.of([Segment(count, unit) for count, unit in segments], repeat, tp)
    return Storage(shape, Shard(dim, partition), tp)


@pytest.mark.parametrize(("what", "shape", "dim", "segments", "repeat", "held"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_are_plain_chunks_and_come_back(what, shape, dim, segments, repeat, held, tp):
    storage = storage_of(shape, dim, segments, repeat, tp)
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    pieces = storage.shard(full, PLAIN_PROCESS, full.device)
    assert torch.equal(storage.full(pieces), full)
    assert len(storage.names("w")) == len(pieces) and (len(pieces) <= held or tp == 4)
    assert storage.as_held or "plain" not in what and "uneven" not in what  # else by a tensor of other dimensions
    spans = storage.layout.partition  # type: ignore[attr-defined]
    for rank in range(tp):
        # DTensor's Shard deals a dimension as torch.chunk does.
        mine = [
            (list(p.chunk(tp, x.dim)) + [p.narrow(x.dim, 0, 0)] * tp)[rank]  # type: ignore[arg-type]
            for p, x in zip(pieces, storage.pieces, strict=True)
        ]
        wanted = torch.cat(
            [full.narrow(dim, at, n) for at, n in spans.spans(rank, tp)] or [full.narrow(dim, 0, 0)], dim
        )
        assert torch.equal(storage.local(mine), wanted), (what, rank)


def test_a_whole_parameter_is_one_piece():
    storage, full = Storage((3, 4), I, 4), torch.randn(3, 4)
    assert storage.names("w") == ["w"] and not storage.split
    assert storage.full([full]) is full and storage.local([full]) is full


def test_a_bias_of_many_runs_of_heads_is_whole_where_its_weight_has_a_dimension_more():
    bias, weight = (storage_of((512, *more), 0, [(2, 8)], 32, 2) for more in ((), (3,)))
    full = torch.arange(512.0)
    [piece] = bias.shard(full, PLAIN_PROCESS, full.device)
    assert bias.held_whole and torch.equal(piece, full) and [x.offset for x in bias.boxes([piece])] == [(0,)]
    [piece] = weight.shard(full[:, None].expand(512, 3), PLAIN_PROCESS, full.device)
    assert weight.split and piece.shape == (32, 16, 3) and len(weight.boxes([piece])) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_a_few_values_are_compared_of_any_type(dtype):
    """Of packed types too, whose elements torch reads as no numbers."""
    raw = torch.arange(128, dtype=torch.uint8)
    assert few(raw.view(dtype)) == few(raw.clone().view(dtype)) != few(raw.flip(0).view(dtype))


def equal_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_the_state_of_a_plain_process_is_the_originals():
    model: Any = transformer("gpt2")
    sharded: Any = autotp.compile(model, 4, example_inputs=inputs_of(model))
    equal_states(sharded.full_state_dict(), model.state_dict())
    assert list(sharded.state_dict()) == list(model.state_dict())
    doubled = {n: 2 * t for n, t in model.state_dict().items()}
    sharded.load_state_dict(doubled)
    equal_states(sharded.full_state_dict(), doubled)
    assert torch.equal(2 * model.lm_head.weight, sharded.full_state_dict()["lm_head.weight"])  # the original is not
    with pytest.raises(StateError, match="lm_head.weight differ"):
        sharded.load_state_dict(doubled | {"lm_head.weight": model.lm_head.weight})  # one tensor, of two values


def test_a_state_dict_that_does_not_fit_loads_nothing():
    model = redrawn(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(3, 4))
    given: dict[str, Any] = {n: t + 1 for n, t in model.state_dict().items()}
    before = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    del given["0.bias"], given["1.running_mean"]
    given |= {"2.weight": torch.zeros(4, 9), "2.bias": 3.0, "extra": torch.zeros(1)}
    with pytest.raises(StateError) as caught:
        sharded.load_state_dict(given)
    for text in (
        "missing: 0.bias",
        "missing: 1.running_mean",
        "unknown: the state dict: extra",
        "2.weight is [4, 9], the model has [4, 8]",
        "2.bias is float",
    ):
        assert text in str(caught.value)
    equal_states(sharded.full_state_dict(), before)
    given |= {"2.weight": torch.zeros(4, 8), "2.bias": torch.ones(4)}
    result = sharded.load_state_dict(given, strict=False)
    assert result.missing_keys == ["0.bias", "1.running_mean"] and result.unexpected_keys == ["extra"]
    assert torch.equal(sharded.full_state_dict()["2.bias"], torch.ones(4))
    with pytest.raises(StateError, match="got list"):
        sharded.load_state_dict([1])  # type: ignore[arg-type]
    inner = {"inner." + n: t for n, t in model.state_dict().items()}
    with pytest.raises(StateError, match=r"missing: 0.weight"):
        sharded.load_state_dict(inner)  # names are the model's own, as torch has it
    sharded.load_checkpoint(inner)
    equal_states(sharded.full_state_dict(), model.state_dict())


def models() -> dict[str, tuple[nn.Module, Any]]:
    """Every way of holding a parameter: fused, transposed, tied, unequal, in uneven heads, of an odd vocabulary."""
    six = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
    made = {
        "gpt2": transformer("gpt2"),
        "phi3": transformer("phi3"),
        "llama-uneven": transformer("llama-uneven", tie_word_embeddings=True, **six),
    }
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, Any]] = {name: (model, inputs_of(model)) for name, model in made.items()}
    return found | {"multihead": (redrawn(SelfAttention(True)), torch.randn(2, 16, 64))}


def first(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def run(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        return first(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def holding(rank: int, world: int, group: Any) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    found = {name: held(model, inputs, mesh) for name, (model, inputs) in models().items()}
    found["llama-uneven"]["meta"] = from_meta(*models()["llama-uneven"], mesh)
    return found


def held(model: nn.Module, inputs: Any, mesh: DeviceMesh) -> dict[str, Any]:
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh)
    named, original = dict(sharded.named_parameters()), dict(model.named_parameters())
    pieces = {n.rsplit("_part", 1)[0] for n in named}
    before, wanted = run(sharded, inputs), model.state_dict()
    state = sharded.full_state_dict()
    equal_states(state, wanted)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    equal_states(saved, wanted)
    parts = sharded.state_dict()
    assert list(parts) == list(wanted)
    with torch.no_grad():
        for p in sharded.parameters():
            p.add_(1.0)
    moved = float((run(sharded, inputs) - before).abs().max())
    sharded.load_state_dict(saved)
    back = torch.equal(run(sharded, inputs), before)
    with torch.no_grad():
        copies = {n: t.clone() for n, t in sharded.state_dict().items()}
        for p in sharded.parameters():
            p.zero_()
    sharded.load_state_dict(copies)  # DTensors too
    return {
        "tensors": all(isinstance(p, DTensor) for p in named.values()),
        "names": pieces == set(original),
        "fused": sorted(n for n in named if n not in original)[:1],
        "close": float((before - run(model, inputs)).abs().max() / before.abs().max()),
        "moved": moved,
        "back": back and torch.equal(run(sharded, inputs), before),
        "part": sum(p.to_local().numel() for p in named.values()) / sum(p.numel() for p in original.values()),
    }


def from_meta(model: nn.Module, inputs: Any, mesh: DeviceMesh) -> float:
    """A model without weights is sharded first, and loaded then."""
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    sharded: Any = autotp.compile(empty, example_inputs=inputs, mesh=mesh)
    try:
        run(sharded, inputs)
    except StateError as error:
        assert "meta device" in str(error)
    else:
        raise AssertionError("a module without weights answered")
    once = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}  # tied weights come under one name
    sharded.load_state_dict({n: t for n, t in model.state_dict().items() if n in once})
    return float((run(sharded, inputs) - run(model, inputs)).abs().max())


def test_every_way_of_holding_a_parameter_on_four_ranks(pool):
    for found in pool.run(holding):
        for name, one in found.items():
            assert one["tensors"] and one["names"] and one["back"], (name, one)
            assert one["close"] < 1e-5 and one["moved"] > 1e-2, (name, one)
            assert one["part"] < 0.5, (name, one)
        assert found["phi3"]["fused"] and found["llama-uneven"]["meta"] < 1e-4


def three_heads() -> tuple[Any, Any, dict[Any, Any]]:
    """Three heads, which two ranks share unevenly: biases that no split of DTensor can say."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1}
    model = transformer("llama-tied", **sizes, attention_bias=True).double()
    return model, inputs_of(model), {"heads": Split(0)}


def test_what_holds_a_parameter_is_picked_by_its_dimensions():
    gpt2 = transformer("gpt2")
    for model, inputs, pins in ((gpt2, inputs_of(gpt2), None), three_heads()):
        sharded: Any = autotp.compile(model, 2, example_inputs=inputs, pins=pins)
        held = {(n.rsplit("_part", 1)[0], p.dim() >= 2) for n, p in sharded.named_parameters()}
        assert held == {(n, p.dim() >= 2) for n, p in model.named_parameters()}
        fused = [n for n, _ in sharded.named_parameters() if "_part" in n]
        assert fused
        owner, _, leaf = fused[0].rsplit("_part", 1)[0].rpartition(".")
        with pytest.raises(AttributeError, match=f"{leaf} of {owner} is held in pieces"):
            getattr(sharded.get_submodule(owner), leaf)


def stepping(rank: int, world: int, group: Any) -> float:
    """Largest difference of a parameter after steps that decay what has two dimensions, by memory's order."""
    with doubled():  # norms take their sums in float32, and a split sum rounds otherwise
        return _stepping(group)


def _stepping(group: Any) -> float:
    found = 0.0
    gpt2 = transformer("gpt2").double()
    for model, inputs, pins in ((gpt2, inputs_of(gpt2), None), three_heads()):
        sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), pins=pins)
        for m in (model, sharded):
            held = list(m.parameters())
            groups = [
                {"params": [p for p in held if p.dim() >= 2], "weight_decay": 0.5},
                {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
            for _ in range(2):
                m(**inputs).logits.square().mean().backward()
                optimizer.step()
        state = sharded.full_state_dict()
        found = max([found, *(float((state[n] - t).abs().max()) for n, t in model.state_dict().items())])
    return found


def test_steps_of_fused_and_uneven_parameters(pool):
    assert max(pool.run(stepping, world=2)) < 1e-8


class Rotary(nn.Module):
    """Buffers that no state dict holds, with torch's own way of initialising them."""

    angles: Tensor
    places: Tensor

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.register_buffer("places", torch.arange(8), persistent=False)
        self.known = known

    def reset_parameters(self) -> None:
        if self.known:
            self.angles.copy_(torch.arange(8.0))
            self.places.copy_(torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.angles[self.places]


@pytest.mark.parametrize("known", [True, False])
def test_buffers_that_no_state_dict_holds(known):
    x = torch.randn(3, 8)
    model: Any = redrawn(Rotary(known))
    with torch.device("meta"):
        empty = Rotary(known)
    sharded: Any = autotp.compile(empty, 1, example_inputs=x)
    sharded.load_state_dict(model.state_dict())
    if known:
        assert torch.equal(sharded(x), model(x))
        return
    with pytest.raises(StateError, match="angles"):
        sharded(x)
    sharded.load_state_dict({**model.state_dict(), "angles": model.angles, "places": model.places})
    assert torch.equal(sharded(x), model(x))


def test_layouts_are_in_the_plan():
    model = transformer("phi3")
    plan = autotp.plan(model, 2)
    layouts: dict[str, Layout] = plan.placements
    fused = layouts["model.layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(fused, Shard) and len(fused.partition.segments) > 1
