"""`ladder bench inference`: times of prefill and decode of plans and reducers, side by side.

Every configuration is checked before it is timed (`verify`). Finished points are appended to
inference.jsonl and skipped when the command is started again; the page and summary.json are made
from that file.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ladder.bench.floors import bandwidth, matrix_rate
from ladder.bench.inference import cold
from ladder.bench.inference.derive import (
    EXPLANATION,
    SAME,
    by_point,
    derive_rows,
    plain,
    text_table,
)
from ladder.bench.inference.measure import chunks, free_bytes, measure
from ladder.bench.inference.page import write_page
from ladder.bench.inference.points import (
    InferencePoint,
    Settings,
    definition,
    describe_case,
    expand,
    load_option_sets,
    refuse_degree,
)
from ladder.bench.results import read_results
from ladder.comm.access import common_push_refusal
from ladder.comm.switch import P2P_SWITCH, p2p_disabled
from ladder.files import check_writable, checksum, make_folder, write_text
from ladder.models.errors import UserError
from ladder.ops import table
from ladder.parallel import dispatch, launch
from ladder.parallel.choose import REDUCERS
from ladder.records import append, facts, file_name

RESULTS, COLD, SUMMARY, PAGE = "inference.jsonl", "cold.jsonl", "summary.json", "inference.html"


@dataclass(frozen=True)
class InferenceRun:
    """The work of the ranks: option sets, P2P on or off.

    deadline: the time (epoch, s) after which no measurement starts. asked: the options come from
    the user and not from a suite, whose points that cannot run are left out.
    """

    settings: tuple[Settings, ...]
    out: Path
    p2p: bool
    deadline: float
    cold: bool = False
    profile: bool = False
    asked: bool = False


def main(options: Any) -> int:
    """Run `ladder bench inference`: the option sets, with P2P on and then off, on new ranks."""
    if options.cold_child:
        return cold.child(InferencePoint(**json.loads(options.cold_child)))
    launch.check_nproc(options.ranks)
    settings = chosen(options)
    if options.budget is not None and not options.budget > 0:
        raise UserError(f"--budget={options.budget} must be above 0 minutes")
    if options.cold and options.profile:
        raise UserError("--profile with --cold, which times no steps to trace: leave one out")
    there = torch.cuda.device_count()
    if not there:
        raise UserError(
            "`ladder bench inference` needs a GPU, and torch sees none: `ladder doctor`"
        )
    if options.ranks > there:
        raise UserError(f"--nproc={options.ranks}: this machine has {there} GPUs; use fewer")
    ranks = options.ranks if launch.world_size() == 1 else launch.world_size()
    asked = options.suite is None
    for tp in settings[0].tp if asked else ():
        if ranks % tp:
            raise UserError(
                f"--tp={tp} does not divide the {ranks} ranks; start {tp}, or a multiple, with "
                f"--nproc or torchrun"
            )
    if asked:
        refuse_degree(settings[0], ranks)
    budget = float("inf") if options.budget is None else 60 * options.budget
    deadline, out = time.time() + budget, Path(options.out)
    if launch.rank() == 0:
        check_writable(out / RESULTS)
    make_folder(out)
    modes = [p2p for p2p in (True, False) if any(p2p in each.p2p for each in settings)]
    if len(modes) > 1 and launch.world_size() > 1:
        raise UserError(
            "--p2p on off under torchrun: each needs ranks of its own; run torchrun once for --p2p "
            "on and once for --p2p off"
        )
    code = 0
    for p2p in modes:
        job = InferenceRun(
            tuple(settings), out, p2p, deadline, options.cold, options.profile, asked
        )
        if options.cold:
            code = cold_starts(job, options.ranks) or code
        else:
            code = launch.run(run_job, (job,), options.ranks) or code
    return code


def chosen(options: Any) -> list[Settings]:
    """The option sets: those of a suite, overridden by given options, or one of the options."""
    names = {item.name for item in fields(Settings)}
    given = {key: value for key, value in vars(options).items() if key in names}
    if "p2p" in given:
        given["p2p"] = [{"on": True, "off": False}[value] for value in given["p2p"]]
    if options.suite is not None:
        return load_option_sets(options.suite, given)
    return [Settings.from_dict(given)]


def run_job(job: InferenceRun) -> int:
    """Measure the unfinished points on each rank; rank 0 prints and writes.

    Returns the exit status: 1 if a point failed its check.
    """
    if not job.p2p:
        os.environ[P2P_SWITCH] = "1"  # before NCCL starts
    else:
        refuse_p2p_off()
    device = launch.join("cuda")
    launch.agree({"options": str(job.settings), "P2P": job.p2p})
    cases, left_out = expand(job.settings, launch.world_size(), job.p2p, _refusal, job.asked)
    for line in left_out:
        _say(f"left out: {line}")
    if not cases:
        return 0
    done = launch.from_first(finished(job.out / RESULTS))
    traced = [p for p in done if not job.profile or trace_file(job.out, p).is_file()]
    skip = launch.from_first(traced)
    traces = (lambda point: trace_file(job.out, point)) if job.profile else None
    speed, rate = bandwidth(device), matrix_rate(device)
    facts = machine(device, speed, rate)
    _say(f"{facts['gpu']}: {speed / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s")
    for case in cases:
        check_same_code(case, done, skip, facts, job.out / RESULTS)
    wrong: list[str] = []
    for number, case in enumerate(cases, start=1):
        todo = [point for point in case if point not in skip]
        parts, too_large = chunks(todo, free_bytes(device)) if todo else ([], [])
        for point in too_large:
            _say(f"left out: {point}: it does not fit in this GPU's memory")
        for part in parts:
            if launch.from_first(time.time() > job.deadline):
                _say(f"left out, the budget is spent: {'; '.join(map(str, part))}")
                continue
            _say(
                f"case {number} of {len(cases)}, {describe_case(case[0])}: {len(part)} side by side"
            )
            keep = functools.partial(_keep, job, facts, done)
            _, refused = measure(part, device, speed, rate, traces, keep)
            wrong += refused
        rows = derive_rows([done[point] for point in case if point in done])
        if rows and len(parts):
            _say(text_table(rows) + "\n")
    if launch.rank() == 0:
        write_report(job.out)
    _say(f"{EXPLANATION}\n\n{job.out / PAGE}")
    return 1 if wrong else 0


def refuse_p2p_off() -> None:
    """Raise UserError if the environment turns P2P off, for a run that has it on."""
    if p2p_disabled():
        raise UserError(
            f"{P2P_SWITCH}={os.environ[P2P_SWITCH]} turns P2P off, and --p2p is on: give --p2p "
            f"off, or unset the variable"
        )


def check_same_code(
    case: Sequence[InferencePoint],
    done: Mapping[InferencePoint, dict[str, Any]],
    skip: Collection[InferencePoint],
    facts: Mapping[str, Any],
    file: Path,
) -> None:
    """Raise UserError if new points of a case would be compared with records of other code, or if
    a finished point's model or plan has changed under its name.

    case: the points of this call. done: the records so far, also of other plans and reducers of the
    case. skip: finished points, which are not measured again. facts: those of this machine.
    """
    kept = [point for point in case if point in skip]
    for point in kept:
        if done[point].get("definition") not in (None, definition(point)):
            raise UserError(
                f"{file} holds {point}, whose model or plan has changed since; choose another "
                f"--out, or remove the lines of this case from the file"
            )
    others = [each for each in done if each.case == case[0].case and each not in case]
    for point in (*kept, *others) if len(kept) < len(case) else ():
        for key in SAME:
            there, here = done[point]["machine"].get(key), facts.get(key)
            if there != here:
                raise UserError(
                    f"{file} holds {point}, measured with {key} {there}, which now is {here}: "
                    f"compared points must share it; choose another --out, or remove the lines of "
                    f"this case from the file"
                )


def _say(text: str) -> None:
    if launch.rank() == 0:
        print(text, flush=True)


def _keep(
    job: InferenceRun,
    facts: dict[str, Any],
    done: dict[InferencePoint, Any],
    found: list[Any],
    refused: list[str],
) -> None:
    """Append the records of measured points, and print the errors of refused ones."""
    records = [
        {**record, "definition": definition(InferencePoint(**record["point"])), "machine": facts}
        for record in found
    ]
    done |= by_point(records)
    if launch.rank() == 0:
        append(job.out / RESULTS, records)
        for line in refused:
            print(f"error: {line}", file=sys.stderr, flush=True)


def trace_file(out: Path, point: InferencePoint) -> Path:
    """The file of a point's trace."""
    return out / "traces" / f"{file_name(str(point))}.json.gz"


