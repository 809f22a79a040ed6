"""Write ladder/perf/machines from the recorded results: `python benchmarks/machines.py`.

The times of older decode kernels (older/h200.json) are those that benchmarks/results/README.md
lists; the rest is in the JSON lines, but for the memory of a GPU and DECLARED, which no record says
and each of which says where it is from. What `ladder bench machine` measured (MEASURED) comes in
their place: what is of one GPU for all machines, the rest for that of as many GPUs.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ladder.config import model_config
from ladder.costs import BF16
from ladder.perf.calibration.options import family, family_of_value
from ladder.perf.links import fit_link
from ladder.perf.machine import BETWEEN_GPUS, OF_STEPS, Curve, Link, Machine, Value
from ladder.perf.machine import DECLARED as DEFAULTS
from ladder.perf.machine_files import FOLDER, OLDER, read, with_steps_of, write
from ladder.perf.prediction.fitting import calibrated, fit_prompts, fit_steps
from ladder.perf.prediction.records import RANK

Named = TypeVar("Named", Curve, Value)
RESULTS = Path(__file__).parent / "results"
GPU = "NVIDIA H200"
MEMORY = Value(139.8, "declared: what torch reports as total_memory of an H200; not recorded")
FLOORS = {"copy_tb_s": "bandwidth_tb_s", "matrix_tflop_s": "matrix_tflop_s"}
FILES = (
    "2026-11-21-figures-h200x4.jsonl",
    "2026-11-21-half-8b-h200x2.jsonl",
    "2026-11-21-inference-h200x4.jsonl",
    "2026-11-21-p2p-off-h200x4.jsonl",
    "2026-11-21-quality-latency-h200x4.jsonl",
    "2026-11-21-table1-h200x4.jsonl",
    "2026-11-22-accumulate-h200x2.jsonl",
    "2026-11-22-frame-after-2b-h200x2.jsonl",
    "2026-11-22-frame-after-h200x4.jsonl",
    "2026-11-22-rare-reduces-half-8b-h200x2.jsonl",
    "2026-11-22-table1-h200x2.jsonl",
    "2026-11-22-virtual-ranks-h200x2.jsonl",
    "2026-11-23-quarter-8b-h200.jsonl",
    "2026-11-24-decode-h200.jsonl",
    "2026-11-24-quarter-8b-before-h200.jsonl",
    "2026-11-24-quarter-8b-h200.jsonl",
)
COMM = {2: "2026-11-22-comm-h200x2.jsonl", 4: "2026-11-21-comm-h200x4.jsonl"}
FITTED = ("prompt_gap_us", "power_limit", "training_bytes")
CALIBRATION = (
    "2026-11-21-inference-h200x4.jsonl",
    "2026-11-21-figures-h200x4.jsonl",
    "2026-11-22-frame-before-h200x4.jsonl",
    "2026-11-22-frame-after-h200x4.jsonl",
    "2026-11-21-train-ahead-h200x4.jsonl",
    "2026-11-21-train-8b-again-h200x4.jsonl",
)
# H100s as a user would describe them: all of `ladder bench machine`, and records to calibrate by.
H100S = {
    1: (
        "2026-11-24-machine-h100x1.json",
        "2026-11-24-inference-h100.jsonl",
        "2026-11-26-fp8-h100.jsonl",
    ),
    2: (
        "2026-11-26-machine-h100x2.json",
        "2026-11-26-inference-h100x2.jsonl",
        "2026-11-26-train-8b-h100x2.jsonl",
    ),
}
# Of today's kernels, on one GPU.
TODAY = (
    "2026-11-24-eight-bits-few-rows-h200.jsonl",
    "2026-11-24-int8-h200.jsonl",
    "2026-11-24-quarter-8b-h200.jsonl",
)
# Of four H200s: what is taken of a file of `ladder bench machine`, and records to calibrate by.
FOUR_MEASURED = "2026-11-27-machine-h200x4.json"
FOUR_CURVES = "exchange", "peer copy"
FOUR_VALUES = "barrier_us", "product_beside_direct", "direct_beside_product"
FOUR_CALIBRATION = (
    "2026-11-27-inference-again-h200x4.jsonl",
    "2026-11-27-fp8-again-h200x4.jsonl",
    "2026-11-27-train-again-h200x4.jsonl",
)
FOUR_IDLE = Value(
    0.25,
    "declared: in traces of 64 prompts of an 8B products of standard, which computes for 69 % of "
    "the time, take 9 % less than those of none, and of parallel, 81 %, 4.6 % less, which is 0.21 "
    "and 0.29; 2026-11-27-profile-h200x4.txt",
)
ATTENTION_RATE = (
    "declared: {} of FlashAttention-3 as published for an H100, causal, heads of 128: 400, 500, "
    "560, 600 TFLOP/s at 1k, 2k, 4k, 8k tokens; cuDNN in a trace of half-8b at 1k: 372"
)
BESIDE_NCCL = (
    "{}: in traces of training steps at TP 4 NCCL takes 1.3 times as long beside products "
    "(2026-11-21-train-8b-again-h200x4.jsonl){}"
)
DECLARED = {
    "boost_ms": Value(
        DEFAULTS["boost_ms"],
        "declared: between what batches 4 and 16 of llama-3-8b, none, TP 4 ask for, whose prefill "
        "is off by +1 and -3 % with it; 2026-11-21-figures-h200x4.jsonl",
    ),
    "idle_power": Value(
        0.64,
        "declared: half-8b, ladder and standard, batch 64, in traces of the engine of that time; "
        "2026-11-21-profile-half-8b-h200x2.txt",
    ),
    "prompt_attention_tflop_s": Value(
        DEFAULTS["prompt_attention_tflop_s"], ATTENTION_RATE.format("the rate")
    ),
    "prompt_attention_half": Value(
        DEFAULTS["prompt_attention_half"], ATTENTION_RATE.format("the shape of the curve")
    ),
}
TOGETHER = {
    "nccl_beside_product": Value(
        DEFAULTS["nccl_beside_product"], BESIDE_NCCL.format("declared", "")
    ),
    "product_beside_nccl": Value(
        DEFAULTS["product_beside_nccl"],
        "measured by hand: layers of products on 4x H200 (torch 2.11, 2026-11-20) lose 0.40 to "
        "0.62 of the time of NCCL's all-reduces beside them, five shapes, 0.48 on average; "
        "1 - 0.48 x nccl_beside_product",
    ),
}
COPIES = {
    2: Value(
        0.87,
        "declared: in the trace of half-8b, ladder, batch 64, products take 3.1 % longer than in "
        "standard's, and copies run for 23 % of the time; 2026-11-21-profile-half-8b-h200x2.txt",
    ),
    4: Value(
        DEFAULTS["product_beside_copies"],
        "measured by hand: a product of 8192 rows takes 3650 us for 3533 while 409 us of copies "
        "run beside it on 4x H200 (torch 2.11, 2026-11-22), which is 0.71; rounded up",
    ),
}
PEERS = Curve(
    "peer copy",
    {},
    tuple((float(size), round(2 + size / 380e3, 2)) for size in (2**20, 2**24, 2**28)),
    "measured by hand: copy engines of 4x H200, all at once, read 369 GB/s and write 390 GB/s "
    "(torch 2.11, 2026-11-20); and 2 us for each copy, declared",
)
TRACES = "measured by hand: in the traces of half-8b, {}; 2026-11-21-profile-half-8b-h200x2.txt"
TURNS = {
    "barrier_us": Value(
        DEFAULTS["barrier_us"], TRACES.format("standard, batches 4 and 16, a barrier's kernel")
    ),
    "copy_turn_us": Value(
        DEFAULTS["copy_turn_us"],
        TRACES.format(
            "batch 4, the GPU idles 22.1 us longer for an exchange of standard's than for none's "
            "norm, of which 4.6 are 2 barriers', as other kernels', and 7.6 gaps of copies and "
            "landings; the rest, by 2"
        ),
    ),
}
NOTES = "benchmarks/results/README.md, `Block shapes of the decode kernels`"
# Microseconds of two products of one row at TP 4: QKV with the output projection, gate and up with
# down.
PAIRS = {"llama-3-8b": (6.5, 21.9), "llama-3-70b": (19.1, 78.1), "2b-class": (3.9, 8.3)}
# Layers of an 8B and of a 1B (linear layers and norms, no attention) as one graph on 4x H200, torch
# 2.11, 2026-11-20, microseconds a layer: no communication; the same as a ladder, whose two landings
# run under products; standard, whose two blocking pushes are in the products.
SKETCH = (
    "measured by hand: layers of products and norms on 4x H200 (torch 2.11, 2026-11-20) take 38.8 "
    "us (8B), 113.7 (70B), 18.1 (1B) without communication, {}"
)
LANDINGS = {2048: (18.1 - 16.4) / 2, 4096: (38.8 - 36.0) / 2}
WITH_PUSHES = (
    "and 41.8, 119.8, 21.1 with two pushes by products: 1.02 us each and 3.5 % of the time between "
    "them, least squares; "
)
PUSHES = {
    name: Value(DEFAULTS[name], text)
    for name, text in {
        "push_kernel_us": SKETCH.format(
            f"{WITH_PUSHES}an all-reduce of 8 KiB by push takes 2.72",
        ),
        "rank_spread": SKETCH.format(
            f"{WITH_PUSHES}of the slowest of four ranks, 1.05 standard deviations",
        ),
        "row_beside_nccl": (
            "measured by hand: as a ladder with NCCL on a stream of its own, a layer of products "
            "and norms takes 53.9 us for 44.4 (8B) and 129.7 for 123.2 (70B) on 4x H200 (torch "
            "2.11, 2026-11-20), with torch's one-shot 45.2 and 124.6: 0.74 and 0.84 while NCCL "
            "runs, 17 us"
        ),
    }.items()
}
FOUR = {4: 40.2, 16: 40.2, 32: 42.3, 64: 39.3}  # rows: the four products of an 8B's layer
COPY = 4.2  # TB/s read and written
ATTENTION = {2: 5.7, 128: 22.6}  # KV heads of all sequences, over 1100 keys


def weights(model: str, tp: int) -> tuple[float, float]:
    """Mean bytes of a weight in each pair of products."""
    shape = model_config(model)
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    attention = BF16 * shape.hidden_size * heads / tp / 2
    return attention, BF16 * 3 * shape.hidden_size * shape.intermediate_size / tp / 2


def records(name: str) -> Iterator[dict[str, Any]]:
    with (RESULTS / name).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def values(gpus: int) -> dict[str, Value]:
    """Medians over the runs on so many GPUs, one figure for each run."""
    found: dict[str, dict[tuple[str, str, str], float]] = {}
    for file in FILES:
        for record in records(file):
            machine = record["machine"]
            if machine["gpu"] != GPU or machine["gpus"] != gpus:
                continue
            for name, key in FLOORS.items():
                run = file, machine["commit"], str(machine[key])
                found.setdefault(name, {})[run] = machine[key]
    return {"memory_gib": MEMORY} | {
        name: Value(
            round(statistics.median(runs.values()), 3),
            f"measured: median of {len(runs)} runs, {min(runs.values()):.3f} to "
            f"{max(runs.values()):.3f}; {', '.join(sorted({run[0] for run in runs}))}",
        )
        for name, runs in found.items()
    }


def kernels() -> list[Curve]:
    """Products and attention of a decode step on one GPU."""
    points = []
    for model, times in PAIRS.items():
        for size, us in zip(weights(model, 4), times, strict=True):
            points.append((size, us / 2))
    text = f"measured: half of the time of two products in a chain, by their mean bytes; {NOTES}"
    found = [Curve("product", {"rows": 1}, tuple(sorted(points)), text)]
    mean = sum(weights("llama-3-8b", 4)) / 2
    text = f"measured: a fourth of the four products of an 8B's layer at TP 4; {NOTES}"
    for rows, us in FOUR.items():
        found.append(Curve("product", {"rows": rows}, ((mean, us / 4),), text))
    text = SKETCH.format("36.0 (8B) and 16.4 (1B) if their two landings run under products")
    for hidden, us in LANDINGS.items():  # of more rows also their bytes: 4 tensors
        more = 63 * 4 * BF16 * hidden / (1e6 * COPY)
        points = ((1, round(us, 3)), (64, round(us + more, 3)))
        found.append(Curve("landing", {"hidden": hidden}, points, text))
    text = f"measured: 4 query heads for each KV head, of 128; {NOTES}"
    return [*found, Curve("attention", {"keys": 1100}, tuple(sorted(ATTENTION.items())), text)]


def collectives(gpus: int) -> tuple[list[Curve], list[Link]]:
    """The newest time of each all-reduce and size."""
    times: dict[str, dict[int, float]] = {}
    commits, settings = set(), set()
    for record in records(COMM[gpus]):
        point = record["point"]
        times.setdefault(point["algorithm"], {})[point["size"]] = round(record["result"]["us"], 3)
        about = record["machine"]
        commits.add(about["commit"])
        settings |= {f"{key}={value}" for key, value in about.get("environment", {}).items()}
    about = ", ".join([*sorted(commits), *sorted(settings)])
    text = f"measured: `ladder bench comm`; {COMM[gpus]}, the newest of {about}"
    found = [
        Curve("all-reduce", {"algorithm": name}, tuple(sorted(each.items())), text)
        for name, each in sorted(times.items())
    ]
    nccl = next(each for each in found if each.where["algorithm"] == "nccl")
    return found, [fit_link("NVLink", nccl, gpus)]


# Files of `ladder bench machine` in results/, and the parts of each that are taken, by their names
# for --only. Of a rate the median over many runs stays; a file has that of one.
# What is not taken, and why:
# - prompt-attention: of heads of 128 values, and half of the recorded models have heads of 64.
# - matrix: prompts and training are predicted better with it, operators worse, whose chunks take
#   the rate of a whole product of as few rows, with its waves of tiles.
# - all-gather, reduce-scatter: 96 of 64 MiB take 16 ms by these curves, as in `ladder bench ops`,
#   and a recorded training step of TP 2 with SP 6 ms more than without them. Half of an all-reduce
#   stands for each.
# - beside: in the middle of a product an all-reduce waits for its end, so that there was one for
#   each product: 397 and 386 us, for 144 and 347 alone. In a model it begins where a product ends.
#   The curves of decode steps come without what changes of streams take, which row_beside_nccl
#   includes. Products lose 3 % to copies where they are below the limit of power, and more where
#   the copies' power is missing, as in the trace that COPIES is from.
MEASURED: dict[str, tuple[str, ...]] = {
    "2026-11-23-machine-h200x2.json": (
        "values",
        "all-reduce",
        "peer-copy",
        "exchange",
        "copy",
    ),
    "2026-11-24-machine-h200x1.json": ("product", "landing"),
    "2026-11-24-attention-h200x1.json": ("attention",),
}
# Of the parts that are taken, what is left out, and why.
LEFT_OUT = {
    "2026-11-23-machine-h200x2.json": {
        "launch_us": "stands for changes of streams and for room on a multiprocessor, too",
        "host_launch_us": "that of one host; hosts of the records differ",
    },
}
OF_ONE_GPU = ("memory_gib", "launch_us", "host_launch_us", "prompt_attention_tflop_s",
              "prompt_attention_half")  # fmt: skip
OF_NEAREST = ("barrier_us",)  # what other numbers of GPUs have is of the traces of two, too


def measured() -> list[tuple[str, Machine]]:
    """What is taken of each file, with the file's name."""
    found = []
    for name, families in MEASURED.items():
        each, without = read(RESULTS / name), LEFT_OUT.get(name, {})
        curves = tuple(
            one for one in each.curves
            if family(one.name) in families and one.name not in without
        )  # fmt: skip
        values = {
            key: value for key, value in each.values.items()
            if family_of_value(key) in families and key not in without
        }  # fmt: skip
        found.append((name, replace(each, curves=curves, values=values)))
    return found


