"""The description of a machine: values and curves, each with its provenance, in a JSON file.

    {"version": 1, "name": "h200x4", "gpu": "NVIDIA H200", "gpus": 4,
     "values": {"copy_tb_s": {"value": 4.244, "provenance": "..."}},
     "curves": [{"name": "all-reduce", "where": {"algorithm": "nccl"},
                 "points": [[8192, 15.04], ...], "provenance": "..."}],
     "links": [{"tier": "NVLink", "alpha_us": 14.0, "beta_gb_s": 310.0, "provenance": "..."}]}

A curve gives microseconds over one quantity (curves in RATIOS give ratios). Curves with one name
are a family: `where` tells them apart. What a file lacks has not been measured: `missing` names it,
and asking for it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from ladder.models.errors import UserError

VERSION = 1
Basis = Literal["measured", "interpolated", "extrapolated"]
ORDER: tuple[Basis, ...] = ("measured", "interpolated", "extrapolated")

VALUES = {
    "memory_gib": "memory of one GPU",
    "copy_tb_s": "TB/s read and written by a large copy on one GPU",
    "matrix_tflop_s": "TFLOP/s of a product of two matrices of 8192 x 8192, bfloat16",
    "launch_us": "one kernel without work, in a CUDA graph",
    "step_stretch": "the time of a decode step's kernels, of that in a chain of their own; fitted",
    "launch_gap_us": "what a launch takes in a step besides, in files without step_stretch",
    "push_kernel_us": "what an all-reduce by push takes of which a landing takes as much; sketched",
    "streams_together": "what two streams of a step get out of a GPU if no curve says it; fitted",
    "whole_row_us": "what a slot adds to a landing whose row one program makes; fitted",
    "rank_spread": "standard deviation of a sublayer's time among ranks, of that time; sketched",
    "host_launch_us": "the host's time to launch one kernel",
    "barrier_us": "a barrier of all ranks by a kernel, as in prompts",
    "copy_turn_us": "what copies to peers take besides, between two kernels of their stream",
    "prompt_gap_us": "what a kernel of a prompt takes beyond its arithmetic or bytes; fitted",
    "power_limit": "the power that a GPU may take, of what products without a pause would; fitted",
    "training_bytes": "bytes of a parameter in a training step beyond those counted; fitted",
    "boost_ms": "how long the GPU stays above its power limit",
    "power_exponent": "the speed of products goes with this power of what the limit leaves",
    "idle_power": "the power while nothing computes, of that under products without a pause",
    "fp8_power": "the power of prompts with weights in fp8, of that in bfloat16; fitted",
    "product_beside_nccl": "the speed of a product beside an NCCL collective, of its speed alone",
    "row_beside_nccl": "the speed of a product of one row beside NCCL, of its speed alone",
    "nccl_beside_product": "the speed of an NCCL collective beside a product, of its speed alone",
    "product_beside_copies": "the speed of a product beside copies to peers, of its speed alone",
    "copies_beside_product": "the speed of copies to peers beside a product, of their speed alone",
    "copies_to_all": "the speed of copies of all ranks to all peers in turn, of those to one peer",
    "product_beside_push": "the speed of a product beside our all-reduces, of its speed alone",
    "push_beside_product": "the speed of our all-reduces beside a product, of their speed alone",
    "product_beside_direct": "that of a product beside landings over links, of its speed alone",
    "direct_beside_product": "that of landings over links beside a product, of their speed alone",
    "prompt_attention_tflop_s": "TFLOP/s of causal attention of a very long prompt",
    "prompt_attention_half": "the tokens of a prompt at which attention has half of that rate",
}
# Values for files that lack them: those of H200s; benchmarks/machines_by_hand.py names the sources.
DECLARED = {
    "launch_us": 1.2,
    "launch_gap_us": 0.0,
    "push_kernel_us": 1.7,
    "streams_together": 1.14,
    "whole_row_us": 0.45,
    "rank_spread": 0.033,
    "row_beside_nccl": 0.79,
    "barrier_us": 4.8,
    "copy_turn_us": 5.0,
    "power_limit": 1.0,  # no limit
    "boost_ms": 10.0,
    "power_exponent": 1 / 3,  # power goes with the cube of the clock
    "idle_power": 0.64,
    "fp8_power": 0.87,
    "product_beside_nccl": 0.64,
    "nccl_beside_product": 0.75,
    "product_beside_copies": 0.75,
    "copies_beside_product": 1.0,
    "copies_to_all": 0.79,
    "product_beside_push": 0.64,
    "push_beside_product": 0.75,
    "product_beside_direct": 0.64,
    "direct_beside_product": 0.75,
    "prompt_attention_tflop_s": 650.0,
    "prompt_attention_half": 750.0,
}
# The curves `streams together` by type of weights, for files that have none: those of H200s.
STREAMS_TOGETHER = {
    "bf16": (
        (1.0, 1.35),
        (2.0, 1.3),
        (4.0, 1.25),
        (8.0, 1.25),
        (16.0, 1.27),
        (32.0, 1.21),
        (64.0, 1.12),
    ),
    "fp8": (
        (1.0, 1.41),
        (2.0, 1.3),
        (4.0, 1.22),
        (8.0, 1.22),
        (16.0, 1.21),
        (32.0, 1.29),
        (64.0, 1.24),
    ),
    "fp8-block": (
        (1.0, 1.47),
        (2.0, 1.32),
        (4.0, 1.25),
        (8.0, 1.35),
        (16.0, 1.36),
        (32.0, 1.32),
        (64.0, 1.28),
    ),
    "int8": (
        (1.0, 1.38),
        (2.0, 1.35),
        (4.0, 1.22),
        (8.0, 1.19),
        (16.0, 1.21),
        (32.0, 1.24),
        (64.0, 1.18),
    ),
}
# By family: the quantity on the x axis, the keys of `where`, and what the curves are.
CURVES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "copy": ("bytes", (), "a copy on one GPU"),
    "peer copy": ("bytes", (), "a copy to another GPU's memory, by a copy engine"),
    "product": ("bytes", ("rows",), "a product of few rows in a chain, by bytes of its weight"),
    "product in 8 bits": (
        "bytes",
        ("rows", "weights"),
        "a product of few rows with a weight in 8 bits, in a chain, by its stored bytes",
    ),
    "more rows": ("rows", (), "what a product of more rows than one takes besides; fitted"),
    "converted": (
        "rows",
        ("weights",),
        "the time of a product in 8 bits over that of its curve, or of one in 16; fitted",
    ),
    "streams together": (
        "rows",
        ("weights",),
        "what two streams of a step get out of a GPU, of what one does; fitted",
    ),
    "matrix": ("rows", ("outputs", "inputs"), "a product of many rows"),
    "attention": ("heads", ("keys",), "attention of a decode step, by KV heads of all sequences"),
    "attention over fp8": ("heads", ("keys",), "attention over a cache in fp8"),
    "landing": ("rows", ("hidden",), "a landing of own partials as a kernel of its own"),
    "all-reduce": ("bytes", ("algorithm",), "a sum over all GPUs"),
    "all-gather": ("bytes", ("algorithm",), "bytes of the gathered whole"),
    "reduce-scatter": ("bytes", ("algorithm",), "bytes of the whole partial"),
    "exchange": ("bytes", ("transport",), "rows of a prompt's partial: sum, norm, gather"),
    "decode beside nccl": ("bytes", (), "the speed of decode products beside NCCL's all-reduces"),
    "nccl beside decode": ("bytes", (), "the speed of NCCL's all-reduces beside decode products"),
    "nccl awaited": ("bytes", (), "what an all-reduce by NCCL adds to a step that waits for it"),
    "nccl hidden": ("bytes", (), "what one adds to a step that waits for it a sublayer later"),
}
HEAD_DIM = 128  # the size of the heads with which curves of attention are measured
ATTENTION = {"bf16": "attention", "fp8": "attention over fp8"}  # by the type of the cache
IN_8_BITS = "product in 8 bits"
FITTED_CURVES = ("more rows", "converted", "streams together")
OPTIONAL = (*FITTED_CURVES, ATTENTION["fp8"], IN_8_BITS)
# Kernels of decode steps.
OF_STEPS = ("product", IN_8_BITS, *ATTENTION.values(), "landing", *FITTED_CURVES)
AWAITED, HIDDEN = TURNS = ("nccl awaited", "nccl hidden")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
SPEEDS = ("decode beside nccl", "nccl beside decode")  # as shares of the speed alone, not times
EXCHANGES = ("direct", "copy-kernels")  # transports of ladder.comm.transports
RATIOS = (*SPEEDS, "converted", "streams together")
BETWEEN_GPUS = ("peer copy", "exchange", *COLLECTIVES, *SPEEDS, *TURNS)
ALGORITHMS = ("nccl", "gloo", "push", "two-shot", "torch one-shot", "torch two-shot")


@dataclass(frozen=True)
class Value:
    value: float
    provenance: str


@dataclass(frozen=True)
class Estimate:
    """Microseconds. basis: whether they were measured at this very point."""

    us: float
    basis: Basis


def worst(bases: Sequence[Basis]) -> Basis:
    """The basis of a sum of estimates: that of its least certain part."""
    return max(bases, key=ORDER.index, default="measured")


@dataclass(frozen=True)
class Curve:
    """Measured points (x, us), by ascending x. where: tells the curve from others of its name."""

    name: str
    where: Mapping[str, float | str]
    points: tuple[tuple[float, float], ...]
    provenance: str

    def at(self, x: float) -> Estimate:
        """The value at x. Between points it is linear, which is exact for a latency plus a rate.
        Above the last point the last slope continues; below the first point its value holds, since
        a latency does not shrink. The basis of a declared curve is never `measured`."""
        found = self._at(x)
        declared = self.provenance.startswith("declared")
        return Estimate(found.us, "extrapolated") if declared else found

    def _at(self, x: float) -> Estimate:
        first, last = self.points[0], self.points[-1]
        for point_x, us in self.points:
            if point_x == x:
                return Estimate(us, "measured")
        if x < first[0] or len(self.points) == 1:
            return Estimate(first[1], "extrapolated")
        if x > last[0]:
            before = self.points[-2]
            slope = max(0.0, (last[1] - before[1]) / (last[0] - before[0]))
            return Estimate(last[1] + slope * (x - last[0]), "extrapolated")
        for a, b in pairwise(self.points):
            if a[0] < x < b[0]:
                return Estimate(a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]), "interpolated")
        raise AssertionError(x)

    def __str__(self) -> str:
        about = ", ".join(f"{key}={value}" for key, value in self.where.items())
        return f"{self.name} ({about})" if about else self.name


@dataclass(frozen=True)
class Link:
    """A tier of links. A message of n bytes takes alpha_us + n / beta_gb_s, where n is what one GPU
    sends."""

    tier: str
    alpha_us: float
    beta_gb_s: float
    provenance: str


@dataclass(frozen=True)
class Machine:
    name: str
    gpu: str
    gpus: int
    values: Mapping[str, Value]
    curves: tuple[Curve, ...] = ()
    links: tuple[Link, ...] = ()

    def value(self, name: str) -> float:
        """A value of the file, or else of DECLARED. Raises UserError if neither has it."""
        if name in self.values:
            return self.values[name].value
        if name in DECLARED:
            return DECLARED[name]
        raise self._lacks(name, VALUES[name])

    def family(self, name: str, **where: float | str) -> list[Curve]:
        """The curves of a name whose own `where` agrees with `where`."""
        return [
            curve
            for curve in self.curves
            if curve.name == name
            and all(curve.where.get(key) == value for key, value in where.items())
        ]

    def curve(self, name: str, **where: float | str) -> Curve:
        """The one curve of a name and `where`. Raises UserError if it has not been measured."""
        found = self.family(name, **where)
        if not found:
            about = " ".join(f"{key}={value}" for key, value in where.items())
            raise self._lacks(f"{name} {about}".strip(), CURVES[name][2])
        assert len(found) == 1, (name, where)
        return found[0]

    def nccl(self, kind: str, nbytes: float) -> Estimate:
        """The time of a collective by NCCL. If the file has all-reduces alone, a gather or a
        reduce-scatter takes half the time of an all-reduce."""
        if kind != "all-reduce" and self.family(kind, algorithm="nccl"):
            return self.curve(kind, algorithm="nccl").at(nbytes)
        found = self.curve("all-reduce", algorithm="nccl").at(nbytes)
        return found if kind == "all-reduce" else Estimate(found.us / 2, "extrapolated")

    def between(
        self, name: str, key: str, value: float, x: float, **where: float | str
    ) -> Estimate:
        """The time at `x`, linear in `key` between curves of a family (those that agree with
        `where`) that differ in `key` alone.

        Outside of the measured range of `key` the nearest curve counts as it is.
        """
        family = sorted(self.family(name, **where), key=lambda each: each.where[key])
        if not family:
            raise self._lacks(name, CURVES[name][2])
        places = [float(each.where[key]) for each in family]
        if value in places:
            return family[places.index(value)].at(x)
        if not places[0] < value < places[-1]:
            nearest = family[0] if value < places[0] else family[-1]
            return Estimate(nearest.at(x).us, "extrapolated")
        n = next(n for n, place in enumerate(places) if place > value)
        low, high = family[n - 1].at(x), family[n].at(x)
        share = (value - places[n - 1]) / (places[n] - places[n - 1])
        basis = worst([low.basis, high.basis, "interpolated"])
        return Estimate(low.us + share * (high.us - low.us), basis)

    @property
    def missing(self) -> list[str]:
        """What has not been measured, each with its meaning."""
        known = {*self.values, *DECLARED}
        names = [f"{name}: {text}" for name, text in VALUES.items() if name not in known]
        for name, (_, _, text) in CURVES.items():
            optional = name in OPTIONAL or (self.gpus == 1 and name in BETWEEN_GPUS)
            if not self.family(name) and not optional:
                names.append(f"{name}: {text}")
        return names + (["links: latency and rate"] if self.gpus > 1 and not self.links else [])

    def _lacks(self, name: str, meaning: str) -> UserError:
        ranks = max(2, self.gpus) if name.startswith(BETWEEN_GPUS) else self.gpus
        remedy = f"measure it: ladder bench machine --nproc {ranks} --out machine.json"
        if name in ("step_stretch", "prompt_gap_us", "training_bytes"):
            bench = "train" if name == "training_bytes" else "inference"
            remedy = f"give --calibrate=RECORDS, results of `ladder bench {bench}`"
        return UserError(f"machine {self.name!r} has no {name!r} ({meaning}); {remedy}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "name": self.name,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "values": {name: asdict(each) for name, each in self.values.items()},
            "curves": [
                {
                    "name": each.name,
                    "where": dict(each.where),
                    "points": [list(point) for point in each.points],
                    "provenance": each.provenance,
                }
                for each in self.curves
            ],
            "links": [asdict(each) for each in self.links],
        }


def with_links_of(machine: Machine, other: Machine) -> Machine:
    """`machine` with the number of GPUs, the collectives and the slowdowns of `other`. What
    concerns a single GPU stays its own."""
    own = tuple(each for each in machine.curves if each.name not in BETWEEN_GPUS)
    theirs = tuple(each for each in other.curves if each.name in BETWEEN_GPUS)
    values = {name: each for name, each in machine.values.items() if "beside" not in name}
    return replace(other, values={**other.values, **values}, curves=own + theirs)
