"""`ladder plans`: residual plans as text, with a picture, a table and their costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.next_step import free, say_next

if TYPE_CHECKING:
    from ladder.models.config import ModelConfig
    from ladder.models.plan import Landing, Plan, SublayerRecord

OVERVIEW = (
    "standard",
    "parallel",
    "ladder",
    "hybrid",
    "desync-2x",
    "desync-4x",
    "accumulate-4x",
    "accumulate-8x-lag4",
    "dtp-1",
    "none",
)
CHECKPOINT = "checkpoint"  # what --plans calls a folder's own plan
FAMILIAR = "llama-3-8b"  # proposed before other shapes, if it has the plan's number of layers
ACCUMULATED = """\
reduce accumulated: one sum of the plain partials of all sublayers since the last reduce, read as
late as peer_lag says. Until then a rank reads its own partials, times own_scale (sqrt(T) in the
presets: about the size of a sum of T independent partials); the sum then replaces them, so nothing
is scaled or averaged in the end."""
SHORT = {"attention": "attn", "mlp": "mlp", "attention+mlp": "attn+mlp"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plans",
        nargs="*",
        metavar="PLAN",
        help="a preset (standard, parallel, ladder, hybrid, desync-4x, accumulate-4x, "
        "accumulate-8x-lag4, dtp-2, none), presets on layers (ladder@16-31), or a YAML file; "
        "default: an overview of the presets",
    )
    parser.add_argument("--model", help="a name from configs/models: take its number of layers")
    parser.add_argument(
        "--layers",
        type=int,
        help="number of layers, without --model (those of a plan in a file, else 32)",
    )
    parser.add_argument(
        "--tp-degree",
        type=int,
        help="number of ranks T, for plans that depend on it (default: the T in the plan file, or "
        "4)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    from ladder.config import load_plan, model_config
    from ladder.models import UserError, resolve_plan
    from ladder.models.presets import MOST_LAYERS, layers_named

    chosen = [load_plan(plan) for plan in options.plans or OVERVIEW]
    layers = options.layers
    if layers is None:  # the number that a plan's ranges in a file cover
        layers = next((named for named in map(layers_named, chosen) if named), 32)
    if options.model is not None:
        layers = model_config(options.model).num_layers
        if options.layers not in (None, layers):
            raise UserError(
                f"--layers={options.layers}: {options.model} has {layers}; leave one of --layers "
                f"and --model out"
            )
    if not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"--layers={layers} must be from 1 to {MOST_LAYERS}")
    if options.tp_degree is None:
        own = (plan.get("tp_degree") for plan in chosen if isinstance(plan, Mapping))
        options.tp_degree = next((degree for degree in own if isinstance(degree, int)), 4)
    found: list[Plan] = []
    for plan in chosen:
        try:
            found.append(resolve_plan(plan, layers, options.tp_degree))
        except UserError as error:
            if options.plans or not found:
                raise
            print(f"left out: {error}", file=sys.stderr)  # a preset that needs more layers
    if options.json:
        print(json.dumps([summary(plan) for plan in found], indent=1))
    elif options.plans:
        print("\n\n".join(describe(plan) for plan in found))
        _after_plans(options, layers, found)
    else:
        print(f"{layers} layers\n\n{overview(found)}")
        shape = ("--model", options.model) if options.model else ("--layers", layers)
        say_next("plans", "ladder", *shape, "--tp-degree", options.tp_degree)
    return 0


def _after_plans(options: argparse.Namespace, layers: int, found: Sequence[Plan]) -> None:
    """Propose the next command, the first of these that can run.

    Train the plan, if it is the only one, `tiny` has its number of layers, and the data of the
    recipe `tiny` exists. Time the plans, if --model or `tiny` has their number of layers. Predict
    their times, if another shape has that number. Otherwise run the demo. A shape that cannot be
    split over T ranks, where a plan needs that, is passed over.
    """
    from ladder.config import find, load_mapping, model_config

    name = options.model or "tiny"
    timed = [each for each, plan in zip(options.plans, found, strict=True) if not plan.no_comm]
    data = Path(load_mapping(find("train", "tiny"))["data"])
    config = model_config(name)
    fits = config.num_layers == layers and _can_split(config, found, options.tp_degree)
    trains = fits and name == "tiny" and (data / "index.json").is_file()
    if trains and len(found) == len(timed) == 1:
        ranks = [f"tp_degree={options.tp_degree}"] if found[0].depends_on_tp else []
        out = free(Path("runs", Path(timed[0]).stem))
        say_next("train", "tiny", f"plan={timed[0]}", *ranks, f"out={out}")
    elif timed and fits:
        degree = ("--tp-degree", options.tp_degree)
        shape = ("--model", name, "--seq-len", 128, *degree)
        say_next("bench", "train", *shape, "--plans", *timed)
    elif timed and (other := _shape_of(layers, found, options.tp_degree)):
        ranks = ["--tp-degree", options.tp_degree] if _any_of_ranks(found) else []
        say_next("predict", other, "--plans", *timed, *ranks)
    else:
        say_next("demo")


def _can_split(config: ModelConfig, plans: Sequence[Plan], tp_degree: int) -> bool:
    """Whether a model of this shape can be split as the plans need."""
    from ladder.models import UserError

    try:
        config.check_divides(tp_degree if _any_of_ranks(plans) else 1, "--tp-degree")
    except UserError:
        return False
    return True


def _any_of_ranks(plans: Sequence[Plan]) -> bool:
    return any(plan.depends_on_tp and not plan.no_comm for plan in plans)


def _shape_of(layers: int, plans: Sequence[Plan], tp_degree: int) -> str | None:
    """The name of a shape with `layers` layers that can be split as the plans need, or None."""
    from ladder.config import configs_folder, model_config

    names = sorted(path.stem for path in (configs_folder() / "models").glob("*.yaml"))
    for name in (FAMILIAR, *names):
        config = model_config(name)
        if config.num_layers == layers and _can_split(config, plans, tp_degree):
            return name
    return None


def summary(plan: Plan) -> dict[str, Any]:
    """A plan's records and costs as plain data. Collectives are all-reduces per decoded token."""
    blocking = sum(plan.blocking)
    return {
        **plan.to_dict(),
        "num_layers": plan.num_layers,
        "collectives_per_token": plan.collectives,
        "blocking_collectives_per_token": blocking,
        "depends_on_tp": plan.depends_on_tp,
        "no_comm": plan.no_comm,
        "beside_the_sublayers": {"embedding": 1, "head": 1, "final_mean": int(plan.final_mean)},
        "reads": [_reads(plan, n) for n in range(len(plan.sublayers) + 1)],
        "blocking": list(plan.blocking),
        "equal_reads": list(plan.equal_reads),
    }


