"""Ladder Residual's Tables 1, 2 and 6 predicted: 8 H100 with NVLink and without, 405B on 16.

For each kind of link, one curve of all-reduces is set so that `standard` is as far from the model
without communication as published. Everything else follows from each plan's own schedule; nothing
here knows what a plan's name means.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ladder.config import model_config
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan
from ladder.perf.machine import Curve
from ladder.perf.scale.published import (
    FIGURE_2,
    FIGURE_3,
    LINKS,
    LOGGED_2,
    LOGGED_34B,
    NEW,
    NO_NVLINK,
    NVLINK,
    TABLE_1,
    TABLE_1_BATCH,
    TABLE_2,
    TABLE_6,
    TWO_NODES,
    VOCABULARY_34B,
    Table,
)
from ladder.perf.scale.software import H100, PHASES, SOFTWARE, Phase, Work, as_run, bare, time
from ladder.perf.scores import FIT, OUT, Dots, Result, Row, Score, factor, points

# The share of their speed that operations lose beside one of NCCL's all-reduces: medians over our
# records of four and two H200 with NVLink of (ladder - none) / (standard - none), by phase and
# batch. tests/perf/test_scale.py computes them again. 1: all is lost, nothing overlaps.
BESIDE: dict[tuple[Phase, int], float] = {
    ("prefill", 1): 0.545, ("prefill", 4): 0.459, ("prefill", 64): 0.455,
    ("decode", 1): 0.276, ("decode", 4): 0.230, ("decode", 64): 0.501,
}  # fmt: skip
COUNTS: dict[Phase, int] = {"prefill": 1, "decode": NEW - 1}  # passes of a generation
DECODE_POINTS, PREFILL_POINTS = 5.0, 8.0  # tolerances, set before the simulation
RATIO = 5.0  # %, of Table 1


def work(model: str, phase: Phase, batch: int, vocabulary: int | None = None) -> Work:
    """A phase of a model at the paper's TP degree. vocabulary: replaces the model's own size."""
    config = as_run(model_config(model))
    if vocabulary is not None:
        config = replace(config, vocab_size=vocabulary)
    return Work(config, phase, batch, 16 if model == TWO_NODES else 8)


def plan(name: str, model: str) -> Plan:
    return resolve_plan(name, model_config(model).num_layers, 16 if model == TWO_NODES else 8)


def _whole(
    model: str, batch: int, name: str, curve: Curve, beyond: float, vocabulary: int | None
) -> float:
    """Microseconds of a prompt and its new tokens. beyond: added to the time of each all-reduce."""
    found = 0.0
    for phase, count in COUNTS.items():
        case = work(model, phase, batch, vocabulary)
        reduce = curve.at(case.message).us + beyond
        found += count * time(case, plan(name, model), reduce, BESIDE[case.phase, batch])
    return found


def _reduce(table: Table, link: str, phase: Phase) -> float:
    """Microseconds of an all-reduce with which `standard` is as far from the bound as published."""
    share = table.bound[link].of(phase) / 100
    count = plan("standard", table.model).collectives
    return bare(work(table.model, phase, table.batch)) * share / (1 - share) / count


@cache
def reduces(link: str) -> Curve:
    """All-reduces of 8 GPUs by bytes, from rows without communication and `standard` alone."""
    found = {}
    for table in (TABLE_2, TABLE_6):
        for phase in PHASES:
            case = work(table.model, phase, table.batch)
            found[case.message] = _reduce(table, link, phase)
    curve = _curve(link, found)
    # Figure 2, batch 4, has whole generations: subtract the prefill, by the points found so far.
    cases = {phase: work(TABLE_2.model, phase, TABLE_1_BATCH) for phase in PHASES}
    count = plan("standard", TABLE_2.model).collectives
    whole = bare(cases["prefill"]) + (NEW - 1) * bare(cases["decode"])
    prefill = count * curve.at(cases["prefill"].message).us
    decode = (whole * (FIGURE_2[link] - 1) - prefill) / (NEW - 1) / count
    return _curve(link, {**found, cases["decode"].message: decode})


def _curve(link: str, points_: dict[float, float]) -> Curve:
    text = f"fitted: Ladder Residual's Tables 2 and 6 and Figure 2, {link}, bound and standard"
    return Curve("all-reduce", {"algorithm": "nccl"}, tuple(sorted(points_.items())), text)


@cache
def between_nodes(link: str) -> float:
    """Microseconds that an all-reduce over two nodes takes beyond one on a node, from Figure 3."""
    cases = {phase: work(TWO_NODES, phase, TABLE_1_BATCH) for phase in PHASES}
    count = plan("standard", TWO_NODES).collectives
    curve = reduces(link)
    whole = one_node = 0.0
    for phase, times in COUNTS.items():
        whole += times * bare(cases[phase])
        one_node += times * count * curve.at(cases[phase].message).us
    return (whole * (FIGURE_3[link] - 1) - one_node) / (NEW * count)


def improvement(table: Table, link: str, name: str, phase: Phase) -> float:
    """The improvement of latency over `standard`, in %."""
    case = work(table.model, phase, table.batch)
    reduce, slowed = _reduce(table, link, phase), BESIDE[phase, table.batch]
    bound = name == "bound"
    new = bare(case) if bound else time(case, plan(name, table.model), reduce, slowed)
    return 100 * (1 - new / time(case, plan("standard", table.model), reduce, slowed))


def speedup(model: str, link: str, name: str = "ladder", vocabulary: int | None = None) -> float:
    """The ratio of tokens/s over standard, as in Table 1. name: a plan; `none` has no reduces."""
    beyond = between_nodes(link) if model == TWO_NODES else 0.0
    one, other = (
        _whole(model, TABLE_1_BATCH, each, reduces(link), beyond, vocabulary)
        for each in ("standard", name)
    )
    return one / other


def table_1() -> Result:
    scores, rows = [], []
    for model, cells in TABLE_1.items():
        ours = {link: speedup(model, link) for link in LINKS}
        scores += [
            factor(f"{model}, {link}", cells[link], ours[link], RATIO, OUT) for link in LINKS
        ]
        rows.append(Row(model, ours, cells))
    ours_34b = [speedup("codellama-34b", link, vocabulary=VOCABULARY_34B) for link in LINKS]
    theirs_34b = [LOGGED_34B[link] for link in LINKS]
    bloom = work("bloom-176b", "decode", TABLE_1_BATCH)
    needed = (TABLE_1["bloom-176b"][NVLINK] - 1) * bare(bloom)
    needed /= plan("standard", "bloom-176b").collectives
    return Result(
        None, "Table 1: tokens/s of ladder over standard, batch 4, TP 8 (405B: 16, two nodes)",
        tuple(scores), Dots(tuple(rows), "tokens/s over standard"),
        (
            "BLOOM's shape is that of configs/models/bloom-176b.yaml, and the 3B has 32 heads of "
            "72, as in the authors' benchmark; the paper's text has no shapes.",
            "Inconsistent with the authors' own run: 34B. Their logs have one of this shape with "
            f"{VOCABULARY_34B:,} tokens in the vocabulary. Its ladder is {theirs_34b[0]:.2f} times "
            f"as fast with NVLink and {theirs_34b[1]:.2f} without; ours for it is "
            f"{ours_34b[0]:.2f} and {ours_34b[1]:.2f}. The six other pairs in these logs agree "
            "with the table within 2 %.",
            "176B: with NVLink the paper's ladder gains more than our model gains without any "
            f"communication ({speedup('bloom-176b', NVLINK, 'none'):.2f}). Each all-reduce of "
            f"{bloom.message / 1024:.0f} KiB would take {needed:.0f} us if the ladder hid all of "
            f"it; by Table 6 one of 512 KiB takes {reduces(NVLINK).at(2**19).us:.0f}. In the "
            "authors' code the ladder's MLP is 50,176 wide, and the standard's width is misspelt "
            "so that it cannot be built; no log tells what ran.",
            "405B: what two nodes cost beyond one comes from Figure 3's rows without communication "
            "and of standard, batch 4; its ladder is held out.",
        ),
    )  # fmt: skip


def _detailed(table: Table, title: str, notes: tuple[str, ...]) -> Result:
    scores: list[Score] = []
    rows = []
    tolerance = {"prefill": PREFILL_POINTS, "decode": DECODE_POINTS}
    for link in LINKS:
        for name, paper in {"bound": table.bound[link], **table.rows[link]}.items():
            ours = {phase: improvement(table, link, name, phase) for phase in PHASES}
            basis = FIT if name == "bound" else OUT
            scores += [
                points(f"{link}, {name}, {p}", paper.of(p), ours[p], tolerance[p], basis)
                for p in PHASES
            ]
            paper_too = {str(phase): paper.of(phase) for phase in PHASES}
            rows.append(Row(f"{name}, {link}", {str(p): ours[p] for p in PHASES}, paper_too))
    chart = Dots(tuple(rows), "improvement of latency over standard, %", 1)
    return Result(None, title, tuple(scores), chart, notes)


def table_2() -> Result:
    case = work(TABLE_2.model, "prefill", 1)
    us = reduces(NO_NVLINK).at(case.message).us
    logged = "; ".join(
        f"{link} {name} {LOGGED_2.rows[link][name].prefill:.1f} % "
        f"(ours {improvement(LOGGED_2, link, name, 'prefill'):.1f})"
        for link in LINKS
        for name in LOGGED_2.rows[link]
    )
    rate = 1e-3 * 1.75 * case.message / us
    return _detailed(
        TABLE_2,
        "Table 2: 70B, batch 1, TP 8",
        (
            f"Inconsistent in the paper: without NVLink, dropping all-reduces of 16.8 MB saves "
            f"only so much that each takes {us:.0f} us, {rate:.0f} GB/s in and out of each GPU; a "
            f"PCIe 5 slot has 64. NCCL_P2P_DISABLE=1 does not switch NVLink SHARP off: prompts "
            f"seem to have kept it, decode steps not.",
            "Inconsistent in the paper: with NVLink, half of the all-reduces (parallel) cost 25 of "
            "30.5 % of a prompt's time. Whatever an all-reduce takes, dropping half of them and "
            "changing nothing else saves half of what dropping all of them saves.",
            f"Inconsistent with the authors' own run: in their logs of this case prompts gain "
            f"{LOGGED_2.bound[NVLINK].prefill:.1f} % without communication, with NVLink, and not "
            f"{TABLE_2.bound[NVLINK].prefill:.1f}. Prefill in these logs, and ours calibrated on "
            f"their bound: {logged}. All are within 8 points. Decode there agrees with the table "
            "but for the ladder without NVLink, "
            f"{LOGGED_2.rows[NO_NVLINK]['ladder'].decode:.1f} %.",
            "Tokens/s are not scored: they follow from the two columns.",
        ),
    )


def table_6() -> Result:
    return _detailed(
        TABLE_6,
        "Table 6: 8B, batch 64, TP 8",
        (
            "Not scored: tokens/s, whose column is not consistent with the other two. With NVLink "
            "the bound's 34.31 % follows from 25.43 and 27.22 % if a prompt is 94 % of the time, "
            "ladder's 14.43 % if it is 69 %; by their milliseconds it is about 20 % of 512 tokens.",
        ),
    )


FITTED = {
    "an all-reduce of 16 KiB, 64 KiB, 512 KiB, 16 MiB, 512 MiB, for each kind of link": (
        "the bound rows of Tables 2 and 6, and of Figure 2 at batch 4"
    ),
    "what an all-reduce of two nodes takes beyond one": "the bound of Figure 3 at batch 4",
    f"kernel = {SOFTWARE.kernel:g} us, rows = {SOFTWARE.rows:g} us, flops = "
    f"{1e-12 * SOFTWARE.flops:g} T, repeated = {SOFTWARE.repeated:g}, score = "
    f"{SOFTWARE.score:g} B": ("milliseconds of four rows without communication"),
}
DECLARED = (
    "what products lose beside an all-reduce: medians of our own records of H200, by phase and "
    f"batch ({', '.join(f'{p} {share:.3f} at {b}' for (p, b), share in BESIDE.items())}); the "
    "all-reduce loses nothing",
    f"H100: {1e-12 * SOFTWARE.hbm:g} TB/s, {H100.values['copy_tb_s'].provenance}",
    "kernels: one for each product and each landing, 5 for attention, 2 for gate and up",
)
