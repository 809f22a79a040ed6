"""The benchmark's page: tables and the figures of Ladder Residual (arXiv 2501.06589), section 3."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from ladder import report
from ladder.infer.derive import EXPLANATION, HEAD, by_case, cells, improvements, pareto
from ladder.infer.points import Point, describe

PAPER_HEAD = ("plan", "reducer", "prefill", "decode", "tokens/s", "prefill", "decode", "tokens/s")
COLD_PARTS = ("imports_s", "group_s", "weights_s", "capture_s", "prefill_s", "total_s")


def write_page(
    rows: Sequence[dict[str, Any]], cold: Sequence[dict[str, Any]], machines: Sequence[str]
) -> str:
    """The page as HTML from derived rows and cold-start records."""
    parts = [report.text(text) for text in machines]
    if rows:
        parts += [*_figures(rows), report.heading("Every point"), report.code(EXPLANATION)]
    for case, members in by_case(rows).items():
        parts += [report.text(describe(case)), report.table(HEAD, [cells(row) for row in members])]
    if rows:
        parts += _paper_tables(rows)
    if cold:
        parts += [report.heading("Cold start: from no process to the first token, seconds")]
        parts.append(report.table(("point", *COLD_PARTS), [_cold_cells(record) for record in cold]))
    return report.page("ladder bench inference", parts)


def _figures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The figures of shapes that were measured at several batch sizes; of one, tables say all."""
    if importlib.util.find_spec("matplotlib") is None:
        return [report.text("No figures: they need matplotlib (pip install 'ladder[report]').")]
    over: list[str] = []
    for reducer, what in ((None, "each plan with its best reducer"), ("async", "all with NCCL")):
        for (shape, tp), plans in improvements(rows, reducer).items():
            lines: dict[str, tuple[list[float], list[float]]] = {
                plan: ([*found], [*found.values()]) for plan, found in plans.items()
            }
            batches = sorted({batch for found in plans.values() for batch in found})
            if len(batches) > 1:
                over.append(report.text(f"{_shape(shape)}, TP {tp}; {what}, standard too"))
                over.append(report.curves(lines, "batch size", "% more tokens/s", batches))
    against: list[str] = []
    for shape, frontiers in pareto(rows).items():
        lines = {
            plan: ([pair[0] for pair in found], [pair[1] for pair in found])
            for plan, found in frontiers.items()
        }
        if any(len(found) > 1 for found in frontiers.values()):
            what = f"{_shape(shape)}; the frontier over batch sizes, TP degrees and reducers"
            against.append(report.text(what))
            against.append(report.curves(lines, "completion latency (s)", "tokens/s per GPU"))
    sections = {
        "End-to-end throughput over standard (the paper's Figures 2 and 3)": over,
        "Latency against throughput per GPU (the paper's Figure 4)": against,
    }
    return [
        part
        for title, parts in sections.items()
        if parts
        for part in (report.heading(title), *parts)
    ]


def _shape(shape: Point) -> str:
    return (
        f"{shape.model}, {shape.layers} layers, prompt {shape.prompt}, {shape.new_tokens} new "
        f"tokens{'' if shape.p2p else ', P2P off'}"
    )


def _paper_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Improvements as the paper's Tables 1, 2 and 6 define them."""
    parts = [
        report.heading("Improvement over standard (the paper's Tables 1, 2 and 6)"),
        report.text(
            "Latencies: one minus the ratio of the times; tokens/s: how many more. First over "
            "standard with NCCL, as in the paper, then over standard with its best reducer."
        ),
    ]
    for case, members in by_case(rows).items():
        table = [_improved(row) for row in members if row["point"].plan != "standard"]
        if any(cell != "-" for line in table for cell in line[2:]):
            parts += [report.text(describe(case)), report.table(PAPER_HEAD, table)]
    return parts


def _improved(row: dict[str, Any]) -> list[str]:
    found = [row["point"].plan, row["point"].reducer]
    for baseline in ("nccl", "standard"):
        for phase in ("prefill", "decode", "total"):
            gain = row[f"{phase}_x_{baseline}"]
            if gain is None:
                found.append("-")
            else:
                value = gain - 1 if phase == "total" else 1 - 1 / gain
                found.append(f"{100 * value:.2f}%")
    return found


def _cold_cells(record: dict[str, Any]) -> list[str]:
    return [str(Point(**record["point"])), *(f"{record['cold'][name]:.2f}" for name in COLD_PARTS)]
