"""From times to ECT, overlap efficiency and floors; tables of them.

ECT, the effective communication time, and E, the overlap efficiency, are those of FLUX (arXiv
2406.06858, section 2.3): ECT = time - product alone; E = 1 - ECT / ECT of product, then collective.
E is 0 for that baseline, 1 where communication costs nothing, and negative for what is slower.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from ladder.bench.ops.points import BAGS, OpPoint, Variant
from ladder.comm.capture import Mode
from ladder.plans import aligned

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

EXPLANATION = """\
alone: the fastest plain product or lookup. link: bytes received over the measured rate. floor: the
larger of the two, where a lookup counts as its bytes over the memory's measured rate. In brackets,
E: the share of the communication's cost that is hidden; 0: product, then NCCL (on a CPU gloo); 1:
nothing is left. * is what runs when nothing is insisted on, + what runs where the group allows any
order of sums."""


@dataclass(frozen=True)
class Result:
    """Microseconds per call on the slowest rank: median, 10th and 90th percentile, derived times.

    efficiency: None where the baseline is not slower than the product. error: the largest, in units
    of the largest exact value. picked: `ladder.ops.explain` names this way. picked_any: it names
    this way where any order of sums is allowed. mhz: the clock of the GPU's SMs meanwhile, on the
    rank where it was the lowest; a GPU lowers it at its power limit. host_us: the host's time to
    enqueue a call, on the slowest rank; for a graph, the call's share of the replay.
    """

    us: float
    low_us: float
    high_us: float
    ect_us: float
    efficiency: float | None
    link_us: float
    floor_us: float
    of_floor: float
    error: float
    picked: bool
    picked_any: bool = False
    mhz: float | None = None
    host_us: float | None = None


@dataclass(frozen=True)
class Timed:
    """A way's name, role, mode, error and times. For the other fields see `Result` and `Way`."""

    name: str
    role: str
    mode: Mode
    times: Sequence[float]
    error: float
    picked: bool = False
    picked_any: bool = False
    variant: Variant | None = None
    mhz: float | None = None
    host_us: float | None = None


def ect_us(us: float, alone_us: float) -> float:
    """The effective communication time."""
    return us - alone_us


def efficiency(us: float, alone_us: float, collective_us: float) -> float | None:
    """The overlap efficiency, or None where the collective costs nothing."""
    baseline = ect_us(collective_us, alone_us)
    return 1 - ect_us(us, alone_us) / baseline if baseline > 0 else None


def summarise(
    timed: Sequence[Timed], link_us: float, memory_us: float = 0.0
) -> list[tuple[Timed, Result]]:
    """The results of a point. Each mode is compared with its own fastest product and collective.

    memory_us: the least time that reading and writing take; 0: the measured product's time. A mode
    has no results if its product or its collective is missing, because it was wrong.
    """
    found = []
    for mode in dict.fromkeys(each.mode for each in timed):
        members = [each for each in timed if each.mode == mode]
        alone = [statistics.median(each.times) for each in members if each.role == "alone"]
        staged = [statistics.median(each.times) for each in members if each.role == "collective"]
        if not alone or not staged:
            continue
        product = min(alone)
        floor = max(memory_us or product, link_us)
        for each in members:
            us = statistics.median(each.times)
            tenths = statistics.quantiles(each.times, n=10, method="inclusive")
            e = None if each.role == "alone" else efficiency(us, product, min(staged))
            found.append((each, Result(
                us, tenths[0], tenths[-1], ect_us(us, product), e, link_us, floor, us / floor,
                each.error, each.picked, each.picked_any, each.mhz,
                each.host_us,
            )))  # fmt: skip
    return found


