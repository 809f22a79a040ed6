"""Predicted times and E of operators against those of `ladder bench ops`, and the errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ladder.bench.ops.points import OpPoint, Variant, point_of, recorded
from ladder.comm.capture import MODES, Mode
from ladder.perf.machine import Machine
from ladder.perf.operators.cost import HOSTS, Host
from ladder.perf.operators.predict import ALONE, Predicted, Predictor, efficiency_text, plain
from ladder.perf.prediction.records import check_kinds, check_number, cut, known_degrees, records
from ladder.plans import aligned

HEAD = [
    "operator", "m", "implementation", "mode", "measured us", "predicted", "error", "ECT us",
    "predicted", "E", "predicted", "10 to 90 % of its turns",
]  # fmt: skip
NOTE = """\
E, measured: of the record, against the product and NCCL of its own run. The last column: E that its
10th and 90th percentile would have against the same two medians; what the GPU's clock does to one
way and not to another is in it. Of records of operators these were taken: the rate of our Triton
product, what the host takes for a call, and that graphs run two streams at once."""


@dataclass(frozen=True)
class Measured:
    """One way of a record: microseconds, ECT, E, and E at the time's 90th and 10th percentile."""

    us: float
    ect_us: float
    efficiency: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True)
class OperatorScore:
    """A way of a point in a mode (captured, eager), with its prediction. The way is a variant of
    ours, the product alone, or the baseline."""

    point: OpPoint
    way: str
    mode: Mode
    measured: Measured
    predicted: Predicted

    @property
    def error(self) -> float:
        return self.predicted.us / self.measured.us - 1

    @property
    def off(self) -> float | None:
        """The error of the predicted E."""
        if self.predicted.efficiency is None or self.measured.efficiency is None:
            return None
        return self.predicted.efficiency - self.measured.efficiency

    def to_dict(self) -> dict[str, Any]:
        point = {each.name: getattr(self.point, each.name) for each in fields(OpPoint)}
        return {
            "phase": "ops", **point, "way": self.way, "mode": self.mode,
            "measured_us": self.measured.us, "predicted_us": self.predicted.us,
            "measured_ect_us": self.measured.ect_us, "predicted_ect_us": self.predicted.ect_us,
            "measured_e": self.measured.efficiency, "predicted_e": self.predicted.efficiency,
        }  # fmt: skip


