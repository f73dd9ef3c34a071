"""Capture is what these tests are about: each makes its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def sharing() -> None:
    """No captures are shared."""
