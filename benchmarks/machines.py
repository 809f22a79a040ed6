"""Write ladder/perf/machines from the recorded results: `python benchmarks/machines.py`.

benchmarks/results/README.md lists the times of the older decode kernels (older/h200.json). All
other figures come from the JSON lines of the results, except the memory of a GPU and the values of
machines_by_hand.py: no record has these, so each states its source. Measurements of `ladder bench
machine` (MEASURED) replace such figures: measurements of one GPU in all machines, others only in
the machine with as many GPUs.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from machine_parts import RESULTS, taken, with_measured, with_newer
from machine_records import (
    BLOCK_MEASURED,
    CALIBRATION,
    COMM,
    CUTS_CALIBRATION,
    CUTS_MEASURED,
    CUTS_PARTS,
    FILES,
    FOUR_CALIBRATION,
    FOUR_MEASURED,
    FOUR_PARTS,
    H100S,
    HALVES_CALIBRATION,
    INT8_MEASURED,
    LEFT_OUT,
    LONG_KEYS,
    LONG_MEASURED,
    MEASURED,
    PEERS_MEASURED,
    PEERS_PARTS,
    PROMPTS_CALIBRATION,
    STEPS_CALIBRATION,
    STEPS_MEASURED,
    STEPS_PARTS,
    TODAY,
    TRAINING_CALIBRATION,
)
from machines_by_hand import (
    BOOST,
    BOTH_STREAMS,
    BOTH_STREAMS_THEN,
    COPIES,
    DECLARED,
    FITTED_BY_HAND,
    FOUR_BY_HAND,
    PEERS,
    PUSHES,
    TOGETHER,
    TURNS,
    kernels,
)

from ladder.perf.links import fit_link
from ladder.perf.machine import (
    ATTENTION,
    FITTED_CURVES,
    OF_STEPS,
    Curve,
    Link,
    Machine,
    Value,
)
from ladder.perf.machine_files import FOLDER, OLDER, read, with_steps_of, write
from ladder.perf.prediction.fitting import (
    calibrated,
    calibrations,
    fit_prompts,
    fit_steps,
    fit_training,
)
from ladder.perf.prediction.records import RANK, predicted

GPU = "NVIDIA H200"
MEMORY = Value(139.8, "declared: what torch reports as total_memory of an H200; not recorded")
FLOORS = {"copy_tb_s": "bandwidth_tb_s", "matrix_tflop_s": "matrix_tflop_s"}
AS_IN_CHAINS = Value(1.0, "declared: kernels take as long in a step as in a chain of their own")
FITTED = ("prompt_gap_us", "power_limit", "training_bytes")
# Values that two GPUs take from four with today's kernels. With these, predictions of 107 prompts
# by push on two GPUs are 2.7 % off (5.1 % with values fitted to older kernels), and of 26 training
# steps 1.9 % (3.6 %), in records from 2026-11-27 on.
OF_FOUR = (*FITTED, *FLOORS, "power_exponent", "idle_power")
# Types whose products were measured again, and the files.
NEWER = {"int8": INT8_MEASURED, "fp8-block": BLOCK_MEASURED}
MISSING = "more rows", "converted (weights=fp8)", "converted (weights=int8)"


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


def measured() -> list[tuple[str, Machine]]:
    """The parts that are taken from each file of MEASURED, with the file's name."""
    return [taken(name, parts, LEFT_OUT.get(name, ())) for name, parts in MEASURED.items()]


def with_older(gpus: int) -> Machine:
    """`gpus` H200s with the older decode kernels, before anything is fitted.

    The curves of decode steps are those of the older kernels alone.
    """
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
    """Four H200s with the older decode kernels, and all values fitted to records of these."""
    return calibrated(with_older(4), *(RESULTS / file for file in CALIBRATION))


def fitted(gpus: int) -> Machine:
    """`with_older`, with the values that are fitted to prompts and training on four GPUs."""
    found = with_older(gpus)
    return replace(found, values={**found.values, **{key: four().values[key] for key in FITTED}})


