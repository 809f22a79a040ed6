"""The table and the page of the results of benchmarks/adapt.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quality_report

from ladder.bench import figures
from ladder.bench.figures import COLOURS, MUTED, Bar
from ladder.bench.report import NO_FIGURES, Aside, Figure, PagePart, Table, page

TASKS = {
    "cloze": "local_cloze acc",
    "copying": "local_copying acc",
    "copying, bits per byte": "local_copying bits_per_byte",
    "sums": "local_arithmetic exact_match",
}
COLUMNS = ("layers", "chosen", "way", "rate", "bits per byte", "more", "KL", "recovered", *TASKS,
           "s")  # fmt: skip
WAYS = ("original", "zero-shot", "trained-on", "plain", "distil", "progressive",
        "progressive-distil")  # fmt: skip
SHORT = {"zero-shot": "zero-shot", "plain": "plain", "distil": "distilled"}
BESIDE = ("layers", "reduces", *SHORT.values())
FACTOR = re.compile(r"-(x[\d.e+-]+)$")  # ends the name of a point at another learning rate
MEANING = """\
more: bits per byte above the original's. KL: nats a token of the divergence from it. recovered: of
what the changed layers cost before any training, in bits per byte; above 100 % the model is better
than the original was, as more training makes that too (trained-on; none: the original, trained for
as many tokens). reduces: all-reduces a token. chosen: the last layers, or the cheapest by `ladder
convert sensitivity`; both: they are the same. rate: the peak. s: of conversion or training, with
its start."""


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a result file, the newest of each name."""
    return quality_report.read(file, ("name",), "adapt.py")


def recovered(record: dict[str, Any], records: Sequence[dict[str, Any]]) -> float | None:
    """The share of the zero-shot loss that a point recovers, in bits per byte; None: unknown.

    (zero-shot - after) / (zero-shot - original), for the same layers and plan.
    """
    original = _bits(records, way="original")
    before = _bits(records, way="zero-shot", layers=record["layers"], plan=record["plan"])
    if original is None or before is None or before == original or not record["tokens"]:
        return None
    return (before - float(record["bits_per_byte"])) / (before - original)


def _bits(records: Sequence[dict[str, Any]], **wanted: Any) -> float | None:
    found = (r for r in records if all(r.get(key) == value for key, value in wanted.items()))
    record = next(found, None)
    return None if record is None else float(record["bits_per_byte"])


def rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each point, under COLUMNS: the original, the controls, then each choice."""
    original, points = _bits(records, way="original"), _sorted(records)
    found = []
    for each in points:
        share = recovered(each, points)
        more = None if original is None else each["bits_per_byte"] - original
        tasks = [each["tasks"].get(key, [None])[0] for key in TASKS.values()]
        found.append(
            [
                each["plan"] if each["layers"] else "-",
                each["chosen"],
                each["way"],
                "-" if each["lr"] is None else f"{each['lr']:.2g}",
                f"{each['bits_per_byte']:.4f}",
                "-" if more is None or each["way"] == "original" else f"{more:+.4f}",
                f"{each['divergence']:.4f}",
                "-" if share is None else f"{100 * share:.0f} %",
                *("-" if value is None else f"{value:.3f}" for value in tasks),
                f"{each['make_s']:.0f}",
            ]
        )
    return found


def _sorted(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points: the same layers and plan side by side, and in these the order of WAYS."""
    points = [record for record in records if "way" in record]
    plans = list(dict.fromkeys(each["plan"] for each in points))
    return sorted(
        points,
        key=lambda each: (
            len(each["layers"]), each["chosen"] == "cheapest",
            plans.index(each["plan"]) if each["layers"] else 0, WAYS.index(each["way"]),
        ),
    )  # fmt: skip


