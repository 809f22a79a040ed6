"""Residual plans: what presets mean, and what follows from the records."""

from __future__ import annotations

import math
import random

import pytest

from ladder.models import Plan, SublayerRecord, UserError, resolve_plan
from tests.samples import PLANS, both, random_plan, small_config

L = 6  # layers


# Presets against DESIGN's table


def test_standard_waits_for_every_reduce() -> None:
    """Catches a default record that lags, or a layer whose reduces are counted once."""
    plan = resolve_plan("standard", L)
    assert plan.sublayers == tuple(both() * L)
    assert (plan.collectives, sum(plan.blocking)) == (2 * L, 2 * L)
    assert plan.equal_reads == (True,) * (2 * L + 1)
    assert not plan.depends_on_tp
    assert not plan.final_mean
    assert plan.num_layers == L
    assert plan.layers == tuple(n // 2 for n in range(2 * L))


def test_parallel_has_one_reduce_a_layer() -> None:
    """Catches attention and MLP reduced apart, which loses what PaLM's block is for."""
    plan = resolve_plan("parallel", L)
    assert plan.sublayers == (SublayerRecord("attention+mlp"),) * L
    assert (plan.collectives, sum(plan.blocking)) == (L, L)
    assert plan.layers == tuple(range(L))
    assert not plan.depends_on_tp


def test_ladder_blocks_only_at_the_end() -> None:
    """Equation 2: as many reduces as Llama, one of them waited for. Catches lag 1 on MLPs only."""
    plan = resolve_plan("ladder", L)
    assert plan.sublayers == tuple(both(own_lag=1, peer_lag=1) * L)
    assert (plan.collectives, sum(plan.blocking)) == (2 * L, 1)
    assert plan.blocking[-1]
    assert plan.equal_reads == (True,) * (2 * L + 1)
    assert not plan.depends_on_tp
    # Each landing runs beneath a sublayer, but for the first read's, which has none before it, and
    # the final norm's, which takes the newest output as well.
    assert plan.early == (False, *[True] * (2 * L - 1), False)
    assert not any(resolve_plan("standard", L).early)


@pytest.mark.parametrize(
    ("name", "first"),
    [("ladder", 1), ("hybrid", L), ("standard", 2 * L), ("dtp-2", 2 * L), ("none", 2 * L)],
)
def test_sublayers_that_run_beside_the_one_before(name: str, first: int) -> None:
    """From the first one on that needs nothing of it."""
    assert resolve_plan(name, L, 4).beside == tuple(n >= first for n in range(2 * L))
    assert resolve_plan("parallel", L).beside == (False,) * L


def test_hybrid_of_an_odd_number_of_layers_lags_on_the_larger_half() -> None:
    assert resolve_plan("hybrid", 5).sublayers == resolve_plan("ladder@2-4", 5).sublayers


@pytest.mark.parametrize(
    ("spec", "first", "last"),
    [("hybrid", 3, 5), ("ladder@2-5", 2, 5), ("ladder@0-5", 0, 5), ("ladder@4", 4, 4)],
)
def test_hybrid_lags_where_the_reader_is_a_ladder_layer(spec: str, first: int, last: int) -> None:
    """The lag is the reader's (4.2): the last standard MLP is read late, by the first ladder layer.

    Catches lag counted from the writer, one sublayer further on. Blocking: each reduce whose next
    reader is standard, and the last.
    """
    plan = resolve_plan(spec, L)
    for n, record in enumerate(plan.sublayers):
        lag = int(first <= n // 2 <= last)
        assert record == SublayerRecord(("attention", "mlp")[n % 2], lag, lag)
    readers_lag = [*(record.own_lag for record in plan.sublayers[1:]), 0]
    assert plan.blocking == tuple(lag == 0 for lag in readers_lag)
    # An output in flight where ladder layers begin lands under the first of them, one where
    # they end lands with the next: so each range saves its own 2 per layer, and nothing more.
    ladder_layers = last - first + 1
    saved = 2 * ladder_layers - (first == 0)
    assert sum(plan.blocking) == 2 * L - saved
    assert plan.collectives == 2 * L


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_desync_keeps_each_nth_reduce(n: int) -> None:
    """Section 5. Catches the first of each group kept in place of the last, and a model whose last
    residuals are left unequal where n does not divide 2 L."""
    plan = resolve_plan(f"desync-{n}x", L)
    kept = {*range(n - 1, 2 * L, n), 2 * L - 1}
    for i, record in enumerate(plan.sublayers):
        assert record == SublayerRecord(
            ("attention", "mlp")[i % 2], reduce="residual" if i in kept else "none"
        )
        if n % 2 == 0 and record.reduce == "residual":
            assert record.kind == "mlp"
    assert plan.collectives == sum(plan.blocking) == len(kept)
    # A sublayer reads equal residuals right after a kept reduce, and at the start.
    assert plan.equal_reads == tuple(i == 0 or i - 1 in kept for i in range(2 * L + 1))
    assert plan.depends_on_tp
    assert not plan.final_mean


@pytest.mark.parametrize("n", [2, 3, 4, 8, 99])
@pytest.mark.parametrize("degree", [2, 4])
def test_accumulate_sums_each_group_once(n: int, degree: int) -> None:
    """Catches desync under another name, a reduce or a last one that is scaled, a group that goes
    over a reduce, and a model whose last group is left unsummed where n does not divide 2 L."""
    plan = resolve_plan(f"accumulate-{n}x", L, degree)
    kept = {*range(n - 1, 2 * L, n), 2 * L - 1}
    for i, record in enumerate(plan.sublayers):
        reduce, scale = ("accumulated", 1.0) if i in kept else ("none", math.sqrt(degree))
        kind = ("attention", "mlp")[i % 2]
        assert record == SublayerRecord(kind, reduce=reduce, own_scale=scale)
    assert plan.group_begins == tuple(i // n * n for i in range(2 * L))
    assert plan.collectives == sum(plan.blocking) == len(kept)
    assert plan.equal_reads == tuple(i == 0 or i - 1 in kept for i in range(2 * L + 1))
    assert plan.own_needed == tuple(i not in kept for i in range(2 * L))
    assert plan.depends_on_tp
    assert not plan.final_mean


@pytest.mark.parametrize(("n", "lag"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4), (8, 4), (4, 11)])
@pytest.mark.parametrize("degree", [2, 4])
def test_accumulate_reads_each_sum_late(n: int, lag: int, degree: int) -> None:
    """Catches a lag of own parts, a last sum whose own part is scaled although nothing reads it
    apart, and a sum that blocks, or that lands a sublayer too early or too late."""
    plan = resolve_plan(f"accumulate-{n}x-lag{lag}", L, degree)
    kept = sorted({*range(n - 1, 2 * L, n), 2 * L - 1})
    for i, record in enumerate(plan.sublayers):
        reduce = "accumulated" if i in kept else "none"
        scale = math.sqrt(degree) if i < 2 * L - 1 else 1.0
        assert record == SublayerRecord(("attention", "mlp")[i % 2], 0, lag, reduce, scale)
    lands = {x.output: k for k, read in enumerate(plan.landings) for x in read if x.on_base}
    assert lands == {m: min(m + lag + 1, 2 * L) for m in kept}
    assert plan.blocking == tuple(i == 2 * L - 1 for i in range(2 * L))
    assert plan.equal_reads == (True, *[False] * (2 * L - 1), True)
    assert plan.longest_flight == min(lag, max(2 * L - 1 - m for m in kept))


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("accumulate-4x-lag12", "12 sublayers but the model has only 12;"),
        ("accumulate-8x-lag99", "99 sublayers but the model has only 12;"),
        ("accumulate-2x-lag4@1-2", "4 sublayers but its layers have only 4;"),
        ("dtp-12", "12 sublayers but the model has only 12;"),
    ],
)
def test_a_delay_beyond_the_end_is_refused(name: str, has: str) -> None:
    """It would be the same model as a smaller one, under another name."""
    with pytest.raises(UserError, match=f"delays by {has} give a smaller number, or more layers"):
        resolve_plan(name, L, 2)