def scores(files: Sequence[Path], machine: Machine) -> list[OperatorScore]:
    """All recorded ways on this machine's GPUs that can be predicted. Of several records of a way,
    the one with the median time counts."""
    found: dict[tuple[OpPoint, str, Mode, Variant, Host], list[Measured]] = {}
    predictors = {host: Predictor(machine, host) for _, host in HOSTS}
    for point, way, mode, variant, host, measured in _ways(files, machine):
        if predictors[host].able(point, variant):
            found.setdefault((point, way, mode, variant, host), []).append(measured)
    return [
        OperatorScore(
            point, way, mode,
            sorted(each, key=lambda one: one.us)[len(each) // 2],
            predictors[host](point, variant, mode),
        )
        for (point, way, mode, variant, host), each in found.items()
    ]  # fmt: skip


def _ways(
    files: Sequence[Path], machine: Machine
) -> Iterator[tuple[OpPoint, str, Mode, Variant, Host, Measured]]:
    """What was timed, the host's time for a call at that date (`OperatorCost`), and the time."""
    degrees = known_degrees(machine)
    for record in records(files):
        data, about = record["point"], record["machine"]
        if "way" not in data or about.get("gpu") != machine.gpu or not record.get("result"):
            continue
        try:
            point = point_of(data)
            check_kinds(point)
            for name in ("m", "n", "k"):
                check_number(name, getattr(point, name), above=0)
            _check_way(data)
            variant = _variant(data, point)
            if variant is None or point.ranks not in degrees:
                continue
            host = max((day, host) for day, host in HOSTS if day <= about["date"])[1]
            found = point, data["way"], data["mode"], variant, host, _measured(record["result"])
        except (KeyError, TypeError) as error:
            raise cut(files, error) from error
        yield found


def _check_way(data: Mapping[str, Any]) -> None:
    """Raise TypeError unless the way is named, and its mode is one."""
    for name, right in (("way", isinstance(data["way"], str)), ("mode", data["mode"] in MODES)):
        if not right:
            raise TypeError(f"{name}={data[name]!r}")


def _variant(data: Mapping[str, Any], point: OpPoint) -> Variant | None:
    """The variant that was timed; None for one that is not ours."""
    if data["role"] == "alone":
        return Variant(ALONE) if data["way"] == ALONE else None
    if data["role"] == "collective":
        return plain(point.op)
    if data["role"] != "operator":
        return None
    return recorded(data["way"], point.op)


def _measured(result: Mapping[str, Any]) -> Measured:
    us, ect, e = result["us"], result["ect_us"], result["efficiency"]
    for name in ("us", "low_us", "high_us"):
        check_number(name, result[name], above=0)
    check_number("ect_us", ect)
    if e is not None:
        check_number("efficiency", e)
    if e is None or e == 1:
        return Measured(us, ect, e, None, None)
    baseline = ect / (1 - e)  # of NCCL

    def at(time: float) -> float:
        return 1 - (ect + time - us) / baseline

    return Measured(us, ect, e, at(result["high_us"]), at(result["low_us"]))


def report(found: Sequence[OperatorScore]) -> list[str]:
    """Every way, then the errors by implementation, and how often the prediction picks the fastest
    one."""
    rows = [HEAD]
    for each in sorted(found, key=_order):
        one, other = each.measured, each.predicted
        spread = "-" if one.least is None else f"{one.least:.2f} to {one.most:.2f}"
        rows.append([
            each.point.op, str(each.point.m), each.way, each.mode, f"{one.us:.1f}",
            f"{other.us:.1f}", f"{100 * each.error:+.1f} %", f"{one.ect_us:.1f}",
            f"{other.ect_us:.1f}", efficiency_text(one.efficiency),
            efficiency_text(other.efficiency), spread,
        ])  # fmt: skip
    lines = ["ops\n", aligned(rows), "", NOTE, ""]
    rows = [["mean errors", "calls", "time", "ECT", "E", "E, with its sign"]]
    for name, (count, error, ect, off) in summary(found).items():
        shares = ["-", "-"]
        if off:
            shares = [f"{statistics.mean(map(abs, off)):.2f}", f"{statistics.mean(off):+.2f}"]
        rows.append([name, str(count), f"{error:.1f} %", f"{ect:.0f} us", *shares])
    lines += [aligned(rows), ""]
    picked = picks(found)
    if picked:
        best = sum(regret <= 0 for regret in picked)
        lines.append(
            f"what is predicted to be the fastest was it in {best} of {len(picked)} points and "
            f"modes; elsewhere it took at most {100 * max(picked):.1f} % longer than the fastest"
        )
    return [*lines, ""]


def _order(each: OperatorScore) -> tuple[str, str, int, bool, str]:
    return each.point.op, each.mode, each.point.m, each.way != ALONE, each.way


def summary(found: Iterable[OperatorScore]) -> dict[str, tuple[int, float, float, list[float]]]:
    """By implementation: the number of calls, the mean error of their times (%) and of their ECT
    (us), and the error of each E."""
    groups: dict[str, list[OperatorScore]] = {}
    for each in found:
        groups.setdefault(each.way, []).append(each)
    return {
        name: (
            len(some), statistics.mean(100 * abs(each.error) for each in some),
            statistics.mean(abs(each.predicted.ect_us - each.measured.ect_us) for each in some),
            [each.off for each in some if each.off is not None],
        )
        for name, some in sorted(groups.items())
    }  # fmt: skip


def picks(found: Iterable[OperatorScore]) -> list[float]:
    """For each point and mode with several ways (the product alone not counted): how much longer
    than the fastest way the one took that is predicted to be the fastest, as a share."""
    cases: dict[tuple[OpPoint, str], list[OperatorScore]] = {}
    for each in found:
        if each.way != ALONE:
            cases.setdefault((each.point, each.mode), []).append(each)
    return [
        min(some, key=lambda one: one.predicted.us).measured.us
        / min(one.measured.us for one in some)
        - 1
        for some in cases.values()
        if len(some) > 1
    ]
