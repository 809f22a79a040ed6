"""Collectives and copies between GPUs that nobody measured, from those measured between others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ladder.perf.machine import Curve, Machine, Value, with_links_of

# Families over bytes that are extrapolated to more ranks, by the key and the values of `where`.
CONTINUED = {
    "all-reduce": ("algorithm", ("nccl", "push", "two-shot")),
    "exchange": ("transport", ("direct", "copy-kernels")),
}

# Values that belong to a fitted `power_limit`. They hold for no other GPU than the one it is for.
POWER = ("boost_ms", "power_exponent", "idle_power", "fp8_power")


def of_more_ranks(measured: Mapping[int, Machine], ranks: int) -> list[Curve]:
    """Curves for `ranks` GPUs, which are more than were measured: all-reduces and exchanges from
    those of the two largest measured numbers, and copies to one peer, whose time does not depend on
    the number of GPUs."""
    few, many = sorted(measured)[-2:]
    by = f"those of {measured[few].name} and {measured[many].name}"
    about = f"declared: all-reduces and exchanges as extrapolated from {by}"
    curves = []
    for name, (key, kinds) in CONTINUED.items():
        for kind in kinds:
            pair = [measured[each].family(name, **{key: kind}) for each in (few, many)]
            if all(pair):
                points = _continued([each[0] for each in pair], (few, many, ranks), kind == "push")
                curves.append(Curve(name, {key: kind}, points, about))
    about = f"declared: copies to a peer as of {measured[many].name}"
    for each in measured[many].family("peer copy"):
        curves.append(replace(each, provenance=f"{about}; {each.provenance}"))
    return curves


def _continued(
    pair: Sequence[Curve], ranks: tuple[int, int, int], sends_to_each: bool
) -> tuple[tuple[float, float], ...]:
    """The points of a curve for the last of three numbers of ranks, from those of the other two.

    A part of the time goes into the bytes that each rank sends and receives, at the rate of the
    largest messages. The rest is linear in the number of ranks: each further rank adds two steps to
    a ring, or one copy. All of a push is linear, since it sends its message to each rank.
    """
    few, many, more = ranks
    last = [each.points[-2:] for each in pair]
    slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in last]
    if sends_to_each:
        slopes = [0.0, 0.0]
    share = (1 - 1 / more) / (1 - 1 / many)  # of the bytes that each rank sends and receives
    points: list[tuple[float, float]] = []
    for size in sorted({x for each in pair for x, _ in each.points}):
        if size > min(each.points[-1][0] for each in pair):
            break
        first, second = (
            each.at(size).us - slope * size for each, slope in zip(pair, slopes, strict=True)
        )
        longer = max(0.0, second - first) * (more - many) / (many - few)
        us = second + longer + share * slopes[1] * size
        points.append((size, round(max(us, points[-1][1] if points else 0.0), 3)))
    return tuple(points)


def several(one: Machine, base: Machine, found: Machine) -> Machine:
    """The machine `found`: each GPU is as `one`, and what is between GPUs is as of `base`. Traffic
    of an exchange within a GPU's memory takes longer if the memory of `one` is slower."""
    further = any(each.provenance.startswith("declared") for each in base.curves)
    what = "what else is" if further else "what is"
    about = f"declared: {what} between GPUs as of {base.name}, which has the same links"

    def said(provenance: str) -> str:
        return provenance if provenance.startswith("declared") else f"{about}; {provenance}"

    longer = 1e-6 * (1 / one.value("copy_tb_s") - 1 / base.value("copy_tb_s"))  # us a byte
    curves = []
    for each in base.curves:
        moved = 0.0  # bytes that move in memory for each byte of a message
        if each.where.get("transport") == "copy-kernels":
            moved = (found.gpus + 3) / found.gpus  # by the landing in it, see `PromptCost.exchange`
        points = tuple((x, us + longer * moved * x) for x, us in each.points)
        curves.append(replace(each, points=points, provenance=said(each.provenance)))
    values = {
        name: Value(each.value, said(each.provenance))
        for name, each in base.values.items()
        if name not in POWER
    }
    return with_links_of(one, replace(found, values=values, curves=tuple(curves)))
