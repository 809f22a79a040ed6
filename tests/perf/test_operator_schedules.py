"""Schedules of operators, simulated step by step: closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.ops import schedules
from ladder.ops.steps import Schedule, Word, Work
from ladder.perf.operators.run import Copies, Moves, Rates, Task, Tasks, Tiles, run

FREE = Rates(4)  # four multiprocessors, and nothing slows anything


def tasks(product: Task, copy: float, moved: float = 0.0) -> Tasks:
    def of(rank: int, step: Work) -> Task:
        if step.action == "product":
            return product
        return Copies(copy) if step.action in ("copy", "spread") else Moves(moved)

    return of


def gathers(world: int, streams: int = 1) -> list[Schedule]:
    return [schedules.all_gather(rank, world, streams=streams) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("copy", [0.0, 3.0, 25.0])
def test_a_gather_takes_its_products_or_its_copies(world: int, copy: float) -> None:
    """Each shard's product begins when it is there and the one before has ended."""
    product = Tiles(6, 5.0)  # two waves of four multiprocessors
    end = 10.0
    for n in range(1, world):
        end = max(end, n * copy) + 10.0
    found = run(gathers(world), tasks(product, copy), FREE)
    assert found.us == pytest.approx(end)
    assert found.busy_us == pytest.approx(world * 10.0)


def test_products_of_two_streams_share_multiprocessors() -> None:
    """Twice six tiles on four multiprocessors take three waves instead of twice two."""
    product = Tiles(6, 5.0)
    assert run(gathers(2), tasks(product, 0.0), FREE).us == pytest.approx(20.0)
    assert run(gathers(2, 2), tasks(product, 0.0), FREE).us == pytest.approx(15.0)


def test_gaps_and_slowdowns() -> None:
    """A product at half of its speed while a copy runs; a gap before each kernel and copy, and
    after a wait: here of the second product, for its shard."""
    product, slow = Tiles(4, 10.0), replace(FREE, product_beside_copies=0.5)
    assert run(gathers(2), tasks(product, 6.0), slow).us == pytest.approx(23.0)
    held = replace(FREE, gap_us=1.0)
    assert run(gathers(2), tasks(product, 6.0), held).us == pytest.approx(22.0)
    # The copies' stream waits for no event that has not been recorded: 1 + 30, then 1 + 1 + 10.
    assert run(gathers(2), tasks(product, 30.0), held).us == pytest.approx(43.0)


@pytest.mark.parametrize("world", [2, 4])
def test_a_reduce_scatter_ends_with_its_sum(world: int) -> None:
    """The peers' chunks are sent under the products that follow; then the sum is left."""
    made = [schedules.reduce_scatter(rank, world) for rank in range(world)]
    product = Tiles(4, 10.0)
    found = run(made, tasks(product, 4.0, 2.0), FREE)
    assert found.us == pytest.approx(10.0 * world + 2.0)
    late = run(made, tasks(product, 40.0, 2.0), FREE)
    assert late.us == pytest.approx(10.0 + 40.0 * (world - 1) + 2.0)


def test_an_all_reduce_hides_the_sums_of_all_blocks_but_the_last() -> None:
    product = Tiles(4, 10.0)
    for blocks in (1, 2, 4):
        made = [schedules.all_reduce(rank, 2, blocks) for rank in range(2)]
        found = run(made, tasks(product, 4.0, 1.0), FREE)
        # Products; each block's sum; the last block's copy, during which the rows of the others are
        # put in place; and the last block's rows.
        assert found.us == pytest.approx(2 * blocks * 10.0 + blocks + max(4.0, blocks - 1) + 1.0)


def test_tiles_wait_for_their_own_shard_alone() -> None:
    """Two waves need no shard, so one that comes before their end costs nothing."""

    def of(copy: float) -> Tasks:
        def task(rank: int, step: Work) -> Task:
            if step.action == "product":
                other = Word(rank, "arrived", 1 - rank)
                return Tiles(12, 5.0, [None] * 8 + [other] * 4)
            return Copies(copy) if step.action == "copy" else Moves(0.0)

        return task

    made = [schedules.all_gather(rank, 2, waiting=True) for rank in range(2)]
    assert run(made, of(9.0), FREE).us == pytest.approx(15.0)
    assert run(made, of(14.0), FREE).us == pytest.approx(19.0)


def test_products_of_two_streams_take_turns_in_a_graph() -> None:
    """Of two products of two waves, the first one's later tiles then wait for the other's: it ends
    after 15 and not 10, and so does the peers' copy begin."""
    made = [schedules.reduce_scatter(rank, 2, streams=2) for rank in range(2)]
    product, shared = Tiles(8, 5.0), replace(FREE, interleaved=True)
    assert run(made, tasks(product, 12.0, 2.0), FREE).us == pytest.approx(10.0 + 12.0 + 2.0)
    assert run(made, tasks(product, 12.0, 2.0), shared).us == pytest.approx(15.0 + 12.0 + 2.0)
    one = [schedules.reduce_scatter(rank, 2) for rank in range(2)]
    assert run(one, tasks(product, 12.0, 2.0), shared) == run(one, tasks(product, 12.0, 2.0), FREE)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    made = [schedules.all_gather(0, 2), ()]
    with pytest.raises(AssertionError, match="wait for each other"):
        run(made, tasks(Tiles(1, 1.0), 1.0), FREE)
