"""The page of inference, with the figures of Ladder Residual (arXiv 2501.06589), section 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ladder.bench import figures
from ladder.bench.figures import COLOURS, MUTED, Bar
from ladder.bench.inference.derive import (
    EXPLANATION,
    HEAD,
    by_case,
    by_sitting,
    cells,
    improvements,
    pareto,
)
from ladder.bench.inference.points import InferencePoint, describe_case, describe_kind
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, page

PAPER_HEAD = ("plan", "reducer", "prefill, NCCL", "decode, NCCL", "tokens/s, NCCL", "prefill, best",
              "decode, best", "tokens/s, best")  # fmt: skip
COLD_PARTS = ("imports_s", "group_s", "weights_s", "capture_s", "prefill_s", "total_s")
REDUCER_NAMES = {"async": "NCCL"}  # the reducers' names in figures


def write_page(
    rows: Sequence[dict[str, Any]],
    cold: Sequence[dict[str, Any]],
    machines: Iterable[Mapping[str, Any]],
) -> str:
    """The page as HTML from derived rows, cold-start records and the machines of both.

    Records of different GPUs, torch versions, commits or tables are shown apart (`by_sitting`).
    """
    parts: list[PagePart] = []
    if rows:
        parts += [*_figures(rows), Heading("Every point"), Aside("Columns", EXPLANATION)]
    for said, case, members in _cases(rows):
        parts.append(Table(HEAD, [cells(row) for row in members], describe_case(case) + said))
    if rows:
        parts += _paper_tables(rows)
    if cold:
        parts += [Heading("Cold start: from no process to the first token, seconds")]
    for said, started in by_sitting(cold):
        lines = [_cold_cells(record) for record in started]
        parts.append(Table(("point", *COLD_PARTS), lines, said.removeprefix(", ")))
    return page("Inference: prefill and decode by plan", finding(rows, cold), parts, machines)


def finding(rows: Sequence[dict[str, Any]], cold: Sequence[dict[str, Any]]) -> str:
    """The main result of the records in a sentence, for the case with the most points."""
    if rows:
        said, members = leading_case(rows)
        plans = fastest(members)
        ways = {plan: row for plan, row in plans.items() if plan != "none"} or plans
        best = min(ways.values(), key=lambda row: float(row["decode_ms"]))
        plan, standard = best["point"].plan_name, ways.get("standard")
        case, ms = describe_case(best["point"]) + said, best["decode_ms"]
        said = f"{case}: {plan} is the fastest, {ms:.3f} ms a step"
        if plan == "standard" or standard is None:
            return f"{said}."
        ratio = standard["decode_ms"] / best["decode_ms"]
        return f"{said}, {ratio:.2f} x as fast as standard ({standard['decode_ms']:.3f} ms)."
    if cold:
        first = min(cold, key=lambda record: float(record["cold"]["total_s"]))
        point, seconds = InferencePoint(**first["point"]), first["cold"]["total_s"]
        return f"{point}: {seconds:.1f} s to the first token."
    return "Nothing has been measured yet."


def _cases(
    rows: Iterable[dict[str, Any]],
) -> list[tuple[str, InferencePoint, list[dict[str, Any]]]]:
    """(text of the sitting, case, rows) for each case of each sitting (see `by_sitting`)."""
    return [
        (said, case, members)
        for said, own in by_sitting(rows)
        for case, members in by_case(own).items()
    ]


def leading_case(rows: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """(text of the sitting, rows) of the case with the most points; of equal cases, the first."""
    said, _, members = max(_cases(rows), key=lambda each: len(each[-1]))
    return said, members


def fastest(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The row with the shortest decode step of each plan (with its T), over all reducers."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        plan = row["point"].plan_name
        if plan not in best or row["decode_ms"] < best[plan]["decode_ms"]:
            best[plan] = row
    return best


def decode_bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Bars of the rows of one case, the slowest first, and the memory floor last."""
    found = []
    for row in sorted(rows, key=lambda row: -float(row["decode_ms"])):
        point: InferencePoint = row["point"]
        name = f"{point.plan_name}, {REDUCER_NAMES.get(point.reducer, point.reducer)}"
        no_comm = point.plan == "none"
        faster = row["decode_x_nccl"]
        text = f"{row['decode_ms']:.2f} ms"
        if faster and not no_comm and (point.plan, point.reducer) != ("standard", "async"):
            text += f", {faster:.2f} x"
        name = "no communication" if no_comm else name
        colour = COLOURS.get(point.plan, MUTED)
        found.append(Bar(name, row["decode_ms"], text, colour, bound=no_comm))
    floor = min(row["decode_ms"] * row["decode_of_floor"] for row in rows)
    return [*found, Bar("memory floor", floor, f"{floor:.2f} ms", MUTED, bound=True)]


