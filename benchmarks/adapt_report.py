"""The table and the page of the results of benchmarks/adapt.py."""

from __future__ import annotations

from collections.abc import Sequence
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
MEANING = """\
more: bits per byte above the original's. KL: nats a token of the divergence from it. recovered: of
what the choice of layers costs before any training, in bits per byte; above 100 % the model is
better than the original was, as more training makes that too (trained-on). chosen: the last layers,
or the cheapest by `ladder convert sensitivity`; both: they are the same. rate: the peak. s: of
conversion or training, with its start."""


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a result file, the newest of each name."""
    return quality_report.read(file, ("name",), "adapt.py")


def recovered(record: dict[str, Any], records: Sequence[dict[str, Any]]) -> float | None:
    """(zero-shot - after) / (zero-shot - original) in bits per byte, of the same layers."""
    original = _bits(records, way="original")
    before = _bits(records, way="zero-shot", layers=record["layers"])
    if original is None or before is None or before == original or not record["tokens"]:
        return None
    return (before - float(record["bits_per_byte"])) / (before - original)


def _bits(records: Sequence[dict[str, Any]], **wanted: Any) -> float | None:
    found = (r for r in records if all(r.get(key) == value for key, value in wanted.items()))
    record = next(found, None)
    return None if record is None else float(record["bits_per_byte"])


def rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each point, under COLUMNS: the original, the controls, then each choice."""
    points = [record for record in records if "way" in record]
    original = _bits(points, way="original")
    points.sort(key=lambda r: (len(r["layers"]), r["chosen"] == "cheapest"))
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
    cells = [list(COLUMNS), ["---"] * len(COLUMNS), *rows(records)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in cells)
    return f"{caption(records)}\n\n{table}\n\n{MEANING}"


def write_page(records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The main result in a sentence, and the page."""
    points = [record for record in records if "way" in record]
    shares = {
        f"{each['name']} ({each['plan']})": share
        for each in points
        if (share := recovered(each, points)) is not None
    }
    finding = "No loss was recovered: the points have no zero-shot model beside them."
    drawn: PagePart = NO_FIGURES
    if shares:
        best = max(shares, key=lambda name: shares[name])
        finding = (
            f"{best} recovers {100 * shares[best]:.0f} % of the bits per byte that turning its "
            f"layers into a ladder costs."
        )
        if figures.available():
            bars = [
                Bar(name, 100 * share, f"{100 * share:.0f} %",
                    COLOURS["ladder"] if "distil" in name else MUTED)
                for name, share in sorted(shares.items(), key=lambda each: -each[1])
            ]  # fmt: skip
            said = "Share of the zero-shot loss that is recovered; coloured: by distillation."
            drawn = Figure(figures.bars(bars, "%"), said)
    parts: list[PagePart] = [drawn] if shares else []
    parts += [Table(COLUMNS, rows(records), caption(records)), Aside("Columns", MEANING)]
    machines = [record["machine"] for record in records if "machine" in record]
    return finding, page("A trained model turned into a ladder", finding, parts, machines)
