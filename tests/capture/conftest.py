"""Capture is what these tests are about: each makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.sharing import capture_files, shared_captures


@pytest.fixture(scope="module", autouse=True)
def sharing() -> None:
    """No captures are shared."""


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's own equal captures are one, where it calls several functions with one model; none is another test's."""
    monkeypatch.delenv(capture_files.FOLDER, raising=False)
    monkeypatch.setattr(shared_captures, "KEPT", {})
    with shared_captures.shared_captures():
        yield
