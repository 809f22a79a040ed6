"""How much longer products by chunks take than one: by hand, and what a table then picks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.ops.derive import entries, picked_by, summarise
from ladder.bench.ops.points import Variant
from ladder.ops import explain, registry
from ladder.ops.registry import OPERATORS, VARIABLE, Call, bucket
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
    """257 rows have three rows of tiles, 514 have five; 512 of 1024 rows lose nothing.

    A shard takes 0.5 x 1700 / 24576 of the product on the link.
    """
    exchange = 0.5 * 1700 / 24576
    assert surplus(RS, "chunked", 1024, 12288) == 0
    longer = 2 * 1.5 * SLOT / least_taken(514, 12288) - 1
    assert surplus(RS, "chunked", 514, 12288) == pytest.approx(longer / exchange)
    assert longer > 0.3
    # 47 waves of all rows, 2 x 24 of the two chunks; with two streams they share the last one.
    k = 12288
    assert surplus(AG, "chunked", 8192, 24576, k=k) == pytest.approx((48 / 47 - 1) / exchange)
    assert surplus(AG, "chunked", 8192, 24576, k=k, streams=2) == 0
    assert surplus(AG, "waiting", 8192, 24576, k=k) == 0
    assert surplus(AG, "waiting", 514, 24576, k=k) > 1  # no tile has rows of two ranks
    assert surplus(AG, "waiting", 512, 24576, k=k, tile="256x128x64") == 0
    # Blocks are chunks, too, and each reads the whole weight; those of `ring` are two.
    assert surplus(AR, "chunked", 1024, 12288, blocks=4) > 1
    assert surplus(AR, "ring", 2048, 12288) == surplus(AR, "chunked", 2048, 12288, blocks=2)
    # A product of less depth is shorter, and the exchange takes as long.
    assert surplus(RS, "chunked", 514, 12288, k=2048) == pytest.approx(longer / 12 / exchange)
    # Fewer rows than ranks: empty chunks take nothing.
    assert surplus(AR, "chunked", 1, 12288, 4) == 0


def entry(op: str, of: Call, name: str = "chunked") -> dict[str, Any]:
    return {
        "op": op, "device": of.device, "dtype": "bfloat16", "ranks": of.ranks,
        "sizes": list(of.sizes), "implementation": name, "options": {}, "source": "a test",
    }  # fmt: skip


def test_a_table_is_not_for_such_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between measured sizes, too, what is picked is not slower than the product and NCCL."""
    whole, ragged = call(RS, 1024, 12288), call(RS, 514, 12288)
    assert whole.sizes == ragged.sizes
    file = tmp_path / "table.json"
    file.write_text(json.dumps([entry(RS, whole)]))
    monkeypatch.setenv(VARIABLE, str(file))

    def picked(m: int, **more: Any) -> registry.Choice:
        return explain(RS, [(m, 24576), (24576, 12288)], ranks=2, device="NVIDIA H200", **more)

    assert picked(1024).implementation == registry.listed(whole)[0] == "chunked"
    assert picked(514).implementation == registry.listed(ragged)[0] == "staged"
    assert "table.json has 'chunked', whose tiles take longer at this size" in picked(514).why
    assert picked(514, any_order=True).implementation == "collective"
    assert registry.listed(replace(ragged, exact=()))[0] == "chunked"  # of its bucket, it is
    with registry.use(RS, "chunked"):
        assert picked(514).implementation == "chunked"  # who asks for it gets it


def test_slow_points_at_such_rows_do_not_keep_it_out_of_a_table() -> None:
    """Their picks are `staged`'s; where nothing is lost in tiles, being slower counts."""
    staged, chunked = Variant("staged"), Variant("chunked")

    def point(m: int, us: float) -> Any:
        each = [timed("alone", "alone", 80.0), timed("NCCL", "collective", 100.0),
                timed("staged", "operator", 110.0, variant=staged),
                timed("chunked", "operator", us, variant=chunked)]  # fmt: skip
        return call(RS, m, 12288), summarise(each, 1.0)

    points = [point(514, 300.0), point(1024, 90.0)]
    (made,) = entries(points, "a test")
    assert (made["implementation"], made["sizes"]) == ("chunked", [1024, 16384, 32768])
    assert picked_by(points, [made]) == [
        f"{RS} -0.50 to 0.50 (below 0, slower than the baseline: 1 of 2)",
        f"{RS} in any order 0.50",  # `collective` was not measured
    ]
    (made,) = entries([point(1000, 300.0), points[1]], "a test")
    assert surplus(RS, "chunked", 1000, 12288) == 0
    assert made["implementation"] == "staged"