@functools.cache
def one() -> Machine:
    """One H200 with the kernels that were measured on it, and with values fitted to their decode
    steps and prompts."""
    found, files = fitted(1), [RESULTS / file for file in TODAY]
    found = replace(found, curves=with_measured(replace(found, curves=()), measured()).curves)
    return fit_prompts(fit_steps(found, files, RANK[0], older=False), files, RANK[0])


def machine(gpus: int) -> Machine:
    """One or two H200s with the decode steps of four. One GPU keeps the values fitted to its own
    prompts; two take OF_FOUR from four."""
    found = with_steps_of(one() if gpus == 1 else fitted(gpus), four_today())
    found = replace(found, values={**found.values, **FITTED_BY_HAND, "boost_ms": BOOST})
    if gpus == 1:
        return fit_prompts(found, [RESULTS / file for file in TODAY], RANK[0])
    of_four = {name: four_today().values[name] for name in OF_FOUR}
    return replace(found, values={**found.values, **of_four})


def before(gpus: int) -> Machine:
    """H200s with values fitted to older prompts and training, and with the decode steps of one."""
    return with_steps_of(fitted(gpus), one())


@functools.cache
def four_then() -> Machine:
    """Four H200s with today's kernels, except for those of decode steps: in these, attention read
    the keys after its wait. What is between the GPUs was measured on four; values are fitted to
    records of passes (FOUR_CALIBRATION)."""
    files = [taken(FOUR_MEASURED, FOUR_PARTS), taken(PEERS_MEASURED, PEERS_PARTS)]
    found = with_measured(before(4), files)
    found = replace(found, values={**found.values, **FOUR_BY_HAND})
    return with_missing(calibrated(found, *(RESULTS / file for file in FOUR_CALIBRATION)))


@functools.cache
def four_today() -> Machine:
    """`four_uncut` with the products, attention and landings of today's steps, and with prompts and
    training that are fitted again."""
    found = with_measured(four_uncut(), [taken(CUTS_MEASURED, CUTS_PARTS)])
    for weights, file in NEWER.items():
        found = with_newer(found, file, "product", partial(_stored_in, weights))
    curves = tuple(each for each in found.curves if each.name not in FITTED_CURVES)
    found = replace(found, curves=curves)
    files = [RESULTS / file for file in CUTS_CALIBRATION]
    found = replace(found, values={**found.values, "step_stretch": AS_IN_CHAINS})
    found = fit_steps(with_attention_in_steps(found, files), files)
    found = replace(found, curves=(*found.curves, *BOTH_STREAMS))
    found = replace(found, values={**found.values, "boost_ms": BOOST})
    found = fit_prompts(found, [RESULTS / file for file in PROMPTS_CALIBRATION])
    return fit_training(found, [RESULTS / file for file in TRAINING_CALIBRATION])


def _stored_in(weights: str, where: Mapping[str, float | str]) -> bool:
    """Whether a curve is of products with such weights. Those of one row are threads' work, as
    before."""
    return where.get("weights") == weights and where.get("rows") != 1


@functools.cache
def four_uncut() -> Machine:
    """`four_then` with the products and attention before their cuts for one and two rows. Steps
    with weights in int8 were not measured again: without communication they take as long as
    before."""
    found = with_measured(four_then(), [taken(STEPS_MEASURED, STEPS_PARTS)])
    found = with_newer(
        found, LONG_MEASURED, "attention",
        lambda each: "keys" in each and float(each["keys"]) >= LONG_KEYS,
    )  # fmt: skip
    files = [RESULTS / file for file in STEPS_CALIBRATION]
    found = with_halves(with_missing(fit_steps(with_attention_in_steps(found, files), files)))
    curves = (*found.curves, *BOTH_STREAMS_THEN)
    return replace(found, values={**found.values, **FITTED_BY_HAND}, curves=curves)


