"""What `ladder predict decode` and `ladder predict validate` compute and print."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from ladder.config import load_plan, model_config
from ladder.models.errors import UserError
from ladder.models.presets import resolve_plan
from ladder.perf import memory, phases
from ladder.perf.machine import Machine, load
from ladder.perf.prediction.records import calibrated, scores, summary
from ladder.plans import aligned

KEPT = ("us", "basis", "exposed_us", "collectives", "launches")  # of a Prediction, in --json
DOUBT = """\
Predicted, not measured: `ladder predict validate RECORDS` prints the errors. NCCL beside products
is slower than predicted here, and a small model faster."""


def machine_of(options: Any) -> Machine:
    machine = load(options.machine)
    return machine if options.calibrate is None else calibrated(machine, options.calibrate)


def decode(options: Any) -> int:
    machine = machine_of(options)
    options.tp = tp = options.tp or machine.gpus
    shape = model_config(options.model)
    room = machine.values.get("memory_gib")
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        for name in options.plans:
            plan = resolve_plan(load_plan(name), shape.num_layers, options.tp_degree or tp)
            degree = (options.tp_degree or tp) if plan.depends_on_tp else None
            if degree not in (None, tp):
                raise UserError(
                    f"--tp-degree={degree} with --tp={tp}: fused decode steps have no virtual "
                    f"ranks; give both alike"
                )
            config = replace(shape, plan=plan, tp_degree=degree)
            held = memory.inference(config, tp, batch, options.context, options.context)
            for reducer in options.reducers[:1] if plan.no_comm or tp == 1 else options.reducers:
                step = phases.decode(config, machine, tp, reducer, batch, options.context)
                fits = None if room is None else memory.fits(held, machine)
                row = {"plan": name, "reducer": reducer, "batch": batch, "fits": fits}
                row |= {name: getattr(step, name) for name in KEPT}
                rows.append(row | {"memory_gib": held.total / memory.GIB})
    rows.sort(key=lambda row: (row["batch"], row["fits"] is False, row["us"]))
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{options.model}, TP {tp} on {machine.name}, {options.context} tokens so far\n")
    table = [["plan", "reducer", "batch", "ms", "exposed ms", "launches", "GiB", "fits", "basis"]]
    for row in rows:
        said = {None: "unknown", True: "yes", False: "no"}[row["fits"]]
        table.append(
            [row["plan"], row["reducer"], str(row["batch"]), f"{row['us'] / 1e3:.3f}",
             f"{row['exposed_us'] / 1e3:.3f}", str(row["launches"]), f"{row['memory_gib']:.1f}",
             said, row["basis"]]
        )  # fmt: skip
    print(aligned(table))
    if room is None:
        print(f"\nfits: machine {machine.name!r} does not say memory_gib, which was not recorded")
    print(f"\n{DOUBT}")
    return 0


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