def describe(plan: Plan, table: bool = True) -> str:
    """The plan's picture, its table (one row for each run of equal layers), and its costs."""
    facts = summary(plan)
    apart = "one embedding sum, one gather of logits"
    if plan.final_mean:
        apart += ", one final mean"
    lines = [
        f"plan {plan.name}: {plan.num_layers} layers, {len(plan.sublayers)} sublayers",
        "",
        picture(plan),
        "",
    ]
    if table:
        lines += [_table(plan), ""]
    lines += [
        f"collectives per token   {facts['collectives_per_token']}  (apart from these: {apart})",
        f"of which block          {facts['blocking_collectives_per_token']}",
        "depends on T            "
        + ("yes: set tp_degree, if no file states it" if plan.depends_on_tp else "no"),
    ]
    if any(record.reduce == "accumulated" for record in plan.sublayers):
        lines += ["", ACCUMULATED]
    if plan.no_comm:
        lines.append("no communication (no_comm): for benchmarks, not a model")
    return "\n".join(lines)


def overview(plans: list[Plan]) -> str:
    """A table of the costs of plans, one line each."""
    rows = [["plan", "collectives per token", "blocking", "depends on T"]]
    for plan in plans:
        depends = "yes" if plan.depends_on_tp else "no"
        rows.append([plan.name, str(plan.collectives), str(sum(plan.blocking)), depends])
    return aligned(rows)


def picture(plan: Plan, limit: int = 6) -> str:
    """A time line of `limit` sublayers, with the reduces in flight below them.

    A blocking reduce leaves a gap (`....`) in the upper line. A reduce that overlaps with the next
    sublayers leaves none; its bar lasts until a sublayer reads the sum. The picture starts at the
    layer before the first one that differs from layer 0, to show where a hybrid changes. The last
    layer does not count if it has the lags of layer 0, and layer 0 is not standard: it then only
    ends the reduces of the layers below (dtp-D, accumulate-Nx). If the sum of an accumulated group
    stays in flight past the next sublayer, the picture starts at the layer of the first such sum
    instead, and has one more sublayer.
    """
    by_layer = [
        [plan.sublayers[n] for n in numbers]
        for _, numbers in groupby(range(len(plan.sublayers)), key=lambda n: plan.layers[n])
    ]
    differs = next((i for i, records in enumerate(by_layer) if records != by_layer[0]), 0)
    ends = differs == len(by_layer) - 1 and _lags(by_layer[0]) == _lags(by_layer[-1])
    from_layer = 0 if ends and not _standard(by_layer[0]) else max(0, differs - 1)
    waits = _waits(plan)
    groups = [n for n, begin in enumerate(plan.group_begins) if begin not in (None, n)]
    if (late := next((n for n in groups if waits.get(n, 0) > n + 1), None)) is not None:
        from_layer, limit = plan.layers[late], limit + 1
    first = plan.layers.index(from_layer)
    shown = range(first, min(first + limit, len(plan.sublayers)))
    width = 12
    lanes: list[str] = []
    compute = ""
    columns: dict[int, int] = {}  # the column at which each sublayer's box ends
    reduce_end: dict[int, int] = {}
    for n in shown:
        record = plan.sublayers[n]
        start = len(compute)
        ready = max(
            (reduce_end[m] for m, read in waits.items() if read == n and m in columns), default=0
        )
        if ready > start:
            compute += "." * (ready - start)
        compute += f"[{SHORT[record.kind]} {plan.layers[n]}".ljust(width - 1) + "]"
        columns[n] = len(compute)
        if record.reduce != "none":
            reduce_end[n] = len(compute) + max(width - 4, len(_bar(plan, n)) + 1)
    for n, end in reduce_end.items():
        start = columns[n]
        # The bar of a sum in flight for several sublayers spans all of them that are shown.
        until = min(waits[n], shown[-1] + 1) - 1
        cut = until > n + 1 and waits[n] > shown[-1] + 1
        if until > n + 1:
            end = columns[until] if cut else max(end, columns[until] - 4)
        bar = _bar(plan, n).ljust(end - start - 1, "-") + ("-" if cut else ">")
        lane = next((i for i, text in enumerate(lanes) if len(text) <= start), None)
        if lane is None:
            lanes.append("")
            lane = len(lanes) - 1
        lanes[lane] = lanes[lane].ljust(start) + bar
    before, after = "... " if first else "", " ..." if shown[-1] + 1 < len(plan.sublayers) else ""
    indent = " " * len(before)
    lines = ["compute  " + before + compute + after]
    lines += ["reduce   " + indent + lane for lane in lanes or ["(none)"]]
    return "\n".join(lines)


