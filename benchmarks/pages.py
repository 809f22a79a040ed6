"""Pages and figures of the recorded results: `make pages`.

    python benchmarks/pages.py [--out FOLDER] [--figures FOLDER]

Draws, from benchmarks/results alone, the figures that the documentation shows (docs/figures, which
are committed) and a page for each file of results, with an index (runs/pages, which are not).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapt_report
import bench_pages
import operator_figures
import quality_frontier
import quality_report
import residual_report
from jobs import finish

from ladder.bench import figures, results
from ladder.bench.inference import page as inference
from ladder.bench.inference.derive import by_case, derive_rows, improvements
from ladder.bench.ops import page as ops
from ladder.bench.ops.best import of_role
from ladder.bench.ops.derive import groups
from ladder.bench.report import Link, PagePart, Text, page
from ladder.files import make_folder, write_text
from ladder.parser import Parser, parse_words

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LATENCY = "2026-11-21-inference-h200x4"
TODAY = "2026-11-30-inference-h200x4"
BATCHES = "2026-11-21-figures-h200x4"
QUALITY = (
    "2026-11-21-quality-h200",
    "2026-11-22-scaled-desync-h200x4",
    "2026-11-22-quality-h200x2",
    "2026-11-22-learned-scales-h200x2",
)
QUALITY_LATENCY = (
    "2026-11-21-quality-latency-h200x4",
    LATENCY,
    "2026-11-21-p2p-off-h200x4",
    "2026-11-22-rare-reduces-half-8b-h200x2",
)
RESIDUAL = "2026-11-22-residual-cpu"
OPS, FUSED = "2026-11-27-ops-h200x4", "flux-gpt3"  # the shape that is drawn
OPS_SUMMED, SUMMED = "2026-11-28-blocked-h200x4", "matmul_all_reduce"  # newer records of it
OPS_BAGS = "2026-11-25-ops-bags-h100x2"
OPS_FEW, OPS_ROWS = "2026-11-25-ops-h100x2", "2026-11-25-ops-rows-h100x2"
MODEL, TP, BATCH = "llama-3-8b", 4, 1  # of the figures of inference


# ---- figures of the documentation -----------------------------------------------------------


def latency() -> str:
    """Decode ms per token of an 8B by batch and plan, with today's kernels."""
    bars, faster = [], []
    rows = derive_rows(read(TODAY))
    for row in sorted(rows, key=lambda row: (row["point"].batch, -row["decode_ms"])):
        plan, ms, ratio = row["point"].plan, row["decode_ms"], row["decode_x_standard"]
        bound = plan == "none"
        said = f"{ms:.2f} ms"
        if plan not in ("standard", "none"):
            said += f", {ratio:.2f} x"
        if plan == "ladder":
            faster.append(ratio)
        name = f"batch {row['point'].batch}: {'no communication' if bound else plan}"
        colour = figures.COLOURS.get(plan, figures.MUTED)
        bars.append(figures.Bar(name, ms, said, colour, bound))
    title = (
        f"The ladder decodes {min(faster):.2f} to {max(faster):.2f} x as fast as a standard "
        f"Transformer"
    )
    point = rows[0]["point"]
    subtitle = (
        f"{point.model}, TP {point.tp} on {machine(TODAY)}, all-reduce push, prompt {point.prompt}"
    )
    return figures.bars(bars, "ms", title=title, subtitle=subtitle, row=20)


def latency_nccl() -> str:
    """Decode ms per token of an 8B by plan and all-reduce, beside the bounds, by older kernels."""
    members = [
        row
        for row in derive_rows(read(LATENCY))
        if row["point"].plan in ("standard", "ladder", "none")
        and (row["point"].model, row["point"].tp, row["point"].batch) == (MODEL, TP, BATCH)
    ]
    (case,) = by_case(members)
    (ladder,) = (r for r in members if (r["point"].plan, r["point"].reducer) == ("ladder", "push"))
    faster = ladder["decode_x_nccl"]
    title = f"The ladder decodes {faster:.1f} x as fast as a standard Transformer with NCCL"
    subtitle = (
        f"{MODEL}, TP {TP} on {machine(LATENCY)}, batch {case.batch}, prompt {case.prompt}; time a "
        f"token; hatched: bounds"
    )
    return figures.bars(inference.decode_bars(members), "ms", title=title, subtitle=subtitle)


