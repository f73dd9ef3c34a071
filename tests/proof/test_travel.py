"""Rows that travel to their experts, proved on simulated ranks; what is put in wrongly is noticed."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import autotp
from autotp.comm import conversions
from autotp.errors import CaptureError, InputError
from autotp.ir.specs import ShardSpec, TravelledSpec
from autotp.passes.shard import travel
from autotp.plans.plan import Plan
from tests.helpers.modules.mixtures import Mixture, mixture, tokens

TWO: dict[str, Any] = {"dp": 2, "ep": 2}


def proved(model: nn.Module, tp: int = 1, **keywords: Any) -> Any:
    return autotp.verify(model, tp, tokens(batch=keywords.pop("batch", 4)), **{**TWO, **keywords})


@pytest.mark.parametrize("name", ["by hand", "mixtral", "qwen3", "gpt-oss"])
def test_a_mixture_is_that_of_one_device(name):
    report = proved(mixture(name, double=False), 1 if name == "qwen3" else 2, certify=name == "by hand")
    assert report and report.gradient_error < 1e-12, report
    assert report.certificate is None or report.certificate
    assert report.plan.batch.ep == 2 and any("rows travel" in note for note in report.plan.notes)


def test_deepseek_on_four_ranks_on_two_groups_and_without_travelling():
    model = mixture("deepseek", double=False)
    for ep in (4, 2, 1):
        report = proved(model, dp=4, ep=ep)
        assert report and not any("gathered" in note for note in report.plan.notes), report


@pytest.mark.parametrize("experts", [[9.0, 9.0, 0.0, 0.0], [0.0, 9.0, 9.0, 0.0]], ids=["one rank's", "both ranks'"])
def test_a_rank_may_get_no_row(experts):
    model = mixture("by hand")
    assert isinstance(model, Mixture)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor(experts))
    assert proved(model)


def lost(x: Tensor, src: Any, dst: Any, rank: int, tp: int) -> Tensor:
    """Rows that come back in the order of their owners, and not of who sent them."""
    return x


def test_a_return_that_is_left_out_is_noticed():
    kind = conversions.KINDS["T", "S"]
    with patch.dict(
        conversions.KINDS, {("T", "S"): conversions.ConversionKind(kind.name, lost, "all_to_all", uneven=True)}
    ):
        report = proved(mixture("by hand"))
    assert not report and "experts" not in str(report.unproved), report


def test_a_wrong_count_is_noticed():
    """Ends of a rank's experts that are off by a row."""
    right = travel.own_ends

    def wrong(there: Any, dtype: Any, like: Tensor, *, rank: int, tp: int) -> Tensor:
        ends = right(there, dtype, like, rank=rank, tp=tp)
        return torch.cat([ends[:1] - (ends[:1] > 0).to(ends.dtype), ends[1:]])

    wrong.rule = right.rule  # type: ignore[attr-defined]
    with patch.object(travel, "own_ends", wrong):
        assert not proved(mixture("by hand"))


def test_a_gradient_of_experts_that_is_left_in_summands_is_noticed():
    """Such as that of a weight which all ranks have whole: each would have what its own experts make of it."""
    with patch.object(travel, "_way", lambda way: []):
        model = mixture("by hand")
        assert proved(model)
        place = ShardSpec.place
        halved = lambda self, x, rank, tp: place(self, x, rank, tp) / (tp if x.ndim == 3 else 1)  # noqa: E731
        with patch.object(ShardSpec, "place", halved):
            report = proved(model)
    assert not report and report.difference.direction == "backward", report


class Turned(Mixture):
    """Reads one weight of its experts transposed, and adds the other up besides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(self.up.detach().transpose(1, 2).contiguous())

    def experts(self) -> tuple[Tensor, Tensor]:
        return self.up.transpose(1, 2), self.down

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.down.sum()


class Quantised(Mixture):
    """Keeps its experts in eight bits, with a scale for each."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("up", "down"):
            weight = getattr(self, name).detach()
            scale = weight.abs().amax((1, 2), keepdim=True) / 127
            delattr(self, name)
            self.register_buffer(name, (weight / scale).round().to(torch.int8))
            self.register_buffer(f"{name}_scale", scale)

    def experts(self) -> Any:
        return [getattr(self, n).to(torch.float32) * getattr(self, f"{n}_scale") for n in ("up", "down")]


def test_quantised_experts_are_whole_on_each_rank_and_right():
    torch.manual_seed(0)
    report = proved(Quantised(), 2)
    assert report and report.plan.batch.experts == (), report


def test_what_others_read_too_is_whole_on_each_rank():
    torch.manual_seed(0)
    report = proved(Turned(), 2)
    assert report and report.plan.batch.experts == ("up",), report


