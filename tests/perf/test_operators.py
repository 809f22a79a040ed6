"""Predicted operators: their parts, and their records."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest

from ladder.bench.ops.points import BY_COLUMNS, OpPoint, Variant, calls_of
from ladder.cli import main
from ladder.models.errors import UserError
from ladder.operator_names import (
    GATHER,
    GATHER_BACKWARD,
    LANDING,
    REDUCE,
    SCATTER,
    SCATTER_BACKWARD,
)
from ladder.ops import schedules, track_schedules
from ladder.ops.registry import OPERATORS
from ladder.ops.track_maps import all_to_all
from ladder.perf.machine import Curve, Machine, Value
from ladder.perf.machine_files import load
from ladder.perf.nodes import for_degree
from ladder.perf.nodes import load as load_any
from ladder.perf.operators.cost import HOST_LAUNCH_US, HOSTS, OperatorCost
from ladder.perf.operators.lower import OPS
from ladder.perf.operators.predict import BACKWARD, Predictor, plain, predicts
from ladder.perf.operators.scores import picks, scores, summary

RECORD, SECOND, SHORT = (
    Path(__file__).parents[2] / f"benchmarks/results/2026-11-{day}-ops-h200x2.jsonl"
    for day in (22, 23, 25)
)
STREAMS = (("streams", 2),)
ALONE, STAGED, CHUNKED = Variant("alone"), Variant("staged"), Variant("chunked")


def point(op: str, m: int = 4096, ranks: int = 2) -> OpPoint:
    n, k = (49152, 12288) if op in BY_COLUMNS else (12288, 49152)
    return OpPoint(op, "flux-gpt3", m, n, k, ranks, "bfloat16")


def machine(gb_s: float = 378.0, beside: float = 1.0, gap: float = 0.0) -> Machine:
    """Two H200 without a limit of power, with copies at a rate that slow a product to `beside`."""
    found = load("h200x2")
    changed = {"prompt_gap_us": gap, "power_limit": 1.0, "product_beside_copies": beside}
    values = {name: Value(value, "declared: a test") for name, value in changed.items()}
    copy = Curve("peer copy", {}, ((0.0, 0.0), (1e9, 1e6 / gb_s)), "declared: a test")
    kept = tuple(each for each in found.curves if each.name != "peer copy")
    return replace(found, values={**found.values, **values}, curves=(*kept, copy))


# -- predictions ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if op not in BACKWARD])
def test_staged_is_the_product_then_its_exchanges(op: str) -> None:
    found = machine(gap=2.0)
    times, size = Predictor(found), point(op)
    alone = times.us(size, ALONE)
    nbytes = 2 * 4096 * 12288  # of the gathered rows, and of a partial
    exchange = found.nccl("all-gather", nbytes).us + 2.0
    rows = {GATHER: 0, SCATTER: 3, LANDING: 5, REDUCE: 3}[op]  # read and written by the sum
    summed = rows * nbytes / 2 / (1e6 * found.value("copy_tb_s")) + (2.0 if rows else 0.0)
    again = exchange if op == REDUCE else 0.0
    assert times.us(size, STAGED) == pytest.approx(alone + exchange + summed + again)
    assert times(size, plain(op)).efficiency == 0.0


@pytest.mark.parametrize(
    ("op", "of", "kind"),
    [(GATHER_BACKWARD, SCATTER, "reduce-scatter"), (SCATTER_BACKWARD, GATHER, "all-gather")],
)
def test_a_gradients_baseline_is_both_products_and_an_exchange(op: str, of: str, kind: str) -> None:
    """Of whole rows and of the matrix; `staged` is what the table picks."""
    found = machine(gap=2.0)
    times, size = Predictor(found), point(op)
    exchange = found.nccl(kind, 2 * 4096 * 12288).us + 2.0
    assert times.us(size, plain(op)) == pytest.approx(times.us(size, ALONE) + exchange)
    one = times.us(point(of), ALONE)
    assert 1.9 * one < times.us(size, ALONE) < 2.1 * one
    assert not predicts(size, STAGED)


@pytest.mark.parametrize(("op", "of"), [(GATHER_BACKWARD, SCATTER), (SCATTER_BACKWARD, GATHER)])
def test_a_gradient_hides_the_copies_behind_the_other_product(op: str, of: str) -> None:
    """Over links for whose copies the exchange's own products are too short."""
    times = Predictor(machine(gb_s=12.0))
    alone, both = (times(point(each), CHUNKED).ect_us for each in (of, op))
    assert both < 0.5 * alone
    late = times(point(op), Variant("chunked", (("streams", 2),))).ect_us
    assert late <= (both if op == GATHER_BACKWARD else 1.05 * both)


