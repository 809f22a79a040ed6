"""`ladder bench train`: training steps of several plans under several layouts, in one run.

The steps are those of `ladder train` on random tokens, launched while the GPU computes the previous
step. Each plan under TP is also timed without its sublayers' reduces (no_comm); the difference is
its exposed communication. `none` is `standard` without communication. Points of a layout that fit
into memory together take turns, so that drift of the machine affects all of them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ladder.bench.training.measure import (
    has_room,
    measure,
    prepare_point,
    release_memory,
    trace_passes,
)
from ladder.bench.training.points import (
    TrainingPoint,
    is_virtual,
    parse_layout,
    points,
    recipe_of,
    shape_of,
)
from ladder.bench.training.table import label, table
from ladder.files import check_writable, make_folder
from ladder.models.errors import UserError
from ladder.parallel import launch
from ladder.parallel.apply import check_sequence_parallel
from ladder.parallel.mesh import make_mesh
from ladder.records import append, facts
from ladder.train.config import MOST

RESULTS = "train.jsonl"


def main(options: Any) -> int:
    """Run `ladder bench train` on every rank; rank 0 records and prints."""
    device = launch.join(options.device)
    launch.agree(vars(options))
    if options.profile:
        check_profile(device)
    todo = checked_points(options, device)
    out, main_rank = Path(options.out), launch.rank() == 0
    without = [name for name in options.layouts if parse_layout(name).tp == 1]
    if main_rank and without and "none" in options.plans:
        said = f"--plans none is left out under {', '.join(without)}: without TP there is no reduce"
        print(said, file=sys.stderr, flush=True)
    if main_rank:
        check_writable(out / RESULTS)
        make_folder(out)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    machine = {**facts(gpu), "ranks": launch.world_size()}
    records: list[dict[str, Any]] = []
    order = list(todo)
    # Virtual ranks last, so that the others of a layout are neighbours.
    layouts = [point.layout for point in order]
    todo.sort(key=lambda p: (layouts.index(p.layout), is_virtual(p, options.tp_degree)))
    while todo:
        steps = [prepare_point(todo.pop(0), options.tp_degree, device)]
        while todo and has_room(steps, todo[0], options.tp_degree, device):
            steps.append(prepare_point(todo.pop(0), options.tp_degree, device))
        results = measure(steps, options.steps, device)
        try:
            for step, result in zip(steps, results, strict=True):
                if options.profile and not step.point.no_comm:
                    result["trace"] = trace_passes(step, device, out)
        finally:  # a trace that fails loses no figures
            for step, result in zip(steps, results, strict=True):
                point = step.point
                records.append({"point": asdict(point), "result": result, "machine": machine})
                if main_rank:
                    append(out / RESULTS, records[-1:])
                    said = f"{point.layout} {label(point)}: {result['step_ms']:.1f} ms"
                    print(said, file=sys.stderr, flush=True)
        del steps, step
        release_memory(device)
    if main_rank:
        records.sort(key=lambda record: order.index(TrainingPoint(**record["point"])))
        print(table(records))
        print(f"\n{out / RESULTS}")
    return 0


def check_profile(device: torch.device) -> None:
    """Raise UserError where there is nothing to trace."""
    if device.type != "cuda":
        raise UserError(
            "--profile traces the kernels of a GPU, and this run is on a CPU; leave it out"
        )


def checked_points(options: Any, device: torch.device) -> list[TrainingPoint]:
    """The points of the options. Raises UserError if any of them cannot be timed here."""
    for name, least in (("steps", 1), ("batch", 1), ("micro_batch", 0)):
        if (value := getattr(options, name)) < least:
            raise UserError(f"--{name.replace('_', '-')}={value} must be {least} or more")
    if options.batch > (most := MOST["batch_size"]):
        raise UserError(f"--batch={options.batch} is too large; give {most:,} or less")
    if options.batch % (options.micro_batch or options.batch):
        raise UserError(
            f"--micro-batch={options.micro_batch} does not divide --batch={options.batch}; choose "
            f"a divisor"
        )
    found = []
    wanted = points(options)
    if not wanted:
        raise UserError(
            "--plans none needs a layout with tpN, such as tp4: without TP there is no reduce"
        )
    for point in wanted:
        recipe = recipe_of(point)
        make_mesh(device, recipe.tp, recipe.dp_shard)
        shape = shape_of(point, options.tp_degree)
        if recipe.sequence_parallel:
            check_sequence_parallel(shape, recipe.tp)
            recipe.check_rows(point.micro_batch)
        found.append(replace(point, tp_degree=shape.tp_degree))
    return found
