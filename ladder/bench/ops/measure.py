"""Checking and timing the ways of computing a point, in turns."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.bench.ops.cases import Case, torch_calls
from ladder.bench.ops.points import FLOATS, TURNS, Variant, accepts, calls_of
from ladder.comm import symmetric
from ladder.comm.capture import MODES, Mode
from ladder.infer.graphs import capture_graph, time_turns
from ladder.jit import device_name
from ladder.kernels.clock import Meter
from ladder.ops import Choice, explain, use
from ladder.ops.registry import DEFAULT, OPERATORS
from ladder.parallel import launch

NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"
CHECKS = 3  # calls that are compared with the exact result
# Rounds over all ways, and timed turns of a way in each. A GPU at its limit of power changes its
# clock by some percent from round to round, so many rounds say more than many turns.
ROUNDS = 15
LINK_BYTES = 2**26
# Every call of torch 2.11's fused operators warns of this, since they use a deprecated function.
DEPRECATED = "`enable_symm_mem_for_group` is deprecated"
# The largest error, in units of the largest exact value: a few roundings of partial sums.
TOLERANCE = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-13}
ROLES = ("alone", "collective", "operator", "torch")


@dataclass(frozen=True)
class Way:
    """One way to compute a point. role: one of ROLES. within: the context to call it in."""

    name: str
    role: str
    call: Callable[[], Any]
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    variant: Variant | None = None


def pick(case: Case, device: torch.device, any_order: bool = False, mode: Mode = "eager") -> Choice:
    """The implementation that runs the case when none is insisted on.

    any_order: whether the group allows any order of sums.
    """
    return explain(
        case.point.op, case.shapes, dtype=FLOATS[case.point.dtype], ranks=case.point.ranks,
        device=device_name(device), any_order=any_order, mode=mode,
    )  # fmt: skip


def ways(
    case: Case, choices: Sequence[Choice], asked: Sequence[Variant] | None, backend: str,
    fused: bool,
) -> tuple[list[Way], list[str]]:  # fmt: skip
    """All ways of a case, and a line for each that cannot run.

    asked: the implementations to include; None: all in the registry. `staged` and the picked ones
    (choices) are always included. fused: whether torch's own operators can run.
    """
    op, found, left_out = case.point.op, [], []
    for name, call in case.alone.items():
        found.append(Way(name, "alone", call))
    for name, call in case.collective.items():
        found.append(Way(f"{backend}{name and f', {name}'}", "collective", call))
    known = OPERATORS[op].implementations
    wanted = [Variant(DEFAULT), *(Variant(each.implementation, each.options) for each in choices)]
    wanted += [Variant(name) for name in known] if asked is None else asked
    for variant in dict.fromkeys(wanted):
        if variant.name not in known or not accepts(known[variant.name], variant):
            continue  # of another operator
        if refusal := known[variant.name].refusal(choices[0].call):
            left_out.append(f"{op} by {variant.name}: {refusal}")
            continue
        found.append(Way(str(variant), "operator", case.operator, _using(op, variant), variant))
    for name, call in torch_calls(case).items() if fused else ():
        found.append(Way(name, "torch", call, _native if name == "torch native" else _not_native))
    return found, left_out


def _using(op: str, variant: Variant) -> Callable[[], AbstractContextManager[None]]:
    return lambda: use(op, variant.name, **dict(variant.options))


@contextlib.contextmanager
def _native(value: str | None = "1") -> Iterator[None]:
    """torch's native all-gather and product, which an environment variable asks for."""
    before = os.environ.pop(NATIVE, None)
    if value is not None:
        os.environ[NATIVE] = value
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
            yield
    finally:
        os.environ.pop(NATIVE, None)
        if before is not None:
            os.environ[NATIVE] = before


def _not_native() -> AbstractContextManager[None]:
    return _native(None)


# -- checks -----------------------------------------------------------------------------------