def _refusal(reducer: str, tp: int) -> str | None:
    """The reason why some rank cannot run a reducer, or None; every rank must call this."""
    return common_push_refusal(tp) if REDUCERS[reducer].peer_memory else None


def cold_starts(job: InferenceRun, ranks: int) -> int:
    """Time the first token of every point from a cold start, and record it in cold.jsonl."""
    if launch.world_size() > 1:
        raise UserError("--cold under torchrun: it starts its own processes; use --nproc")
    if job.p2p:
        refuse_p2p_off()

    def refusal(reducer: str, tp: int) -> str | None:
        return "P2P is off" if REDUCERS[reducer].peer_memory and not job.p2p else None

    cases, left_out = expand(job.settings, ranks, job.p2p, refusal, job.asked)
    for line in left_out:
        print(f"left out: {line}", flush=True)
    file = job.out / COLD
    done = finished(file, "cold")
    cases = [[point for point in case if not point.no_comm] for case in cases]
    cases = [case for case in cases if case]
    # The facts name the GPU, which starts CUDA here: before the first start only to compare them.
    here = cold_machine() if done else {}
    for case in cases if done else ():
        check_same_code(case, done, done, here, file)
    for point in [point for case in cases for point in case]:
        if point in done:
            print(f"already measured{_when(done[point], here)}: {point}", flush=True)
            continue
        if time.time() > job.deadline:
            print(f"left out, the budget is spent: {point}", flush=True)
            continue
        times = cold.start(point)
        here = here or cold_machine()
        found = {"point": asdict(point), "cold": times, "definition": definition(point)}
        append(file, [{**found, "machine": here}])
        shown = ", ".join(f"{part[:-2]} {seconds:.1f}" for part, seconds in times.items())
        print(f"cold start of {point}, seconds: {shown}", flush=True)
    write_report(job.out)
    print(f"\n{job.out / PAGE}", flush=True)
    return 0


