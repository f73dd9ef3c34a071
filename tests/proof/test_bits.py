"""Equal bits at every number of processes, proved on simulated ranks; what is another sum shows by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from autotp.comm import virtual
from autotp.comm.virtual import AllHosts, Host, subtrees
from autotp.errors import InputError
from tests.helpers.models import transformer


@pytest.mark.parametrize("name", ["llama-short", "llama-uneven-short", "gpt2-short"])
def test_every_number_of_processes_has_the_bits_of_all(name: str):
    report = autotp.verify(transformer(name), tp_invariant=6)
    assert report, report
    assert report.degrees == (1, 2, 3, 6) and "equal bits at tp=1, 2, 3, 6" in str(report)


def test_narrow_types_and_slices_of_the_sequence_too():
    model = transformer("llama-short").to(torch.bfloat16)
    for split in (True, False):
        assert autotp.verify(model, tp_invariant=4, sequence_parallel=split)


def test_a_tree_that_is_changed_in_one_place_shows(monkeypatch: pytest.MonkeyPatch):
    send = Host.send

    def swapped(self: Host, primitive: Any, xs: Sequence[Tensor], reduction: str) -> Tensor:
        xs = [xs[0], xs[2], xs[1], xs[3]] if len(xs) == 4 and primitive == "all_reduce" else xs
        return send(self, primitive, xs, reduction)

    monkeypatch.setattr(Host, "send", swapped)
    report = autotp.verify(transformer("llama-short"), tp_invariant=4, sequence_parallel=False)
    assert not report and report.difference is not None
    assert report.difference.direction == "forward" and "other bits at tp=1 than at tp=4" in str(report)


def test_sums_in_the_order_of_ranks_show(monkeypatch: pytest.MonkeyPatch):
    """As an all-reduce adds up: on each number of processes in another order."""
    monkeypatch.setattr(virtual, "middle", lambda tree: tree[1] - 1)
    assert subtrees(2, 4, (0, 4)) == [(2, 3), (3, 4)]
    assert autotp.verify(transformer("llama-short"), tp_invariant=4)  # one tree too, if not a good one
    monkeypatch.setattr(virtual, "subtrees", lambda first, last, tree: [(first, last)])
    monkeypatch.setattr(virtual, "total", lambda parts, tree, reduction: sum(parts.values()))
    assert not autotp.verify(transformer("llama-short"), tp_invariant=4)


def test_what_is_sent_of_a_tree():
    assert subtrees(0, 4, (0, 8)) == [(0, 4)] and subtrees(2, 4, (0, 8)) == [(2, 4)]
    assert subtrees(0, 3, (0, 6)) == [(0, 2), (2, 3)]  # what is left is sent unsummed
    xs = [torch.randn(6, 5) for _ in range(6)]
    for primitive in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        most = AllHosts(6).exchange(primitive, xs, "sum")
        for own in (2, 3, 6):
            ours = AllHosts(6, own).exchange(primitive, xs, "sum")
            assert all(torch.equal(x, y) for x, y in zip(ours, most, strict=True))


def test_what_is_not_compared_is_refused():
    with pytest.raises(InputError, match="tp_invariant=8 for all that divide that"):
        autotp.verify(transformer("llama-short"))
    with pytest.raises(InputError, match="leave out generate=, certify=, precision=, shares=, dp=, cp= and pp="):
        autotp.verify(transformer("llama-short"), tp_invariant=2, cp=2)
    with pytest.raises(InputError, match="leave out generate=, certify=, precision="):
        autotp.verify(transformer("llama-short"), tp_invariant=2, precision="float8")
    with pytest.raises(InputError, match="tp_invariant='8'"):
        autotp.verify(transformer("llama-short"), tp_invariant="8")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-short", "t5-short"])
def test_every_mesh_has_the_bits_of_all_slices_of_the_batch(name: str):
    report = autotp.verify(transformer(name), tp_invariant=2, dp_invariant=2)
    assert report, report
    assert report.degrees == ((1, 1), (1, 2), (2, 1), (2, 2)) and "dp x tp=1 x 1, 1 x 2, 2 x 1, 2 x 2" in str(report)


def test_another_sum_over_the_batch_shows(monkeypatch: pytest.MonkeyPatch):
    """A tree over the slices of the batch that is changed in one place, and a sum in the order of ranks."""
    send = Host.send

    def swapped(self: Host, primitive: Any, xs: Sequence[Tensor], reduction: str) -> Tensor:
        return send(self, primitive, [xs[0], xs[2], xs[1], xs[3]] if len(xs) == 4 else xs, reduction)

    with monkeypatch.context() as changed:
        changed.setattr(Host, "send", swapped)
        report = autotp.verify(transformer("llama-short"), dp_invariant=4)
    assert not report and report.difference is not None
    assert "other bits at dp=1 x tp=1 than at dp=4 x tp=1" in str(report)
    monkeypatch.setattr(virtual, "middle", lambda tree: tree[1] - 1)
    monkeypatch.setattr(virtual, "subtrees", lambda first, last, tree: [(first, last)])
    monkeypatch.setattr(virtual, "total", lambda parts, tree, reduction: sum(parts.values()))
    assert not autotp.verify(transformer("llama-short"), dp_invariant=4)