def test_ranges_whose_sums_are_in_flight() -> None:
    """The range takes at once what the layers below have in flight, and its own last sum is read as
    late as the layers above say. Catches an output of another kind that is lost on the base."""
    plan = resolve_plan("ladder@0-1,accumulate-2x-lag1@2-3,ladder@4", L, 2)
    assert [record.peer_lag for record in plan.sublayers] == [1] * 4 + [0, 1, 1, 1] + [1, 1, 0, 0]
    outputs = [[(x.output, x.on_base) for x in read] for read in plan.landings]
    assert outputs[4:10] == [
        [(2, False), (3, False)],  # the range's first read
        [(4, False)],
        [(5, False)],
        [(5, True), (6, False)],  # the sum of 4 and 5, and the own part of 6
        [],  # a ladder's read, which leaves output 7 out
        [(7, True)],  # the sum of 6 and 7, while output 8 is in flight
    ]
    assert plan.equal_reads == tuple(n not in (5, 6, 7, 8) for n in range(2 * L + 1))
    assert plan.base_needed == tuple(4 <= n < 9 for n in range(2 * L + 1))
    standard = resolve_plan("accumulate-2x-lag1@0-1", L, 2)
    assert [x.output for x in standard.landings[4]] == [3]
    assert standard.equal_reads[4:] == (True,) * (2 * L - 3)


