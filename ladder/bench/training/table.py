"""The table of `ladder bench train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ladder.bench.training.points import TrainingPoint
from ladder.plans import aligned

HEAD = ("layout", "plan", "step ms", "range", "tokens/s/GPU", "MFU", "exposed", "x standard",
        "hidden", "bare ms", "GiB")  # fmt: skip


def label(point: TrainingPoint) -> str:
    if not point.no_comm:
        return point.plan
    return "none" if point.plan == "standard" else f"{point.plan} no_comm"


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text."""
    return aligned([HEAD, *cells(records)], left=2)


def cells(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each point, in the order of HEAD, with ratios to points of the same run.

    exposed: over the same plan without TP's reduces. For the forward / backward pass of a traced
    micro-batch: hidden, the share of all communication that ran under computation, and bare ms, the
    rest.
    """
    found = {TrainingPoint(**each["point"]): each["result"] for each in records}
    rows: list[tuple[str, ...]] = []
    for point, result in found.items():
        no_comm = None if point.no_comm else found.get(replace(point, no_comm=True))
        standard = found.get(replace(point, plan="standard", no_comm=False, tp_degree=None))
        exposed = f"{result['step_ms'] / no_comm['step_ms'] - 1:.1%}" if no_comm else "-"
        speed = f"{standard['step_ms'] / result['step_ms']:.3f}" if standard else "-"
        times, passes = result["steps_ms"], result.get("trace", {}).values()
        row = (
            point.layout, label(point), f"{result['step_ms']:.1f}",
            f"{min(times):.1f}-{max(times):.1f}", f"{result['tokens_s_gpu']:,.0f}",
            f"{result['mfu']:.1%}" if "mfu" in result else "-", exposed, speed,
            " / ".join(f"{each['hidden']:.0%}" for each in passes) or "-",
            " / ".join(f"{each['exposed_ms']:.1f}" for each in passes) or "-",
            f"{result['memory_gib']:.1f}" if "memory_gib" in result else "-",
        )  # fmt: skip
        rows.append(row)
    return rows
