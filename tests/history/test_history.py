"""Bugs of other systems: the modules are right, and each bug put back in is noticed, and named."""

from __future__ import annotations

import pytest
import torch

from autotp.comm.virtual import Host
from tests.history import equal_bits, on_ranks
from tests.history.prove import CHECKER, SEQUENCE, Proved
from tests.history.row import Row
from tests.history.table import PAGE, ROWS, page, written


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))
def test_the_module_is_right_and_the_bug_is_noticed_and_named(row: Row):
    proved = Proved(row)
    for tp in (2, 4):
        for sequence in SEQUENCE:
            found = proved.judged(*proved.program(tp, sequence, pinned=sequence == row.sequence))
            assert not found.witnesses, (tp, sequence, str(found.numbers), found.types)
    if row.precision is None:  # else refused with tp_invariant, by name
        assert (bits := proved.bits(4)), str(bits)
    for tp in row.degrees:
        found = proved.mutated(tp)
        assert "numbers" in found.witnesses and found.named(row.value), (tp, str(found.numbers))
        asked = set(written()[row.number]) - (set() if CHECKER else {"certificate"})
        assert asked <= set(found.witnesses)


def test_every_bug_of_the_table_has_a_row_and_the_page_is_of_them():
    assert sorted(row.number for row in (*ROWS, *on_ranks.ROWS)) == list(range(1, 50))
    assert page(written()) == PAGE.read_text(encoding="utf-8")


def test_what_runs_after_the_backward_is_that_of_one_device(pool, tmp_path):
    two = pool.run(on_ranks.run, str(tmp_path), world=2)
    four = pool.run(on_ranks.run, str(tmp_path), world=4)
    for row, *each in zip(on_ranks.ROWS, *two, *four, strict=True):
        for right, wrong in filter(None, each):
            assert right < 1e-5 and wrong > 1e-4, (row.number, right, wrong)


def test_what_runs_after_the_backward_has_the_same_bits_on_any_number_of_ranks(pool, tmp_path, monkeypatch):
    equal_bits.trained(tmp_path / "whole", None, 1, load=False)
    alone = equal_bits.run(0, 1, None, str(tmp_path / "whole"))
    for world in (2, 4):
        for ranks in pool.run(equal_bits.run, str(tmp_path / "moved"), world=world):
            for number, values in ranks.items():
                if world == 2 and number == 45:  # the first step of two
                    continue
                odd = [name for name, value in alone[number].items() if not torch.equal(values[name], value)]
                assert not odd and values.keys() == alone[number].keys(), (world, number, odd)
    send, swap = Host.send, [0, 2, 1, 3]
    monkeypatch.setattr(Host, "send", lambda self, p, xs, r: send(self, p, [xs[i] for i in swap], r))
    assert not torch.equal(equal_bits.ROWS[31](None)["norm"], alone[31]["norm"])  # a control
