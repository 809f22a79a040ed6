"""Every layout of 2 and of 4 ranks trains every plan as one process does.

`make test` takes a part of the matrix; `make parity`, and `make test-all`, all of it: five minutes
on two cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import Pools
from tests.parallel.layouts import LAYOUTS, Layouts, compare

# Of a plan, every layout at one number of ranks, and at the other what differs most: TP is at both.
MOST_OF_2 = {2: LAYOUTS[2], 4: [(4, 1, "TP")]}
MOST_OF_4 = {2: [(2, 1, "TP")], 4: LAYOUTS[4]}
DEPEND_ON_T = ("desync-2x", "desync-3x", "desync-4x", "accumulate-4x", "accumulate-2x-lag1",
               "dtp-1", "dtp-2")  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "degree", "layouts"),
    [
        pytest.param("standard", None, MOST_OF_2, marks=pytest.mark.slow),
        ("ladder", None, MOST_OF_4),
        pytest.param("desync-2x", 4, MOST_OF_4, marks=pytest.mark.slow),
        ("dtp-1", 4, MOST_OF_2),
        *(
            pytest.param(plan, degree, LAYOUTS, marks=pytest.mark.parity)
            for degree, plans in (
                (None, ("standard", "parallel", "ladder", "hybrid")),
                (4, DEPEND_ON_T),
            )
            for plan in plans
        ),
    ],
)
def test_every_layout_trains_as_one_process(
    corpus: Path,
    tmp_path: Path,
    pools: Pools,
    plan: str,
    degree: int | None,
    layouts: dict[int, Layouts],
) -> None:
    """Steps of micro-batches, on 2 and on 4 ranks: 8, or 20 of the whole matrix. Catches gradients
    that are summed and not averaged, reduced once too often, or of one micro-batch only; shared
    ones summed over the wrong ranks; a norm that counts replicas or leaves shards out; windows read
    twice."""
    steps = 20 if layouts is LAYOUTS else 8
    compare(corpus, tmp_path, pools, layouts, {}, steps, plan=plan, tp_degree=degree)
