"""The table of benchmarks/quality.py, and its page, which adds latency."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder.bench import figures
from ladder.bench.inference.command import finished
from ladder.bench.inference.derive import EXPLANATION, HEAD, by_case, cells, derive_rows
from ladder.bench.inference.page import fastest
from ladder.bench.inference.points import describe_case
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, Text, page
from ladder.models.errors import UserError

PLANS = ("standard", "parallel", "ladder", "desync-2x", "desync-4x", "dtp-1")
T = 4  # of the plans that depend on it, and of the latency beside their quality


def read(
    file: Path, keys: Sequence[str] = ("plan", "seed"), script: str = "quality.py"
) -> list[dict[str, Any]]:
    """The records of a result file that `script` writes, the newest of each value of `keys`."""
    if not file.is_file():
        raise UserError(f"no results at {file}; `{script} run` writes them")
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            each = json.loads(line)
            found[tuple(each[key] for key in keys)] = each
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"line {number} of {file} is no record ({error}); remove the line"
            ) from error
    return list(found.values())


COLUMNS = ("plan", "T", "seeds", "bits per byte", "spread", "less standard", "tokens/s", "MFU",
           "GiB", "wall s")  # fmt: skip
MEANING = """\
bits per byte: of all held-out text, the mean over seeds. spread: the largest less the smallest of
them. less standard: the mean less that of standard, below 0 is better. T: of plans that depend on
it, which train on one GPU as that many virtual ranks. tokens/s, MFU: of training, medians. wall:
a whole run, its start, evaluation and checkpoint included."""


def by_plan(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The records by plan, in the order of PLANS, then others."""
    plans = dict.fromkeys([*PLANS, *(record["plan"] for record in records)])
    found = {plan: [r for r in records if r["plan"] == plan] for plan in plans}
    return {plan: members for plan, members in found.items() if members}


def mean(members: Sequence[dict[str, Any]], key: str = "heldout_bits_per_byte") -> float:
    return statistics.fmean(record[key] for record in members)