def cold_machine() -> dict[str, Any]:
    """The facts of this machine for records of cold starts."""
    return {**facts(torch.cuda.get_device_name(0)), "tables": own_tables()}


def _when(record: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What has changed since a record was made, as text: `, with commit a, which now is b`."""
    there = record["machine"]
    changed = [key for key in SAME if there.get(key) != here.get(key)]
    return "".join(
        f", with {key} {there.get(key)}, which now is {here.get(key)}" for key in changed
    )


def finished(file: Path, kind: str = "check") -> dict[InferencePoint, dict[str, Any]]:
    """The finished points of a result file; records without `kind` are in an older format."""
    return by_point(_records(file, kind))


def _records(file: Path, kind: str) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [record for record in read_results(file) if kind in record]


def write_report(out: Path) -> None:
    """Write summary.json (derived rows) and the page from all records in the folder."""
    records = _records(out / RESULTS, "check")
    started = list(finished(out / COLD, "cold").values())
    rows = derive_rows(records)
    machines = [record["machine"] for record in (*by_point(records).values(), *started)]
    write_text(out / SUMMARY, json.dumps([plain(row) for row in rows], indent=1) + "\n")
    write_text(out / PAGE, write_page(rows, started, machines))


def machine(device: torch.device, speed: float, rate: float) -> dict[str, Any]:
    """The facts of this machine for records."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        **facts(torch.cuda.get_device_name(device)),
        "nccl": nccl,
        "gpus": launch.world_size(),
        "bandwidth_tb_s": round(speed / 1e12, 3),
        "matrix_tflop_s": round(rate / 1e12, 1),
        "tables": own_tables(),
    }


def own_tables() -> dict[str, str] | None:
    """The SHA-256 of the user's tables of all-reduces and operators, by the environment variables
    that name the tables; None: there are none."""
    given = {name: os.environ.get(name) for name in (dispatch.VARIABLE, table.VARIABLE)}
    try:
        return {name: checksum(Path(file)) for name, file in given.items() if file} or None
    except OSError as error:
        name = next(name for name, file in given.items() if file == error.filename)
        raise UserError(
            f"cannot read the table {name}={error.filename} ({error.strerror}); unset {name}, or "
            f"correct it"
        ) from error
