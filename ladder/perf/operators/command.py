"""`ladder predict ops`: time, ECT and E of operators by implementation, without a GPU."""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from ladder.bench.ops.derive import sizes
from ladder.bench.ops.points import (
    OpPoint,
    Variant,
    accepts,
    check_options,
    expand,
    matrices,
    variants,
)
from ladder.models.errors import UserError, unknown
from ladder.ops.registry import OPERATORS
from ladder.perf.nodes import declaration
from ladder.perf.operators.lower import OPS
from ladder.perf.operators.predict import ALONE, KNOWN, Predictor, efficiency_text, plain
from ladder.perf.prediction.command import machine_of
from ladder.plans import aligned

NCCL = "NCCL"
MOST_ROWS = 2**17  # of a product: its tiles are simulated one by one, here for minutes
HEAD = ["operator", "shape", "m", "implementation", "us", "ECT us", "E", "eager us", "E"]
EXPLANATION = """\
alone: the product by cuBLAS. ECT: the time beyond it. E: the share of NCCL's ECT that is hidden;
0: product, then NCCL; 1: nothing is left. In CUDA graphs, and eager, where short calls wait for the
host. * is the fastest in graphs, + eager. At the clock that a GPU at its limit of power has in the
turns of `ladder bench ops`."""


def main(options: Any) -> int:
    for op in options.ops or ():  # before `check_options`, which knows more operators
        if op not in OPERATORS:
            raise unknown("--ops", op, OPS)
        if op not in OPS:
            raise UserError(f"--ops={op} is not predicted; choose from {', '.join(OPS)}")
    check_options(options)
    for shape in options.shapes or ():
        if not any(op in OPS for each in matrices(shape) for op in getattr(each, "ops", ())):
            kind = "exchanges of lookups" if shape == "dlrm" else "its products"
            raise UserError(
                f"--shapes={shape}: {kind} are not predicted; give flux-gpt3, flux-llama2-70b or a "
                f"name from configs/models"
            )
    for m in options.m or ():
        if m > MOST_ROWS:
            raise UserError(f"--m={m} must be 1 to {MOST_ROWS:,}")
    machine = machine_of(options)
    if options.tp is None and machine.gpus < 2:
        raise UserError(
            f"--machine={options.machine} has one GPU; give --tp 2 or more, or another one"
        )
    ranks = options.tp = machine.gpus if options.tp is None else options.tp
    if ranks < 2:
        raise UserError(f"--tp={ranks}: a rank alone has nothing to exchange; give 2 or more")
    asked = Namespace(**{**vars(options), "ops": options.ops or list(OPS)})
    points, left_out = expand(asked, ranks, cpu=False)
    wanted = variants(options.implementations, asked.ops, options.tune)
    wanted = [Variant(name) for name in KNOWN] if wanted is None else wanted
    predictor = Predictor(machine)
    left_out += _lacking(predictor, points, wanted)
    rows = [row for point in points for row in _rows(predictor, point, wanted)]
    if options.json:
        data = {"machine": machine.name, "ranks": ranks, "unmeasured": predictor.unmeasured}
        print(json.dumps(data | {"left_out": left_out, "calls": rows}, indent=1))
        return 0
    table = [HEAD]
    for row in rows:
        marks = "*" * row["fastest"] + "+" * row["fastest_eager"]
        table.append([
            row["op"], sizes(row), str(row["m"]), f"{row['way']} {marks}".rstrip(),
            f"{row['us']:.1f}", f"{row['ect_us']:.1f}", efficiency_text(row["efficiency"]),
            f"{row['eager_us']:.1f}", efficiency_text(row["eager_efficiency"]),
        ])  # fmt: skip
    print(f"{machine.name}, {ranks} ranks\n\n{aligned(table)}\n")
    said = f"not measured: {', '.join(predictor.unmeasured)}" if predictor.unmeasured else ""
    print(EXPLANATION)
    for text in (declaration(machine), said, *(f"left out: {each}" for each in left_out)):
        print("".join(f"{line}\n" for line in textwrap.wrap(text, 100)), end="")
    return 0


def measuring(options: Any) -> list[str]:
    """The command that measures what was predicted, on as many GPUs."""
    words = ["bench", "ops", "--nproc", str(options.tp)]
    for name in ("ops", "shapes", "m", "implementations"):
        if getattr(options, name):
            words += [f"--{name}", *map(str, getattr(options, name))]
    return [*words, "--tune"] if options.tune else words


def _rows(predictor: Predictor, point: OpPoint, wanted: list[Variant]) -> list[dict[str, Any]]:
    """A row for the product alone, for NCCL, and for each implementation of the operator."""
    ways = {ALONE: Variant(ALONE), NCCL: plain(point.op)}
    ways |= {str(each): each for each in wanted if _accepts(predictor, point, each)}
    found = {way: predictor(point, variant, "captured") for way, variant in ways.items()}
    eager = {way: predictor(point, variant, "eager") for way, variant in ways.items()}
    least, first = (min(each[way].us for way in ways if way != ALONE) for each in (found, eager))
    return [
        {**asdict(point), "way": way, **asdict(each),
         "fastest": way != ALONE and each.us == least,
         "eager_us": eager[way].us, "eager_efficiency": eager[way].efficiency,
         "fastest_eager": way != ALONE and eager[way].us == first}
        for way, each in found.items()
    ]  # fmt: skip


def _accepts(predictor: Predictor, point: OpPoint, variant: Variant) -> bool:
    return predictor.able(point, variant) and _has(point, variant)


def _has(point: OpPoint, variant: Variant) -> bool:
    """Whether the point's operator has this implementation with these options."""
    found = OPERATORS[point.op].implementations.get(variant.name)
    return found is not None and accepts(found, variant)


def _lacking(predictor: Predictor, points: list[OpPoint], wanted: list[Variant]) -> list[str]:
    """A line for each reason why the machine cannot predict some of the implementations."""
    found: dict[str, dict[str, None]] = {}
    for point in points:
        for variant in wanted:
            why = predictor.lacks(point, variant)
            if why is not None and _has(point, variant):
                found.setdefault(why, {})[variant.name] = None
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]
