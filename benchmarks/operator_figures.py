"""Counterparts of figures of the fused operators' paper (arXiv 2305.06942), as pages.py draws them.

Figures 8 to 10, 13 and 14: the time of an operator over that of its parts one after the other. Both
were measured here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ladder.bench import figures
from ladder.bench.ops.derive import groups
from ladder.bench.ops.page import latest, normalised
from ladder.bench.ops.points import BAGS, EXPERTS, FEW

Records = Sequence[dict[str, Any]]
SAMPLES = "{samples | tables of a rank}, float32"
ROW = 20  # points of height for each bar


def bags(records: Records) -> str:
    """Figure 8: embedding bags and their exchange."""
    bars = over_baseline(records, BAGS, lambda point: point["way"] == "pushed")
    title = f"Embedding bags: {less(bars)} less than lookup, then NCCL"
    return draw(bars, title, f"{SAMPLES}, {where(records)}")


def few_rows(records: Records) -> str:
    """Figure 9: a product of one row and its all-reduce."""
    bars = over_baseline(
        records, FEW, lambda point: point["shape"].startswith("gemv") and point["m"] == 1, True
    )
    title = f"One row: {less(bars)} less than product, then NCCL"
    return draw(bars, title, f"gemv n: a weight [n, 8192], bfloat16, {where(records)}")


def experts(records: Records) -> str:
    """Figure 10: the second products of a mixture of experts and their exchange."""
    bars = over_baseline(records, EXPERTS, lambda point: True, True)
    title = f"Experts: {less(bars)} less than products, then NCCL"
    return draw(bars, title, f"m: rows on each rank, bfloat16, {where(records)}")


def programs(records: Records) -> str:
    """Figure 13: embedding bags by the number of the kernel's programs, which is its occupancy."""
    bars = over_baseline(records, BAGS, lambda point: True)
    fewer = [bar for bar in bars if not bar.bound]
    title = "Embedding bags by programs of the kernel (pushed: all at once)"
    return draw(fewer, title, f"{SAMPLES}, {where(records)}")


def orders(records: Records) -> str:
    """Figure 14: embedding bags by the order of the work. The first record of each way counts."""
    ways = [f"pushed:order={order}" for order in ("oblivious", "remote", "tables")]
    bars = over_baseline(records[::-1], BAGS, lambda point: point["way"] in ways)
    drawn = [bar for bar in bars if not bar.bound]
    oblivious, remote = ([bar.value for bar in drawn if bar.name.endswith(way)] for way in ways[:2])
    saved = [100 * (1 - b / a) for a, b in zip(oblivious, remote, strict=True)]
    least, most = min(saved), max(saved)
    title = f"Peers' samples first save {least:.0f} to {most:.0f} % over rank 0's first"
    return draw(drawn, title, f"{SAMPLES}, {where(records)}")


def over_baseline(
    records: Records, op: str, chosen: Callable[[dict[str, Any]], bool], fastest: bool = False
) -> list[figures.Bar]:
    """Times of an operator's chosen ways over the baseline of the same point, in CUDA graphs."""
    points = groups(latest([r for r in records if r["point"]["op"] == op]))[op, "captured"]
    found = []
    for text, members in sorted(points.items(), key=lambda each: json.loads(each[0])["pooling"]):
        ours = [r for r in members if r["point"]["role"] == "operator" and chosen(r["point"])]
        ours.sort(key=lambda r: ("=" not in r["point"]["way"], r["point"]["way"]))
        if ours:
            others = [r for r in members if r["point"]["role"] != "operator"]
            found += normalised(text, [*others, *ours], fastest)
    return found


def draw(bars: Sequence[figures.Bar], title: str, subtitle: str) -> str:
    return figures.bars(bars, "x", title=title, subtitle=subtitle, row=ROW)


def less(bars: Sequence[figures.Bar]) -> str:
    """The range of the share of time that is saved, as text."""
    saved = [100 * (1 - bar.value) for bar in bars if not bar.bound]
    return f"{min(saved):.0f} to {max(saved):.0f} %"


def where(records: Records) -> str:
    facts = records[0]["machine"]
    return f"{facts['ranks']}x {facts['gpu']}, CUDA graphs; time over the baseline's"
