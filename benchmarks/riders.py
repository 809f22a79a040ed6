"""Times of whole decode steps with other ways for sends and landings to ride, in turns.

    python benchmarks/riders.py --nproc 2 --ways today 0/0 1/0 b16/2 b16/b16
        [--model half-8b] [--plan ladder] [--batch 16 64] [--weights fp8] [--layers 16]

A way is SEND/LANDING, of products in tiles (3 rows and more): the chunks (1024 elements of a row)
that each of the product's first programs has at once before its tile; 0: programs of its own,
behind the tiles; bN: N programs of its own (at most one for each row) of whole rows, beside tiles
which are so large that N multiprocessors have none. What would need more programs than the product
has takes the next larger number (1, 2, 4), or stays behind. `today`: what
`ladder.kernels.decode_shapes.ride` chooses.

Random weights and cache; sums by push, over all ranks. The steps of all ways are captured first,
and then take turns, so that clocks and memory are the same for all. A way whose logits are not
those of the first but for rounding is named and not timed, and makes the exit status 1. The last
line is JSON, in microseconds a step, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from cuts import capture, in_turns, same_logits, step

from ladder.bench.inference.build import build_model
from ladder.bench.inference.measure import worst
from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.ops.measure import slowest
from ladder.infer.engine import Engine
from ladder.kernels import decode_shapes
from ladder.kernels.decode_shapes import Ride
from ladder.models.errors import UserError
from ladder.parallel import launch
from ladder.parser import Parser, parse_words
from ladder.records import facts

SPANS = (0, 1, 2, 4)
TODAY, BESIDE = "today", "b"
ONE_WAY = re.compile(rf"[{''.join(map(str, SPANS))}]|{BESIDE}[1-9]\d*", re.ASCII)
Way = tuple[str, str]  # of sends, and of landings


def parse_way(text: str) -> Way | None:
    """None: today's."""
    if text == TODAY:
        return None
    send, _, landing = text.partition("/")
    if not (ONE_WAY.fullmatch(send) and ONE_WAY.fullmatch(landing)):
        known = ", ".join(map(str, SPANS))
        raise UserError(
            f"--ways: {text!r} is not SEND/LANDING, each of {known} or {BESIDE}N with a number N, "
            f"nor {TODAY}"
        )
    return send, landing


def ride(
    way: Way, sends: bool, rows: int, chunks: int, outputs: int, block: int, gated: bool,
    eight_bits: bool, most: int,
) -> Ride:  # fmt: skip
    """As `decode_shapes.ride`, whose place it takes."""
    of = way[0 if sends else 1]
    own = decode_shapes.rows_each(outputs, block, gated)
    if not rows:
        return Ride(1, 0, block, own)
    if of.startswith(BESIDE):
        programs = min(int(of.removeprefix(BESIDE)), rows)
        block, own = decode_shapes.leaving(programs, outputs, block, gated)
        return Ride(min(most, decode_shapes.power_of_2(chunks)), programs, block, own)
    tiles = -(-outputs // own)
    for span in SPANS:
        if 0 < int(of) <= span and rows * -(-chunks // span) <= tiles:
            return Ride(span, 0, block, own)
    return Ride(1, rows * chunks, block, own)


@contextmanager
def riding(way: Way | None) -> Iterator[None]:
    """Within, sends and landings ride so when a step is captured."""
    chosen = decode_shapes.ride if way is None else partial(ride, way)
    with mock.patch.object(decode_shapes, "ride", chosen):
        yield


def of_slowest(us: dict[str, float], device: torch.device) -> dict[str, float]:
    """The times of the slowest rank, way by way."""
    times = slowest(list(us.values()), device)
    return {name: round(time, 1) for name, time in zip(us, times, strict=True)}


@torch.inference_mode()
def main(options: argparse.Namespace) -> int:
    ways = {text: parse_way(text) for text in options.ways}
    device = launch.join("cuda")
    first, rows, wrong = launch.rank() == 0, [], False
    for batch in options.batch:
        point = InferencePoint(
            options.model, options.plan, "push", launch.world_size(), batch, options.context, 1,
            options.layers, weights=options.weights,
        )  # fmt: skip
        if not rows:
            engine = Engine(build_model(point, resolve(point), "push", device))
        sessions = {}
        for text, way in ways.items():
            with riding(way):
                session = capture(engine, batch, options.context)
            logits = step(session, options.context)
            if not sessions:
                expected = logits
            if worst(float(not same_logits(logits, expected)), device) == 0:  # on all ranks
                sessions[text] = session
            else:
                print(f"{batch} sequences, {text}: wrong logits", flush=True)
                wrong = True
        us = of_slowest(in_turns(sessions, options.context), device)
        rows.append({"batch": batch, "us": us})
        if first:
            each = ", ".join(f"{way} {time:.1f} us" for way, time in us.items())
            print(f"{batch} sequences: {each}", flush=True)
    if first:
        about = facts(torch.cuda.get_device_name(device)) | {
            "gpus": launch.world_size(), "command": " ".join(["python", *sys.argv]), "steps": rows,
        }  # fmt: skip
        print(json.dumps(about))
    return int(wrong)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=[TODAY, "0/0"])
    parser.add_argument("--model", default="half-8b")
    parser.add_argument("--plan", default="ladder")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    return parse_words(parser, argv)


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.run(main, (given,), given.nproc))
