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
           "attention", "mlp", "balance", "gradient", "error")  # fmt: skip
MEANING = """\
partial, output, written: RMS of a rank's partial, of its sum over the ranks, and of what the sum
adds to the final residual, % of the RMS of that; means over the sublayers that do not reduce / that
do. own: the coefficient with which a partial joins its own rank's residual; coefficient: that in
later layers' residual, of all ranks. apart: RMS of the difference of the ranks' residuals from
their mean, over the residual's, the largest of all reads. attention, mlp: their shares of the final
residual; the rest is the embedding. balance: what the sublayers that do not reduce add, over what
the same sublayers of standard add, in geometric mean; divided by the same for those that reduce.
gradient: of the loss by a rank's partial, x 1000, as for partials. error: the largest difference of
a residual from the sum of the partials with their coefficients, over the residual's RMS. Below, all
gradients are x 1000; inside a group of an accumulating plan, the residual's is that of what the
group reads alone."""
MOMENTS = {"initial": "at initialisation", "trained": "trained"}
SCALED = ("#c2508f", "#94780f", "#168a94")  # for plans without a colour of their own


def read(file: Path) -> list[Record]:
    """The records of a result file, the newest of each plan and moment."""
    return quality_report.read(file, ("plan", "when"), "residual.py")


def plan(record: Record) -> str:
    """The plan's name, without the seed that the folder of a run of quality.py names."""
    name: str = record["plan"].partition("-seed")[0]
    return name


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
        standard = next((each for each in members if plan(each) == "standard"), None)
        found = [row(each, standard) for each in members]
        parts.append(f"{when}\n{aligned([COLUMNS, *found], left=1)}")
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


def percent(record: Record, value: Callable[[Record], float]) -> str:
    """`mean` of an RMS, in percent of the final residual's."""
    whole = record["residuals"][-1]["rms"] / 100
    return mean(record, lambda each: value(each) / whole, ".1f")


def shares(record: Record) -> dict[str, float]:
    """The share of each kind of sublayer in the final residual."""
    found: dict[str, float] = {"embedding": record["embedding"]["share"]}
    for each in record["sublayers"]:
        found[each["kind"]] = found.get(each["kind"], 0.0) + each["share"]
    return found


def balance(record: Record, standard: Record) -> float | None:
    """What unreduced outputs add to later residuals relative to reduced ones, standard being 1."""
    if len(standard["sublayers"]) != len(record["sublayers"]) or len(groups(record)) < 2:
        return None
    kept, summed = (
        statistics.geometric_mean(
            each["written_rms"] / standard["sublayers"][each["sublayer"]]["written_rms"]
            for each in group
        )
        for group in groups(record)
    )
    return kept / summed


def row(record: Record, standard: Record | None) -> list[str]:
    quality, share = record["heldout_bits_per_byte"], shares(record)
    found = None if standard is None else balance(record, standard)
    return [
        record["plan"],
        "-" if quality is None else f"{quality:.4f}",
        percent(record, lambda each: statistics.fmean(each["partial_rms"])),
        percent(record, lambda each: each["output_rms"]),
        percent(record, lambda each: each["written_rms"]),
        mean(record, lambda each: each["own_coefficient"], ".3g"),
        mean(record, lambda each: statistics.fmean(each["coefficients"]), ".3g"),
        f"{max(each['apart'] for each in record['residuals']):.2f}",
        *(f"{share[kind]:.2f}" if kind in share else "-" for kind in ("attention", "mlp")),
        "-" if found is None else f"{found:.2f}",
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
                f"{statistics.fmean(each['partial_rms']):.3g}",
                f"{each['output_rms']:.3g}",
                f"{statistics.fmean(each['coefficients']):.3g}",
                f"{each['written_rms']:.3g}",
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


def figure(records: Sequence[Record], when: str, title: str) -> str:
    """What each sublayer adds to the residual of later layers, by plan, as SVG."""
    members = [record for record in records if record["when"] == when]
    spare = iter(SCALED)
    colours = {
        each["plan"]: figures.COLOURS.get(plan(each)) or next(spare, figures.INK)
        for each in members
    }
    lines = {}
    for record in members:
        whole = record["residuals"][-1]["rms"] / 100
        written = [each["written_rms"] / whole for each in record["sublayers"]]
        lines[record["plan"]] = list(range(len(written))), written
    every = [value for _, values in lines.values() for value in values]
    low, high = math.floor(math.log2(min(every))), math.ceil(math.log2(max(every)))
    first = members[0]
    return figures.lines(
        lines, "sublayer (even: attention, odd: MLP)",
        "RMS of what a sublayer adds to the residual of later layers, % of the final residual's",
        y_ticks=[2.0**power for power in range(low, high + 1)], title=title,
        subtitle=f"{first['parameters_count'] / 1e6:.1f}M parameters, T {first['tp_degree']}, "
        f"{MOMENTS[when]}; a reduce in every 4th sublayer of desync-4x", colours=colours,
    )  # fmt: skip