def batches() -> str:
    """Tokens/s of a ladder over standard's, by batch size."""
    rows = derive_rows(read(BATCHES))
    names = {"push": "both with push", "async": "both with NCCL"}
    colours = {"push": figures.COLOURS["ladder"], "async": figures.COLOURS["hybrid"]}
    found = {reducer: improvements(rows, reducer) for reducer in names}
    ((shape, _),) = (key for key in found["push"] if key[1] == TP)
    gains = {names[reducer]: each[shape, TP]["ladder"] for reducer, each in found.items()}
    lines = {name: ([*gain], [*gain.values()]) for name, gain in gains.items()}
    every = [value for gain in gains.values() for value in gain.values()]
    title = (
        f"The ladder generates {min(every):.0f} to {max(every):.0f} % more tokens per second than "
        f"standard"
    )
    return figures.lines(
        lines, "batch size", "% more tokens/s than standard with the same all-reduce",
        ticks=lines[names["push"]][0], title=title,
        subtitle=f"{shape.model}, TP {TP} on {machine(BATCHES)}, prompt {shape.prompt}, "
        f"{shape.new_tokens} new tokens",
        zero="standard", colours={names[key]: colour for key, colour in colours.items()},
        height=300,
    )  # fmt: skip


def quality_latency() -> str:
    """Quality against latency of the trained shape, a panel for each link and batch measured."""
    records, found = drawn_records()
    members = next(each for each in found.chosen.values() if each)
    places = quality_frontier.places(quality_report.by_plan(records), members)
    kept = quality_frontier.frontier(places)
    title = f"{', '.join(kept)}: no other plan is both better and faster"
    if len(kept) == 1:
        title = f"The {kept[0]}: fastest of {len(places)} plans, and none beats its quality"
    return frontier_figure(records, found, title)


def quality_no_nvlink() -> str:
    """The same quality against the latency of an 8B's ranks without NVLink."""
    records, found = drawn_records("half-8b", 2)
    return frontier_figure(
        records, found, "Without NVLink: filled plans are beaten by none in both"
    )


def frontier_figure(
    records: list[dict[str, Any]], found: quality_frontier.Latency, title: str
) -> str:
    subtitle = (
        f"{records[0]['parameters'] / 1e6:.0f}M parameters, {records[0]['tokens'] / 1e6:.0f}M "
        f"tokens each; mean and range of n runs, {quality_frontier.usual_runs(records, found)} if "
        f"no n is given; lower is better, left is faster"
    )
    return quality_frontier.figure(records, found, title, subtitle)


def written(when: str, title: str) -> str:
    """What desync's sublayers add to later residuals, by scale."""
    records = residual_report.read(RESULTS / f"{RESIDUAL}.jsonl")
    shown = [each for each in records if each["plan"].startswith(("standard", "desync"))]
    return residual_report.figure(shown, when, title)


def written_initial() -> str:
    return written("initial", "Desync adds three of four outputs to later residuals divided by T")


def written_trained() -> str:
    return written("trained", "Trained, these outputs have grown, and are still smaller")


def operators() -> str:
    """Communication time that is not hidden, as in FLUX: NCCL, torch's fastest, ours, in graphs."""
    names = {"collective": "NCCL", "torch": "torch, fused", "operator": "ladder"}
    bars, best = [], []
    members = [r for r in read(OPS) if r["point"]["shape"] == FUSED and r["point"]["op"] != SUMMED]
    members += read(OPS_SUMMED)
    for (op, mode), points in sorted(groups(members).items()):
        for text, ways in sorted(points.items(), key=lambda each: json.loads(each[0])["m"]):
            for role, name in names.items() if mode == "captured" else ():
                if (record := of_role(ways, role)) is None:
                    continue
                result, m = record["result"], json.loads(text)["m"]
                said = f"{result['ect_us']:.0f} us"
                if role != "collective":
                    said += f", {100 * result['efficiency']:.0f} % hidden"
                label = f"{op.replace('_', ' ')}, m {m}: {name}"
                colour = ops.ROLE_COLOURS.get(role, figures.COLOURS["ladder"])
                bars.append(figures.Bar(label, result["ect_us"], said, colour))
                best += [result["efficiency"]] if role == "operator" else []
    title = f"Fused operators hide {100 * min(best):.0f} to {100 * max(best):.0f} % of NCCL's time"
    about = members[0]["machine"]
    subtitle = (
        f"FLUX's shapes of GPT-3, {about['ranks']}x {about['gpu']}, CUDA graphs; time beyond "
        f"that of the product alone"
    )
    return figures.bars(bars, "us", title=title, subtitle=subtitle, row=20)


FIGURES: dict[str, Callable[[], str]] = {
    "latency.svg": latency,
    "latency-nccl.svg": latency_nccl,
    "batches.svg": batches,
    "operators.svg": operators,
    "bags.svg": lambda: operator_figures.bags(read(OPS_BAGS)),
    "bags-programs.svg": lambda: operator_figures.programs(read(OPS_BAGS)),
    "bags-order.svg": lambda: operator_figures.orders(read(OPS_ROWS)),
    "few-rows.svg": lambda: operator_figures.few_rows(read(OPS_FEW)),
    "experts.svg": lambda: operator_figures.experts(read(OPS_ROWS)),
    "quality-latency.svg": quality_latency,
    "quality-no-nvlink.svg": quality_no_nvlink,
    "residual-initial.svg": written_initial,
    "residual-trained.svg": written_trained,
}


