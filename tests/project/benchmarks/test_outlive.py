"""Ranks that are killed, agents and a node that are lost, and those that go on from memory."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from benchmarks.helpers.nodes import NoNodesError

outlive = importlib.import_module("benchmarks.outlive.__main__")


@pytest.mark.ranks
def test_ranks_that_are_killed_go_on_with_the_same_losses():
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    script = (str(outlive.ROOT / "examples" / "outlive.py"), "--steps", "3")
    printed = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, check=True).stdout
    assert "tp=2 goes on after step 0" in printed and printed.endswith("done after 3 steps\n")
    with outlive.agents(every=1, redundancy=1) as group:
        rows = outlive.killed(group, kills=2, seed=0)
        assert [(one["of"], one["to"]) for one in rows] == [("worker", 4), ("agent", 3)]
        assert all(one["lost"] <= 1 and one["first"] > 0 for one in rows)
        assert outlive.curve(group) > 4
        losses = group.folder / "losses"
        losses.write_text(losses.read_text().replace("0x1.", "0x1.0", 1))
        with pytest.raises(RuntimeError, match="uninterrupted"):  # negative control: one loss is another
            outlive.curve(group)
    try:
        (row,), _ = outlive.lost_node(every=1)
    except NoNodesError as error:
        pytest.skip(f"no nodes can be made here: {error}")
    assert row["to"] == 2 and row["lost"] <= 1 and row["first"] > 0
