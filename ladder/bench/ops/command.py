"""`ladder bench ops`: the operators that compute and communicate, beside their parts.

At each point, the product or lookup alone, then with the backend's collective, every implementation
of the operator and torch's own fused operators are checked against an exact result, and then timed
in turns. Records are appended to ops.jsonl after each point; the page is made from that file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder.bench.floors import bandwidth
from ladder.bench.ops import derive
from ladder.bench.ops.best import BEST, best_rows
from ladder.bench.ops.cases import make_case
from ladder.bench.ops.derive import Timed
from ladder.bench.ops.measure import link_rate, measure, pick, prepare, ways
from ladder.bench.ops.page import picked_ranges, write_page
from ladder.bench.ops.points import OpPoint, Variant, check_options, expand, product_of, variants
from ladder.bench.ops.table import (
    Measured,
    derive_table,
    entries,
    picked_by,
    source_of,
    write_table,
)
from ladder.bench.results import read_results
from ladder.comm.access import common_push_refusal
from ladder.comm.capture import MODES
from ladder.files import check_names_file, check_writable, make_folder, write_text
from ladder.models.errors import UserError
from ladder.ops.registry import SERIAL
from ladder.ops.table import VARIABLE, read_table
from ladder.parallel import launch
from ladder.plans import aligned
from ladder.records import append, facts

RESULTS, PAGE = "ops.jsonl", "ops.html"
# The options that choose what to measure.
MEASURING = (
    "ops",
    "shapes",
    "m",
    "tables",
    "pooling",
    "dtype",
    "implementations",
    "tune",
    "budget",
)


def check(options: Any) -> None:
    """Raise UserError for wrong options, before ranks are started."""
    check_options(options)
    _check_records(options)
    table = options.write_table
    if table is not None:
        check_names_file(table, "--write-table")
    if table is not None and table.is_file():
        read_table(table, "give another --write-table")  # an invalid table is an error now


def _check_records(options: Any) -> None:
    """Raise UserError if --records comes with options in MEASURING, or names a missing file."""
    if options.records is None:
        return
    if options.write_table is None:
        raise UserError("--records without --write-table: name the table to write")
    for name in MEASURING:
        if getattr(options, name):
            said = name.replace("_", "-")
            raise UserError(f"--{said} with --records, which measures nothing: leave one out")
    if max(options.nproc, launch.world_size()) > 1:  # each would write the table
        raise UserError("--records on several ranks: one derives the table; leave --nproc out")
    for file in options.records:
        if not file.is_file():
            raise UserError(f"--records={file}: there is no such file")


def on_cpu(options: Any) -> bool:
    """Whether the ranks compute on CPUs."""
    return options.device == "cpu" or not torch.cuda.is_available()


@torch.inference_mode()
def main(options: Any) -> int:
    """Run the benchmark on this rank; rank 0 prints and writes.

    Returns the exit status: 1 if something was wrong and not timed.
    """
    device = launch.join(options.device)  # ranks that have joined report an error once
    check(options)
    if options.records is not None:
        recorded = [record for file in options.records for record in read_results(file)]
        _say_table(options.write_table, derive_table(options.write_table, recorded))
        return 0
    if max(options.nproc, launch.world_size()) < 2:
        raise UserError("--nproc=1: a rank alone has nothing to exchange; start 2 or more")
    launch.agree(vars(options))
    group = dist.group.WORLD
    assert group is not None
    world, head, out = launch.world_size(), launch.rank() == 0, Path(options.out)
    points, left_out = expand(options, world, device.type == "cpu")
    launch.on_first(lambda: _check_files(out / RESULTS, options.write_table))
    make_folder(out)
    refusal = common_push_refusal(world) if device.type == "cuda" else "it needs GPUs"
    if refusal:
        left_out.append(f"torch's fused operators, which need peer memory: {refusal}")
    rate = link_rate(group, device, not refusal)
    memory = bandwidth(device) if device.type == "cuda" else float("inf")
    about = _machine(device, world, rate, memory)
    _say(f"link: {rate / 1e9:.1f} GB/s into each rank, all at once")
    _left_out(left_out)
    deadline = float("inf") if options.budget is None else time.time() + 60 * options.budget
    ops = options.ops or [point.op for point in points]
    asked = variants(options.implementations, ops, options.tune)
    measured: dict[OpPoint, Measured] = {}
    made: list[dict[str, Any]] = []
    wrong: list[str] = []
    for number, point in enumerate(points, start=1):
        if launch.from_first(time.time() > deadline):
            _left_out([f"the budget is spent: {each}" for each in points[number - 1 :]])
            break
        found, lines, errors = measure_point(
            point, device, group, asked, (rate, memory), not refusal
        )
        _left_out(line for line in lines if line not in left_out)
        left_out += lines
        wrong += errors
        measured[product_of(point)] = found
        if head:
            new = derive.records(point, found[1], about)
            append(out / RESULTS, new)
            made += new
            for line in errors:
                print(f"error: {line}", file=sys.stderr, flush=True)
        _say(f"{number} of {len(points)}: {point}")
    if head:
        _finish(options, [*measured.values()], made, about)
    return 1 if wrong else 0


def _check_files(results: Path, table: Path | None) -> None:
    """Raise UserError now, and not at the end, for files that cannot be written or read then."""
    check_writable(results)
    if results.is_file():
        read_results(results)
    if table is not None:
        check_writable(table, "--write-table")


def measure_point(
    point: OpPoint, device: torch.device, group: dist.ProcessGroup, asked: Any,
    rates: tuple[float, float], fused: bool,
) -> tuple[Measured, list[str], list[str]]:  # fmt: skip
    """The results of a point, lines of what is left out, and errors of what is wrong.

    rates: bytes per second of the link and of a rank's memory.
    """
    case = make_case(point, group, device)
    choices = {
        (mode, any_order): pick(case, device, any_order, mode)
        for mode in MODES
        for any_order in (False, True)
    }
    backend = {"cpu": "gloo", "cuda": "NCCL"}[device.type]
    each, left_out = ways(case, [*choices.values()], asked, backend, fused)
    ready, more, wrong = prepare(case, each, device)
    times = measure(ready, device)
    picked = {key: Variant(each.implementation, each.options) for key, each in choices.items()}
    timed = [
        Timed(
            one.way.name, one.way.role, one.mode, turns.us, one.error,
            one.way.variant == picked[one.mode, False], one.way.variant == picked[one.mode, True],
            one.way.variant, turns.mhz, turns.host_us,
        )
        for one in ready
        for turns in [times[one.way.name, one.mode]]
    ]  # fmt: skip
    link, memory = (
        1e6 * size / rate
        for size, rate in zip((case.link_bytes, case.memory_bytes), rates, strict=True)
    )
    found = derive.summarise(timed, link, memory)
    return (choices["eager", False].call, found), [*left_out, *more], wrong


def _finish(
    options: Any, measured: list[Measured], made: list[dict[str, Any]], about: dict[str, Any]
) -> None:
    """Write the registry's table, then the page, and print the tables."""
    out, table, new = Path(options.out), options.write_table, []
    if table is not None:
        new = entries(measured, source_of(about))
        write_table(table, new)
    if made:
        write_text(out / PAGE, write_page(read_results(out / RESULTS)))
        print(f"\n{derive.text_table(made)}\n\n{derive.EXPLANATION}\n")
        print(f"{aligned(best_rows(made), left=3)}\n\n{BEST}\n")
        print("E of what is picked:", *picked_ranges(made), out / PAGE, sep="\n", flush=True)
    else:
        print("nothing was measured", flush=True)
    if table is not None:
        _say_table(table, picked_by(measured, new))


def _say_table(table: Path, picked: list[str]) -> None:
    found = read_table(table)
    print("E of what the new table picks:", *picked, sep="\n")
    faster = sum(entry["implementation"] not in SERIAL for entry in found)
    print(
        f"{table}: {len(found)} entries, {faster} of overlapped ways; set {VARIABLE} to "
        f"it to use the table",
        flush=True,
    )


def _machine(device: torch.device, world: int, rate: float, memory: float) -> dict[str, Any]:
    about = {"ranks": world, "link_gb_s": round(rate / 1e9, 1)}
    if device.type == "cpu":
        return {**facts("none"), **about}
    about["memory_gb_s"] = round(memory / 1e9, 1)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {**facts(torch.cuda.get_device_name(device)), "nccl": nccl, **about}


def _say(text: str) -> None:
    if launch.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _left_out(lines: Any) -> None:
    for line in lines:
        _say(f"left out: {line}")
