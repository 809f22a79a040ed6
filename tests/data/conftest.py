"""Fixtures of the tests of `ladder data prepare`."""

from __future__ import annotations

import pytest

from ladder.data import units


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 300 bytes, so that a small corpus has many."""
    monkeypatch.setattr(units, "UNIT", 300)
