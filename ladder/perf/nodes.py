"""Collectives over several nodes, from the latency and rate of links; and declared machines.

Nobody has measured these. Links between nodes come from a machine's own file, if it has any, or
from the file in machines/declared of the same GPU. A declared machine whose GPUs have no access to
each other's memory (NCCL_P2P_DISABLE=1) has a link through the host's memory in place of NVLink.
Where only a single GPU of a kind was measured, collectives come from GPUs that are LIKE it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.models.errors import UserError
from ladder.perf.between_gpus import of_more_ranks, several
from ladder.perf.machine import (
    BETWEEN_GPUS,
    COLLECTIVES,
    Curve,
    Link,
    Machine,
    Value,
    with_links_of,
)
from ladder.perf.machine_files import (
    FOLDER,
    OLDER,
    former_kernels,
    older_kernels,
    read_own,
    shipped,
    uncut_kernels,
    with_steps_of,
)
from ladder.perf.machine_files import load as load_measured

DECLARED = FOLDER / "declared"
KEPT = (former_kernels, uncut_kernels)  # by which a machine may have the decode kernels of then
INSIDE, BETWEEN, HOST = "NVLink", "InfiniBand", "host"
BASE_US = 8.4  # of any collective, in addition to its ring's steps: NCCL's own constant
# A GPU of which only a single one was measured -> a GPU with the same links.
LIKE = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
SIZES = tuple(2.0**n for n in range(10, 33, 2))  # bytes of the points of declared curves


@dataclass(frozen=True)
class Doubt:
    """What is uncertain. latency, rate: factors on a link's latency and on its rate. beside: the
    share of their speed that products lose beside communication; 0.22 to 0.53 in three records."""

    latency: float = 1.0
    rate: float = 1.0
    beside: float = 0.28


LIKELY, BEST, WORST = Doubt(), Doubt(0.5, 1.0, 0.2), Doubt(2.0, 0.6, 0.55)
ENDS = (BEST, WORST)


@dataclass(frozen=True)
class Group:
    """The ranks of a collective by NCCL's rings: `per_node` GPUs on each of `nodes` nodes.

    inside, outside: bytes a second that a GPU sends within its node and to another node.
    step_inside, step_outside: seconds of a ring's step within a node and between nodes. base:
    seconds that any collective takes in addition.

    Each GPU has a network card. With several GPUs of a node in the group, each card carries a ring.
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
        """Bytes a second through each GPU, over all its parallel rings."""
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
    """The group of `per_node` GPUs on each of `nodes` nodes, over a machine's links."""
    tiers = {each.tier: each for each in links}
    inside = tiers[INSIDE] if INSIDE in tiers else tiers[HOST]
    outside = tiers.get(BETWEEN, inside)  # a single node has no link to others
    return Group(
        per_node, nodes, 1e9 * inside.beta_gb_s * doubt.rate, 1e9 * outside.beta_gb_s * doubt.rate,
        1e-6 * inside.alpha_us * doubt.latency, 1e-6 * outside.alpha_us * doubt.latency,
        1e-6 * BASE_US,
    )  # fmt: skip


def links_of(machine: Machine) -> tuple[Link, ...]:
    """The links inside a node and between nodes, as declared for the same GPU. A link between nodes
    in the machine's own file takes precedence. Raises UserError if none are declared."""
    if without_peers(machine):
        raise UserError(
            f"--nodes: the GPUs of machine {machine.name!r} have no access to each other's memory; "
            f"several nodes of such are not predicted"
        )
    own = tuple(each for each in machine.links if each.tier == BETWEEN)
    joined = [
        each for each in map(read_own, sorted(DECLARED.glob("*.json"))) if not without_peers(each)
    ]
    for found in joined:
        if found.gpu == machine.gpu:
            return tuple(each for each in found.links if not own or each.tier == INSIDE) + own
    raise UserError(
        f"--nodes: nothing is declared of links between nodes of {machine.gpu}; known are those of "
        f"{', '.join(dict.fromkeys(each.gpu for each in joined))}"
    )


