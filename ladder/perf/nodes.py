"""Collectives over nodes of GPUs, by the latency and the rate of links; machines that are declared.

Nobody has measured these. Links between nodes come from a machine's own file, if it has any, or
from the file in machines/declared of the same GPU. A declared machine whose GPUs have no access to
each other's memory (NCCL_P2P_DISABLE=1) has a link through the host's in place of NVLink.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.models.errors import UserError
from ladder.perf.machine import (
    BETWEEN_GPUS,
    COLLECTIVES,
    Curve,
    Link,
    Machine,
    with_links_of,
)
from ladder.perf.machine_files import FOLDER, read, shipped
from ladder.perf.machine_files import load as load_measured

DECLARED = FOLDER / "declared"
INSIDE, BETWEEN, HOST = "NVLink", "InfiniBand", "host"
BASE_US = 8.4  # of any collective, beside its ring's steps: NCCL's own constant
SIZES = tuple(2.0**n for n in range(10, 33, 2))  # bytes of the points of declared curves


@dataclass(frozen=True)
class Doubt:
    """What is uncertain. latency, rate: factors of the links' steps and rates. beside: the share of
    their speed that products lose beside communication; between 0.22 and 0.53 in three records."""

    latency: float = 1.0
    rate: float = 1.0
    beside: float = 0.28


LIKELY, BEST, WORST = Doubt(), Doubt(0.5, 1.0, 0.2), Doubt(2.0, 0.6, 0.55)
ENDS = (BEST, WORST)


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `per_node` GPUs of each of `nodes` nodes, by NCCL's rings.

    inside, outside: bytes a second that a GPU sends to its node and to another one. step_inside,
    step_outside: seconds of a ring's step there. base: seconds of any collective.

    Each GPU has a network card; with several of a node in the group, a ring crosses by each card.
    """

    per_node: int
    nodes: int
    inside: float
    outside: float
    step_inside: float
    step_outside: float
    base: float

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    @property
    def bandwidth(self) -> float:
        """Bytes a second through each GPU of a ring, or of several side by side."""
        rates = [self.inside] if self.per_node > 1 else []
        if self.nodes > 1:
            rates.append(self.outside * self.per_node)
        return min(rates)

    def gather(self, size: float) -> float:
        """An all-gather to `size` bytes, or a reduce-scatter of `size` bytes."""
        if self.ranks == 1:
            return 0.0
        within = (self.ranks - self.nodes) * self.step_inside
        steps = within + (self.nodes - 1) * self.step_outside
        return self.base + steps + size * (1 - 1 / self.ranks) / self.bandwidth

    def all_reduce(self, size: float) -> float:
        return max(0.0, 2 * self.gather(size) - self.base)


def group(links: Iterable[Link], per_node: int, nodes: int, doubt: Doubt = LIKELY) -> Group:
    """Ranks of a machine's GPUs, over its links."""
    tiers = {each.tier: each for each in links}
    inside = tiers[INSIDE] if INSIDE in tiers else tiers[HOST]
    outside = tiers.get(BETWEEN, inside)  # of one node there is none
    return Group(
        per_node, nodes, 1e9 * inside.beta_gb_s * doubt.rate, 1e9 * outside.beta_gb_s * doubt.rate,
        1e-6 * inside.alpha_us * doubt.latency, 1e-6 * outside.alpha_us * doubt.latency,
        1e-6 * BASE_US,
    )  # fmt: skip


def links_of(machine: Machine) -> tuple[Link, ...]:
    """Those inside of a node and between nodes: declared ones of the same GPU, but for a link
    between nodes that the machine's own file has. Raises UserError if there is none."""
    if without_peers(machine):
        raise UserError(
            f"--nodes: the GPUs of machine {machine.name!r} have no access to each other's memory; "
            f"several nodes of such are not predicted"
        )
    own = tuple(each for each in machine.links if each.tier == BETWEEN)
    for path in sorted(DECLARED.glob("*.json")):
        found = read(path)
        if found.gpu == machine.gpu and not without_peers(found):
            return tuple(each for each in found.links if not own or each.tier == INSIDE) + own
    raise UserError(
        f"--nodes: nothing is declared of links between nodes of {machine.gpu}; known are those of "
        f"{', '.join(read(path).gpu for path in sorted(DECLARED.glob('*.json')))}"
    )


def load(name: str) -> Machine:
    """A shipped machine or a file, or a declared machine: one GPU as measured on others of its
    kind, and collectives of NCCL's rings over the declared links."""
    if name not in names():
        if name not in shipped() and not Path(name).is_file():
            raise UserError(
                f"unknown machine {name!r}; known: {', '.join(shipped())}, declared: "
                f"{', '.join(names())}, or the path of a file by `ladder bench machine`"
            )
        return load_measured(name)
    found = read(DECLARED / f"{name}.json")
    alike = [each for each in map(load_measured, shipped()) if each.gpu == found.gpu]
    base = max(alike, key=lambda each: each.gpus)
    whole = group(found.links, found.gpus, 1)
    curves = [each for each in base.curves if each.name not in BETWEEN_GPUS]
    for kind in COLLECTIVES:
        exchange = whole.all_reduce if kind == "all-reduce" else whole.gather
        points = tuple((size, 1e6 * exchange(size)) for size in SIZES)
        where = {"algorithm": "nccl"}
        curves.append(Curve(kind, where, points, f"declared: rings over the links of {name}"))
    values = {**base.values, "memory_gib": found.values["memory_gib"]}
    return replace(found, values=values, curves=tuple(curves))


def without_peers(machine: Machine) -> bool:
    """Whether its GPUs cannot access each other's memory."""
    links = {each.tier for each in machine.links}
    pushes = bool(machine.family("all-reduce", algorithm="push"))
    return machine.gpus > 1 and INSIDE not in links and not pushes


def relatives(machine: Machine) -> list[Machine]:
    """The machines that come with the package of the same GPU, with access to each other's memory
    or without as this one. One GPU alone is of either kind."""
    apart = without_peers(machine)
    found = map(load, names()) if apart else map(load_measured, shipped())
    return [each for each in found if each.gpu == machine.gpu and without_peers(each) == apart]


def describing(gpus: set[str], count: int) -> list[Machine]:
    """The machines that come with the package of these kinds of GPUs: measured ones, or, where the
    environment keeps several from each other's memory, those of such."""
    from ladder.comm.access import p2p_disabled

    found = [each for each in map(load_measured, shipped()) if gpus == {each.gpu}]
    if count == 1 or not p2p_disabled():
        return found
    return [each for each in map(load, names()) if gpus == {each.gpu} and without_peers(each)]


def for_degree(machine: Machine, tp: int) -> Machine:
    """The machine for groups of `tp` of its GPUs: itself, or with what is between GPUs from that of
    so many that comes with the package. Raises UserError if there is none."""
    if tp in (1, machine.gpus):  # a group of one needs no collectives
        return machine
    for found in relatives(machine):
        if found.gpus == tp:
            return with_links_of(machine, found)
    raise UserError(
        f"--tp={tp}: machine {machine.name!r} has the collectives of {machine.gpus} GPUs; give "
        f"--tp {machine.gpus} or 1, or another --machine"
    )


@functools.cache
def names() -> tuple[str, ...]:
    """The declared machines that `load` knows."""
    gpus = {load_measured(name).gpu for name in shipped()}
    return tuple(p.stem for p in sorted(DECLARED.glob("*.json")) if read(p).gpu in gpus)