def with_halves(machine: Machine) -> Machine:
    """The machine with its steps with weights in fp8 fitted to HALVES_CALIBRATION. The time for two
    sequences was not recorded: it changes by the same factor as that for four."""
    curve = MISSING[1]
    fitted = fit_steps(machine, [RESULTS / file for file in HALVES_CALIBRATION])
    before, points = points_of(machine)[curve], points_of(fitted)[curve]
    points[2.0] = before[2.0] * points[4.0] / before[4.0]
    (found,) = (each for each in fitted.curves if str(each) == curve)
    found = replace(
        found,
        points=tuple((batch, round(us, 3)) for batch, us in sorted(points.items())),
        provenance=f"{found.provenance}; of two sequences by the change of four",
    )
    return replace(
        machine, curves=tuple(found if str(each) == curve else each for each in machine.curves)
    )


def with_attention_in_steps(machine: Machine, files: Sequence[Path]) -> Machine:
    """The machine with shorter attention, so that the predicted step of one sequence takes as long
    as the recorded one. In a step attention begins before QKV's product has ended; in the chains of
    its curves it does not. `step_stretch` stays: it also scales products, not all of them today's.
    """
    point, ms = next(
        (each, ms) for each, ms in calibrations(files, machine, "decode").items() if each.batch == 1
    )
    stretch = machine.value("step_stretch")
    less = 1e3 * (predicted("decode", point, machine) - ms) / (point.layers * stretch)
    text = f"less {less:.3f} us, fitted: {point} takes {ms:.3f} ms"
    curves = [
        replace(
            each,
            points=tuple((pairs, round(us - less, 3)) for pairs, us in each.points),
            provenance=f"{each.provenance}; {text}",
        )
        if each.name in ATTENTION.values()
        else each
        for each in machine.curves
    ]
    return replace(machine, curves=tuple(curves))


def with_missing(machine: Machine) -> Machine:
    """The machine with the points of MISSING that were not measured on it, from those of one GPU.

    The times for two sequences change from one GPU to this machine as those for four do, and the
    times with weights in int8 by the same factors as those in fp8.
    """
    found, alone = points_of(machine), points_of(one())
    rows, fp8, int8 = MISSING
    found[rows][2.0] = alone[rows][2.0] + found[rows][4.0] - alone[rows][4.0]
    found[fp8][2.0] = alone[fp8][2.0] * found[fp8][4.0] / alone[fp8][4.0]
    longer = {batch: us / alone[fp8][batch] for batch, us in found[fp8].items()}
    found[int8] = {batch: us * longer[batch] for batch, us in alone[int8].items()}
    curves = [
        replace(
            each,
            points=tuple((batch, round(us, 3)) for batch, us in sorted(found[str(each)].items())),
            provenance=f"{each.provenance}; what is missing of it by the differences on one GPU",
        )
        if str(each) in MISSING
        else each
        for each in machine.curves
    ]
    return replace(machine, curves=tuple(curves))


def points_of(machine: Machine) -> dict[str, dict[float, float]]:
    return {str(each): dict(each.points) for each in machine.curves}


def h100s(gpus: int) -> Machine:
    measured, *files = (RESULTS / file for file in H100S[gpus])
    return replace(calibrated(read(measured), *files), name=f"h100x{gpus}")


def steps_of(machine: Machine, name: str) -> Machine:
    """A machine with only the decode kernels of `machine`, and the value fitted to them."""
    values = {"step_stretch": machine.values["step_stretch"]}
    curves = tuple(each for each in machine.curves if each.name in OF_STEPS)
    return Machine(name, GPU, 1, values, curves, ())


def kept() -> dict[str, Machine]:
    """The machines by which older records are predicted, by the names of their files."""
    return {
        "h200": steps_of(four(), "older kernels of h200"),
        "h200-former": steps_of(four_then(), "former kernels of h200"),
        "h200-uncut": steps_of(four_uncut(), "kernels of h200 just before today's"),
        "h200x1-former": steps_of(one(), "former kernels of h200x1"),
        **{f"h200x{gpus}": before(gpus) for gpus in COMM},
    }


if __name__ == "__main__":
    OLDER.mkdir(parents=True, exist_ok=True)
    for each in (*map(machine, (1, 2)), four_today(), *map(h100s, H100S)):
        write(each, FOLDER / f"{each.name}.json")
        print(FOLDER / f"{each.name}.json")
    for name, each in kept().items():
        write(each, OLDER / f"{name}.json")
        print(OLDER / f"{name}.json")
