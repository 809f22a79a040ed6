"""A predicted pass as a trace for Perfetto, which `ladder.bench.trace` reads as a measured one.

Kernels lie on tracks of their streams, under the names that they have in real traces. Below are
tracks of resources with the operations that hold them, one for each stream, since slices of a track
must not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from ladder.files import write_text
from ladder.perf.graph import COMPUTES, REDUCES, ROUNDED, Graph, Operation
from ladder.perf.graph import LINKS as PUSHED
from ladder.perf.memory import held_ranks
from ladder.perf.phases import Prediction
from ladder.perf.planner.question import Row
from ladder.perf.simulate import Times

ROUNDING = 1e-9  # the relative error that a time may have as a sum of floats
PAUSE = 2e3  # microseconds around the pass, as in measured traces
STREAM = 7  # the number of the first stream; real ones have small numbers, too
DECODE = {
    "product": "_project_kernel", "head": "_project_kernel", "attention": "_attention_kernel",
    "landing": "_land_kernel", "sum": "_land_kernel", "norm": "_land_kernel",
    "embed": "_embed_kernel", "send": "_send_kernel", "best": "_best_kernel",
    "choose": "_choose_kernel",
}  # fmt: skip
# The kernels of prompts and of training: products by cuBLAS, attention by cuDNN.
WHOLE = {
    "product": "nvjet_sm90", "head": "nvjet_sm90",
    "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
    "rotary": "_rotary_prompt_kernel", "swiglu": "_swiglu_kernel", "landing": "_norm_kernel",
    "norm": "_norm_kernel", "peers": "_land_rows_kernel", "sum": "vectorized_elementwise_kernel",
    "copies": "Memcpy PtoP (Device -> Device)", "barrier": "c10d::symmetric_memory::barrier_kernel",
}  # fmt: skip
# Decode steps with virtual ranks: torch sums their partials, and no landing waits for slots.
VIRTUAL = DECODE | {kind: WHOLE[kind] for kind in ("landing", "norm", "sum")}
FUSED = {"decode": DECODE, "virtual decode": VIRTUAL}
COLLECTIVES = {
    "all-reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "reduce-scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "all-gather": "ncclDevKernel_AllGather_RING_LL",
    "gather": "ncclDevKernel_AllGather_RING_LL",
    "copy": "Memcpy DtoD (Device -> Device)",
}
OURS = {"push": "_push_all_reduce", "two-shot": "_two_shot_all_reduce"}
MEMORY, SMS, LINKS = "HBM", "SMs", "links"
ON_LINKS = (*REDUCES, "all-gather", "copies", "peers")


def kernel_name(each: Operation, phase: str, reducer: str, sharded: bool) -> str:
    """The name of an operation's kernel in a real trace. sharded: whether the residual is sharded
    by tokens."""
    key = each.part if each.kind == "choice" else each.kind
    if key == "all-reduce":
        name = reducer if phase in FUSED else each.algorithm or reducer
        if name == ROUNDED:  # NCCL gathers what one kernel has rounded and the next one adds
            return COLLECTIVES["all-gather"]
        return OURS.get(name, COLLECTIVES[key])
    if key in COLLECTIVES:
        return COLLECTIVES[key]
    if key == "attention" and each.backward:
        return WHOLE[key].replace("fprop", "bprop")
    if key == "landing" and sharded and not each.few:
        return "_land_rows_kernel"
    return FUSED.get(phase, WHOLE).get(key, each.kind)


def tracks(phase: str) -> tuple[str, str]:
    """The resources of a phase: the one that computation holds (a decode step mostly reads weights
    and caches), and the links."""
    return (MEMORY if phase == "decode" else SMS), LINKS


def resources(operation: Operation, phase: str) -> list[str]:
    """The resources that an operation holds, besides its stream."""
    found = []
    if operation.kind in (*COMPUTES, "head"):
        found.append(tracks(phase)[0])
    if operation.kind in ON_LINKS or operation.part == "gather":
        found.append(LINKS)
    return found


def spans(
    graph: Graph, times: Times, begin: float = 0.0
) -> Iterator[tuple[Operation, float, float]]:
    """Each operation with its start and end. begin: when the first one starts."""
    for each in graph.operations:
        yield each, begin + times.starts[each.index], begin + times.ends[each.index]


def all_spans(found: Prediction) -> list[tuple[Operation, float, float]]:
    """Those of a prediction; of a training step, of all its micro-batches."""
    made: list[tuple[Operation, float, float]] = []
    begin = 0.0
    if found.earlier is not None:
        graph, times, count = found.earlier
        for _ in range(count):
            *work, (_, begin, _) = spans(graph, times, begin)  # the optimiser would begin then
            made += work
    return [*made, *spans(found.graph, found.times, begin)]


def describe(operation: Operation) -> str:
    """An operation in words."""
    words = [operation.part or operation.kind]
    if operation.sublayer is not None:
        words.append(f"of sublayer {operation.sublayer}")
    if operation.pushes:
        words.append("with its push")
    if operation.algorithm == ROUNDED:
        words.append("in 8 bits, with its rounding")
    if operation.backward:
        words.append("backward")
    return " ".join(words)


def left_out(row: Row, drawn: float) -> str:
    """The part of the predicted time that the trace, of `drawn` microseconds, does not show, in
    words; empty if there is none."""
    found, more = row.prediction, []
    late = found.us - drawn - found.waiting_us
    if late > drawn * ROUNDING:
        more.append(f"without {late / 1e3:.3f} ms of waiting for the host's launches")
    if found.waiting_us:
        more.append(f"without {found.waiting_us / 1e3:.3f} ms of waiting for slower ranks")
    said = f"{drawn / 1e3:.3f} of {found.us / 1e3:.3f} ms: {', '.join(more)}"
    return said if more else ""


def events(row: Row, phase: str) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    drawn = all_spans(row.prediction)
    operations, total = [each for each, _, _ in drawn], max(end for _, _, end in drawn)
    streams = dict.fromkeys(each.stream for each in operations if each.launched)
    numbers = {name: STREAM + n for n, name in enumerate(streams)}
    used = {(name, each.stream) for each in operations for name in resources(each, phase)}
    ordered = [pair for pair in product(tracks(phase), (*streams, PUSHED)) if pair in used]
    held = {pair: 100 + n for n, pair in enumerate(ordered)}
    title = f"predicted: {row.candidate}"
    if said := left_out(row, total):
        title += f"; {said}"
    config, tp = row.candidate.config, row.candidate.tp
    virtual = phase == "decode" and held_ranks(config, tp) > 1
    kernels = "virtual decode" if virtual else phase
    sharded = any(each.kind == "barrier" for each in operations)
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((0, title), (1, "resources"))
    ]
    named = [(0, number, f"stream {number}: {name}") for name, number in numbers.items()]
    for (name, on), number in held.items():
        of = "what was pushed" if on == PUSHED else f"stream {numbers[on]}"
        named.append((1, number, f"{name}, {of}"))
    for pid, number, name in named:
        made.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}}
        )
    made.append(
        {"ph": "X", "cat": "user_annotation", "name": phase, "pid": 0, "tid": 0,
         "ts": 0.0, "dur": total + 2 * PAUSE}
    )  # fmt: skip
    for each, start, end in drawn:
        if end == start:  # no kernel, as a sum over a single rank
            continue
        about = {"is": describe(each)}
        place = {"ph": "X", "ts": PAUSE + start, "dur": end - start}
        if each.launched:
            name = kernel_name(each, kernels, row.candidate.way, sharded)
            stream = numbers[each.stream]
            made.append(
                place | {"cat": "kernel", "name": name, "pid": 0, "tid": stream,
                         "args": {"stream": stream, **about}}
            )  # fmt: skip
        for name in resources(each, phase):
            track = held[name, each.stream]
            made.append(place | {"cat": "resource", "name": describe(each), "pid": 1, "tid": track})
    return made


def write_trace(path: Path, row: Row, phase: str) -> None:
    data = {"displayTimeUnit": "ms", "traceEvents": events(row, phase)}
    write_text(path, json.dumps(data) + "\n")