def with_measured(machine: Machine, files: Sequence[tuple[str, Machine]]) -> Machine:
    """The machine with what was measured in place of what it has: all of a family of curves of one
    GPU, and OF_NEAREST, from the file of the nearest number of GPUs that has them (of several the
    last one); and from those of its own number collectives, one by one, and slowdowns."""
    values, curves, found = dict(machine.values), list(machine.curves), machine.links
    for file, each in sorted(files, key=lambda one: -abs(one[1].gpus - machine.gpus)):
        own = each.gpus == machine.gpus
        for name, value in each.values.items():
            of_pair = own and family_of_value(name) in ("beside", "exchange")
            if name in OF_ONE_GPU or of_pair or (machine.gpus > 1 and name in OF_NEAREST):
                values[name] = replace(value, provenance=f"{value.provenance}; {file}")
        taken = [curve for curve in each.curves if own or curve.name not in BETWEEN_GPUS]
        families = {curve.name for curve in taken if curve.name not in BETWEEN_GPUS}
        names = {str(curve) for curve in taken}
        curves = [
            curve for curve in curves if curve.name not in families and str(curve) not in names
        ]
        curves += [replace(one, provenance=f"{one.provenance}; {file}") for one in taken]
        if own and each.family("all-reduce") and each.links:
            found = tuple(replace(link, tier="NVLink") for link in each.links)
    return replace(machine, values=values, curves=tuple(curves), links=found)


