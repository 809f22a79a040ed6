"""What `ladder predict validate` computes and prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ladder.models.errors import UserError
from ladder.perf.machine import Machine, load
from ladder.perf.prediction.records import calibrated, scores, summary
from ladder.plans import aligned


def machine_of(options: Any) -> Machine:
    machine = load(options.machine)
    return machine if options.calibrate is None else calibrated(machine, options.calibrate)


def validate(options: Any) -> int:
    found = scores(options.records, machine_of(options))
    if not found:
        raise UserError(
            f"{', '.join(map(str, options.records))}: no fused decode step with peer memory on the "
            f"GPUs of machine {options.machine!r}; give its records, or another --machine"
        )
    if options.json:
        data = [
            {**asdict(each.point), "measured_ms": each.measured, "predicted_ms": each.predicted,
             "calibrated": each.calibrated}
            for each in found
        ]  # fmt: skip
        print(json.dumps(data, indent=1))
        return 0
    table = [["model", "batch", "plan", "reducer", "measured ms", "predicted", "error"]]
    for each in sorted(found, key=lambda one: str(one.point)):
        point = each.point
        plan = f"{point.plan} no_comm" if point.no_comm else point.plan
        error = "calibrated" if each.calibrated else f"{100 * each.error:+.1f} %"
        table.append([point.model, str(point.batch), plan, point.reducer, f"{each.measured:.3f}",
                      f"{each.predicted:.3f}", error])  # fmt: skip
    print(aligned(table), end="\n\n")
    groups = [["held out", "reducer", "points", "mean error", "largest"]]
    for (model, reducer), (count, mean, most) in summary(found).items():
        groups.append([model, reducer, str(count), f"{mean:.1f} %", f"{most:.1f} %"])
    print(aligned(groups))
    return 0
