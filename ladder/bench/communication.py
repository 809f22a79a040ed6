"""`ladder bench comm`: times of all-reduces by message size, and the dispatch table from them.

Each candidate is captured in a CUDA graph of many calls, without launch costs. The candidates take
turns, round by round, and the sums of each are checked before it is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.bench.options import SIZES
from ladder.comm import symmetric
from ladder.comm.access import push_refusal
from ladder.comm.push import PushAllReduce, reference_all_reduce
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.config import DTYPES
from ladder.files import check_names_file, check_writable, make_folder
from ladder.infer.graphs import capture_graph, time_turns
from ladder.models.errors import UserError, unknown
from ladder.parallel import launch
from ladder.parallel.dispatch import (
    Dispatch,
    derive,
    load_dispatch,
    read_table,
    size_text,
    write_table,
)
from ladder.records import append, facts

PUSHED = 12 * 2**20  # bytes sent by a rank, above which push is not timed: it sends too much
CALLS, REPLAYS, ROUNDS = 20, 5, 7
THEIRS = ("nccl", "torch one-shot", "torch two-shot")
OURS = ("push", "two-shot")
RESULTS = "comm.jsonl"
# A dispatch table is made from these sizes, the default ones, and this dtype: its bounds are bytes.
TABLE_SIZES, TABLE_DTYPE = SIZES, "bfloat16"
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}


@dataclass(frozen=True)
class AllReducePoint:
    """One all-reduce. size: bytes. programs: thread blocks of our two-shot kernel, or None."""

    algorithm: str
    size: int
    dtype: str
    world: int
    programs: int | None


@dataclass(frozen=True)
class AllReduceTimes:
    """Microseconds per call: median, 10th and 90th percentile, on the slowest rank.

    algbw_gb_s: size / median. ratio: median / that of the fastest of NCCL and torch's kernels.
    """

    us: float
    low_us: float
    high_us: float
    algbw_gb_s: float
    ratio: float


@dataclass(frozen=True)
class Candidate:
    """An all-reduce of `source`; `call` returns the sum, which may be `source` itself."""

    source: Tensor
    call: Callable[[], Tensor]


def candidates(
    size: int, dtype: torch.dtype, group: Any, device: torch.device, two_shot: TwoShotAllReduce
) -> dict[str, Candidate]:
    """The candidates by name, for messages of `size` bytes; each has memory of its own."""
    elements = size // dtype.itemsize
    ops = torch.ops.symm_mem
    plain = [torch.empty(elements, dtype=dtype, device=device) for _ in range(3)]
    shared = [symmetric.allocate((elements,), dtype, group, device).own for _ in range(2)]

    def nccl() -> Tensor:
        dist.all_reduce(plain[0], group=group)
        return plain[0]

    found = {
        "nccl": Candidate(plain[0], nccl),
        "torch one-shot": Candidate(
            shared[0], lambda: ops.one_shot_all_reduce(shared[0], "sum", group.group_name)
        ),
        "torch two-shot": Candidate(
            shared[1], lambda: ops.two_shot_all_reduce_(shared[1], "sum", group.group_name)
        ),
        "two-shot": Candidate(plain[2], lambda: two_shot(plain[2], True)),
    }
    if size * (dist.get_world_size(group) - 1) <= PUSHED:
        push = PushAllReduce(elements, dtype, group, device)
        found["push"] = Candidate(plain[1], lambda: push(plain[1], True))
    return found


def check_sums(name: str, candidate: Candidate, group: Any) -> None:
    """Raise RuntimeError, on every rank, unless repeated sums in a graph are correct.

    Our sums must equal the float32 sum in rank order, rounded once. The others may differ from it
    by the error bound of a sum in any order with rounding at each step.
    """
    source = candidate.source
    torch.manual_seed(launch.rank())
    partial = torch.randn(source.shape, device=source.device).to(source.dtype)
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, partial, group=group)
    expected = reference_all_reduce(parts)
    room = torch.zeros_like(expected, dtype=torch.float32)
    if name not in OURS:
        for part in parts:
            room += part.abs().float() * (len(parts) * ROUNDING[source.dtype])

    def work() -> Tensor:
        source.copy_(partial)
        return candidate.call()

    graph, total = capture_graph(work)
    wrong = torch.zeros((), device=source.device)
    for _ in range(3):
        total.fill_(torch.nan)
        graph.replay()
        bad = (total.float() - expected.float()).abs() <= room
        wrong += (~bad).sum()
    dist.all_reduce(wrong, group=group)
    if wrong.item():
        raise RuntimeError(
            f"{name}, {size_text(source.nbytes)}: {int(wrong.item())} wrong elements in 3 sums on "
            f"{len(parts)} ranks; it is not timed"
        )


def measure(found: Mapping[str, Candidate], group: Any) -> dict[str, list[float]]:
    """Microseconds per call of each candidate on this rank, one figure per replay."""

    def calls(candidate: Candidate) -> Callable[[], None]:
        def work() -> None:
            for _ in range(CALLS):
                candidate.call()

        return work

    graphs = {name: capture_graph(calls(candidate))[0] for name, candidate in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(ROUNDS + 1):  # the first warms up
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            dist.barrier(group)
            graph.replay()  # aligns the ranks
            replays = time_turns(graph.replay, REPLAYS)
            if turn:
                times[name] += [ms * 1e3 / CALLS for ms in replays]
    return times


def summarise(times: Mapping[str, Sequence[float]], size: int) -> dict[str, AllReduceTimes]:
    """The figures of each candidate for messages of `size` bytes, from times in microseconds."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min(medians[name] for name in THEIRS)
    results = {}
    for name, each in times.items():
        tenths = statistics.quantiles(each, n=10, method="inclusive")
        us = medians[name]
        results[name] = AllReduceTimes(us, tenths[0], tenths[-1], size / us / 1e3, us / best)
    return results


