"""The command `ladder bench machine` on one rank."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ladder.comm.access import common_push_refusal
from ladder.files import check_names_file, check_writable
from ladder.models.errors import UserError
from ladder.parallel import launch
from ladder.perf.calibration.parts import CPU, GPU, Part, parts
from ladder.perf.calibration.timing import REPEATS
from ladder.perf.machine import Curve, Link, Machine, Value, fit_link, write
from ladder.records import facts


def check(options: Any) -> None:
    """Raise UserError for wrong options, before ranks are started."""
    launch.check_nproc(options.nproc)
    if not 0 < options.budget < math.inf:
        raise UserError(f"--budget={options.budget} must be a number of minutes above 0")
    check_names_file(options.out, "--out")


@torch.inference_mode()
def main(options: Any) -> int:
    """Measure on this rank; rank 0 prints and writes the file, at the end."""
    deadline = time.monotonic() + 60 * options.budget
    check(options)
    device = launch.join(options.device)
    launch.agree(vars(options))
    world, head, out = launch.world_size(), launch.rank() == 0, Path(options.out)
    if head:
        check_writable(out)
    cuda = device.type == "cuda"
    push = cuda and world > 1 and common_push_refusal(world) is None
    gpu = torch.cuda.get_device_name(device) if cuda else "none"
    about = provenance(gpu, world)
    each = parts(GPU if cuda else CPU, device, push)
    values, curves, left_out = measure(each, deadline, about)
    machine = Machine(out.stem, gpu, world, values, tuple(curves), links(curves, world))
    if head:
        write(machine, out)
        print(f"{out}: {len(values)} values and {len(curves)} curves of {gpu} x{world}")
        for line in left_out:
            print(f"left out, the budget of {options.budget:g} minutes is spent: {line}")
        for line in machine.missing:
            print(f"missing: {line}")
        sys.stdout.flush()
    return 0


def measure(
    each: Iterable[Part], deadline: float, about: str
) -> tuple[dict[str, Value], list[Curve], list[str]]:
    """Run the parts until the deadline, which rank 0 watches: values, curves, what is left out."""
    values: dict[str, Value] = {}
    curves: list[Curve] = []
    left_out: list[str] = []
    for part in each:
        if launch.from_first(time.monotonic() > deadline):
            left_out.append(str(part))
            continue
        start = time.monotonic()
        found = part.run()
        if part.name == "values":
            values |= {name: Value(rounded(each), about) for name, each in found.items()}
        else:
            points = tuple((x, rounded(us)) for x, us in found)
            curves.append(Curve(part.name, part.where, points, about))
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if launch.rank() == 0:
            took = time.monotonic() - start
            print(f"{part}: {took:.1f} s", file=sys.stderr, flush=True)
    return values, curves, left_out


def rounded(value: float) -> float:
    """Four digits: more than the measurements have."""
    return float(f"{value:.4g}")


def links(curves: Iterable[Curve], world: int) -> tuple[Link, ...]:
    """The link that the backend's all-reduces show, if they were measured."""
    for curve in curves:
        if curve.name == "all-reduce" and curve.where["algorithm"] in ("nccl", "gloo"):
            found = fit_link("between ranks", curve, world)
            return (found,) if found.alpha_us > 0 and found.beta_gb_s > 0 else ()
    return ()


def provenance(gpu: str, world: int) -> str:
    found = facts(gpu)
    settings = "".join(f", {key}={value}" for key, value in found["environment"].items())
    return (
        f"measured: `ladder bench machine --nproc {world}`, median of {REPEATS} turns of the "
        f"slowest rank; {gpu}, driver {found['driver']}, torch {found['torch']}, commit "
        f"{found['commit']}, {found['date']}{settings}"
    )
