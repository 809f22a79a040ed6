"""GPU traces for Perfetto, and the share of the communication that was hidden.

A trace has phases (a prefill and some decode steps; a training step's forward and backward pass),
separated by pauses. The work of a CUDA graph has its own names and streams in it. Conventions:

- A stream runs one kernel after another. A dependent launch starts before the previous kernel on
  its stream ends, but waits for it; so a kernel's own time begins at the end of the previous
  kernel. (CUDA graphs put their branches on separate streams.)
- A reduce is hidden while a computation runs on another stream. The time for which a kernel waits
  for its peers is part of its own time.
- If a plan's reduces are fused into its matrix products (pushes) and landings, no kernel only
  communicates. Then only landings that are kernels of their own are visible. A kernel that computes
  and communicates counts as a computation.

Source: Ladder Residual (arXiv 2501.06589), Figure 6, as a number.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import json
import pkgutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from ladder import comm, jit, kernels
from ladder.files import make_folder, write_text
from ladder.models.errors import UserError
from ladder.parallel import launch

COMMUNICATION, LANDING, TRANSFER, COMPUTATION, BOTH = (
    "communication",
    "landing",
    "transfer",
    "computation",
    "both",
)
# Part of the name of a kernel that is not ours -> its kind; the first match counts. All other
# kernels compute.
KINDS = (
    ("Memcpy PtoP", COMMUNICATION),  # copy engines, between GPUs
    # Other transfers neither are reduces nor hide them. (For a copy on the device, a trace does not
    # tell whether one end is a peer's memory.)
    ("Memcpy", TRANSFER),
    ("Memset", TRANSFER),
    ("nccl", COMMUNICATION),
    ("symm_mem", COMMUNICATION),
    ("symmetric_memory", COMMUNICATION),
    ("all_reduce", COMMUNICATION),  # torch's one-shot and two-shot
    ("reduce_scatter", COMMUNICATION),
    ("all_gather", COMMUNICATION),
    ("two_shot", COMMUNICATION),
    ("one_shot", COMMUNICATION),
    ("barrier", COMMUNICATION),
    ("wait_signal", COMMUNICATION),
    ("put_signal", COMMUNICATION),
)
PAUSE = 2e-3  # seconds around a phase, far above the difference of GPU and host clocks in a trace
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 10
CLOCK = 1.8e9  # Hz, about that of a GPU: torch's `_sleep` counts cycles

Interval = tuple[float, float]


class Kernel(NamedTuple):
    """One kernel, copy or memset; start and end in microseconds."""

    name: str
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Reduce:
    """One communication kernel. hidden: the share of its time under computation, 0 to 1."""

    name: str
    start: float
    microseconds: float
    hidden: float


@dataclass(frozen=True)
class Overlap:
    """The figures of one phase, in microseconds.

    span: from the first kernel's start to the last one's end. idle: the part without any kernel.
    communication: the sum over the reduces. hidden: the share of it under computation (0 to 1).
    exposed: the time with communication or landings but no computation. landing: the sum over the
    kernels that only land. top: (name, count, total, mean), by total.
    """

    span: float
    idle: float
    communication: float
    hidden: float
    exposed: float
    landing: float
    streams: int
    reduces: tuple[Reduce, ...]
    top: tuple[tuple[str, int, float, float], ...]


@functools.cache
def all_kernels() -> Mapping[str, jit.Kind]:
    """The kinds of our kernels, also of those that only a trace read from a file has."""
    for package in (comm, kernels):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return jit.KERNELS


def kernel_kind(name: str) -> str:
    """The kind of a kernel: ours declare it (`ladder.jit.kernel`), others have it by KINDS."""
    ours = all_kernels()
    if name in ours:
        return ours[name]
    lowered = name.lower()
    return next((kind for part, kind in KINDS if part.lower() in lowered), COMPUTATION)


def in_own_time(events: Iterable[Kernel]) -> list[Kernel]:
    """The events in order, each beginning no earlier than the end of the previous on its stream."""
    free: dict[int, float] = {}
    found = []
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        start = max(event.start, free.get(event.stream, event.start))
        end = max(event.end, start)
        free[event.stream] = end
        found.append(event._replace(start=start, end=end))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as ordered and disjoint intervals."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def covered(start: float, end: float, cover: Sequence[Interval]) -> float:
    """The length of (start, end) that the disjoint intervals `cover` cover."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in cover)