def beside(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each plan, under BESIDE: bits per byte above the original's, share recovered."""
    original, lines = _bits(records, way="original"), {}
    for each in _sorted(records):
        kind = "plain" if each["way"] == "trained-on" else each["way"]
        if kind not in SHORT or original is None or FACTOR.search(each["name"]):
            continue
        name = each["plan"] if each["layers"] else "none, trained as long"
        line = lines.setdefault(name, dict.fromkeys(BESIDE, "-") | {"layers": name})
        share = recovered(each, records)
        said = "" if share is None else f" ({100 * share:.0f} %)"
        line[SHORT[kind]] = f"{each['bits_per_byte'] - original:+.4f}{said}"
        line["reduces"] = str(each.get("reduces", "-"))
    return [list(line.values()) for line in lines.values()]


def tables(records: Sequence[dict[str, Any]]) -> list[list[list[str]]]:
    """The tables of the plans side by side, and of every point; without empty columns."""
    found = [[list(BESIDE), *beside(records)], [list(COLUMNS), *rows(records)]]
    kept = [[n for n, cells in enumerate(zip(*table, strict=True)) if {*cells[1:]} - {"-"}]
            for table in found]  # fmt: skip
    return [
        [[row[n] for n in columns] for row in table]
        for table, columns in zip(found, kept, strict=True)
        if columns
    ]


def caption(records: Sequence[dict[str, Any]]) -> str:
    first = next((record for record in records if "way" in record), None)
    if first is None:
        return "no point is finished yet"
    recipe, data = first["standard"]["recipe"], first["data"]["heldout"]
    total = recipe["steps"] * recipe["batch_size"] * recipe["seq_len"]
    tokens = max((record.get("tokens") or 0) for record in records if "way" in record)
    return (
        f"trained on {total:,} tokens; recovered with {tokens:,} ({tokens / total:.1%}), "
        f"{' '.join(first['settings']['recovery'])}; measured on {first['heldout_tokens']:,} of "
        f"{data['tokens']:,} held-out tokens"
    )


def markdown(records: Sequence[dict[str, Any]]) -> str:
    found = [caption(records)]
    for head, *body in tables(records):
        cells = [head, ["---"] * len(head), *body]
        found.append("\n".join("| " + " | ".join(row) + " |" for row in cells))
    return "\n\n".join([*found, MEANING])


def write_page(records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The main result in a sentence, and the page."""
    points = [record for record in records if "way" in record and record["layers"]]
    wirings = {record["plan"].partition("@")[0] for record in points}
    finding, figure = _by_wiring(records) if len(wirings) > 1 else _by_share(records)
    drawn: list[PagePart] = [] if figure is None else [NO_FIGURES]
    if figure is not None and figures.available():
        drawn = [figure()]
    parts: list[PagePart] = [*drawn]
    for n, (head, *body) in enumerate(tables(records)):
        parts.append(Table(head, body, caption(records) if n == 0 else ""))
    parts.append(Aside("Columns", MEANING))
    machines = [record["machine"] for record in records if "machine" in record]
    title = "under another plan" if len(wirings) > 1 else "turned into a ladder"
    return finding, page(f"A trained model {title}", finding, parts, machines)


def _by_share(records: Sequence[dict[str, Any]]) -> tuple[str, Callable[[], Figure] | None]:
    """Which way recovers most of what the plan costs: a sentence, and what draws its figure."""
    shares = {
        f"{each['name']} ({each['plan']})": share
        for each in records
        if "way" in each and (share := recovered(each, records)) is not None
    }
    if not shares:
        return "No loss was recovered: the points have no zero-shot model beside them.", None
    best = max(shares, key=lambda name: shares[name])
    finding = (
        f"{best} recovers {100 * shares[best]:.0f} % of the bits per byte that turning its layers "
        f"into a ladder costs."
    )

    def draw() -> Figure:
        bars = [
            _bar(name, 100 * share, f"{100 * share:.0f} %")
            for name, share in sorted(shares.items(), key=lambda each: -each[1])
        ]
        said = "Share of the zero-shot loss that is recovered; coloured: by distillation."
        return Figure(figures.bars(bars, "%"), said)

    return finding, draw


def _by_wiring(records: Sequence[dict[str, Any]]) -> tuple[str, Callable[[], Figure] | None]:
    """Which plan ends nearest to the original: as `_by_share`.

    Shares are not compared here, since each plan has a zero-shot loss of its own.
    """
    original = _bits(records, way="original")
    if original is None:
        return "The original was not measured beside these points.", None
    points = [each for each in records if "way" in each and each["layers"]]
    more = {
        f"{each['plan']} {each['way']}{_factor(each)}": float(each["bits_per_byte"]) - original
        for each in points
    }
    best = min(more, key=lambda name: more[name])
    finding = f"{best} is nearest to the original: {more[best]:+.4f} bits per byte."

    def draw() -> Figure:
        bars = [
            _bar(name, max(value, 0.0), f"{value:+.4f}")
            for name, value in sorted(more.items(), key=lambda each: each[1])
        ]
        said = "Bits per byte above the original's; coloured: distilled."
        return Figure(figures.bars(bars, "bits per byte"), said)

    return finding, draw


def _factor(record: dict[str, Any]) -> str:
    """The multiple of the learning rate in a point's name, as ` x0.5`; '' if it has none."""
    found = FACTOR.search(record["name"])
    return "" if found is None else f" {found[1]}"


def _bar(name: str, value: float, text: str) -> Bar:
    return Bar(name, value, text, COLOURS["ladder"] if "distil" in name else MUTED)
