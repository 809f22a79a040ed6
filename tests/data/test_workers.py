"""Worker processes of ladder.data: one that dies, and one whose function fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ladder.data.workers import in_order
from ladder.models.errors import UserError
from tests.items import die, refuse


def test_a_worker_that_dies_or_fails() -> None:
    """Catches a wait without end, and an error that depends on who was first."""
    with pytest.raises(UserError, match="one of workers=2 processes was killed"):
        list(in_order(die, range(9), 2))

    def items(last: int) -> Iterator[int]:
        yield from (0, 1, last)
        raise UserError("no more items")

    for last, match in ((2, "item 2 is broken"), (1, "no more items")):
        results = in_order(refuse, items(last), 2)
        assert [next(results), next(results)] == [(0, 0), (1, 1)]
        with pytest.raises(UserError, match=match):
            list(results)