def table(results: Mapping[int, Mapping[str, AllReduceTimes]]) -> str:
    """A table of microseconds by size and candidate, with the ratio and bandwidth of ours."""
    names = (*THEIRS, *OURS)
    head = f"{'size':>9}" + "".join(f"{name:>16}" for name in names)
    lines = [f"{head}{'ours/best':>11}{'GB/s':>8}"]
    for size, row in sorted(results.items()):
        cells = "".join(f"{row[name].us:16.1f}" if name in row else f"{'-':>16}" for name in names)
        ours = min((row[name] for name in OURS if name in row), key=lambda each: each.us)
        lines.append(f"{size_text(size):>9}{cells}{ours.ratio:11.2f}{ours.algbw_gb_s:8.0f}")
    return "\n".join(lines)


def dispatch_of(
    results: Mapping[int, Mapping[str, AllReduceTimes]], source: str, known: Dispatch
) -> Dispatch:
    """The dispatch table for the results. known: the table whose entries for prompts are kept."""
    times = {size: {name: each.us for name, each in row.items()} for size, row in results.items()}
    return Dispatch(derive(times), source, known.prefill)


def verdict(dispatch: Dispatch) -> str:
    """The dispatch table as text, with the size from which NCCL is used."""
    if not dispatch.hand_over:
        return f"{dispatch.describe()}\nauto uses NCCL for all sizes"
    over = size_text(dispatch.hand_over)
    return f"{dispatch.describe()}\nauto uses NCCL above {over}"


def check_options(options: Any) -> None:
    """Raise UserError for invalid options, and for those that this machine cannot measure."""
    if options.dtype not in DTYPES:
        raise unknown("--dtype", options.dtype, DTYPES)
    for size in options.sizes:
        if size < 16 or size % 16:
            raise UserError(f"--sizes={size} must be a number of bytes, a multiple of 16")
    if options.programs < 1:
        raise UserError(f"--programs={options.programs} must be 1 or more")
    if options.write_table is not None:
        check_names_file(options.write_table, "--write-table")
        _check_whole(options)
    if options.write_table is not None and options.write_table.is_file():
        read_table(options.write_table)  # an invalid table is an error now, not at the end
    refusal = push_refusal(launch.world_size())
    if refusal:
        raise UserError(f"`ladder bench comm` compares kernels over peer memory: {refusal}")
    if launch.world_size() < 2:
        raise UserError("--nproc=1: a rank alone has nothing to reduce; start one for each GPU")


def _check_whole(options: Any) -> None:
    """Raise UserError unless the options measure all that a table needs: it replaces the whole one
    of this GPU and number of ranks."""
    if options.dtype != TABLE_DTYPE:
        raise UserError(
            f"--write-table with --dtype={options.dtype}: the table is of {TABLE_DTYPE}; leave one "
            f"of the two out"
        )
    missing = [size for size in TABLE_SIZES if size not in options.sizes]
    if missing:
        raise UserError(
            f"--write-table with --sizes={' '.join(map(str, options.sizes))}: the table is of all "
            f"default sizes, and {size_text(missing[0])} is left out; leave out --sizes, or add "
            f"others to the default ones"
        )


@torch.inference_mode()
def main(options: Any) -> int:
    """Run `ladder bench comm` on this rank; rank 0 prints and writes."""
    device = launch.join("auto")
    check_options(options)
    launch.agree(vars(options))
    group = dist.group.WORLD
    world, head, dtype = launch.world_size(), launch.rank() == 0, getattr(torch, options.dtype)
    gpu = torch.cuda.get_device_name(device)
    about = {**facts(gpu), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    if head:
        check_writable(Path(options.out) / RESULTS)
        if options.write_table is not None:
            check_writable(options.write_table, "--write-table")
    make_folder(Path(options.out))
    two_shot = TwoShotAllReduce(max(options.sizes), group, device, options.programs)
    results: dict[int, dict[str, AllReduceTimes]] = {}
    for size in sorted(set(options.sizes)):
        found = candidates(size, dtype, group, device, two_shot)
        for name, candidate in found.items():
            check_sums(name, candidate, group)
        times = {}
        for name, each in measure(found, group).items():
            slowest = torch.tensor(each, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            times[name] = slowest.tolist()
        results[size] = summarise(times, size)
        if head:
            append(Path(options.out) / RESULTS, records(results[size], size, options, about))
            print(f"{size_text(size)} measured", file=sys.stderr, flush=True)
    if head:
        source = f"{gpu} x{world}, {options.dtype}, torch {about['torch']}, NCCL {about['nccl']}"
        file = options.write_table
        known = load_dispatch(gpu, world, file if file is not None and file.is_file() else None)
        chosen = dispatch_of(results, f"`ladder bench comm`, {source}, {about['date']}", known)
        print(f"{source}; microseconds in a CUDA graph of {CALLS} calls\n{table(results)}\n")
        print(verdict(chosen), flush=True)
        if options.write_table is not None:
            write_table(options.write_table, gpu, world, chosen)
            print(f"{options.write_table}: written; set LADDER_DISPATCH to it to use the table")
    return 0


def records(
    row: Mapping[str, AllReduceTimes], size: int, options: Any, about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The records of one size for comm.jsonl."""
    made = []
    for name, result in row.items():
        programs = options.programs if name == "two-shot" else None
        point = AllReducePoint(name, size, options.dtype, launch.world_size(), programs)
        made.append({"point": asdict(point), "result": asdict(result), "machine": about})
    return made