def load(name: str) -> Machine:
    """A shipped or declared machine by its name, or the machine of a file.

    A declared machine's single GPU is as measured on GPUs of its kind. Its collectives are those
    measured with as many GPUs of its kind or LIKE it, or are extrapolated from those of fewer GPUs.
    Without access to each other's memory they are NCCL's rings over the declared link.
    """
    if name not in names():
        if name not in shipped() and not Path(name).is_file():
            raise UserError(
                f"unknown machine {name!r}; known: {', '.join(shipped())}, declared: "
                f"{', '.join(names())}, or the path of a file by `ladder bench machine`"
            )
        return load_measured(name)
    found = declared()[name]
    kind = LIKE.get(found.gpu, found.gpu)
    measured = [*map(load_measured, shipped())]
    alike = {each.gpus: each for each in measured if each.gpu == kind}
    if found.gpus in alike and not without_peers(found):
        base = alike[found.gpus]
    else:
        base = alike[max(alike)]
        between = _rings(found) if without_peers(found) else of_more_ranks(alike, found.gpus)
        own = [each for each in base.curves if each.name not in BETWEEN_GPUS]
        base = replace(base, curves=(*own, *between))
    if kind == found.gpu:
        values = {**base.values, "memory_gib": found.values["memory_gib"]}
        return replace(found, values=values, curves=base.curves)
    one = _one(found.gpu)
    assert one is not None, found.gpu
    return several(with_training_bytes(one), base, found)


def with_older_kernels(machine: Machine) -> Machine | None:
    """The machine with its older decode kernels. None if `load` does not know the machine by its
    name, or if no older kernels are kept."""
    kept = older_kernels(machine.gpu)
    return with_steps_of(machine, kept) if kept is not None and _known(machine) else None


def with_former_kernels(machine: Machine) -> Machine:
    """The machine with the decode kernels after the older ones. The machine itself if `load` does
    not know it by its name, or if none are kept."""
    return _then(machine.name, former_kernels) if _known(machine) else machine


def with_uncut_kernels(machine: Machine) -> Machine:
    """As `with_former_kernels`, with the decode kernels just before today's."""
    return _then(machine.name, uncut_kernels) if _known(machine) else machine


def older_passes(machine: Machine) -> Machine | None:
    """The machine's file from before its prompts and training were measured again. None if `load`
    does not know the machine by its name, or if the file is not kept."""
    file = OLDER / f"{machine.name}.json"
    return read_own(file) if file.is_file() and _known(machine) else None


def with_training_bytes(machine: Machine) -> Machine:
    """The machine with `training_bytes`: its own value, or else that of a shipped machine. Machines
    of the same GPU come first, and among them the nearest number of GPUs."""
    name = "training_bytes"
    if name in machine.values:
        return machine
    known = [each for each in map(_loaded, shipped()) if name in each.values]
    alike = [each for each in known if each.gpu == machine.gpu]
    nearest = min(alike or known, key=lambda each: abs(each.gpus - machine.gpus))
    value = nearest.values[name]
    about = f"declared: {name} as of {nearest.name}; {value.provenance}"
    return replace(machine, values={**machine.values, name: Value(value.value, about)})


@functools.cache
def _one(gpu: str) -> Machine | None:
    """The shipped machine that consists of a single such GPU, or None."""
    found = [each for each in map(load_measured, shipped()) if (each.gpu, each.gpus) == (gpu, 1)]
    return found[0] if found else None


def _known(machine: Machine) -> bool:
    """Whether it is what `load` returns for its name, with today's kernels or those before."""
    if machine.name not in (*shipped(), *names()):
        return False
    then = (_then(machine.name, each) for each in KEPT)
    return machine in (_loaded(machine.name), *then)


@functools.cache
def _loaded(name: str) -> Machine:
    return load(name)


@functools.cache
def _then(name: str, kernels: Callable[[Machine], Machine | None]) -> Machine:
    """What `load` returns, with the decode kernels that are kept of a time before."""
    found = load(name)
    kept = kernels(found)
    return found if kept is None else with_steps_of(found, kept)


def _rings(machine: Machine) -> list[Curve]:
    """The curves of the machine's file, and of NCCL's other collectives rings over its link."""
    whole, curves = group(machine.links, machine.gpus, 1), [*machine.curves]
    there = {each.name for each in curves}
    for kind in (each for each in COLLECTIVES if each not in there):
        exchange = whole.all_reduce if kind == "all-reduce" else whole.gather
        points = tuple((size, 1e6 * exchange(size)) for size in SIZES)
        about = f"declared: collectives as rings over the links of {machine.name}"
        curves.append(Curve(kind, {"algorithm": "nccl"}, points, about))
    return curves