def test_rows_are_sent_to_their_experts_and_come_back():
    """Of three experts on three ranks; the weight of a row in the loss says where it was."""
    ids = [torch.tensor([0, 2, 2]), torch.tensor([2, 2, 2]), torch.tensor([0, 0, 1])]
    counts = torch.stack([x.bincount(minlength=3) for x in ids])
    src, dst = ShardSpec(0, 1, ((9, 1),)), cast(Any, TravelledSpec(0, counts, ((3, 1),)))
    rows = [(x.double() * 10 + r).requires_grad_() for r, x in enumerate(ids)]
    there = conversions.simulate(rows, src, dst)
    assert [x.tolist() for x in there] == [[0, 2, 2], [12], [20, 20, 21, 21, 21]]
    back = conversions.simulate(there, dst, src)
    assert all(a.equal(b) for a, b in zip(rows, back, strict=True))
    torch.stack([(x.square() * (r + 1)).sum() for r, x in enumerate(there)]).sum().backward()
    for x, owner in zip(rows, ids, strict=True):
        assert x.grad is not None and x.grad.equal(2 * x.detach() * (owner + 1))


def test_rows_go_to_the_copy_that_has_the_senders_place():
    """Of two experts on four ranks, each on two that follow each other; a row says who sent it."""
    ids = [torch.tensor(x) for x in ([0, 1, 1], [1], [0, 0], [0, 1])]
    counts = torch.stack([x.bincount(minlength=2) for x in ids])
    src, dst = ShardSpec(0, 1, ((8, 1),)), cast(Any, TravelledSpec(0, counts, ((2, 1),), 2))
    rows = [x.double() * 10 + r for r, x in enumerate(ids)]
    there = conversions.simulate(rows, src, dst)
    assert [x.tolist() for x in there] == [[0, 2, 2], [3], [10, 10], [11, 13]]
    assert all(a.equal(b) for a, b in zip(rows, conversions.simulate(there, dst, src), strict=True))


def test_groups_of_ranks_hold_parts_of_their_experts():
    """A gradient that is left on one of the ranks which have an expert is noticed."""
    model = mixture("by hand")
    report = proved(model, 2, dp=4, ep=2, certify=True)
    assert report and report.certificate and report.plan.batch.experts == ("up", "down"), report
    add = conversions.KINDS["D", "S'"]
    own = lambda x, src, dst, rank, tp: x[rank % src.copies]  # noqa: E731  its own summand alone
    left = conversions.ConversionKind(add.name, conversions.then(add.pre, own))
    with patch.dict(conversions.KINDS, {("D", "S'"): left}):
        report = proved(model, 1, dp=4, ep=2)
    assert not report and report.difference.direction == "backward", report
    report = proved(model, 1, dp=8, ep=2, batch=8)
    assert report and report.plan.batch.experts == (), "eight ranks have no part each of four experts"


class Plain(nn.Module):
    """A model without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def refused(**keywords: Any) -> str:
    model = keywords.pop("model", None) or mixture("by hand")
    with pytest.raises((InputError, CaptureError)) as error:
        autotp.plan(model, keywords.pop("tp", 1), example_inputs=tokens(), **{**TWO, **keywords})
    return str(error.value)


def test_what_does_not_go_with_it_is_refused():
    assert "does not deal out the 3 experts" in refused(model=Mixture(experts=3))
    assert "does not deal out the 4 experts" in refused(dp=8, ep=8)
    assert "Give dp=2 or a multiple" in refused(dp=3)
    assert "Give dp=2" in refused(dp=None)
    assert "float8" in refused(precision="float8")
    assert "sequences do not travel" in refused(cp=2)
    assert "no products by expert" in refused(model=Plain())


def test_stages_have_rows_that_travel():
    report = proved(mixture("mixtral", double=False, num_hidden_layers=2), 1, pp=2)
    assert report and report.plan.batch.ep == 2, report


class Peeking(Mixture):
    """Gives the rows in the order in which they were sorted, which is of the whole batch."""

    def forward(self, input_ids: Tensor) -> Any:
        out = super().forward(input_ids)
        x = self.embed(input_ids).flatten(0, 1)
        experts, order = self.router(x).argmax(-1).sort(stable=True)
        ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        return out, torch.ops.transformers.grouped_mm_fallback(x[order], self.up, ends)


def test_rows_whose_order_is_read_do_not_travel():
    torch.manual_seed(0)
    model = Peeking()
    assert "depends on that order" in refused(model=model)


def test_a_router_that_names_an_expert_that_is_not_there():
    model = mixture("by hand")
    assert isinstance(model, Mixture)
    plan = autotp.plan(model, 1, example_inputs=tokens(batch=2), **TWO)
    assert Plan.from_json(plan.to_json()) == plan
    good = torch.tensor([[3, 1, 4], [2, 5, 7]])
    assert travel.agreed_counts(good).equal(good[:, :2])
    for bad in (torch.tensor([[3, 1, 4], [2, 5, 8]]), torch.tensor([[5, -1, 4], [2, 5, 7]])):
        with pytest.raises(InputError, match=r"dp ranks \[[01]\].*an expert that is not there"):
            travel.agreed_counts(bad)


def test_experts_whole_over_tp_and_by_expert_in_a_rank():
    report = proved(mixture("by hand"), 2, pins={"up": Replicate(), "down": Replicate()})
    assert report, report