def quality_cells(plan: str, groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Bits per byte, spread, difference from standard."""
    values = [record["heldout_bits_per_byte"] for record in groups[plan]]
    spread = f"{max(values) - min(values):.4f}" if len(values) > 1 else "-"
    less = "-"
    if "standard" in groups and plan != "standard":
        less = f"{mean(groups[plan]) - mean(groups['standard']):+.4f}"
    return [f"{mean(groups[plan]):.4f}", spread, less]


def rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each plan, under COLUMNS."""
    groups, found = by_plan(records), []
    for plan, members in groups.items():
        known = members[0]["mfu"] is not None, members[0]["memory_gib"] is not None
        found.append(
            [
                plan,
                str(members[0]["tp_degree"] or "-"),
                str(len(members)),
                *quality_cells(plan, groups),
                f"{mean(members, 'tokens_per_second'):,.0f}",
                f"{100 * mean(members, 'mfu'):.0f}%" if known[0] else "-",
                f"{mean(members, 'memory_gib'):.0f}" if known[1] else "-",
                f"{mean(members, 'wall_s'):.0f}",
            ]
        )
    return found


def caption(records: Sequence[dict[str, Any]]) -> str:
    first = next(iter(by_plan(records).values()))[0]  # standard, where it is there
    split, heldout = first["data"]["train"], first["data"]["heldout"]
    return (
        f"{first['recipe']['model']['name']}, {first['parameters']:,} parameters; "
        f"{first['tokens']:,} tokens, {first['tokens'] / split['tokens']:.2f} epochs of "
        f"{split['tokens']:,}; held out {heldout['tokens']:,} tokens, {heldout['bytes']:,} bytes"
    )


JOINED = ("plan", "bits per byte", "spread", "less standard", "decode ms/token", "reducer",
          "x faster than standard", "on the frontier")  # fmt: skip


def latency_rows(
    file: Path, model: str, layers: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of decode latency at batch 1 by plan and reducer, and the machines of their records."""
    if not file.is_file():
        raise UserError(f"no results at {file}; `ladder bench inference` writes inference.jsonl")
    wanted = (model, layers, T, 1, True)
    found, records = [], list(finished(file).values())
    for row in derive_rows(records):
        point = row["point"]
        same = (point.model, point.layers, point.tp, point.batch, point.p2p) == wanted
        if same and point.degree in (0, T):
            found.append(row)
    cases = by_case(found)
    if len(cases) != 1:
        known = "; ".join(describe_case(case) for case in cases) or "none"
        raise UserError(
            f"{file} must hold one case of {model}, {layers} layers, TP {T}, batch 1; it holds "
            f"{known}: run `ladder bench inference --model {model} --nproc {T}` with a new --out"
        )
    return found, [record["machine"] for record in records]


def write_page(
    records: Sequence[dict[str, Any]],
    latency: Sequence[dict[str, Any]],
    machines: Sequence[dict[str, Any]],
) -> str:
    """The page as HTML: bits per byte against ms per token, then both tables.

    machines: of the latencies.
    """
    groups, best = by_plan(records), fastest(latency)
    places = positions(groups, best)
    step = describe_case(latency[0]["point"])
    drawn: PagePart = NO_FIGURES
    if figures.available():
        what = "A dot a seed. Lower is better, left is faster."
        drawn = Figure(figure(groups, best), what)
    parts: list[PagePart] = [
        drawn,
        Table(JOINED, [joined(plan, groups, best, places) for plan in groups]),
        Text(
            "On the frontier: no other plan is at once better and faster. Differences within the "
            "spread between seeds are noise; of a plan with one seed the spread was not "
            "measured: take that of the others."
        ),
        Text(f"Quality: {caption(records)}. One shape and one corpus; the residual plan differs."),
        Text(
            f"Latency: {step}, a decode step of the same shape with random weights, each plan with "
            f"its fastest reducer."
        ),
        Heading("Quality"),
        Table(COLUMNS, rows(records)),
        Aside("Columns", MEANING),
        Heading("Latency"),
        Table(HEAD, [cells(row) for row in latency]),
        Aside("Columns", EXPLANATION),
    ]
    ran = [*(record["machine"] for record in records), *machines]
    return page("Quality against latency", finding(places), parts, ran)


def positions(
    groups: dict[str, list[dict[str, Any]]], best: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """(ms per token, bits per byte) by plan, of plans with both."""
    return {
        plan: (best[plan]["decode_ms"], mean(members))
        for plan, members in groups.items()
        if plan in best
    }


def beaten(plan: str, places: dict[str, tuple[float, float]]) -> bool:
    """Whether another plan is as good in both, and better in one."""
    own = places[plan]
    return any(
        other != own and other[0] <= own[0] and other[1] <= own[1] for other in places.values()
    )


def finding(places: dict[str, tuple[float, float]]) -> str:
    kept = [plan for plan in places if not beaten(plan, places)]
    if len(kept) == 1:
        ms, bits = places[kept[0]]
        return (
            f"{kept[0]} is the fastest of {len(places)} plans, {ms:.3f} ms a token, and none beats "
            f"its quality, {bits:.4f} bits per byte."
        )
    return f"No other plan is at once better and faster than {', '.join(kept)}."


def figure(
    groups: dict[str, list[dict[str, Any]]], best: dict[str, dict[str, Any]], title: str = "",
    subtitle: str = "",
) -> str:  # fmt: skip
    """A point for each plan; several seeds are points joined by a line."""
    lines = {
        plan: (
            [best[plan]["decode_ms"]] * len(members),
            sorted((record["heldout_bits_per_byte"] for record in members), reverse=True),
        )
        for plan, members in groups.items()
        if plan in best
    }
    return figures.lines(
        lines, f"decode, ms a token (TP {T}, batch 1)", "held-out bits per byte", title=title,
        subtitle=subtitle,
    )  # fmt: skip


def joined(
    plan: str, groups: dict[str, list[dict[str, Any]]], best: dict[str, dict[str, Any]],
    places: dict[str, tuple[float, float]],
) -> list[str]:  # fmt: skip
    quality = [plan, *quality_cells(plan, groups)]
    if plan not in best:
        return [*quality, "-", "-", "-", "-"]
    row, standard = best[plan], best.get("standard")
    faster = f"{standard['decode_ms'] / row['decode_ms']:.3f}" if standard else "-"
    kept = "no" if beaten(plan, places) else "yes"
    return [*quality, f"{row['decode_ms']:.3f}", row["point"].reducer, faster, kept]