@pytest.mark.parametrize("op", OPS)
def test_chunks_over_an_endless_link_leave_the_sum_alone(op: str) -> None:
    """Here chunks take as many waves as the whole: E is 1 but for sums and rows put in place."""
    found = Predictor(machine(gb_s=1e9))
    one = found(point(op), CHUNKED)
    rows = {GATHER: 0, SCATTER: 3, LANDING: 5, REDUCE: 3 + 2}.get(op, 0)
    rows = 3 if op == GATHER_BACKWARD else rows
    moved = rows * 4096 * 12288 / (1e6 * found.machine.value("copy_tb_s"))
    # A matrix's gradient is by two parts, each of which fills and ends its tiles.
    parts = found.cost(2).alone(12288, 24576, 2048), found.cost(2).alone(12288, 24576, 4096)
    moved += 2 * parts[0] - parts[1] if op == SCATTER_BACKWARD else 0.0
    assert one.ect_us == pytest.approx(moved, abs=0.01)
    if op == GATHER:
        assert one.efficiency == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_slower_links_and_copies_that_disturb_take_longer(op: str) -> None:
    for way in (CHUNKED, Variant("ring"), Variant("waiting"), Variant("tracked")):
        if not predicts(point(op), way):
            continue
        rates = [Predictor(machine(gb_s)).us(point(op), way) for gb_s in (800, 200, 50, 12)]
        # but for the bandwidth that faster copies take from kernels that move bytes
        assert all(slow > 0.99 * fast for fast, slow in pairwise(rates)), rates
        assert rates[-1] > 4096 * 12288 / 12e3  # what one rank must send
        assert Predictor(machine(beside=0.7)).us(point(op), way) > rates[0]


def test_a_tracked_product_sends_by_its_own_track_map() -> None:
    """The peer's half is sent as soon as the first of its pieces has been computed."""
    found = machine(gb_s=12.0)  # the copies end last
    times, cost = Predictor(found), OperatorCost(found)
    tile = cost.tile(4096, 12288, 24576, 128 * 256)
    half = 16 * 48  # tiles
    sent, size = 1e-3 * 2 * 2048 * 12288 / 12.0, point(SCATTER)
    summed = cost.moves(3 * 2 * 2048 * 12288).us
    for pieces in (1, 2, 4):
        first = ceil(half / pieces / 132) * tile
        us = times.us(size, Variant("tracked", (("pieces", pieces),)))
        assert us == pytest.approx(first + sent + summed, rel=1e-3)


def test_tiles_of_cublas() -> None:
    """A chunk of few rows has smaller tiles, and one of fewer tiles than multiprocessors is split
    in its depth; nothing is faster than the rate of all multiprocessors."""
    cost = OperatorCost(machine())
    square = cost.alone(8192, 8192, 8192)
    assert square == pytest.approx(cost.square)
    assert cost.alone(1024, 12288, 24576) <= 2 * cost.alone(512, 12288, 24576) * 1.0001
    for rows in (128, 512, 3000, 8192):
        perfect = cost.square * rows / 8192 * (4096 / 8192)
        assert cost.alone(rows, 8192, 4096) > 0.95 * perfect
    read = 2 * (8192 * 8192 + 128 * 2 * 8192) / cost.memory
    assert cost.alone(128, 8192, 8192) < 1.6 * read


def test_the_limit_of_power_slows_what_never_pauses() -> None:
    limited = load("h200x2")
    free = replace(
        limited, values={**limited.values, "power_limit": Value(1.0, "declared: a test")}
    )
    for way in (ALONE, STAGED, CHUNKED):
        assert Predictor(limited).us(point(SCATTER), way) > Predictor(free).us(point(SCATTER), way)
    slow, fast = (
        Predictor(each)(point(SCATTER), plain(SCATTER)).ect_us for each in (limited, free)
    )
    assert slow < fast  # the product beside an exchange is slowed less


