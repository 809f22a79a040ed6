"""T3's figures that are simulated. Each function computes and scores one figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ladder.perf.scores import FIT, OUT, Curves, Dots, Result, Row, holds, points, speedup
from ladder.perf.t3 import shares, simulate
from ladder.perf.t3 import system as closed
from ladder.perf.t3.system import (
    LARGE,
    MODELS,
    Sublayer,
    System,
    each_degree,
    geomean,
    sublayer,
    sublayers,
)

IDEAL, NEAR_MEMORY = "ideal overlap", "ideal RS + NMC"
SERIES = (IDEAL, NEAR_MEMORY, "T3", "T3-MCA")


def figure_16(system: System) -> Result:
    """Speedups over the sequential sublayer."""
    cases, large = sublayers(), sublayers(LARGE)
    found = {case.name: speedups(case, system) for case in (*cases, *large)}

    def all_of(series: str, some: list[Sublayer]) -> list[float]:
        return [found[case.name][series] for case in some]

    def of(name: str, series: str) -> float:
        return found[name][series]

    mean = {name: geomean(all_of(name, cases)) for name in SERIES}
    most = {name: max(all_of(name, cases)) for name in SERIES}
    nmc = [of(c.name, NEAR_MEMORY) / of(c.name, IDEAL) for c in cases]
    faster = {
        degree: geomean([
            closed.reduce_scatter(c, system) / closed.reduce_scatter(c, system, near_memory=True)
            for c in cases if c.degree == degree
        ])
        for degree in (8, 16)
    }  # fmt: skip

    def behind(kinds: tuple[str, ...]) -> float:
        """T3's time over the ideal overlap's, less 1, in %."""
        ratios = [of(c.name, IDEAL) / of(c.name, "T3") for c in cases if c.kind in kinds]
        return 100 * (geomean(ratios) - 1)

    small, wide = behind(("OP",)), behind(("FC-1", "FC-2"))
    gain = [of(c.name, "T3-MCA") / of(c.name, "T3") for c in cases]
    below = 100 * (1 - mean["T3-MCA"] / mean[IDEAL])
    wide_mean, wide_most = (f(all_of("T3-MCA", large)) for f in (geomean, max))
    known = {"T-NLG TP 16 FC-1": {IDEAL: 1.5}, "Mega-GPT-2 TP 16 OP": {IDEAL: 1.15}}
    return Result(
        16, "Speedup of sublayers over one operation after the other",
        (
            speedup("ideal overlap, geomean", 35, mean[IDEAL], 2, FIT),
            speedup("ideal overlap, FC-1 T-NLG TP 16", 50, of("T-NLG TP 16 FC-1", IDEAL), 2, FIT),
            speedup("ideal overlap, OP Mega TP 16", 15, of("Mega-GPT-2 TP 16 OP", IDEAL), 2, FIT),
            speedup("RS + NMC: RS faster at TP 8", 7, faster[8], 1, FIT),
            speedup("RS + NMC: RS faster at TP 16", 3, faster[16], 1, FIT),
            speedup("RS + NMC over ideal overlap, most", 4, max(nmc), 1, OUT),
            speedup("T3, geomean", 20, mean["T3"], 4, FIT),
            speedup("T3, most", 39, most["T3"], 4, OUT),
            speedup("T3-MCA, geomean", 30, mean["T3-MCA"], 3, OUT),
            speedup("T3-MCA, most", 47, most["T3-MCA"], 3, OUT),
            points("T3-MCA below ideal overlap, geomean", 5, below, 3, OUT),
            speedup("T3-MCA over T3, most", 29, max(gain), 4, OUT),
            speedup("large models, T3-MCA, geomean", 29, wide_mean, 4, OUT),
            speedup("large models, T3-MCA, most", 35, wide_most, 4, OUT),
            holds("T3 < T3-MCA < ideal, geomean", mean["T3"] < mean["T3-MCA"] < mean[IDEAL]),
            holds("T3: OP closer to the ideal than FC", small < wide),
            holds(f"T3: FC more than 15 % behind the ideal ({wide:.1f} %)", wide > 15),
            holds(f"T3: OP near the ideal, within 5 % ({small:.1f} % behind)", small <= 5),
        ),
        Dots(
            (
                *(Row(c.name, found[c.name], known.get(c.name, {})) for c in (*cases, *large)),
                Row("geomean", mean, {IDEAL: 1.35, "T3": 1.2, "T3-MCA": 1.3}),
                Row("most", most, {IDEAL: 1.5, "T3": 1.39, "T3-MCA": 1.47}),
                Row("geomean, TP 32", {"T3-MCA": wide_mean}, {"T3-MCA": 1.29}),
                Row("most, TP 32", {"T3-MCA": wide_most}, {"T3-MCA": 1.35}),
            ),
            "speedup over one operation after the other",
        ),
        (
            "Inconsistent in the paper: T3-MCA is said to be 13 % over T3 on the geomean; 1.30 / "
            "1.20 is 1.083. The two are scored, the third is not.",
            "No number that was held out set a parameter. But the simulation's structure (what the "
            "DRAM loses by switching streams) was chosen among variants with this figure in view, "
            "and the cache model was corrected once, when it made the large models' products read "
            "more than the DRAM can deliver.",
            "Out of reach: what bypassing the cache does to a product's time (6.1.3).",
        ),
    )  # fmt: skip


def figure_17(system: System) -> Result:
    """Traffic of the DRAM over time: T-NLG FC-2, TP 8, 4K tokens."""
    case = sublayer(replace(MODELS[1], tokens=4096), "FC-2", 8)
    runs = {
        "GEMM alone": simulate.alone(case, system, trace=True),
        "T3": simulate.fused(case, system, mca=False, trace=True),
        "T3-MCA": simulate.fused(case, system, mca=True, trace=True),
    }
    width = 4_000_000  # picoseconds
    peaks = {}
    series: dict[str, dict[str, tuple[list[float], list[float]]]] = {name: {} for name in runs}
    for name, run in runs.items():
        count = int(run.end * 1e12) // width + 1
        for kind in dict.fromkeys(kind for _, kind, _ in run.trace):
            bins = [0.0] * count
            for time, what, size in run.trace:
                bins[time // width] += size * (what == kind)
            rates = [b / width for b in bins]  # TB/s
            peaks[name, kind] = max(rates) / (sum(rates) / count)
            series[name][kind] = ([i * width / 1e6 for i in range(count)], rates)
    alone, t3, mca = (runs[name].product for name in runs)
    axes = "microseconds", "TB/s, in windows of 4 microseconds"
    first, *more = (Curves(lines, *axes, name) for name, lines in series.items())
    burst = peaks["GEMM alone", "product writes"]
    return Result(
        17, "DRAM traffic of T-NLG FC-2, TP 8, 4K tokens",
        (
            holds(f"GEMM alone: writes come in bursts (peak {burst:.1f} x mean)", burst > 3),
            holds(f"T3: copy reads come in bursts (peak {peaks['T3', 'copy reads']:.1f} x mean)",
                  peaks["T3", "copy reads"] > 3),
            holds(f"T3 slows the GEMM ({t3 / alone:.2f}x its time alone)", t3 > alone),
            holds(f"T3-MCA slows it less ({mca / alone:.2f}x)", alone < mca < t3),
        ),
        first,
        ("Out of reach: the shapes of cycles; the paper prints no number of this figure.",),
        tuple(more),
    )  # fmt: skip


def figure_19(system: System) -> Result:
    """Whole models."""
    rows, scores = [], []
    paper = {
        ("training", "T3"): (7, 9), ("training", "T3-MCA"): (10, 12),
        ("prompt", "T3"): (9, 12), ("prompt", "T3-MCA"): (12, 15),
    }  # fmt: skip
    found: dict[tuple[str, str, str], list[float]] = {}
    for group, models in (("small", MODELS), ("large", LARGE)):
        for model, degree in each_degree(models):
            for phase in shares.PHASES:
                layer = shares.layer(model, degree, phase, system)
                cases = {kind: sublayer(model, kind, degree) for kind in shares.kinds(phase)}
                reduce = shares.all_reduce(cases["OP"], system)
                row = {}
                for mca, name in ((False, "T3"), (True, "T3-MCA")):
                    gains = {k: simulate.speedup(c, system, mca) for k, c in cases.items()}
                    row[name] = layer.sped_up(gains, reduce)
                    found.setdefault((group, phase, name), []).append(row[name])
                rows.append(Row(f"{model.name} TP {degree}, {phase}", row))
    for phase in shares.PHASES:
        each = {name: found["small", phase, name] for name in ("T3", "T3-MCA")}
        means = {name: geomean(values) for name, values in each.items()}
        most_of = {name: max(values) for name, values in each.items()}
        for text, ours, i in (("geomean", means, 0), ("most", most_of, 1)):
            known = {name: 1 + paper[phase, name][i] / 100 for name in each}
            rows.append(Row(f"{text}, TP 8 and 16, {phase}", ours, known))
    for (when, name), (mean, most) in paper.items():
        values = found["small", when, name]
        scores += [
            speedup(f"{when}, {name}, geomean", mean, geomean(values), 3, OUT),
            speedup(f"{when}, {name}, most", most, max(values), 3, OUT),
        ]
    for when, most in (("training", 12), ("prompt", 14)):
        value = max(found["large", when, "T3-MCA"])
        scores.append(speedup(f"large models, {when}, most", most, value, 4, OUT))
    return Result(
        19, "Speedup of whole models", tuple(scores),
        Dots(tuple(rows), "speedup"),
        (
            "Input: the breakdown of figure 4, in place of the paper's, which is not published. "
            "Sublayers have the speedups of figure 16.",
        ),
    )  # fmt: skip


def figure_20(system: System) -> Result:
    """Twice the compute units, the same network."""
    double = replace(system, units=2 * system.units)
    rows, scores = [], []

    def means(speed: Callable[[Sublayer, System], float]) -> str:
        """The mean of `speed` for FC-2 at TP 16, on both GPUs, in words."""
        wide = [sublayer(model, "FC-2", 16) for model in MODELS]
        before, after = (geomean([speed(case, at) for case in wide]) for at in (system, double))
        return f"{before:.2f} to {after:.2f}x"

    overlapped = means(lambda case, at: closed.sequential(case, at) / closed.ideal(case, at))
    narrow = sublayer(MODELS[1], "FC-2", 16)
    halved = closed.sequential(narrow, double) / closed.ideal(narrow, double)
    plain = means(lambda case, at: simulate.speedup(case, at, mca=False))
    fixed = means(
        lambda case, at: simulate.speedup(case, at, mca=True)
        * closed.sequential(case, system) / closed.sequential(case, at)
    )  # fmt: skip
    for kind, more in (("FC-2", True), ("OP", False)):
        for degree in (8, 16, 32):
            models = MODELS if degree < 32 else LARGE
            pairs = []
            for case in (sublayer(model, kind, degree) for model in models):
                before = simulate.speedup(case, system, mca=True)
                after = simulate.speedup(case, double, mca=True)
                pairs.append((before, after))
                rows.append(Row(case.name, {"T3-MCA": before, "T3-MCA, 2x units": after}))
            old, new = (geomean([pair[i] for pair in pairs]) for i in (0, 1))
            word = "more" if more else "less"
            scores.append(
                holds(f"{kind} gains {word}, TP {degree} ({old:.2f} to {new:.2f}x)",
                      (new > old) == more)
            )  # fmt: skip
    return Result(
        20, "Twice the compute units: speedup of T3-MCA", tuple(scores),
        Dots(tuple(rows), "speedup over one operation after the other"),
        (
            "Out of reach: the paper prints no number of this figure, nor its TP degrees.",
            "FC-2 at TP 16 does not follow from what the paper states. By 7.5 a sublayer gains "
            "where compute dominates, and loses where compute and communication are balanced. "
            "T-NLG's FC-1 at TP 16, of FC-2's shape, is balanced: all-gather and reduce-scatter "
            "take alike (6.1.1: all but 3 %), so that 50 % in figure 16 needs a product that takes "
            f"as long. With half of the product its ideal is 2.5 / 2 ({halved:.2f} in ours, whose "
            "writes stay). To gain there, T3-MCA must have been below that, for an ideal of 1.50; "
            "6.1.3 has FC-1 there far from its ideal, and says neither how far nor that of FC-2.",
            f"Other readings of that row: the ideal overlap falls, too ({overlapped}), and T3 "
            f"without MCA ({plain}). Over the sequential time of the smaller GPU T3-MCA rises "
            f"({fixed}). That is not scored: OP's ideal then stays as it is, and communication "
            "that is exposed, the paper's reason for OP's loss, would lower nothing.",
        ),
    )  # fmt: skip


def speedups(case: Sublayer, system: System) -> dict[str, float]:
    """The speedups of a sublayer, by SERIES."""
    total = closed.sequential(case, system)
    return {
        IDEAL: total / closed.ideal(case, system),
        # the ideal of figure 16 with the faster reduce-scatter
        NEAR_MEMORY: total / closed.ideal(case, system, near_memory=True),
        "T3": simulate.speedup(case, system, mca=False),
        "T3-MCA": simulate.speedup(case, system, mca=True),
    }
