"""Tables of each point's fastest way, beside the baseline, torch's own operators and the aim."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ladder.bench.ops.derive import by_case, sizes
from ladder.bench.ops.points import BAGS, FEW, OF_EXPERTS
from ladder.operator_names import GATHER, REDUCE, SCATTER

Records = Sequence[Mapping[str, Any]]
# The overlap efficiencies to reach with FLUX's shapes of GPT-3 on four H200s.
E_AIMS = {
    GATHER: {1024: 0.50, 2048: 0.68, 4096: 0.80, 8192: 0.75},
    SCATTER: {1024: 0.55, 2048: 0.68, 4096: 0.78, 8192: 0.60},
    REDUCE: {1024: 0.30, 2048: 0.50, 4096: 0.60, 8192: 0.60},
}
DECODE_AIMS = {1: 2.0, 8: 2.0, 64: 6.0}  # microseconds beyond the product
HEAD = ["operator, mode", "shape", "path", "m", "us", "ECT", "E", "floor", "of floor", "NCCL ECT",
        "torch E", "aim us", "reached"]  # fmt: skip
BEST = """\
path: the fastest implementation, with its options. ECT: time less the fastest product. floor: the
larger of product, of a lookup its bytes, and link. NCCL ECT: of the product, then the backend's
collective. torch E: of the faster of torch's fused operators. aim: for FLUX's shapes of GPT-3, the
E that is aimed at on four H200s; in decoding, the product + 2, 2, 6 us for m 1, 8, 64; for other
products from m 1024 on, 1.05 x floor + 10 us; for lookups, 1.10 x the larger of alone and link."""


def aim_us(point: Mapping[str, Any], alone: float, link: float, collective: float) -> float | None:
    """The aim at a point, if there is one. It and alone, link, collective are in microseconds."""
    op, m = point["op"], point["m"]
    if point["shape"] == "flux-gpt3" and point["ranks"] == 4:
        e = E_AIMS.get(op, {}).get(m)
        return None if e is None else alone + (1 - e) * (collective - alone)
    if op == FEW:
        return alone + DECODE_AIMS[m] if m in DECODE_AIMS else None
    if op == BAGS:
        return 1.10 * max(alone, link)
    if op in OF_EXPERTS or m < 1024 or point["shape"].startswith("flux"):
        return None
    return 1.05 * max(alone, link) + 10


def best_rows(records: Records) -> list[list[str]]:
    """Head and cells of a table of all points in each mode. Rows name the dtype, the ranks and the
    GPU where an operator has several."""
    table, cases = [HEAD], by_case(records)
    several = Counter(case[:2] for case in cases)
    for case, points in cases.items():
        name = f"{case.op}, {case.mode}"
        if several[case[:2]] > 1:
            name += f", {case.setting}"
        for text, members in points.items():
            row = _row(json.loads(text), members)
            if row is not None:
                table.append([name, *row])
    return table


def of_role(members: Records, *roles: str) -> Mapping[str, Any] | None:
    """The fastest of these records whose way has one of the roles."""
    found = [record for record in members if record["point"]["role"] in roles]
    return min(found, key=lambda record: record["result"]["us"], default=None)


def _row(point: Mapping[str, Any], members: Records) -> list[str] | None:
    ours, baseline, alone = (of_role(members, r) for r in ("operator", "collective", "alone"))
    if ours is None or baseline is None or alone is None:
        return None
    result, theirs = ours["result"], of_role(members, "torch")
    aim = aim_us(
        point, alone["result"]["us"], result["link_us"], baseline["result"]["us"]
    )  # fmt: skip
    return [
        sizes(point), ours["point"]["way"], str(point["m"]), f"{result['us']:.1f}",
        f"{result['ect_us']:.1f}", _share(result), f"{result['floor_us']:.1f}",
        f"{result['of_floor']:.2f}", f"{baseline['result']['ect_us']:.1f}",
        "-" if theirs is None else _share(theirs["result"]),
        "-" if aim is None else f"{aim:.1f}",
        "-" if aim is None else "yes" if result["us"] <= aim else "no",
    ]  # fmt: skip


def _share(result: Mapping[str, Any]) -> str:
    return "-" if result["efficiency"] is None else f"{result['efficiency']:.2f}"
