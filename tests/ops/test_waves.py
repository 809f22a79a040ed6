"""How much longer products by chunks take than one: by hand, and what a table then picks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.ops.derive import summarise
from ladder.bench.ops.points import Variant
from ladder.bench.ops.table import (
    Measured,
    entries,
    host_waits,
    picked_by,
    recorded_points,
    timed_entry,
    times_of,
)
from ladder.bench.results import read_results
from ladder.cli import main
from ladder.comm.capture import MODES, Mode
from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
from ladder.ops import Choice, between, choice, explain, use
from ladder.ops.registry import OPERATORS, SERIAL, Call, bucket
from ladder.ops.table import PACKAGED, VARIABLE
from ladder.ops.waves import count, least_taken, split, taken
from tests.bench.records import timed

RS, AG, AR = "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"
SLOT = 128 * 256  # elements of the largest tile


def call(op: str, m: int, n: int, ranks: int = 2, k: int = 24576) -> Call:
    sizes = m, n, k
    return Call(op, "NVIDIA H200", torch.bfloat16, ranks, bucket(sizes), exact=sizes)


def surplus(
    op: str, name: str, m: int, n: int, ranks: int = 2, k: int = 24576, **options: Any
) -> float:
    found = OPERATORS[op].implementations[name].surplus
    assert found is not None
    return found(call(op, m, n, ranks, k), options)


def test_waves() -> None:
    """On 132 multiprocessors; a product with few tiles is split by depth."""
    assert count(257, 12288, (128, 256)) == 3 * 48
    assert taken(257, 12288, (128, 256)) == 2 * SLOT  # 144 tiles
    assert least_taken(257, 12288) == 2 * 0.75 * SLOT  # 192 tiles of 128 x 192
    assert split(64, 2048, (128, 256)) == 16
    assert taken(64, 2048, (128, 256)) == SLOT / 16


def test_chunks_of_ragged_rows_take_more_tiles() -> None:
    """257 rows have three rows of tiles, 514 have five; 512 of 1024 rows lose nothing."""
    assert surplus(RS, "chunked", 1024, 12288) == 0
    longer = 2 * 1.5 * SLOT / least_taken(514, 12288) - 1
    assert surplus(RS, "chunked", 514, 12288) == pytest.approx(longer)
    assert longer > 0.3
    # 47 waves of all rows, 2 x 24 of the two chunks; with two streams they share the last one.
    k = 12288
    assert surplus(AG, "chunked", 8192, 24576, k=k) == pytest.approx(48 / 47 - 1)
    assert surplus(AG, "chunked", 8192, 24576, k=k, streams=2) == 0
    gradients = [surplus(GATHER_BACKWARD, "chunked", 5248, 3584, k=1280, streams=n) for n in (1, 2)]
    assert gradients[0] == gradients[1] > 0.3  # the second stream is the sum's
    assert surplus(AG, "waiting", 8192, 24576, k=k) == 0
    assert surplus(AG, "waiting", 514, 24576, k=k) > 0.1  # no tile has rows of two ranks
    assert surplus(AG, "waiting", 512, 24576, k=k, tile="256x128x64") == 0
    # Blocks are chunks, too, and each reads the whole weight; those of `ring` are two.
    assert surplus(AR, "chunked", 1024, 12288, blocks=4) > 0.1
    assert surplus(AR, "ring", 2048, 12288) == surplus(AR, "chunked", 2048, 12288, blocks=2)
    # Chunks of 256 rows fill 96 tiles of a wave of 132, pairs of them 192 of two.
    alone, pairs = (surplus(RS, "chunked", 1024, 12288, 4, pairs=p) for p in (False, True))
    height = {rows: least_taken(rows, 12288) for rows in (256, 512, 1024)}
    assert alone == pytest.approx(4 * height[256] / height[1024] - 1)
    assert pairs == pytest.approx((height[512] + 2 * height[256]) / height[1024] - 1)
    # Of two and three ranks there is no pair, of five one, but for the last rank.
    for ranks in (2, 3):
        chunks = surplus(RS, "chunked", 257 * ranks, 12288, ranks)
        assert surplus(RS, "chunked", 257 * ranks, 12288, ranks, pairs=True) == chunks > 0
    wanted = (height[512] + 3 * height[256]) / least_taken(1280, 12288) - 1
    assert surplus(RS, "chunked", 1280, 12288, 5, pairs=True) == pytest.approx(wanted)
    # Fewer rows than ranks: empty chunks take nothing.
    assert surplus(AR, "chunked", 1, 12288, 4) == 0


def entry(of: Call, host_us: float = 0.0, **times: float) -> dict[str, Any]:
    """Of `chunked`. times: as of an element of `measured`."""
    measured = {"us": 900.0, "instead_us": 945.0, "sizes": list(of.exact), **times}
    return {
        "op": of.op, "device": of.device, "dtype": "bfloat16", "ranks": of.ranks,
        "sizes": list(of.sizes), "mode": of.mode, "implementation": "chunked", "options": {},
        "measured": [measured], "host_us": host_us, "source": "a test",
    }  # fmt: skip


def refused(of: Call, given: dict[str, Any]) -> str | None:
    return between.refusal(of, given)


def captured(of: Call) -> Call:
    return replace(of, mode="captured")


def test_what_is_gained_goes_with_the_exchange_over_the_product() -> None:
    """A gather moves m x k, a sum m x n; and so their gradients, of which each is the other."""
    for op, width in ((AG, 2), (SCATTER_BACKWARD, 2), (RS, 3), (GATHER_BACKWARD, 3)):
        wide, deep = call(op, 8192, 2 * 4096, k=4096), call(op, 8192, 4096, k=2 * 4096)
        found = [between._width(each) / between._width(call(op, 8192, 4096, k=4096))
                 for each in (wide, deep)]  # fmt: skip
        assert found == ([2, 1] if width == 2 else [1, 2]), op


def test_between_measured_sizes_tiles_may_take_what_is_gained() -> None:
    """Of 2434 rows by 24576 and 8192, chunks take 48 waves for 47 and no tile more; measured at
    4096 rows, where none is lost."""
    there, here = call(AG, 4096, 24576, k=12288), call(AG, 8192, 24576, k=12288)
    assert surplus(AG, "chunked", 4096, 24576, k=12288) == 0
    assert surplus(AG, "chunked", 2434, 24576, k=12288) == 0
    longer = surplus(AG, "chunked", 8192, 24576, k=12288)
    for gained, said in ((longer + 0.011, None), (longer + 0.009, "whose tiles take 2.1% longer")):
        given = entry(captured(there), us=1000.0, instead_us=1000.0 * (1 + gained))
        found = refused(captured(here), given)
        assert (found is None) == (said is None), found
        assert said is None or (found or "").startswith(said)
        assert refused(captured(there), given) is None
    # What was lost there, too, does not count again.
    given = entry(captured(here), us=1000.0, instead_us=1011.0)
    assert refused(captured(call(AG, 8190, 24576, k=12288)), given) is None
    # The exchange of wider products is a smaller share of them.
    given = entry(captured(call(AG, 4096, 12288, k=12288)), us=1000.0, instead_us=1060.0)
    assert refused(captured(here), given) is not None
    assert refused(captured(call(AG, 8192, 24576 // 2, k=12288)), given) is None


def test_eager_calls_are_long_enough_for_the_host() -> None:
    there = call(RS, 4096, 12288)
    given = entry(there, host_us=400.0, us=3600.0, instead_us=3840.0)
    assert refused(call(RS, 512, 12288), given) is None  # it takes 480 us without
    said = refused(call(RS, 416, 12288), given) or ""
    assert (
        said == "which the host may take 400 us to enqueue, and a call without it takes about 390"
    )
    assert refused(captured(call(RS, 416, 12288)), {**given, "mode": "captured"}) is None
    assert refused(call(RS, 416, 12288), {**given, "measured": []}) is None
    assert refused(replace(there, exact=()), given) is None
    assert refused(call(RS, 0, 12288), given) is None


def test_a_table_is_not_for_such_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between measured sizes, too, what is picked is not slower than the product and NCCL."""
    whole, ragged = captured(call(RS, 1024, 12288)), captured(call(RS, 514, 12288))
    assert whole.sizes == ragged.sizes
    file = tmp_path / "table.json"
    file.write_text(json.dumps([entry(whole)]))
    monkeypatch.setenv(VARIABLE, str(file))

    def picked(m: int, **more: Any) -> Choice:
        given = {"ranks": 2, "device": "NVIDIA H200", "mode": "captured", **more}
        return explain(RS, [(m, 24576), (24576, 12288)], **given)

    assert picked(1024).implementation == choice.listed(whole)[0] == "chunked"
    assert dict(picked(1024, mode="eager").options) == {"streams": 2}  # of the packaged table
    assert picked(514).implementation == choice.listed(ragged)[0] == "staged"
    assert "table.json has 'chunked', whose tiles take 50.0% longer at this size" in picked(514).why
    assert picked(514, any_order=True).implementation == "collective"
    assert choice.listed(replace(ragged, exact=()))[0] == "chunked"  # of its bucket, it is
    with use(RS, "chunked"):
        assert picked(514).implementation == "chunked"  # who asks for it gets it


