"""Machine files: writing, reading and checking them, and those shipped with the package."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ladder.files import write_text
from ladder.models.eight_bits import EIGHT_BITS
from ladder.models.errors import UserError, check_keys, kind_of, reason, unknown
from ladder.models.presets import MOST_RANKS
from ladder.perf.machine import (
    ALGORITHMS,
    CURVES,
    EXCHANGES,
    OF_STEPS,
    VALUES,
    VERSION,
    Curve,
    Link,
    Machine,
    Value,
)

# The keys of `where` whose values are names, with these names.
NAMED = {"algorithm": ALGORITHMS, "transport": EXCHANGES, "weights": ("bf16", *EIGHT_BITS)}
FOLDER = Path(__file__).parent / "machines"
# Former files: of decode kernels by GPU (KERNELS), and of whole machines by name.
OLDER = FOLDER / "older"
KERNELS = {"NVIDIA H200": "h200"}


def write(machine: Machine, path: Path) -> None:
    """Write the file atomically."""
    data = machine.to_dict()
    curves = data.pop("curves")
    text = json.dumps(data | {"curves": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(each)}" for each in curves)  # a line for each curve
    write_text(path, text.replace('"curves": []', f'"curves": [\n{lines}\n ]') + "\n")


def shipped() -> list[str]:
    """The names of the machines whose files come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Machine:
    """A shipped machine by its name, or a file. Raises UserError for an invalid one."""
    if name in shipped():
        return read_own(FOLDER / f"{name}.json")
    if not Path(name).is_file():
        raise UserError(
            f"unknown machine {name!r}; known: {', '.join(shipped())}, or the path of a file by "
            f"`ladder bench machine`"
        )
    return read(Path(name))


def older_kernels(gpu: str) -> Machine | None:
    """A GPU's older decode kernels, as the machine of their file; None if none are kept."""
    return _kept(gpu, "")


def former_kernels(machine: Machine) -> Machine | None:
    """The decode kernels after those, measured on one GPU or several; None if none are kept."""
    return _kept(machine.gpu, "x1-former" if machine.gpus == 1 else "-former")


def uncut_kernels(machine: Machine) -> Machine | None:
    """A GPU's decode kernels just before today's; None if none are kept."""
    return _kept(machine.gpu, "-uncut")


def _kept(gpu: str, which: str) -> Machine | None:
    return read_own(OLDER / f"{KERNELS[gpu]}{which}.json") if gpu in KERNELS else None


def with_steps_of(machine: Machine, other: Machine) -> Machine:
    """`machine` with the decode kernels of `other`, and the values that are fitted to them."""
    curves = [each for each in machine.curves if each.name not in OF_STEPS]
    curves += [each for each in other.curves if each.name in OF_STEPS]
    values = {**machine.values, "step_stretch": other.values["step_stretch"]}
    return replace(machine, values=values, curves=tuple(curves))


def read_own(path: Path) -> Machine:
    """`read` for a shipped file, cached until the file is written again: tables of predictions ask
    for the same few files thousands of times."""
    return _read_once(path, path.stat().st_mtime_ns)


@functools.cache
def _read_once(path: Path, written: int) -> Machine:
    return read(path)


def read(path: Path) -> Machine:
    """The machine of a file. Raises UserError for an invalid one, and one of another version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read the machine file {path}: {reason(error)}; write one with `ladder bench "
            f"machine`"
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"the machine file {path} is {kind_of(data)} and no mapping; {REMEDY}")
    if data.get("version") != VERSION:
        raise UserError(
            f"the machine file {path} has version {data.get('version')!r}, and this ladder reads "
            f"{VERSION}; {REMEDY}"
        )
    try:
        return from_dict(data)
    except UserError as error:
        raise UserError(f"the machine file {path}: {error}; {REMEDY}") from error


REMEDY = "measure the machine again with `ladder bench machine`"


def from_dict(data: Mapping[str, Any]) -> Machine:
    """The machine of plain data, as `to_dict` returns. Raises UserError for anything else."""
    required = ("version", "name", "gpu", "gpus", "values", "curves", "links")
    _take("the machine", data, required)
    name, gpu, gpus = data["name"], data["gpu"], data["gpus"]
    if not isinstance(name, str) or not isinstance(gpu, str):
        raise UserError(f"name={name!r} and gpu={gpu!r} must be text")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= MOST_RANKS:
        raise UserError(f"gpus={gpus!r} must be a whole number of 1 to {MOST_RANKS:,}")
    if not isinstance(data["values"], dict):
        raise UserError(f"values is {kind_of(data['values'])} and no mapping")
    check_keys("values", data["values"], VALUES)
    values = {}
    for key, each in data["values"].items():
        _take(f"value {key!r}", each, ("value", "provenance"))
        values[key] = Value(_positive(f"value of {key!r}", each["value"]), each["provenance"])
    links = []
    for each in _list("links", data["links"]):
        _take("a link", each, ("tier", "alpha_us", "beta_gb_s", "provenance"))
        if not isinstance(each["tier"], str):
            raise UserError(f"tier={each['tier']!r} of a link must be text")
        alpha, beta = (
            _positive(f"{key} of a link", each[key]) for key in ("alpha_us", "beta_gb_s")
        )
        links.append(Link(each["tier"], alpha, beta, each["provenance"]))
    curves = tuple(_curve(each) for each in _list("curves", data["curves"]))
    seen = [str(each) for each in curves]
    for one in seen:
        if seen.count(one) > 1:
            raise UserError(f"the curve {one} is there twice")
    return Machine(name, gpu, gpus, values, curves, tuple(links))


def _curve(data: Any) -> Curve:
    _take("a curve", data, ("name", "where", "points", "provenance"))
    name, where = data["name"], data["where"]
    if not isinstance(name, str) or name not in CURVES:
        raise unknown("curve", name, CURVES)
    _take(f"where of curve {name!r}", where, CURVES[name][1])
    for key, value in where.items():
        if key not in NAMED:
            _positive(f"{key} of curve {name!r}", value)
        elif value not in NAMED[key]:
            raise unknown(f"{key} of curve {name!r}", value, NAMED[key])
    points = []
    for each in _list(f"points of curve {name!r}", data["points"]):
        pair = _list(f"a point of curve {name!r}", each)
        if len(pair) != 2:
            raise UserError(f"a point of curve {name!r} has {len(pair)} numbers; it needs 2")
        points.append((_positive(name, pair[0]), _positive(name, pair[1])))
    if not points or any(a[0] >= b[0] for a, b in pairwise(points)):
        raise UserError(f"points of curve {name!r} must be there, each x above the one before")
    return Curve(name, where, tuple(points), data["provenance"])


def _take(what: str, data: Any, keys: Sequence[str]) -> None:
    """Raise UserError unless `data` is a mapping of exactly these keys."""
    if not isinstance(data, dict):
        raise UserError(f"{what} is {kind_of(data)} and no mapping")
    check_keys(what, data, keys)
    for key in keys:
        if key not in data:
            raise UserError(f"{what} lacks {key!r}")
    provenance = data.get("provenance", "")
    if not isinstance(provenance, str) or ("provenance" in keys and not provenance):
        raise UserError(f"provenance={provenance!r} of {what} must be text")


def _list(what: str, data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise UserError(f"{what} is {kind_of(data)} and no list")
    return data


def _positive(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{what} is {value!r}; it must be a number above 0")
    return value
