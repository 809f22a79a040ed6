"""A predicted pass as a trace for Perfetto, which `ladder.bench.trace` reads as a measured one.

Kernels lie on tracks of their streams, under the names that they have in real traces; what rides on
a kernel is no kernel of its own. Below them is one track for each resource, with what holds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladder.files import write_text
from ladder.perf.graph import COMPUTES, REDUCES, Operation
from ladder.perf.phases import Prediction
from ladder.perf.planner.question import Row

PAUSE = 2e3  # microseconds around the pass, as in measured traces
STREAM = 7  # of the first stream; real ones have small numbers, too
OURS = {
    "product": "_project_kernel", "head": "_project_kernel", "attention": "_attention_kernel",
    "landing": "_land_kernel", "sum": "_land_kernel", "norm": "_land_kernel",
    "embed": "_embed_kernel", "send": "_send_kernel", "best": "_best_kernel",
    "choose": "_choose_kernel",
}  # fmt: skip
# Of prompts and of training, whose products are cuBLAS' and whose attention is torch's.
WHOLE = OURS | {
    "product": "nvjet_sm90", "head": "nvjet_sm90",
    "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
    "landing": "_land_rows_kernel", "norm": "_norm_kernel",
}  # fmt: skip
COLLECTIVES = {
    "all-reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "reduce-scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "all-gather": "ncclDevKernel_AllGather_RING_LL",
    "gather": "ncclDevKernel_AllGather_RING_LL",
    "copy": "Memcpy DtoD (Device -> Device)",
}
PUSHED = {
    "all-reduce": "_push_all_reduce", "reduce-scatter": "Memcpy PtoP (Device -> Device)",
    "all-gather": "Memcpy PtoP (Device -> Device)",
}  # fmt: skip
MEMORY, LINKS = "HBM", "links"


def kernel_name(operation: Operation, phase: str, reducer: str) -> str:
    """The name of its kernel in a real trace."""
    key = operation.part if operation.kind == "choice" else operation.kind
    if key in COLLECTIVES:
        return (PUSHED if reducer == "push" else {}).get(key, COLLECTIVES[key])
    names = OURS if phase == "decode" else WHOLE
    return names.get(key, key)


def resources(operation: Operation) -> list[str]:
    """What it holds, besides its stream."""
    found = []
    if operation.kind in (*COMPUTES, "head"):
        found.append(MEMORY)
    if operation.kind in (*REDUCES, "all-gather") or operation.pushes or operation.part == "gather":
        found.append(LINKS)
    return found


def spans(found: Prediction) -> Iterator[tuple[Operation, float, float]]:
    """Each operation with its start and end."""
    for each in found.graph.operations:
        yield each, found.times.starts[each.index], found.times.ends[each.index]


def describe(operation: Operation) -> str:
    """What it is, in words."""
    words = [operation.part or operation.kind]
    if operation.sublayer is not None:
        words.append(f"of sublayer {operation.sublayer}")
    if operation.pushes:
        words.append("with its push")
    if operation.backward:
        words.append("backward")
    return " ".join(words)


def events(row: Row, phase: str) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    found = row.prediction
    streams = dict.fromkeys(each.stream for each in found.graph.operations)
    numbers = {name: STREAM + n for n, name in enumerate(streams)}
    tracks = {name: 100 + n for n, name in enumerate((MEMORY, LINKS))}
    title = f"predicted: {row.candidate}"
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((0, title), (1, "resources"))
    ]
    for pid, names in ((0, numbers), (1, tracks)):
        for name, number in names.items():
            about = {"name": f"stream {number}: {name}" if pid == 0 else name}
            track = {"ph": "M", "name": "thread_name", "pid": pid, "tid": number}
            made.append(track | {"args": about})
    made.append(
        {"ph": "X", "cat": "user_annotation", "name": phase, "pid": 0, "tid": 0,
         "ts": 0.0, "dur": found.us + 2 * PAUSE}
    )  # fmt: skip
    for each, start, end in spans(found):
        about = {"is": describe(each)}
        place = {"ph": "X", "ts": PAUSE + start, "dur": end - start}
        if each.rides is None:
            name, stream = kernel_name(each, phase, row.candidate.way), numbers[each.stream]
            made.append(
                place | {"cat": "kernel", "name": name, "pid": 0, "tid": stream,
                         "args": {"stream": stream, **about}}
            )  # fmt: skip
        for name in resources(each):
            made.append(
                place | {"cat": "resource", "name": describe(each), "pid": 1, "tid": tracks[name]}
            )
    return made


def write_trace(path: Path, row: Row, phase: str) -> None:
    data = {"displayTimeUnit": "ms", "traceEvents": events(row, phase)}
    write_text(path, json.dumps(data) + "\n")