@dataclass
class Ready:
    """A way that is correct, to be timed. work: a turn of `calls` calls. error: see `compare`."""

    way: Way
    mode: Mode
    work: Callable[[], Any]
    calls: int
    error: float


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error in units of the largest exact value; infinite for NaN or other shapes."""
    worst = 0.0
    for tensor, exact in zip(found, expected, strict=True):
        if tensor.shape != exact.shape:
            return float("inf")
        error = (tensor.double() - exact).abs().max() / exact.abs().max()
        worst = max(worst, float(error.nan_to_num(nan=float("inf"))))
    return worst


def prepare(
    case: Case, each: Sequence[Way], device: torch.device
) -> tuple[list[Ready], list[str], list[str]]:
    """The ways that are correct, lines for those that cannot run, and errors of wrong ones.

    Every way is compared with the exact result, on every rank and in each mode, and only then is
    it made ready to be timed.
    """
    ready: list[Ready] = []
    left_out: list[str] = []
    wrong: list[str] = []
    for way in each:
        for mode in MODES if device.type == "cuda" else ("eager",):
            about = f"{case.point} by {way.name}, {mode}"
            made: Ready | None = None
            reason = ""
            try:
                made = _ready(case, way, mode)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            reason = next((said for said in launch.gathered(reason) if said), "")
            if made is None or reason:
                # torch's own operators, and what waits for the device, cannot always be captured.
                excused = way.role == "torch" or "synchronizing" in reason
                (left_out if excused else wrong).append(f"{about}: {reason}; it is not timed")
                continue
            made.error = max(launch.gathered(made.error))
            if made.error > TOLERANCE[case.point.dtype]:
                wrong.append(
                    f"{about}: its error is {made.error:.1g} of the largest value, above "
                    f"{TOLERANCE[case.point.dtype]:g}; it is not timed"
                )
            else:
                ready.append(made)
    return ready, left_out, wrong


def _ready(case: Case, way: Way, mode: Mode) -> Ready:
    """The way's error over CHECKS calls, and a turn to time."""
    calls = calls_of(case.point) if case.expected[0].is_cuda else 1
    outputs = case.outputs if way.role != "alone" else lambda result: []
    expected = case.expected if way.role != "alone" else []
    error = 0.0
    with way.within():
        if mode == "eager":
            for _ in range(CHECKS):
                error = max(error, compare(outputs(way.call()), expected))
        else:
            way.call()  # the first call may compile, and make buffers
            with _no_waits():
                way.call()
            graph, result = capture_graph(way.call)
            for _ in range(CHECKS):
                for tensor in outputs(result):
                    tensor.fill_(torch.nan)
                graph.replay()
                error = max(error, compare(outputs(result), expected))

    repeated = functools.partial(repeat, way.call, calls)
    if mode == "captured":
        with way.within():
            return Ready(way, mode, capture_graph(repeated)[0].replay, calls, error)

    def turn() -> None:
        with way.within():
            repeated()

    return Ready(way, mode, turn, calls, error)


def repeat(call: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        call()


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the device, which no graph can hold."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # of torch, that this mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# -- times ------------------------------------------------------------------------------------


def clock(
    work: Callable[[], Any], device: torch.device, meter: Meter | None = None
) -> tuple[list[float], float]:  # fmt: skip
    """The microseconds of each of TURNS turns on this rank, and the host's to enqueue a turn.

    On a GPU a first turn, which is not timed, aligns the ranks. The host's time is that turn's: the
    GPU is idle then. meter: the GPU's clock meter, marked before and after the timed turns.
    """
    if device.type != "cuda":
        times = []
        for _ in range(TURNS):
            dist.barrier()
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e6)
        return times, times[-1]
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    work()
    host = (time.perf_counter() - start) * 1e6
    if meter is not None:
        meter.mark(0)
    found = [ms * 1e3 for ms in time_turns(work, TURNS)]
    if meter is not None:
        meter.mark(1)
    return found, host


def slowest(times: Sequence[float], device: torch.device) -> list[float]:
    """Each time on the rank where it was the longest."""
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


@dataclass(frozen=True)
class Turns:
    """Microseconds per call on the slowest rank, for each turn. mhz: the clock of the GPU's SMs on
    the rank where it was the lowest. host_us: the host's time to enqueue a call on a GPU, on the
    rank where it was the longest."""

    us: list[float]
    mhz: float | None = None
    host_us: float | None = None


def measure(ready: Sequence[Ready], device: torch.device) -> Mapping[tuple[str, str], Turns]:
    """The times by (way, mode); the ways take turns.

    Each round has its own order, the same on all ranks. A GPU's clock depends on what ran before,
    so in a fixed order some ways would always be favoured by the way before them.
    """
    order, meter = random.Random(0), Meter(device) if device.type == "cuda" else None
    times: dict[tuple[str, str], list[float]] = {(e.way.name, e.mode): [] for e in ready}
    clocks: dict[tuple[str, str], list[float]] = {key: [] for key in times}
    hosts: dict[tuple[str, str], list[float]] = {key: [] for key in times}
    for number in range(ROUNDS + 1):  # the first warms up
        for each in order.sample(ready, len(ready)):
            key, (found, host) = (each.way.name, each.mode), clock(each.work, device, meter)
            if number:
                times[key] += [us / each.calls for us in found]
            if number and meter is not None:
                clocks[key].append(-meter.mhz())
                hosts[key].append(host / each.calls)
    made: dict[tuple[str, str], Turns] = {}
    for way, own in times.items():
        mhz, host_us = (_slowest_median(each[way], device) for each in (clocks, hosts))
        made[way] = Turns(slowest(own, device), None if mhz is None else -mhz, host_us)
    return made


def _slowest_median(found: Sequence[float], device: torch.device) -> float | None:
    return slowest([statistics.median(found)], device)[0] if found else None


def link_rate(group: dist.ProcessGroup, device: torch.device, peers: bool) -> float:
    """Bytes per second that every rank receives at once: the best of the transports.

    NCCL's or gloo's all-to-all, and copy engines into the others' memory (peers: it is accessible).
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = LINK_BYTES if device.type == "cuda" else LINK_BYTES // 64
    source = torch.zeros(ranks, size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    transports: list[Callable[[], Any]] = [
        lambda: dist.all_to_all_single(target, source, group=group)
    ]
    if peers:
        shared = symmetric.allocate((ranks, size), torch.uint8, group, device)

        def copies() -> None:
            for step in range(1, ranks):
                peer = (rank + step) % ranks
                shared.by_rank[peer][rank].copy_(source[peer], non_blocking=True)

        transports.append(copies)
    best = 0.0
    for transport in transports:
        clock(transport, device)
        us = min(slowest(clock(transport, device)[0], device))
        best = max(best, (ranks - 1) * size / us * 1e6)
    return best