def _figures(rows: Sequence[dict[str, Any]]) -> list[PagePart]:
    """A figure of the leading case's decode steps, and the paper's figures.

    The paper's figures need several batch sizes; tables suffice for one.
    """
    if not figures.available():
        return [NO_FIGURES]
    said, members = leading_case(rows)
    what = (
        f"Decode, ms per step: {describe_case(members[0]['point'])}{said}. x: speed relative to "
        f"standard with NCCL's all-reduces; hatched: theoretical bounds."
    )
    parts: list[PagePart] = [Figure(figures.bars(decode_bars(members), "ms"), what)]
    over: list[PagePart] = []
    against: list[PagePart] = []
    for said, own in by_sitting(rows):
        over += _over_standard(own, said)
        against += _against_latency(own, said)
    sections = {
        "End-to-end throughput over standard (the paper's Figures 2 and 3)": over,
        "Latency against throughput per GPU (the paper's Figure 4)": against,
    }
    for title, drawings in sections.items():
        parts += [Heading(title), *drawings] if drawings else []
    return parts


def _over_standard(rows: Sequence[dict[str, Any]], said: str) -> list[PagePart]:
    """The paper's Figures 2 and 3, from the rows of one sitting. said: the text of the sitting."""
    found: list[PagePart] = []
    for reducer, what in ((None, "each plan with its best reducer"), ("async", "all with NCCL")):
        for (shape, tp), plans in improvements(rows, reducer).items():
            lines: dict[str, tuple[list[float], list[float]]] = {
                plan: ([*found], [*found.values()]) for plan, found in plans.items()
            }
            batches = sorted({batch for found in plans.values() for batch in found})
            if len(batches) > 1:
                drawn = figures.lines(
                    lines, "batch size", "% more tokens/s than standard", ticks=batches,
                    zero="standard",
                )  # fmt: skip
                about = f"{_shape(shape)}, TP {tp}{said}; {what}, standard too"
                found.append(Figure(drawn, about))
    return found


def _against_latency(rows: Sequence[dict[str, Any]], said: str) -> list[PagePart]:
    """The paper's Figure 4, from the rows of one sitting. said: the text of the sitting."""
    drawings: list[PagePart] = []
    for shape, frontiers in pareto(rows).items():
        lines = {
            plan: ([pair[0] for pair in found], [pair[1] for pair in found])
            for plan, found in frontiers.items()
        }
        if any(len(found) > 1 for found in frontiers.values()):
            drawn = figures.lines(lines, "completion latency, s", "tokens/s per GPU")
            what = f"{_shape(shape)}{said}; the frontier over batch sizes, TP degrees and reducers"
            drawings.append(Figure(drawn, what))
    return drawings


def _shape(shape: InferencePoint) -> str:
    return f"{shape.model}, {shape.layers} layers, {describe_kind(shape)}"


def _paper_tables(rows: Sequence[dict[str, Any]]) -> list[PagePart]:
    """Tables of improvements, as defined in the paper's Tables 1, 2 and 6."""
    parts: list[PagePart] = []
    for said, case, members in _cases(rows):
        table = [_improved(row) for row in members if row["point"].plan != "standard"]
        if any(cell != "-" for line in table for cell in line[2:]):
            parts.append(Table(PAPER_HEAD, table, describe_case(case) + said))
    meaning = (
        "prefill, decode: one minus the ratio of the times; tokens/s: the increase.\n"
        "NCCL: over standard with NCCL, as in the paper; best: over standard with its best reducer."
    )
    title = Heading("Improvement over standard (the paper's Tables 1, 2 and 6)")
    return [title, Aside("Columns", meaning), *parts] if parts else []


def _improved(row: dict[str, Any]) -> list[str]:
    found = [row["point"].plan_name, row["point"].reducer]
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
    return [
        str(InferencePoint(**record["point"])),
        *(f"{record['cold'][name]:.2f}" for name in COLD_PARTS),
    ]