def quality_records(
    model: str | None = None, tp: int = quality_frontier.T
) -> tuple[list[dict[str, Any]], quality_frontier.Latency]:
    """The records of trainings, and the latency at TP `tp` of their shape or of `model`."""
    records = quality_report.read_all([RESULTS / f"{name}.jsonl" for name in QUALITY])
    files = [RESULTS / f"{name}.jsonl" for name in QUALITY_LATENCY]
    return records, quality_frontier.latencies(files, records, model, tp)


def read(name: str) -> list[dict[str, Any]]:
    return results.read_results(RESULTS / f"{name}.jsonl")


def machine(name: str) -> str:
    facts = read(name)[0]["machine"]
    return f"{facts['gpus']}x {facts['gpu']}"


# ---- pages ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """A page. name: of its file, without suffix. finding: its main result, for the index."""

    name: str
    finding: str
    text: str


def inference_pages(name: str, records: Sequence[dict[str, Any]]) -> list[Page]:
    """A page of a file; if points were measured again, one page for each commit.

    A commit that measured a point twice has no page: the point does not say how these differ.
    """
    sittings = {name: list(records)}
    if repeats(records):
        sittings = {}
        for record in records:
            commit = re.sub(r"[^A-Za-z0-9]+", "-", record["machine"]["commit"])
            sittings.setdefault(f"{name}-{commit}", []).append(record)
    found = []
    for own, members in sittings.items():
        measured = [record for record in members if "check" in record]  # others have an older form
        started = [record for record in members if "cold" in record]
        rows, machines = derive_rows(measured), [record["machine"] for record in members]
        if (rows or started) and not repeats(members):
            text = inference.write_page(rows, started, machines)
            found.append(Page(own, inference.finding(rows, started), text))
    return found


def repeats(records: Sequence[dict[str, Any]], key: str = "point") -> bool:
    return len({json.dumps(record[key]) for record in records}) < len(records)


def drawn_records(*of: Any) -> tuple[list[dict[str, Any]], quality_frontier.Latency]:
    """`quality_records` without desync's other scales than sqrt(T), which have the same latency."""
    records, found = quality_records(*of)
    lost = ("-full", "-learned", "-init-sqrt")
    return [each for each in records if not each["plan"].endswith(lost)], found


def quality_page(model: str | None = None, tp: int = quality_frontier.T) -> Page:
    records, found = quality_records(model, tp)
    name = QUALITY[0] + (f"-{model}" if model else "")
    text = quality_frontier.write_page(records, found)
    return Page(name, quality_frontier.finding(records, found), text)


def record_files() -> list[Path]:
    return sorted(RESULTS.glob("*.jsonl"))


def pages() -> list[Page]:
    """A page for each file of results in a known form."""
    found = [quality_page(), quality_page(MODEL), quality_page("half-8b", 2)]
    for file in record_files():
        records = read(file.stem)
        point = records[0].get("point", {})
        if "reducer" in point:
            found += inference_pages(file.stem, records)
        elif "layout" in point:
            found.append(Page(file.stem, *bench_pages.train_page(records)))
        elif "way" in point:
            found.append(Page(file.stem, ops.finding(records), ops.write_page(records)))
        elif "algorithm" in point:
            found.append(Page(file.stem, *bench_pages.comm_page(records)))
        elif {"name", "settings"} <= records[0].keys() and not repeats(records, "name"):
            found.append(Page(file.stem, *adapt_report.write_page(records)))
    return found


def index(found: Sequence[Page]) -> str:
    parts: list[PagePart] = [Link(f"{each.name}.html", each.name, each.finding) for each in found]
    names = sorted(file.name for file in RESULTS.iterdir() if file.suffix in (".jsonl", ".txt"))
    shown = (*(each.name for each in found), *QUALITY, *QUALITY_LATENCY)
    left = [name for name in names if not any(each.startswith(Path(name).stem) for each in shown)]
    parts.append(Text(f"Without a page: {', '.join(left)}; benchmarks/results/README.md says why."))
    said = "A page for each file of benchmarks/results, drawn from its records."
    return page("Recorded results", said, parts)


# ---- command line ---------------------------------------------------------------------------


def draw(options: argparse.Namespace) -> int:
    figures.require_matplotlib()
    for folder in (options.figures, options.out):
        make_folder(folder)
    for name, figure in FIGURES.items():
        write_text(options.figures / name, figure())
    found = pages()
    for each in found:
        write_text(options.out / f"{each.name}.html", each.text)
    write_text(options.out / "index.html", index(found))
    print(f"{len(FIGURES)} figures in {options.figures}, {len(found)} pages; open "
          f"{options.out / 'index.html'}")  # fmt: skip
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Pages and figures of the recorded results.")
    parser.set_defaults(verb=draw)
    parser.add_argument("--out", type=Path, default=Path("runs/pages"), help="for the pages")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="for the SVGs")
    return parse_words(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
