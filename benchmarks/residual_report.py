"""The table and the figures of benchmarks/residual.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quality_report

from ladder.bench import figures
from ladder.plans import aligned

Record = dict[str, Any]
COLUMNS = ("plan", "bits per byte", "partial", "output", "written", "own", "coefficient",
           "apart",
           "attention", "mlp", "gradient", "error")  # fmt: skip
MEANING = """\
partial, output, written: RMS of a rank's partial, of its sum over the ranks, and of what the sum
adds to the final residual, means over the sublayers that do not reduce / that do. own: the
coefficient with which a partial joins its own rank's residual; coefficient: that in later layers'
residual, of all ranks. apart: RMS of the difference of the ranks'
residuals from their mean, over the residual's, the largest of all reads. attention, mlp: their
shares of the final residual; the rest is the embedding. gradient: of the loss by a rank's partial,
x 1000, as for partials. error: the largest difference of a residual from the sum of the partials
with their coefficients, over the residual's RMS."""
COLOURS = {"ladder": figures.COLOURS["ladder"], "standard": figures.COLOURS["standard"]}
SCALED = (figures.COLOURS["desync-4x"], figures.COLOURS["parallel"], figures.COLOURS["dtp-1"])


def read(file: Path) -> list[Record]:
    """The records of a result file, the newest of each plan and moment."""
    return quality_report.read(file, ("plan", "when"), "residual.py")


def moments(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["when"] for record in records))


def describe(records: Sequence[Record]) -> str:
    """A table for each moment, then one of the sublayers of each model."""
    first = records[0]
    shape = first["recipe"].get("model") or {}
    parts = [
        f"{shape.get('name', 'model')}, {first['parameters_count']:,} parameters, "
        f"T {first['tp_degree']}; measured on {first['tokens_measured']:,} held-out tokens"
    ]
    for when in moments(records):
        members = [record for record in records if record["when"] == when]
        parts.append(f"{when}\n{aligned([COLUMNS, *map(row, members)], left=1)}")
    parts.append(MEANING)
    for record in records:
        title = f"{record['plan']}, {record['when']}"
        parts.append(f"{title}\n{aligned([SUBLAYER_COLUMNS, *sublayer_rows(record)], left=1)}")
    return "\n\n".join(parts) + "\n"


def groups(record: Record) -> list[list[Record]]:
    """The sublayers that do not reduce, and those that do; only groups with members."""
    kept = [each for each in record["sublayers"] if each["reduce"] == "none"]
    summed = [each for each in record["sublayers"] if each["reduce"] != "none"]
    return [group for group in (kept, summed) if group]


def mean(record: Record, value: Callable[[Record], float], form: str = ".3f") -> str:
    """The means of a value over the unreduced and the reduced sublayers."""
    found = (statistics.fmean(map(value, group)) for group in groups(record))
    return " / ".join(format(each, form) for each in found)


def shares(record: Record) -> dict[str, float]:
    """The share of each kind of sublayer in the final residual."""
    found: dict[str, float] = {"embedding": record["embedding"]["share"]}
    for each in record["sublayers"]:
        found[each["kind"]] = found.get(each["kind"], 0.0) + each["share"]
    return found


def row(record: Record) -> list[str]:
    quality, share = record["heldout_bits_per_byte"], shares(record)
    return [
        record["plan"],
        "-" if quality is None else f"{quality:.4f}",
        mean(record, lambda each: statistics.fmean(each["partial_rms"])),
        mean(record, lambda each: each["output_rms"]),
        mean(record, lambda each: each["written_rms"]),
        mean(record, lambda each: each["own_coefficient"], ".3g"),
        mean(record, lambda each: statistics.fmean(each["coefficients"]), ".3g"),
        f"{max(each['apart'] for each in record['residuals']):.2f}",
        *(f"{share[kind]:.2f}" if kind in share else "-" for kind in ("attention", "mlp")),
        mean(record, lambda each: 1000 * each["partial_gradient"]),
        f"{record['error']:.0e}",
    ]


SUBLAYER_COLUMNS = ("sublayer", "reduce", "residual read", "apart", "partial", "output",
                    "coefficient", "written", "share", "gradient", "of the residual", "of weights",
                    "of the output matrix")  # fmt: skip


def sublayer_rows(record: Record) -> list[list[str]]:
    """A row for each sublayer; gradients x 1000. The last row is the final norm's read."""
    weights = {(each.get("layer"), each["kind"]): each for each in record["parameters"]}
    found = []
    for each, read in zip(record["sublayers"], record["residuals"], strict=False):
        own = weights.get((each["layer"], each["kind"]), {})
        found.append(
            [
                f"{each['layer']} {each['kind']}",
                each["reduce"],
                f"{read['rms']:.3f}",
                f"{read['apart']:.2f}",
                f"{statistics.fmean(each['partial_rms']):.3f}",
                f"{each['output_rms']:.3f}",
                f"{statistics.fmean(each['coefficients']):.3g}",
                f"{each['written_rms']:.3f}",
                f"{each['share']:.3f}",
                f"{1000 * each['partial_gradient']:.3f}",
                f"{1000 * read['gradient']:.3f}",
                *(f"{1000 * own[key]:.3f}" if own else "-"
                  for key in ("gradient", "output_gradient")),
            ]
        )  # fmt: skip
    last = record["residuals"][-1]
    found.append(["final norm", "", f"{last['rms']:.3f}", f"{last['apart']:.2f}", *[""] * 6,
                  f"{1000 * last['gradient']:.3f}", "", ""])  # fmt: skip
    return found


def figure(records: Sequence[Record], when: str, title: str, subtitle: str) -> str:
    """What each sublayer writes into the residual of later layers, by plan, as SVG."""
    members = [record for record in records if record["when"] == when]
    spare = iter(SCALED)
    colours = {each["plan"]: COLOURS.get(each["plan"]) or next(spare) for each in members}
    lines = {
        record["plan"]: (
            [each["sublayer"] for each in record["sublayers"]],
            [each["written_rms"] for each in record["sublayers"]],
        )
        for record in members
    }
    every = [value for _, values in lines.values() for value in values]
    ticks = [2.0**power for power in range(math.floor(math.log2(min(every))),
                                           math.ceil(math.log2(max(every))) + 1)]  # fmt: skip
    return figures.lines(
        lines, "sublayer (even: attention, odd: MLP)", "RMS of what it adds to later residuals",
        y_ticks=ticks, title=title, subtitle=subtitle, colours=colours,
    )  # fmt: skip