def former(gpus: int) -> Machine:
    """With older decode kernels, nothing of which was fitted; and so without what is of newer ones
    alone."""
    more, links = collectives(gpus) if gpus > 1 else ([], [])
    declared = DECLARED
    if gpus > 1:
        more.append(PEERS)
        declared = DECLARED | TOGETHER | PUSHES | TURNS | {"product_beside_copies": COPIES[gpus]}
    name = f"h200x{gpus}"
    found = Machine(name, GPU, gpus, values(gpus) | declared, tuple(more), tuple(links))
    found = with_measured(found, measured())
    others = [each for each in found.curves if each.name not in OF_STEPS]
    return replace(found, curves=(*kernels(), *others))


@functools.cache
def four() -> Machine:
    """Four GPUs, with older decode kernels, and all that is fitted to steps by these."""
    return calibrated(former(4), *(RESULTS / file for file in CALIBRATION))


def fitted(gpus: int) -> Machine:
    """With what is fitted to prompts and training on four GPUs."""
    found = former(gpus)
    return replace(found, values={**found.values, **{key: four().values[key] for key in FITTED}})


@functools.cache
def one() -> Machine:
    """One GPU, with today's kernels as measured, and what is fitted to their steps and prompts."""
    found, files = fitted(1), [RESULTS / file for file in TODAY]
    found = replace(found, curves=with_measured(replace(found, curves=()), measured()).curves)
    return fit_prompts(fit_steps(found, files, RANK[0], older=False), files, RANK[0])