@functools.cache
def declared() -> dict[str, Machine]:
    """The declared machines by name, as their files have them. If a declared GPU is LIKE a measured
    one, there is also a machine for each number of GPUs that was measured of the latter, unless a
    shipped machine has that name."""
    found = {path.stem: read_own(path) for path in sorted(DECLARED.glob("*.json"))}
    for file in tuple(found.values()):
        for measured in map(load_measured, shipped()):
            name = file.name.replace(f"x{file.gpus}", f"x{measured.gpus}")
            if measured.gpu == LIKE.get(file.gpu) and name not in shipped():
                found[name] = replace(file, name=name, gpus=measured.gpus)
    return dict(sorted(found.items()))


def borrowed(provenance: str) -> bool:
    """Whether a provenance says that the value comes from another machine."""
    return provenance.startswith("declared: ") and " as of " in provenance.partition(";")[0]


def declaration(machine: Machine, trains: bool = False) -> str:
    """A sentence that names the sources of a machine's declared curves and of its values from other
    machines; "" if it has none. trains: whether to include `training_bytes`."""
    if trains:
        machine = with_training_bytes(machine)
    found = [each.provenance for each in machine.curves if each.provenance.startswith("declared")]
    found += [
        each.provenance
        for name, each in machine.values.items()
        if borrowed(each.provenance) and (trains or name != "training_bytes")
    ]
    said = dict.fromkeys(each.removeprefix("declared: ").partition(";")[0] for each in found)
    if not said:
        return ""
    return f"Declared, not measured, of machine {machine.name!r}: {'; '.join(said)}."


def without_peers(machine: Machine) -> bool:
    """Whether its GPUs cannot access each other's memory."""
    links = {each.tier for each in machine.links}
    pushes = bool(machine.family("all-reduce", algorithm="push"))
    return machine.gpus > 1 and INSIDE not in links and not pushes


def relatives(machine: Machine) -> list[Machine]:
    """The shipped machines of the same GPU that have access to each other's memory if this one has.

    Declared machines are included if this one has no such access, or if its GPU is LIKE another;
    in the latter case, only machines with at most as many GPUs as this one count.
    """
    apart, like = without_peers(machine), machine.gpu in LIKE
    found = map(_loaded, (*shipped(), *names()) if apart or like else shipped())
    return [
        each
        for each in found
        if each.gpu == machine.gpu and without_peers(each) == apart
        if each.gpus <= machine.gpus or not like
    ]


def describing(gpus: set[str], count: int) -> list[Machine]:
    """The shipped machines, then the declared ones, whose GPU is the only one in `gpus`. If the
    environment keeps several GPUs from each other's memory, only machines without that access."""
    from ladder.comm.switch import p2p_disabled

    apart = count > 1 and p2p_disabled()
    found = map(load, (*shipped(), *names()))
    return [each for each in found if gpus == {each.gpu} and without_peers(each) == apart]


def for_degree(machine: Machine, tp: int) -> Machine:
    """The machine for groups of `tp` of its GPUs.

    If it has more or fewer GPUs, collectives come from one of its `relatives` with `tp` GPUs. For
    tp 1, a machine that `load` knows takes its decode steps from the shipped single GPU. Raises
    UserError if there is no such relative.
    """
    if tp == machine.gpus:
        return machine
    if tp == 1:  # it needs no collectives
        one = _one(machine.gpu)
        if one is None or not _known(machine):
            return machine
        if machine != _loaded(machine.name):
            then = next(each for each in KEPT if machine == _then(machine.name, each))
            one = _then(one.name, then)
        return with_steps_of(machine, one)
    for found in relatives(machine):
        if found.gpus == tp:
            return with_links_of(machine, found)
    give = " or ".join(map(str, dict.fromkeys((machine.gpus, 1))))
    raise UserError(
        f"--tp={tp}: machine {machine.name!r} has {has_degrees([machine.gpus])}; give --tp {give}, "
        f"or another --machine"
    )


def has_degrees(degrees: Iterable[int]) -> str:
    """What a machine has for these TP degrees, in words."""
    known = [*degrees]
    return "one GPU" if known == [1] else f"the collectives of {', '.join(map(str, known))} GPUs"


def names() -> tuple[str, ...]:
    """The declared machines that `load` knows."""
    return tuple(declared())
