"""The command `ladder bench machine` on one rank."""

from __future__ import annotations

import secrets
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder.comm.access import common_push_refusal
from ladder.files import check_writable
from ladder.models.errors import UserError, brief
from ladder.parallel import launch
from ladder.parallel.mesh import make_mesh
from ladder.perf.calibration.options import FAMILIES, check, family
from ladder.perf.calibration.parts import parts
from ladder.perf.calibration.sizes import CPU, GPU, Part
from ladder.perf.calibration.table import table
from ladder.perf.calibration.timing import REPEATS
from ladder.perf.links import fit_link
from ladder.perf.machine import Curve, Link, Machine, Value
from ladder.perf.machine_files import read, write
from ladder.records import facts

PATIENCE = timedelta(seconds=30)  # for the other ranks at the end of a part


@dataclass(frozen=True)
class Outcome:
    """The machine with what was measured. left_out: parts for which there was no time. failed:
    parts that failed, with the reasons."""

    machine: Machine
    left_out: list[str]
    failed: list[str]


@torch.inference_mode()
def main(options: Any) -> int:
    """Measure on this rank; rank 0 writes the file after each part, and prints it at the end."""
    deadline = time.monotonic() + 60 * options.budget
    device = launch.join(options.device)  # ranks that have joined report an error once
    check(options)
    launch.agree(vars(options))
    world, head, out = launch.world_size(), launch.rank() == 0, Path(options.out)
    cuda = device.type == "cuda"
    gpu = torch.cuda.get_device_name(device) if cuda else "none"
    before = launch.on_first(lambda: begun(out, gpu, world))
    if head and not cuda:
        print("no GPU: a rehearsal in tiny sizes; predictions cannot use this file", flush=True)
    push = cuda and world > 1 and common_push_refusal(world) is None
    # The group is that of a model's mesh: its NCCL has priority over products. Without it, all
    # thread blocks of products queued before a collective would run first.
    mesh = make_mesh(device, world)
    group = None if mesh is None else mesh.get_group("tp")
    each = parts(GPU if cuda else CPU, device, group, push)
    only = options.only or FAMILIES
    wanted = (part for part in each if family(part.name) in only)
    if not head:
        before = Machine(out.stem, gpu, world, {})
    about = provenance(gpu, world)
    found = measure(wanted, before, out if head else None, deadline, about)
    if head:
        machine, incomplete = found.machine, found.left_out or found.failed
        if not (options.only or incomplete):
            machine = replace(measured_by(machine, about), name=out.stem)
            write(machine, out)
        print(table(machine))
        print(f"{out}: {len(machine.values)} values and {len(machine.curves)} curves "
              f"of {gpu} x{world}")  # fmt: skip
        for line in found.left_out:
            print(f"left out, the budget of {options.budget:g} minutes is spent: {line}")
        for line in found.failed:
            print(f"failed: {line}")
        if incomplete and (before.values or before.curves):
            print(f"{out} still has what it had of what was not measured")
        for line in machine.missing:
            print(f"missing: {line}")
        sys.stdout.flush()
    return 1 if found.failed else 0


def begun(out: Path, gpu: str, world: int) -> Machine:
    """The machine before anything is measured: that of the file, if there is one. Its parts stay
    until they are measured anew.

    Raises UserError for a file that describes another machine, or no machine: it would be lost.
    """
    check_writable(out)
    if not out.is_file():
        return Machine(out.stem, gpu, world, {})
    try:
        found = read(out)
    except UserError as error:
        raise UserError(f"--out is there already: {error}; name another file") from error
    if (found.gpu, found.gpus) != (gpu, world):
        raise UserError(
            f"--out={out} describes {found.gpus} x {found.gpu}, and this measures {world} x {gpu}; "
            f"name another file"
        )
    return found


def measured_by(machine: Machine, about: str) -> Machine:
    """The machine with what this run measured alone. Values and curves of earlier runs that no run
    measures any more are dropped."""
    values = {name: each for name, each in machine.values.items() if each.provenance == about}
    curves = tuple(each for each in machine.curves if each.provenance == about)
    return replace(machine, values=values, curves=curves, links=links(curves, machine.gpus))


def measure(
    each: Iterable[Part], machine: Machine, out: Path | None, deadline: float, about: str
) -> Outcome:
    """Run the parts until the deadline, which rank 0 watches, and write the file after each.

    A part that fails is reported, on every rank, and costs none of the others.
    """
    left_out: list[str] = []
    failed: list[str] = []
    run = launch.from_first(secrets.token_hex(4))
    for number, part in enumerate(each):
        if launch.from_first(time.monotonic() > deadline):
            left_out.append(str(part))
            continue
        start, reason, found = time.monotonic(), "", None
        try:
            found = part.run()
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {brief(str(error).partition(chr(10))[0], 200)}"
        reason = next((said for said in told(f"{run}/{number}", reason) if said), "")
        if reason:
            failed.append(f"{part}: {reason}")
        else:
            machine = with_part(machine, part, found, about)
            if out is not None:
                write(machine, out)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if launch.rank() == 0:
            took = time.monotonic() - start
            print(f"{part}: {took:.1f} s", file=sys.stderr, flush=True)
    return Outcome(machine, left_out, failed)


def told(key: str, reason: str) -> list[str]:
    """Every rank's reason, through the store and not by a collective: a rank whose part failed may
    have left the others in a collective. Raises RuntimeError if these do not come out of it."""
    world = launch.world_size()
    if world == 1:
        return [reason]
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{launch.rank()}", reason)
    keys = [f"{key}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank has not ended its part {PATIENCE.seconds} s after rank {launch.rank()}, which "
            f"{f'failed ({reason})' if reason else 'has'}; earlier parts are in the file"
        ) from error
    return [store.get(each).decode() for each in keys]


def with_part(machine: Machine, part: Part, found: Any, about: str) -> Machine:
    """The machine with what a part found, in place of its former values or curve."""
    if isinstance(found, dict):
        new = {name: Value(rounded(each), about) for name, each in found.items()}
        return replace(machine, values={**machine.values, **new})
    points = tuple((x, rounded(us)) for x, us in found)
    curve = Curve(part.name, part.where, points, about)
    curves = (*(each for each in machine.curves if str(each) != str(curve)), curve)
    return replace(machine, curves=curves, links=links(curves, machine.gpus))


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