@pytest.mark.parametrize("delay", [1, 2, 3, 6, 7, 11])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_dtp_never_blocks(delay: int, degree: int) -> None:
    """DESIGN's bullet on DTP. Catches sqrt(T) on one stage only, and a last stage that is sent."""
    plan = resolve_plan(f"dtp-{delay}", L, degree)
    count = 2 * L
    for n, record in enumerate(plan.sublayers):
        edge = n < delay or n >= count - delay
        assert (record.own_lag, record.peer_lag) == (0, delay)
        assert record.reduce == ("none" if n >= count - delay else "output")
        assert record.own_scale == pytest.approx(math.sqrt(degree) if edge else 1.0)
    assert plan.collectives == count - delay
    assert sum(plan.blocking) == 0
    assert plan.depends_on_tp
    assert plan.final_mean
    assert plan.equal_reads == (True,) + (False,) * count


def test_dtp_without_delay_is_standard() -> None:
    """DESIGN: d = 0 is `standard`; so it needs no tp_degree."""
    assert resolve_plan("dtp-0", L).sublayers == resolve_plan("standard", L).sublayers
    assert small_config("dtp-0").plan.sublayers == small_config("standard").plan.sublayers


def test_none_drops_every_reduce() -> None:
    """The paper's upper bound: standard without communication, and recognisable as such."""
    plan = resolve_plan("none", L)
    assert plan.sublayers == tuple(both(reduce="none") * L)
    assert (plan.collectives, sum(plan.blocking)) == (0, 0)
    assert plan.no_comm
    assert not plan.final_mean
    assert not resolve_plan("standard", L).no_comm


# What follows from the records, against the definition played out


def groups_of(plan: Plan) -> dict[int, range]:
    """For each `accumulated` reduce the sublayers that it sums: it and those since the last one."""
    found, begin = {}, 0
    for n, record in enumerate(plan.sublayers):
        if record.reduce == "accumulated":
            found[n] = range(begin, n + 1)
        if record.reduce != "none":
            begin = n + 1
    return found


def simulate(plan: Plan) -> tuple[list[set[int]], list[set[int]], list[bool]]:
    """Per read: this rank's outputs and the peers' that are in the residual, and whether equal.

    By the definition alone. Each rank's residual is a bag of (output, whose, factor). A `residual`
    reduce makes all bags one, and a group's sum, which has the factor 1 of each rank's part, makes
    them one as to the group's outputs: these are settled.
    """
    records = plan.sublayers
    own_seen: list[set[int]] = []
    peers_seen: list[set[int]] = []
    equal: list[bool] = []
    own: set[int] = set()
    due: set[int] = set()  # the peers' parts that lags do not keep out
    settled: set[int] = set()
    for n in range(len(records) + 1):
        end = n == len(records)
        own |= {m for m in range(n) if end or m < n - records[n].own_lag}
        due |= {m for m in range(n) if end or m < n - records[n].peer_lag}
        if n and records[n - 1].reduce == "residual":
            own, due, settled = set(range(n)), set(range(n)), set(range(n))
        for last, group in groups_of(plan).items():
            if last in due:
                settled |= set(group)
        own |= settled
        peers = {m for m in due if records[m].reduce in ("output", "residual")} | settled
        own_seen.append(set(own))
        peers_seen.append(peers)
        since = (own | peers) - settled
        equal.append(all(m in own and m in peers and records[m].own_scale == 1 for m in since))
    return own_seen, peers_seen, equal