def test_slow_points_at_such_rows_do_not_keep_it_out_of_a_table() -> None:
    """Their picks are `staged`'s; where nothing is lost in tiles, being slower counts."""
    staged, chunked = Variant("staged"), Variant("chunked")

    def point(m: int, us: float) -> Any:
        each = [timed("alone", "alone", 80.0, "captured"),
                timed("NCCL", "collective", 100.0, "captured"),
                timed("staged", "operator", 110.0, "captured", variant=staged),
                timed("chunked", "operator", us, "captured", variant=chunked)]  # fmt: skip
        return call(RS, m, 12288), summarise(each, 1.0)

    points = [point(514, 300.0), point(1024, 90.0)]
    (made,) = entries(points, "a test")
    assert (made["implementation"], made["sizes"]) == ("chunked", [1024, 16384, 32768])
    assert [each["sizes"][0] for each in made["measured"]] == [1024]
    assert picked_by(points, [made]) == [
        f"{RS}, captured -0.50 to 0.50 (below 0, slower than the baseline: 1 of 2)",
        f"{RS} in any order, captured 0.50",  # `collective` was not measured
    ]
    (made,) = entries([point(1000, 300.0), points[1]], "a test")
    assert surplus(RS, "chunked", 1000, 12288) == 0
    assert made["implementation"] == "staged"


