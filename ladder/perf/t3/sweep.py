"""What the paper does not evaluate: other collectives (7.1), and other TP degrees."""

from __future__ import annotations

from typing import get_args

from ladder.perf.machine import Machine
from ladder.perf.report import Study
from ladder.perf.scores import Dots, Result, Row, holds
from ladder.perf.t3 import simulate
from ladder.perf.t3 import system as closed
from ladder.perf.t3.ours import system_of
from ladder.perf.t3.system import (
    DECLARED,
    FITTED,
    LARGE,
    MODELS,
    SOURCE,
    Collective,
    System,
    sublayer,
)

DEGREES = (4, 8, 16, 32, 64)


def sweep_of(machine: Machine | None) -> Study:
    """The sweep on the paper's system, or on a machine's rates with its tracker and queue."""
    if machine is None:
        return Study(SOURCE, [sweep()], FITTED, DECLARED)
    fitted = {"switch, in entries of the queue": "Figure 16's T3: 20 % geomean, on its own system"}
    return Study(
        f"T3's tracker and memory controller on {machine.gpu}, rates of {machine.name}, simulated",
        [sweep(system_of(machine))], fitted,
        (
            "such hardware: no H200 has it, and links as fast to 64 GPUs",
            "tiles of 128 x 128 x 32, two workgroups a multiprocessor (264 workgroups a stage)",
            *DECLARED[1:3],
            "a cache of 50 MiB that holds what was read last, and one link of a GPU for all peers",
        ),
    )  # fmt: skip


def sweep(system: System | None = None) -> Result:
    """FC-2 of T-NLG and PALM under every collective and TP degree."""
    system = system or System()
    rows = []
    ordered = True
    for model in (MODELS[1], LARGE[1]):
        for kind in get_args(Collective):
            for degree in DEGREES:
                case = sublayer(model, "FC-2", degree)
                found = {
                    "ideal overlap": closed.sequential(case, system, kind)
                    / closed.ideal(case, system, kind=kind),
                    "T3": simulate.speedup(case, system, False, kind),
                    "T3-MCA": simulate.speedup(case, system, True, kind),
                }
                ordered &= found["T3"] <= found["T3-MCA"] * 1.001
                rows.append(Row(f"{model.name} FC-2, {kind}, TP {degree}", found))
    return Result(
        None, "Other collectives (7.1) and TP degrees",
        (holds("T3-MCA is never slower than T3", ordered),),
        Dots(tuple(rows), "speedup over one operation after the other"),
        (
            "The paper has no number of these: there is nothing to score.",
            "direct: every rank stores its part of each shard to the shard's owner, over "
            + (
                f"one link of {system.link / 1e9:.0f} GB/s"
                if system.shared
                else f"a link of {system.link / 1e9:.0f} GB/s to each peer"
            )
            + ". all-to-all: the same without a sum, and without a gather.",
            "Both can beat the ideal overlap, which is of a product that waits for its own writes. "
            "Stores to peers are not waited for, and nothing holds them back.",
        ),
    )  # fmt: skip