def play_landings(plan: Plan) -> tuple[list[set[int]], list[set[int]]]:
    """The same sets as a pass would build them; asserts that nothing is summed twice."""
    own: dict[int, float] = {}  # output -> factor of this rank's own partial in its residual
    peers: dict[int, int] = {}  # output -> times its peers' partials are in the residual
    base: dict[int, int] | None = None  # output -> times it is in the base
    groups = groups_of(plan)
    waited: set[int] = set()
    own_seen, peers_seen = [], []
    for n, read in enumerate(plan.landings):
        assert [landing.output for landing in read] == sorted({x.output for x in read})
        for landing in read:
            m = landing.output
            assert m < n, "landed before it was computed"
            if landing.summed:
                assert m not in waited, "waited for twice"
                assert plan.sublayers[m].reduce != "none"
                waited.add(m)
            if landing.on_base:
                assert base is not None, "no base is kept"
                for k in groups[m]:
                    base[k] = base.get(k, 0) + 1
                own, peers = {k: float(count) for k, count in base.items()}, dict(base)
                continue
            if landing.replaces:
                own, peers = dict.fromkeys(range(m + 1), 1.0), dict.fromkeys(range(m + 1), 1)
                continue
            own[m] = own.get(m, 0.0) + landing.own + landing.summed
            if landing.summed:
                peers[m] = peers.get(m, 0) + 1
        if not plan.base_needed[n]:
            base = None
        elif plan.equal_reads[n]:
            assert base is None or base == peers, "a base that another read gave"
            base = dict(peers)
        own_seen.append({m for m, factor in own.items() if factor})
        peers_seen.append(set(peers))
        assert set(peers.values()) <= {1}
        for m, factor in own.items():
            settled = m in peers and any(
                record.reduce == "residual" or (record.reduce == "accumulated" and m in groups[k])
                for k, record in enumerate(plan.sublayers[:n])
                if k >= m
            )
            scale = 1.0 if settled else plan.sublayers[m].own_scale
            assert factor == pytest.approx(0.0 if m not in own_seen[-1] else scale)
    posted = {n for n, record in enumerate(plan.sublayers) if record.reduce != "none"}
    assert waited == posted, "a reduce that nobody waits for"
    return own_seen, peers_seen


@pytest.mark.parametrize("seed", range(200))
def test_landings_play_out_the_definition(seed: int) -> None:
    """Every part lands once, when the definition says. Catches an output lost or landed twice
    where lags change between sublayers, own and peers differ, or a `residual` reduce intervenes."""
    rng = random.Random(seed)
    plan = random_plan(rng, rng.randint(1, 6), stay_equal=seed % 5 == 0)
    own, peers, equal = simulate(plan)
    assert play_landings(plan) == (own, peers)
    assert plan.equal_reads == tuple(equal)
    records = plan.sublayers
    assert plan.depends_on_tp == any(
        (r.own_lag, r.reduce, r.own_scale) != (r.peer_lag, "output", 1.0) for r in records
    )
    if not plan.depends_on_tp:
        assert all(equal)
    assert resolve_plan(plan.to_dict(), plan.num_layers) == plan
    # In the end all is in the residual: own parts, and the peers' of what was reduced.
    count = len(records)
    last_sync = max((n for n in range(count) if records[n].reduce == "residual"), default=-1)
    grouped = {n for group in groups_of(plan).values() for n in group}
    assert own[-1] == set(range(count))
    assert peers[-1] == {
        n for n in range(count) if n <= last_sync or n in grouped or records[n].reduce != "none"
    }
    # Each output is let go once, not before its last landing nor later than a group's sum.
    assert sorted(m for done in plan.done for m in done) == list(range(count))
    lands = {x.output: n for n, read in enumerate(plan.landings) for x in read}
    sums = {m: lands[last] for last, group in groups_of(plan).items() for m in group}
    for n, done in enumerate(plan.done):
        assert all(n == lands.get(m, sums.get(m)) for m in done)
    # A reduce blocks where it is first needed by the very next read.
    for n in range(count):
        needed = n in peers[n + 1] and records[n].reduce != "none"
        assert plan.blocking[n] == needed


def test_random_plans_have_sums_in_flight() -> None:
    """What the tests of random plans rest on: groups under way at once, and own parts kept."""
    kept = under_way = 0
    for seed in range(200):
        plan = random_plan(random.Random(seed), 5)
        sums = {m: read for read, each in enumerate(plan.landings) for m in
                (landing.output for landing in each if landing.on_base)}  # fmt: skip
        kept += any(
            landing.on_base and len(read) > k + 1 and read[k + 1].own and not read[k + 1].summed
            for read in plan.landings for k, landing in enumerate(read)
        )  # fmt: skip
        under_way += any(m < k < sums[m] - 1 for m in sums for k in sums)
    assert kept > 40
    assert under_way > 20


@pytest.mark.parametrize("name", PLANS)
def test_landings_of_the_sample_plans(name: str) -> None:
    plan = resolve_plan(PLANS[name], 4, 4)
    own, peers, equal = simulate(plan)
    assert play_landings(plan) == (own, peers)
    assert plan.equal_reads == tuple(equal)


@pytest.mark.parametrize(
    ("plan", "flight"), [("standard", 0), ("ladder", 1), ("hybrid", 1), ("dtp-3", 3), ("none", 0)]
)
def test_longest_flight(plan: str, flight: int) -> None:
    """Buffers of outputs in flight are as many: catches one that is written before it is read."""
    assert resolve_plan(plan, L, tp_degree=2).longest_flight == flight
