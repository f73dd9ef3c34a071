"""The notebooks of examples/ run, and show what their cells print."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from tests.helpers import notebooks

PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.23.")
ERROR = re.compile(r"\d\.\de[-+]\d\d")  # of a comparison: another one on another machine


def plain(text: str) -> str:
    return ERROR.sub("_", text)


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_prints(path):
    document = notebooks.read(path)
    printed = list(notebooks.run(document, path.name))
    cells = notebooks.code_cells(document)
    assert document["nbformat"] == 4 and len(printed) == len(cells) > 3
    assert any(printed) and len(document["cells"]) > len(cells)
    if PINNED:
        assert [plain(notebooks.shown(cell)) for cell in cells] == [plain(text) for text in printed]


def test_a_cell_that_fails_is_named():
    cells = [{"cell_type": "code", "source": ["x = 1\n"]}, {"cell_type": "code", "source": ["assert x == 2"]}]
    with pytest.raises(AssertionError) as error:
        list(notebooks.run({"cells": cells}, "n.ipynb"))
    assert str(error.traceback[-1].path).endswith("n.ipynb, cell 1")
    assert len(notebooks.NOTEBOOKS) == 2
