"""Quality against latency: a panel for each link and batch, the frontier, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quality_plans import T, called, unscaled
from quality_report import (
    COLUMNS,
    MEANING,
    TIMED,
    TIMED_MEANING,
    by_plan,
    caption,
    count,
    mean,
    quality_cells,
    rows,
    timed_rows,
)

from ladder.bench import figures
from ladder.bench.inference.derive import EXPLANATION, HEAD, by_case, by_point, cells, derive_rows
from ladder.bench.inference.page import fastest
from ladder.bench.inference.points import describe_case, load_shape
from ladder.bench.panels import Panel, Spot, panels
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, Text, page
from ladder.bench.results import read_results
from ladder.models.errors import UserError

PANELS = ((True, 1), (True, 64), (False, 1), (False, 64))  # P2P, batch
FAR = 0.04  # bits per byte above standard from which a plan is drawn at a figure's edge


@dataclass(frozen=True)
class Latency:
    """Measured decode steps of one shape. chosen: the rows of each panel; [] if not measured.

    left_out: cases that are not drawn, since another case of their panel has as many plans of
    known quality, or more.
    """

    model: str
    tp: int
    chosen: dict[tuple[bool, int], list[dict[str, Any]]]
    machines: list[dict[str, Any]]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A plan's place in a panel: ms per token; mean and range of its runs' bits per byte."""

    ms: float
    mean: float
    low: float
    high: float
    runs: int

    def beats(self, other: Place) -> bool:
        """Whether this place is, by means, no worse in both measures and better in one."""
        own, its = (self.ms, self.mean), (other.ms, other.mean)
        return own != its and own[0] <= its[0] and own[1] <= its[1]

    def overlaps(self, other: Place) -> bool:
        return self.low <= other.high and other.low <= self.high


def latencies(
    files: Sequence[Path],
    records: Sequence[dict[str, Any]],
    model: str | None = None,
    tp: int = T,
) -> Latency:
    """The decode latency at TP `tp` of the trained shape, or of `model`, from several files.

    If a point was measured again, the newest record counts. If a panel has several cases (prompts,
    new tokens), the one with the most plans of known quality counts, and of equal ones the last.
    """
    shape = records[0]["recipe"]["model"]
    name = model or shape["name"]
    layers = load_shape(model).num_layers if model else shape["num_layers"]
    measured: list[dict[str, Any]] = []
    for file in files:
        if not file.is_file():
            raise UserError(
                f"no results at {file}; `ladder bench inference` writes inference.jsonl"
            )
        measured += [record for record in read_results(file) if "check" in record]
    measured.sort(key=lambda record: str(record["machine"].get("date", "")))
    known, found, left = set(by_plan(records)), {}, []
    every = list(by_point(measured).values())
    for panel in PANELS:
        inside = [each for each in every if in_panel(each, name, layers, tp, panel)]
        same = [row for row in derive_rows(inside) if row["point"].degree in (0, tp)]
        cases = list(by_case(same).values())
        cases.sort(key=lambda members: len(known & set(best(members))))
        found[panel] = cases[-1] if cases and known & set(best(cases[-1])) else []
        left += [describe_case(members[0]["point"]) for members in cases[:-1]]
    if not any(found.values()):
        raise UserError(
            f"{', '.join(map(str, files))}: no decode step of {name}, {layers} layers, TP {tp}, at "
            f"batch 1 or 64, under a plan that was trained: run `{command(name, tp, True, 1)}`"
        )
    shown = {row["point"] for members in found.values() for row in members}
    machines = [r["machine"] for point, r in by_point(measured).items() if point in shown]
    return Latency(name, tp, found, machines, left)


def in_panel(
    record: dict[str, Any], model: str, layers: int, tp: int, panel: tuple[bool, int]
) -> bool:
    point = {"p2p": True, **record["point"]}
    own = (point["model"], point["layers"], point["tp"], point["p2p"], point["batch"])
    return own == (model, layers, tp, *panel)


def command(model: str, tp: int, p2p: bool, batch: int) -> str:
    """The command that measures a panel."""
    off = "" if p2p else " --p2p off"
    return f"ladder bench inference --model {model} --nproc {tp} --batch {batch}{off} --plans ..."