def _lags(records: Sequence[SublayerRecord]) -> list[tuple[int, int]]:
    return [(record.own_lag, record.peer_lag) for record in records]


def _standard(records: Sequence[SublayerRecord]) -> bool:
    """Whether a layer's records are those of `standard`, or of `parallel`."""
    return all(
        (record.own_lag, record.peer_lag, record.reduce, record.own_scale) == (0, 0, "output", 1)
        for record in records
    )


def _bar(plan: Plan, n: int) -> str:
    """The text at the start of the bar of sublayer n's reduce."""
    begin = plan.group_begins[n]
    summed = f"{n}" if begin in (None, n) else f"{begin}-{n}"
    return f"<{'sync' if plan.sublayers[n].reduce == 'residual' else 'sum'} {summed}"


def _waits(plan: Plan) -> dict[int, int]:
    """Output (the number of its sublayer) -> the read that waits for the output's reduce."""
    return {
        landing.output: n
        for n, read in enumerate(plan.landings)
        for landing in read
        if landing.summed
    }


def _reads(plan: Plan, n: int) -> str:
    """The outputs that land before read n, in words."""
    # On the base, own parts land a second time: they are not new.
    new = [
        each
        for each in plan.landings[n]
        if each.summed
        or all(
            each.output != old.output for read in plan.landings[each.output + 1 : n] for old in read
        )
    ]
    return ", ".join(_landing(plan, each) for each in new) or "nothing new"


def _landing(plan: Plan, landing: Landing) -> str:
    begin = plan.group_begins[landing.output]
    if landing.on_base:
        return f"{begin}-{landing.output} (in place of the own ones)"
    if landing.replaces:
        return f"{landing.output} (residuals made equal)"
    if not landing.summed:
        return f"own {landing.output}" + (f" x {landing.own:g}" if landing.own != 1 else "")
    if landing.own == -1:
        return f"peers' {landing.output}"
    return str(landing.output) + (f" (own x {1 + landing.own:g})" if landing.own else "")


def _table(plan: Plan) -> str:
    settings = [field.name for field in fields(plan.sublayers[0]) if field.name != "kind"]
    head = ["layers", "sublayer", *settings, "blocks", "norm"]
    rows = [head]
    blocking, equal = plan.blocking, plan.equal_reads
    layers: list[tuple[int, tuple[tuple[str, ...], ...]]] = []
    for layer, numbers in groupby(range(len(plan.sublayers)), key=lambda n: plan.layers[n]):
        cells = [_row(plan, settings, n, blocking[n], equal[n]) for n in numbers]
        layers.append((layer, tuple(cells)))
    for same, group in groupby(layers, key=lambda item: item[1]):
        members = [layer for layer, _ in group]
        name = str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
        for i, row in enumerate(same):
            rows.append([name if i == 0 else "", *row])
    blank = [""] * (len(head) - 3)
    rows.append(["", "final norm", *blank, "shared" if equal[-1] else "per rank"])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Rows of cells as text, each column as wide as its widest cell.

    left: the number of left-aligned columns, the others being right-aligned; None: all of them.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    sides = [str.ljust if left is None or i < left else str.rjust for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _row(plan: Plan, settings: Sequence[str], n: int, blocks: bool, equal: bool) -> tuple[str, ...]:
    record = plan.sublayers[n]
    values = [getattr(record, name) for name in settings]
    return (
        record.kind,
        *(f"{value:g}" if isinstance(value, float) else str(value) for value in values),
        "-" if record.reduce == "none" else "yes" if blocks else "no",
        "shared" if equal else "per rank",
    )