def test_the_clock_is_that_of_a_benchmarks_turns() -> None:
    """Short turns end before the limit of power has slowed the products."""
    machine = load("h200x2")
    cost = OperatorCost(machine)
    shares = [cost.share(us, us, 4) for us in (10.0, 1e3, 1e4, 1e6)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1.0, abs=0.01)
    least = machine.value("power_limit") ** machine.value("power_exponent")
    assert shares[-1] == pytest.approx(least, abs=0.01)
    small, large = replace(point(SCATTER), m=64), point(SCATTER)
    assert (calls_of(small), calls_of(large)) == (20, 4)


def test_short_eager_calls_wait_for_the_host() -> None:
    """What overlaps, that is; a host of half the speed takes twice as long."""
    found = machine()
    times, cost = Predictor(found), OperatorCost(found)
    short, made = replace(point(SCATTER), m=2048, k=512), schedules.reduce_scatter(0, 2)
    assert times.us(short, CHUNKED, "captured") < 170
    assert times.us(short, CHUNKED, "eager") == cost.host(made) == pytest.approx(185)
    (_, first), (_, second), _ = HOSTS
    enqueued = OperatorCost(found, second)
    assert enqueued.host(made) == pytest.approx(140 + 12 * 3 + 90)
    tracked = track_schedules.tracked(all_to_all(8, 16, 2, 4).compile(0), 2)
    assert enqueued.host(tracked, tiles=True) == pytest.approx(140 + 11 * 3 + 2 * 90)
    then = Predictor(found, first)
    assert then.us(short, CHUNKED, "eager") == pytest.approx(270 + 12 * 8.9)
    assert times.us(short, STAGED, "eager") == times.us(short, STAGED, "captured")
    long = times.us(point(SCATTER), CHUNKED, "eager")
    assert long == times.us(point(SCATTER), CHUNKED, "captured") > 1000
    values = {**found.values, "host_launch_us": Value(2 * HOST_LAUNCH_US, "declared: a test")}
    slow = Predictor(replace(found, values=values), second)
    assert slow.us(short, CHUNKED, "eager") == pytest.approx(2 * enqueued.host(made))


def test_measured_shapes_take_the_place_of_the_square() -> None:
    slow = Curve(
        "matrix", {"outputs": 12288, "inputs": 24576}, ((1024.0, 2e3), (8192.0, 16e3)), "measured"
    )
    found = machine()
    times = Predictor(replace(found, curves=(*found.curves, slow)))
    assert times.us(point(SCATTER), ALONE) == pytest.approx(8e3)
    assert times.us(point(SCATTER), CHUNKED) > 8e3


def test_more_ranks_than_two() -> None:
    times = Predictor(load("h200x4"))
    for op in OPS:
        one = times(point(op, ranks=4), CHUNKED)
        assert one.efficiency is not None
        if op != SCATTER_BACKWARD:  # parts of a matrix's gradient take longer than a whole one
            assert 0 < one.efficiency < 1
    down = Predictor(load("h200x4"))(
        replace(point(SCATTER_BACKWARD, 8192, 4), n=14336, k=4096), Variant("chunked", STREAMS)
    )
    assert down.efficiency is not None
    assert 0.5 < down.efficiency < 1
    assert times.cost(4).machine == for_degree(load("h200x4"), 4)
    assert "copies_beside_product 1 (declared)" in times.unmeasured


def test_pushed_sums_take_our_all_reduces() -> None:
    """In one shot or two, of messages that fit; without peers' memory there are none."""
    machine = load("h200x2")
    times, small = Predictor(machine), replace(point(REDUCE), m=512, n=4096, k=4096)
    alone, gap = times.us(small, ALONE), machine.value("prompt_gap_us")
    pushed = Variant("pushed"), Variant("pushed", (("shots", 2),))
    for variant, algorithm in zip(pushed, ("push", "two-shot"), strict=True):
        us = machine.curve("all-reduce", algorithm=algorithm).at(512 * 4096 * 2.0).us
        assert times(small, variant).ect_us == pytest.approx(us + gap, rel=0.02)
        assert times.us(small, variant) > alone
        assert not times.able(replace(small, m=8192), variant)
    apart = Predictor(load_any("h200x2-no-p2p"))
    assert apart.able(small, STAGED)
    assert not any(apart.able(small, each) for each in (*pushed, CHUNKED))