def overlap(events: Iterable[Kernel]) -> Overlap:
    """The overlap of communication and computation; see the module's docstring and `Overlap`."""
    kernels = in_own_time(events)
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kernel_kind(kernel.name)].append(kernel)
        by_name[kernel.name].append(kernel.end - kernel.start)
    times = {kind: [(k.start, k.end) for k in found] for kind, found in by_kind.items()}
    computing = union(times.get(COMPUTATION, []) + times.get(BOTH, []))
    busy = union((kernel.start, kernel.end) for kernel in kernels)
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    reduces = []
    for name, _, start, end in by_kind[COMMUNICATION]:
        own = end - start
        hidden = covered(start, end, computing) / own if own else 0.0
        reduces.append(Reduce(name, start, own, hidden))
    communication = sum(reduce.microseconds for reduce in reduces)
    waiting = union(times.get(COMMUNICATION, []) + times.get(LANDING, []))
    totals = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return Overlap(
        span=span,
        idle=span - length(busy),
        communication=communication,
        hidden=sum(r.microseconds * r.hidden for r in reduces) / communication
        if communication
        else 0.0,
        exposed=length(waiting) - sum(covered(*interval, computing) for interval in waiting),
        landing=length(times.get(LANDING, [])),
        streams=len({kernel.stream for kernel in kernels}),
        reduces=tuple(reduces),
        top=tuple((name, len(t), sum(t), statistics.mean(t)) for name, t in totals),
    )


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, gzipped or not."""
    data = file.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return list(trace["traceEvents"])


def kernels_of(trace: Iterable[Mapping[str, Any]], phase: str) -> list[Kernel]:
    """The GPU work within the host's annotation `phase`, which must occur once in the trace."""
    trace = list(trace)
    marks = [e for e in trace if e.get("cat") == "user_annotation" and e.get("name") == phase]
    assert len(marks) == 1, f"{phase} is {len(marks)} times in the trace"
    start = float(marks[0]["ts"])
    end = start + float(marks[0]["dur"])
    # The annotation ends after the pause, so both ends are far from the first and last kernel.
    return [
        Kernel(
            e["name"], int(e["args"]["stream"]), float(e["ts"]), float(e["ts"]) + float(e["dur"])
        )
        for e in trace
        if e.get("ph") == "X" and e.get("cat") in GPU_CATEGORIES and start <= float(e["ts"]) < end
    ]


def describe_trace(phase: str, found: Overlap, steps: int = 1) -> str:
    """The figures as lines of text, per step."""
    reduces, each = len(found.reduces), f" a step (mean of {steps})" if steps > 1 else ""
    lines = [
        f"{phase}: {found.span / steps:.1f} us{each}, GPU idle {found.idle / steps:.1f} us, "
        f"{found.streams} streams"
    ]
    if reduces:
        parts = sorted(reduce.hidden for reduce in found.reduces)
        lines.append(
            f"{phase}: {reduces / steps:g} communication kernels, "
            f"{found.communication / steps:.1f} us, {found.hidden:.0%} of it under computation "
            f"(of each: median {statistics.median(parts):.0%}, least {parts[0]:.0%}, most "
            f"{parts[-1]:.0%}); exposed {found.exposed / steps:.1f} us"
        )
    else:
        lines.append(
            f"{phase}: communication kernels: none (communication is fused into other kernels, "
            f"whose waiting is part of their time); exposed in landing kernels "
            f"{found.exposed / steps:.1f} us"
        )
    if found.landing and reduces:
        lines.append(f"{phase}: landing kernels {found.landing / steps:.1f} us")
    lines.append(f"{'kernel':60}{'count':>8}{'total us':>11}{'mean us':>10}")
    lines += [
        f"{name[:59]:60}{count / steps:8g}{total / steps:11.1f}{mean:10.2f}"
        for name, count, total, mean in found.top
    ]
    return "\n".join(lines)


def record_trace(
    phases: Mapping[str, Callable[[], object]],
    device: torch.device,
    file: Path | None,
    head_start: float = 0.0,
) -> None:
    """Trace the phases, one after another; write the trace to `file`, if any.

    head_start: seconds for which the GPU waits before each phase while the host launches it, as in
    training, where the host is ahead of the GPU.

    All phases run twice, and the second run is traced. Every rank must call this and trace, whether
    it writes or not: otherwise the cost of tracing would delay one rank's reduces.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(done: torch.profiler.profile) -> None:
        if file is not None:
            done.export_chrome_trace(str(file))

    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(2):
            for phase, work in phases.items():
                _line_up(device)
                if head_start and device.type == "cuda":
                    # The kernel begins before the phase, so it is not part of it.
                    torch.cuda._sleep(int(head_start * CLOCK))
                _pause()
                with record_function(phase):
                    work()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    _pause()
            profiler.step()


def _line_up(device: torch.device) -> None:
    """Wait until all ranks have finished their work, so that they start together."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if launch.world_size() > 1:
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pause() -> None:
    """Spin for PAUSE seconds: after a sleep, ranks would not wake at the same time."""
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


def profile(
    phases: Mapping[str, Callable[[], object]],
    steps: Mapping[str, int],
    device: torch.device,
    out: Path,
    head_start: float = 0.0,
) -> tuple[str, dict[str, Overlap]]:
    """Trace the phases; every rank must call this.

    steps: the number of steps in a phase, 1 by default. head_start: see `record_trace`. out: the
    trace that rank 0 writes, NAME.json.gz, for https://ui.perfetto.dev; NAME.figures.json beside it
    has the `Overlap` of each phase. Returns the figures as text and by phase on rank 0, and empty
    ones on the others. Raises UserError if the profiler saw no kernel.
    """
    assert out.name.endswith(".json.gz"), out
    if launch.rank() != 0:
        record_trace(phases, device, None, head_start)
        return "", {}
    make_folder(out.parent)
    record_trace(phases, device, out, head_start)
    trace = read_trace(out)
    found = {phase: overlap(kernels_of(trace, phase)) for phase in phases}
    if not all(each.span for each in found.values()):
        raise UserError(
            f"--profile: no GPU kernels in {out}; it needs a GPU, and no other profiler on it "
            f"(CUPTI serves one at a time)"
        )
    counts = {phase: steps.get(phase, 1) for phase in phases}
    figures = {phase: {"steps": counts[phase], **asdict(each)} for phase, each in found.items()}
    figures_file = out.with_name(out.name.removesuffix(".json.gz") + ".figures.json")
    write_text(figures_file, json.dumps(figures, indent=1) + "\n")
    lines = [describe_trace(phase, each, counts[phase]) for phase, each in found.items()]
    return "\n".join([f"trace: {out}", *lines]), found