def best(members: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By plan, the row of its fastest reducer; a plan in a file has the file's name."""
    return {called(plan): row for plan, row in fastest(members).items()}


def row_of(plan: str, known: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """A plan's row of `best`; a scaled desync-Nx without one has that of desync-Nx."""
    return known.get(plan) or known.get(unscaled(plan))


def places(
    groups: dict[str, list[dict[str, Any]]], members: Sequence[dict[str, Any]]
) -> dict[str, Place]:
    """The places of the plans that have both quality and latency, the fastest first."""
    known, found = best(members), {}
    for plan, runs in groups.items():
        if row := row_of(plan, known):
            bits = [record["heldout_bits_per_byte"] for record in runs]
            ms = float(row["decode_ms"])
            found[plan] = Place(ms, statistics.fmean(bits), min(bits), max(bits), len(bits))
    return dict(sorted(found.items(), key=lambda item: (item[1].ms, item[1].mean)))


def frontier(found: dict[str, Place]) -> list[str]:
    """The plans that no other plan beats."""
    return [
        plan for plan, own in found.items() if not any(each.beats(own) for each in found.values())
    ]


def standing(plan: str, found: dict[str, Place]) -> str:
    """Whether a plan is on the frontier, which plans beat it, and where spreads overlap.

    The spread of a plan on the frontier is compared with those of faster plans: if they overlap,
    its better quality is not sure.
    """
    own = found[plan]
    beaten = {name: each for name, each in found.items() if each.beats(own)}
    rivals = beaten or {
        name: each for name, each in found.items() if each.ms < own.ms and name != plan
    }
    unsure = [name for name, each in rivals.items() if own.overlaps(each)]
    said = f"no: {', '.join(beaten)}" if beaten else "yes"
    if unsure:
        said += f"; spreads overlap: {', '.join(unsure)}"
    return said + ("; one run" if own.runs == 1 else "")


def panel_name(panel: tuple[bool, int]) -> str:
    return f"{'NVLink' if panel[0] else 'P2P off'}, batch {panel[1]}"


def finding(records: Sequence[dict[str, Any]], latency: Latency) -> str:
    """The frontier of each panel, in a sentence each."""
    groups, said = by_plan(records), []
    for panel, members in latency.chosen.items():
        if members:
            found = places(groups, members)
            kept = frontier(found)
            if len(kept) == 1:
                own = found[kept[0]]
                said.append(
                    f"{panel_name(panel)}: {kept[0]} is the fastest of {len(found)} plans, "
                    f"{own.ms:.3f} ms a token, and none beats its quality, {own.mean:.4f} bits per "
                    f"byte."
                )
            else:
                said.append(
                    f"{panel_name(panel)}: no other plan is at once better and faster than "
                    f"{', '.join(kept)}."
                )
    return " ".join(said)


def missing(latency: Latency) -> list[str]:
    """Panels without a measurement."""
    return [panel_name(panel) for panel, members in latency.chosen.items() if not members]


def usual_runs(records: Sequence[dict[str, Any]], latency: Latency) -> int:
    """The number of runs of most marks in the figure, which names the number where it differs."""
    groups = by_plan(records)
    drawn = [places(groups, members) for members in latency.chosen.values() if members]
    return statistics.mode(own.runs for found in drawn for own in found.values())


def figure(
    records: Sequence[dict[str, Any]], latency: Latency, title: str = "", subtitle: str = ""
) -> str:
    """The panels that were measured, as SVG."""
    groups, drawn = by_plan(records), []
    usual = usual_runs(records, latency)
    for panel, members in latency.chosen.items():
        if not members:
            continue
        found = places(groups, members)
        kept, none = frontier(found), best(members).get("none")
        spots = []
        for plan, own in found.items():
            text = plan if own.runs == usual else f"{plan}, n = {own.runs}"
            spots.append(Spot(plan, text, own.ms, own.mean, own.low, own.high, plan in kept))
        case = describe_case(members[0]["point"])
        bound = (float(none["decode_ms"]), "no communication") if none else None
        drawn.append(Panel(panel_name(panel), f"decode, ms a token ({case})", spots, bound))
    top = mean(groups["standard"]) + FAR if "standard" in groups else None
    return panels(drawn, "held-out bits per byte", title=title, subtitle=subtitle, top=top)


JOINED = ("plan", "seeds", "bits per byte", "spread", "less standard", "decode ms/token", "reducer",
          "x faster than standard", "x none", "on the frontier")  # fmt: skip


def joined(
    groups: dict[str, list[dict[str, Any]]], members: Sequence[dict[str, Any]]
) -> list[list[str]]:
    """A row for each plan of a panel, under JOINED."""
    found, known = places(groups, members), best(members)
    standard, none = known.get("standard"), known.get("none")
    table = []
    for plan, own in found.items():
        faster = f"{standard['decode_ms'] / own.ms:.3f}" if standard else "-"
        bound = f"{own.ms / none['decode_ms']:.3f}" if none else "-"
        quality = [plan, count(groups[plan]), *quality_cells(plan, groups)]
        row = row_of(plan, known)
        assert row is not None, plan  # since it has a place
        reducer = row["point"].reducer
        table.append(
            [*quality, f"{own.ms:.3f}", reducer, faster, bound, standing(plan, found)]
        )  # fmt: skip
    return table


def noise(groups: dict[str, list[dict[str, Any]]]) -> str:
    """What the plans with several runs tell of the spread of those with one, in a sentence."""
    several = {
        plan: [record["heldout_bits_per_byte"] for record in runs]
        for plan, runs in groups.items()
        if len(runs) > 1
    }
    if not several:
        return "Every plan has one run: no spread was measured, so any difference may be chance."
    widest = max(several, key=lambda plan: max(several[plan]) - min(several[plan]))
    spread = max(several[widest]) - min(several[widest])
    alone = [plan for plan, runs in groups.items() if len(runs) == 1]
    said = f"The widest spread is that of {widest}, {spread:.4f}"
    if alone:
        said += f"; {', '.join(alone)} have one run, and may be off by as much"
    repeats = [plan for plan, runs in groups.items() if len(runs) > len({r["seed"] for r in runs})]
    if repeats:
        said += (
            f". Runs of one seed that was repeated ({', '.join(repeats)}) differ by the order of "
            f"floating-point sums alone, which says less than seeds do"
        )
    return f"{said}."


def write_page(records: Sequence[dict[str, Any]], latency: Latency) -> str:
    """The page as HTML: the panels, a table for each, equal training time, all rows."""
    groups = by_plan(records)
    drawn: PagePart = NO_FIGURES
    if figures.available():
        what = (
            f"A mark is the mean of n runs, {usual_runs(records, latency)} where no other n is "
            f"given, the bar from the lowest to the highest of them; filled: on the frontier. "
            f"Lower is better, left is faster. Triangles are above the figure."
        )
        drawn = Figure(figure(records, latency), what)
    parts: list[PagePart] = [drawn, Heading("Equal tokens")]
    for panel, members in latency.chosen.items():
        if not members:
            words = command(latency.model, latency.tp, *panel)
            parts.append(Text(f"{panel_name(panel)}: not measured; `{words}` does."))
            continue
        case = describe_case(members[0]["point"])
        parts.append(Table(JOINED, joined(groups, members), f"{panel_name(panel)}: {case}"))
        known = best(members)
        if lacking := ", ".join(plan for plan in groups if not row_of(plan, known)):
            parts.append(Text(f"Latency not measured in this panel: {lacking}."))
    parts += [
        Text(
            "On the frontier: no other plan is, by means, at once better and faster. Spreads: from "
            "the lowest to the highest run; where they overlap, the order may be chance. "
            + noise(groups)
        ),
        Text(f"Quality: {caption(records)}. One shape and one corpus; the residual plan differs."),
        Text(latency_note(records, latency)),
        Heading("Equal training time"),
        *timed(records),
        Heading("Quality"),
        Table(COLUMNS, rows(records)),
        Aside("Columns", MEANING),
        Heading("Latency"),
    ]
    for members in latency.chosen.values():
        if members:
            case = describe_case(members[0]["point"])
            parts.append(Table(HEAD, [cells(row) for row in members], case))
    parts.append(Aside("Columns", EXPLANATION))
    ran = [*(record["machine"] for record in records), *latency.machines]
    return page("Quality against latency", finding(records, latency), parts, ran)


def latency_note(records: Sequence[dict[str, Any]], latency: Latency) -> str:
    trained = records[0]["recipe"]["model"]["name"]
    same = latency.model == trained
    said = (
        f"Latency: a decode step {'of the same shape' if same else f'of {latency.model}'} with "
        f"random weights, each plan with its fastest reducer."
    )
    if not same:
        said += f" Quality is that of {trained}: no {latency.model} was trained."
    commits = dict.fromkeys(str(each.get("commit", "-")) for each in latency.machines)
    if len(commits) > 1:
        said += f" Measured at several commits: {', '.join(commits)}."
    if latency.left_out:
        said += f" Not drawn, with fewer plans: {'; '.join(latency.left_out)}."
    return said


def timed(records: Sequence[dict[str, Any]]) -> list[PagePart]:
    """The parts of the page on equal training time."""
    table = timed_rows(records)
    if not table:
        return [Text("Without a run of standard there is no training time to compare at.")]
    parts: list[PagePart] = [Table(TIMED, table), Aside("Columns", TIMED_MEANING)]
    if not any(len(record.get("heldout", [])) > 1 for record in records):
        parts.append(
            Text(
                "No curve of held-out quality was recorded, so slower plans are missing: train "
                "with eval_interval=50."
            )
        )
    return parts