def test_what_is_not_predicted_is_refused() -> None:
    times = Predictor(load("h200x2"))
    with pytest.raises(UserError, match="linear_all_reduce by staged is not predicted; known: all"):
        times.us(replace(point(SCATTER), op="linear_all_reduce"), STAGED)
    with pytest.raises(UserError, match="is not predicted"):
        times.us(point(GATHER), Variant("tracked"))


# -- records ----------------------------------------------------------------------------------


def test_recorded_operators_are_predicted_as_well_as_they_were() -> None:
    """Nothing was fitted to them. Their products are predicted too slow, by the limit of power."""
    found = scores([RECORD], load("h200x2"))
    errors = summary(found)
    assert {name: each[0] for name, each in errors.items()} == {
        "NCCL": 22, "alone": 22, "chunked": 22, "collective": 16, "staged": 22, "tracked": 10,
        "waiting": 6,
    }  # fmt: skip
    for name, (_, time, _, off) in errors.items():
        assert time < 10, name
        assert sum(map(abs, off)) <= 0.5 * len(off), name
    (_, _, ect, off) = errors["chunked"]
    assert ect < 65
    assert sum(map(abs, off)) < 0.27 * len(off)


@pytest.mark.slow
def test_a_second_record_is_predicted_in_both_modes() -> None:
    """Of it, only the host's time was taken, from one product, and how graphs run two streams."""
    found = scores([SECOND], load("h200x2"))
    for mode, error, regret in (("captured", 0.07, 0.015), ("eager", 0.09, 0.04)):
        here = [each for each in found if each.mode == mode]
        assert len(here) > 100
        assert statistics.mean(abs(each.error) for each in here) < error
        off = [abs(each.off) for each in here if each.off is not None]
        assert statistics.median(off) < 0.13
        picked = picks(here)
        assert len(picked) == 16
        assert statistics.mean(picked) < regret


def test_recorded_gradients() -> None:
    """Nothing was fitted to them."""
    for ranks in (2, 4):
        file = RECORD.with_name(f"2026-11-28-ops-gradients-h200x{ranks}.jsonl")
        errors = summary(scores([file], load(f"h200x{ranks}")))
        ways = [name for name in errors if name.startswith("chunked")]
        assert len(ways) == 3 - ranks // 2
        for name in ways:
            _, time, ect, off = errors[name]
            assert time < 5
            assert ect < 22
            assert sum(map(abs, off)) < 0.18 * len(off)


@pytest.mark.slow
def test_recorded_products_of_two_gpus() -> None:
    """Of half-8b and an 8B, forward and backward, of which nothing was fitted; in blocks, too."""
    for name, calls, limits in (
        ("backward", 56, (4.2, 13.5)), ("train", 56, (3.0, 11.8)), ("blocks", 62, (4.8, 13.5)),
        ("whole", 32, (2.5, 13.5)),
    ):  # fmt: skip
        file = RECORD.with_name(f"2026-11-28-ops-{name}-h200x2.jsonl")
        errors = summary(scores([file], load("h200x2")))
        ways = [errors[way] for way in errors if way.split(":")[0] in ("chunked", "ring")]
        assert sum(way[0] for way in ways) == calls
        for n, limit in enumerate(limits, start=1):
            assert sum(way[0] * way[n] for way in ways) < limit * calls, (name, n)


def test_short_products_whose_rows_are_pushed() -> None:
    """Nothing was fitted to them but the host's time."""
    errors = summary(scores([SHORT], load("h200x2")))
    calls, time, ect, _ = errors["pushed"]
    assert calls == 16
    assert time < 10
    assert ect < 6