def machine(gpus: int) -> Machine:
    """One GPU or two. On two prompts are as they were recorded there, decode steps as on four."""
    return one() if gpus == 1 else with_steps_of(fitted(gpus), four_today())


def four_before() -> Machine:
    """Four GPUs as older prompts and training were fitted, with decode steps as on one."""
    return with_steps_of(fitted(4), one())


@functools.cache
def four_today() -> Machine:
    """Four GPUs, with what was measured of what is between them, and fitted to today's passes."""
    found, new = four_before(), read(RESULTS / FOUR_MEASURED)
    curves = [each for each in found.curves if each.name not in FOUR_CURVES]
    curves += [named(each) for each in new.curves if each.name in FOUR_CURVES]
    values = found.values | {name: named(new.values[name]) for name in FOUR_VALUES}
    values["idle_power"] = FOUR_IDLE
    found = replace(found, values=values, curves=tuple(curves))
    return with_missing(calibrated(found, *(RESULTS / file for file in FOUR_CALIBRATION)))


def named(measured: Named) -> Named:
    """With the name of the file."""
    return replace(measured, provenance=f"{measured.provenance}; {FOUR_MEASURED}")


def with_missing(machine: Machine) -> Machine:
    """With what nobody measured of steps on this machine, by what was measured on one GPU: of two
    sequences as much less as of four, and weights in int8 as many times as long as in fp8."""
    text = "; what is missing of it by the differences on one GPU"
    curves = {str(each): each for each in machine.curves}
    alone = {str(each): dict(each.points) for each in one().curves if str(each) in curves}
    rows, fp8, int8 = (
        str(Curve(name, where, (), ""))
        for name, where in (
            ("more rows", {}), ("converted", {"weights": "fp8"}), ("converted", {"weights": "int8"})
        )
    )  # fmt: skip
    more = dict(curves[rows].points)
    more[2.0] = alone[rows][2.0] + more[4.0] - alone[rows][4.0]
    stored = dict(curves[fp8].points)
    stored[2.0] = alone[fp8][2.0] * stored[4.0] / alone[fp8][4.0]
    whole = {batch: us * stored[batch] / alone[fp8][batch] for batch, us in alone[int8].items()}
    for name, points in ((rows, more), (fp8, stored), (int8, whole)):
        found = tuple((batch, round(us, 3)) for batch, us in sorted(points.items()))
        known = curves[fp8 if name == int8 else name].provenance
        curves[name] = replace(curves[name], points=found, provenance=known + text)
    return replace(machine, curves=tuple(curves.values()))


def h100s(gpus: int) -> Machine:
    measured, *files = (RESULTS / file for file in H100S[gpus])
    return replace(calibrated(read(measured), *files), name=f"h100x{gpus}")


def older() -> Machine:
    """The older decode kernels, and what is fitted to them."""
    values = {"step_stretch": four().values["step_stretch"]}
    curves = tuple(each for each in four().curves if each.name in OF_STEPS)
    return Machine("older kernels of h200", GPU, 1, values, curves, ())


if __name__ == "__main__":
    OLDER.mkdir(parents=True, exist_ok=True)
    for each in (*map(machine, (1, 2)), four_today(), *map(h100s, H100S)):
        write(each, FOLDER / f"{each.name}.json")
        print(FOLDER / f"{each.name}.json")
    for name, each in (("h200", older()), ("h200x4", four_before())):
        write(each, OLDER / f"{name}.json")
        print(OLDER / f"{name}.json")