# -- records ----------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
RECORDS = [RESULTS / f"2026-11-{day}-ops-h200x2.jsonl" for day in (22, 23)]
H100S = ("ops-rows", "ops", "ops-summing", "ops-sums", "ops-gathers", "ops-gpt3", "ops-bags")
OF_FOUR = ("ops", "ops-turns", "ops-llama", "ops-scatters")
IN_BLOCKS = ("blocked-streams", "blocked-llama2", "blocked")
OF_FOUR_AGAIN = (
    "ops-prompts", "ops-llama", "ops-few", "ops-bags", "ops-pairs", "ops-train", "ops-shots",
)  # fmt: skip
OF_TWO_AGAIN = ("backward", "whole", "blocks", "train")
OF_TABLE = [
    *RECORDS, *(RESULTS / f"2026-11-25-{kind}-h100x2.jsonl" for kind in H100S),
    RESULTS / "2026-11-25-ops-h200x2.jsonl",
    RESULTS / "2026-11-26-ops-again-h100x2.jsonl",
    RESULTS / "2026-11-26-ops-train-h100x2.jsonl",
    RESULTS / "2026-11-26-ops-scatters-h100x2.jsonl",
    *(RESULTS / f"2026-11-27-{kind}-h200x4.jsonl" for kind in OF_FOUR),
    *(RESULTS / f"2026-11-28-{kind}-h200x4.jsonl" for kind in IN_BLOCKS),
    RESULTS / "2026-11-28-ops-bags-h200x2.jsonl",
    *(RESULTS / f"2026-11-28-{kind}-h200x4.jsonl" for kind in OF_FOUR_AGAIN),
    *(RESULTS / f"2026-11-28-ops-gradients-h200x{ranks}.jsonl" for ranks in (2, 4)),
    *(RESULTS / f"2026-11-28-ops-{kind}-h200x2.jsonl" for kind in OF_TWO_AGAIN),
    RESULTS / "2026-11-29-ops-train-h200x4.jsonl",
]  # fmt: skip