def test_validate_prints_operators(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["predict", "validate", str(RECORD), "--machine", "h200x2"]) == 0
    said = capsys.readouterr().out
    assert "what is predicted to be the fastest was it in" in said
    assert "matmul_reduce_scatter_add_rms_norm" in said
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    lines = [each for each in lines if each["point"]["m"] == 4096]
    lines[0]["point"]["way"] = "alone"
    for each in lines:
        if each["point"]["way"] == "chunked":
            each["point"]["way"] = "chunked:streams=2"
        if each["point"]["way"] == "tracked":
            each["point"]["way"] = "gone"  # an implementation of another version
    file = tmp_path / "ops.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["predict", "validate", str(file), "--machine", "h200x2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["phase"] for row in rows} == {"ops"}
    assert {"chunked:streams=2", "waiting", "NCCL"} <= {row["way"] for row in rows}
    assert not {"gone", "torch fused"} & {row["way"] for row in rows}
    del lines[0]["result"]["us"]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["predict", "validate", str(file), "--machine", "h200x2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a record lacks a field" in line


def test_predict_ops(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "ops", "--machine", "h200x2", "--m", "1024"]
    assert main([*words, "--ops", SCATTER, "--tune"]) == 0
    said = capsys.readouterr().out
    assert "chunked:blocks=2,ratio=2,streams=2" in said
    assert "not measured: copies_beside_product 1 (declared)" in said
    assert f"next: ladder bench ops --nproc 2 --ops {SCATTER} --m 1024 --tune" in said
    assert main([*words, "--implementations", "chunked:streams=2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ranks"] == 2
    forward = {op for op in OPS if op not in BACKWARD}  # of a gradient's shape
    assert {row["op"] for row in data["calls"]} == forward
    fastest = [row["way"] for row in data["calls"] if row["fastest"]]
    assert len(fastest) == len(forward)
    words[-1:] = ["8192", "--shapes", "half-8b:backward", "--ops", GATHER_BACKWARD, "--json"]
    assert main(words) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert [row["way"] for row in calls if row["fastest"]] == ["chunked", "chunked"]


def test_what_the_machine_lacks_for_an_implementation_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = "h200x4-no-p2p"
    words = ["predict", "ops", "--machine", machine, "--m", "1024", "--ops", "all_gather_matmul"]
    assert main([*words, "--implementations", "chunked"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"left out: chunked: the GPUs of '{machine}' have no access to peers' memory" in said
    assert "bench machine" not in said
    assert said.endswith(
        "next: env NCCL_P2P_DISABLE=1 ladder bench ops --nproc 4 --ops all_gather_matmul --m 1024 "
        "--implementations chunked"
    )
    assert main([*words, "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["left_out"]
    (said,) = (line for line in lines if "chunked, waiting" in line)
    assert said.endswith(f": the GPUs of '{machine}' have no access to peers' memory")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--ops", "all_gather_matmul", "--m", "3"],
            "4 ranks do not divide m 3; give other ranks",
        ),
        (["--machine", "h200x1"], "--machine=h200x1 has one GPU; give --tp 2 or more"),
        (["--tp", "1"], "--tp=1: a rank alone has nothing to exchange"),
        (["--tp", "8"], "--tp=8: machine 'h200x4' has the collectives of 4 GPUs"),
        (["--ops", "linear_all_reduce"], "--ops=linear_all_reduce is not predicted; choose from"),
        (["--shapes", "dlrm"], "--shapes=dlrm: exchanges of lookups are not predicted; give flux"),
        (["--shapes", "flux-gpt3", "tutel"], "--shapes=tutel: its products are not predicted; "),
        (["--ops", "foo"], f"unknown --ops 'foo'; known: {', '.join(OPS)}\n"),
        (["--m", "1000000000"], "--m=1000000000 must be 1 to 131,072"),
        (
            ["--implementations", "chunked:blocks=99", "--m", "1024"],
            "--implementations=chunked:blocks=99: blocks=99 must be 1 to 8",
        ),
        (["--shapes", "nowhere"], "nowhere"),
    ],
)
def test_predict_ops_refuses(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "ops", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


OPTIONS = sorted(
    {
        (name, option)
        for op in OPS
        for name, each in OPERATORS[op].implementations.items()
        for option in each.options
    }
)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_wrong_option_of_an_implementation_is_one_line(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("0", "-1", "9", "99"):
        word = f"{name}:{option}={value}"
        code = main(["predict", "ops", "--m", "64", "--implementations", word])
        err = capsys.readouterr().err
        if int(value) < 1 or code:
            assert code == 2
            assert err.startswith(f"error: --implementations={word}: ")
            assert err.count("\n") == 1