def records(
    point: OpPoint, found: Sequence[tuple[Timed, Result]], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return [
        {
            "point": {**asdict(point), "way": each.name, "role": each.role, "mode": each.mode},
            "result": asdict(result),
            "machine": about,
        }
        for each, result in found
    ]


def newest_runs(
    found: Iterable[tuple[K, tuple[str, str], Mapping[str, Any], V]],
) -> dict[K, list[V]]:
    """The values of each point's newest run.

    found: (point, (way, mode), facts of the machine, value), the newest last. A new run of a point
    begins where a way comes again, or where the machine's facts change. Ways that are only in older
    runs are left out, so that no ways of different runs are compared.
    """
    runs: dict[K, tuple[Mapping[str, Any], dict[tuple[str, str], V]]] = {}
    for point, way, about, value in found:
        if point not in runs or runs[point][0] != about or way in runs[point][1]:
            runs[point] = about, {}
        runs[point][1][way] = value
    return {point: [*run.values()] for point, (_, run) in runs.items()}


# -- tables -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """The subject of a table: an operator in a mode, on a machine where points are comparable."""

    op: str
    mode: str
    dtype: str
    ranks: int
    gpu: str

    @property
    def setting(self) -> str:
        """What is the same for all operators of a run."""
        gpu = "" if self.gpu == "none" else f", {self.gpu}"
        return f"{self.dtype}, {self.ranks} ranks{gpu}"


def case_of(record: Mapping[str, Any]) -> Case:
    point = record["point"]
    gpu = record["machine"].get("gpu", "none")
    return Case(point["op"], point["mode"], point["dtype"], point["ranks"], gpu)


def shared(record: Mapping[str, Any]) -> str:
    """The point as JSON, without the way that was timed."""
    own = ("way", "role", "mode")
    return json.dumps({key: each for key, each in record["point"].items() if key not in own})


def by_case(found: Sequence[Mapping[str, Any]]) -> dict[Case, dict[str, list[Any]]]:
    """Case -> point as JSON -> its records."""
    grouped: dict[Case, dict[str, list[Any]]] = {}
    for record in found:
        points = grouped.setdefault(case_of(record), {})
        points.setdefault(shared(record), []).append(record)
    return grouped


def groups(found: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, list[Any]]]:
    """(operator, mode) -> point as JSON -> its records, which are all of one GPU."""
    grouped: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for case, points in by_case(found).items():
        grouped.setdefault((case.op, case.mode), {}).update(points)
    return grouped


def rows(points: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Head and cells of a table of one operator in one mode; alone and the link are the bounds."""
    ways: dict[str, None] = {}
    for members in points.values():
        ways |= dict.fromkeys(r["point"]["way"] for r in members if r["point"]["role"] != "alone")
    table = [["shape", "m", "alone", "link", *ways]]
    for text, members in points.items():
        point = json.loads(text)
        by_way = {record["point"]["way"]: record for record in members}
        alone = min(r["result"]["us"] for r in members if r["point"]["role"] == "alone")
        cells = [_cell(by_way[way]) if way in by_way else "-" for way in ways]
        link = members[0]["result"]["link_us"]
        table.append([sizes(point), str(point["m"]), f"{alone:.1f}", f"{link:.1f}", *cells])
    return table


def sizes(point: Mapping[str, Any]) -> str:
    """A point's shape in a few words, without m."""
    if point["op"] == BAGS:
        return f"{point['shape']}, {point['tables']} tables, pooling {point['pooling']}"
    return str(point["shape"])


def _cell(record: Mapping[str, Any]) -> str:
    result = record["result"]
    e = "" if result["efficiency"] is None else f" ({result['efficiency']:.2f})"
    bare = record["point"]["role"] == "collective"
    plus = "+" if result["picked_any"] else ""
    return f"{result['us']:.1f}{'' if bare else e}{'*' if result['picked'] else ''}{plus}"


def text_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The records as text: a table for each operator and mode."""
    parts = []
    for case, points in by_case(found).items():
        head = f"{case.op}, {case.mode}, {case.setting}, microseconds (E)"
        parts.append(f"{head}\n{aligned(rows(points), left=1)}")
    return "\n\n".join(parts)


def ranges(found: Mapping[str, Sequence[float]]) -> list[str]:
    """By operator, the range of E, and how often it is below 0."""
    lines = []
    for op, each in found.items():
        if not each:
            continue
        lost = sum(e < 0 for e in each)
        behind = f" (below 0, slower than the baseline: {lost} of {len(each)})" if lost else ""
        ends = dict.fromkeys(f"{e:.2f}" for e in (min(each), max(each)))
        lines.append(f"{op} {' to '.join(ends)}{behind}")
    return lines
