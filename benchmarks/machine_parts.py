"""Machines with the curves and values of other files, for machines.py."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ladder.perf.calibration.options import family, family_of_value
from ladder.perf.machine import BETWEEN_GPUS, Machine
from ladder.perf.machine_files import read

RESULTS = Path(__file__).parent / "results"
OF_ONE_GPU = ("memory_gib", "launch_us", "host_launch_us", "prompt_attention_tflop_s",
              "prompt_attention_half")  # fmt: skip
OF_NEAREST = ("barrier_us",)  # else all machines have it from traces of two GPUs


def taken(name: str, parts: Container[str], without: Container[str] = ()) -> tuple[str, Machine]:
    """The file's name, and a machine with its curves and values of `parts`, but not of `without`.

    parts: names of parts, as for --only, and of single values. without: names of curves and values.
    """
    found = read(RESULTS / name)
    curves = tuple(
        each for each in found.curves
        if family(each.name) in parts and each.name not in without
    )  # fmt: skip
    values = {
        key: value for key, value in found.values.items()
        if (key in parts or family_of_value(key) in parts) and key not in without
    }  # fmt: skip
    return name, replace(found, curves=curves, values=values)


def with_measured(machine: Machine, files: Sequence[tuple[str, Machine]]) -> Machine:
    """The machine with measured curves and values in place of its own.

    Curves of one GPU (whole families of them) and values OF_ONE_GPU and OF_NEAREST come from the
    file of the nearest number of GPUs that has them; of several files, from the last. Collectives
    (one by one), links and slowdowns come only from files of the machine's own number of GPUs.
    """
    values, curves, found = dict(machine.values), list(machine.curves), machine.links
    for file, each in sorted(files, key=lambda one: -abs(one[1].gpus - machine.gpus)):
        own = each.gpus == machine.gpus
        for name, value in each.values.items():
            of_pair = own and family_of_value(name) in ("beside", "exchange", "peer-copy")
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


def with_newer(
    machine: Machine, file: str, part: str, chosen: Callable[[Mapping[str, float | str]], bool]
) -> Machine:
    """The machine with curves of a part from another file: those that are `chosen` by their
    `where`, and those of names that the machine lacks."""
    known = {each.name for each in machine.curves}
    found = tuple(
        replace(each, provenance=f"{each.provenance}; {file}")
        for each in taken(file, (part,))[1].curves
        if chosen(each.where) or each.name not in known
    )
    new = {(each.name, *each.where.items()) for each in found}
    kept = (each for each in machine.curves if (each.name, *each.where.items()) not in new)
    return replace(machine, curves=(*kept, *found))