def measured_in(file: Path) -> list[Measured]:
    (measured,) = recorded_points(read_results(file)).values()
    return measured


def points_of(file: Path) -> list[tuple[Call, dict[Any, dict[Variant, float]]]]:
    return [(each, times_of(found)) for each, found in measured_in(file)]


def test_chunks_take_the_waves_that_were_recorded() -> None:
    """Products alone, whole and in the two chunks of the ranks, in 16 shapes. The second launch
    takes some 3 us. One shape, m 2434 by 24576, said that there are no tiles of 192 x 128."""
    found = 0
    for each, timed_ways in recorded_points(read_results(RECORDS[1])).popitem()[1]:
        us: dict[str, float] = {}  # the mean of both modes
        for way, result in timed_ways:
            us[way.name] = us.get(way.name, 0.0) + result.us / len(MODES)
        rows, outputs, _ = each.exact
        longer = 2 * least_taken(rows // 2, outputs) / least_taken(rows, outputs)
        expected = us["alone"] * longer + 3.0
        assert us["alone, in chunks"] == pytest.approx(expected, rel=0.03), each.exact
        found += 1
    assert found == 16


@pytest.mark.parametrize("file", RECORDS, ids=["first", "second"])
@pytest.mark.parametrize("mode", MODES)
def test_a_size_held_out_is_picked_only_where_it_was_not_slower(file: Path, mode: Mode) -> None:
    """An entry of each size alone, for each other recorded size of the same product."""
    points, base, tried = points_of(file), Variant("staged"), 0
    for (here, own), (there, times) in permutations(points, 2):
        if (here.op, here.exact[1:]) != (there.op, there.exact[1:]):
            continue
        waits = host_waits([each for each in measured_in(file) if each[0] != there])
        for variant, us in own[mode].items():
            found = OPERATORS[here.op].implementations[variant.name]
            if found.surplus is None or not found.ordered or us > own[mode][base]:
                continue
            if variant in times[mode]:
                at = replace(here, mode=mode), own[mode]
                given = timed_entry([at], variant, base, waits)
                picked = between.refusal(replace(there, mode=mode), given) is None
                slower = times[mode][variant] > times[mode][base]
                assert not (picked and slower), (here.exact, there.exact, variant)
                tried += picked
    assert tried > 15


def test_what_the_shipped_table_picks_was_never_slower_than_staged() -> None:
    """At every recorded point, in its newest record, in each mode; m 2434 of a gather, too, is by
    chunks."""
    records = [record for file in OF_TABLE for record in read_results(file)]
    newest = {
        each: found for measured in recorded_points(records).values() for each, found in measured
    }
    compared = 0
    for each, found in newest.items():
        times = times_of(found)
        for mode in MODES:
            name, options = choice.listed(replace(each, mode=mode))
            us = times[mode].get(Variant(name, tuple(options.items())))
            # Some operators' `staged` cannot be captured.
            staged = {**times["eager"], **times[mode]}[Variant("staged")]
            if us is not None:
                assert us <= staged, (each.exact, mode, name)
                compared += name not in SERIAL
    assert compared > 500
    ragged = call(AG, 2434, 24576, k=12288)
    assert choice.listed(captured(ragged)) == ("chunked", {"streams": 2})
    assert choice.listed(ragged) == ("chunked", {})
    half = replace(call(SCATTER_BACKWARD, 8192, 7168, k=4096), any_order=True)
    assert choice.listed(captured(half))[0] == "chunked"
    assert choice.listed(half)[0] == "staged"


def test_two_models_may_have_the_same_product() -> None:
    """Measured for both, the newer run counts: the older one may lack an implementation."""
    records = read_results(RECORDS[1])
    again = [record | {"point": record["point"] | {"shape": "another"}} for record in records]
    (once,), (twice,) = (recorded_points(some).values() for some in (records, records + again))
    assert [call for call, _ in once] == [call for call, _ in twice]


def test_the_shipped_table_is_that_of_the_records(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    records = [str(each) for each in OF_TABLE]
    assert main(["bench", "ops", "--write-table", str(file), "--records", *records]) == 0
    assert file.read_text() == PACKAGED.read_text()
