"""Times of whole decode steps with other cuts of their products, in turns, on one GPU.

    python benchmarks/cuts.py --cuts down=4x1024x2,2x4096x8 gate-up=1x2048x4 [--model llama-3-8b]
        [--plan ladder] [--batch 1] [--weights fp8] [--layers 8] [--context 1024] [--ranks 4]

A cut is BLOCKxSTEPxWARPS. For products in tiles (from 3 rows on) it is BLOCKxSTEPxWARPSxSTAGES, and
xPARTS may follow; `s` then swaps the operands, and with `/4` four programs share the columns of a
tile of QKV (`ladder.kernels.decode_shapes.Cut`). The products are qkv, o, gate-up, down and head;
they are tried one after the other. The cuts of a product take turns with the best so far, which is
what `decode_shapes.blocks` chooses until a cut takes 0.2 % less. Chains of products (products.py)
do not tell which cuts are fast in a step: in a step the next kernel is another one, and begins
before a product has ended.

With --ranks the model is the part of one of so many ranks. Its products push to the slots of all
ranks, which are all on its own GPU, and landings wait for these slots. So the time is that of a
rank's step without the links.

Random weights and cache. A cut whose logits differ from those of today's by more than rounding is
named, not timed, and makes the exit status 1. The last line is JSON, in microseconds a step.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from kernels import layer

from ladder.bench.inference.build import build_model
from ladder.bench.inference.points import InferencePoint, resolve
from ladder.infer.engine import Engine
from ladder.infer.graphs import time_turns
from ladder.infer.sampling import Sampling
from ladder.infer.session import Session
from ladder.kernels import decode_shapes
from ladder.kernels.decode_shapes import Cut, power_of_2
from ladder.kernels.landing import PushTarget
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.in_flight import InFlight
from ladder.parallel import launch
from ladder.parallel.decode import DecodePass, DecodeReducer
from ladder.parser import Parser, parse_words
from ladder.records import facts

TURNS, REPLAYS = 9, 30  # the first turn warms up
GAIN = 0.002  # of a step's time
SAME = 0.05  # of the logits' standard deviation, root mean square: rounding in another order
Key = tuple[int, int, bool]  # outputs, inputs, gated
SYNTAX = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?(?:x(\d+))?(s?)(?:/(\d+))?")


def products(config: ModelConfig) -> dict[str, Key]:
    shape = (
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        config.intermediate_size,
    )  # fmt: skip
    found = {name.replace(" and ", "-"): (n, k, gated) for name, n, k, _, gated in layer(shape)}
    return found | {"head": (config.vocab_size, config.hidden_size, False)}


def parse_cut(text: str, rows: int) -> Cut:
    found = SYNTAX.fullmatch(text)
    if not found:
        raise UserError(
            f"--cuts: {text!r} is no cut; give BLOCKxSTEPxWARPS, or of tiles "
            f"BLOCKxSTEPxWARPSxSTAGES and xPARTS, as 4x1024x2 or 32x128x4x6s"
        )
    shares = int(found[7] or 1)
    if shares < 1 or (shares > 1 and not found[4]):
        raise UserError(f"--cuts: {text!r}: /{shares} needs 1 or more, and the stages of a tile")
    block, step, warps, stages, parts = (int(each or 0) for each in found.groups()[:5])
    padded = max(16, power_of_2(rows)) if stages else power_of_2(rows)
    return Cut(padded, block, step, warps, stages, parts or 1, bool(found[6]), shares)


def parse_cuts(words: list[str], rows: int, known: Mapping[str, Key]) -> dict[str, dict[str, Cut]]:
    """By product, the cuts by their text."""
    found = {}
    for word in words:
        name, _, cuts = word.partition("=")
        if name not in known or not cuts:
            raise UserError(f"--cuts: {word!r} is not PRODUCT=CUT,..; products: {', '.join(known)}")
        found[name] = {each: parse_cut(each, rows) for each in cuts.split(",")}
        if name != "qkv" and any(cut.shares > 1 for cut in found[name].values()):
            raise UserError(
                f"--cuts: {word!r}: programs share the tiles of qkv alone; leave out /N"
            )
    return found


@contextmanager
def cut_as(chosen: Mapping[Key, Cut]) -> Iterator[None]:
    """Inside, captured steps cut the products of these keys as given."""
    today = decode_shapes.blocks
    parameters = inspect.signature(today)

    def blocks(*args: Any, **options: Any) -> Cut:
        given = parameters.bind(*args, **options).arguments
        cut = chosen.get((given["outputs"], given["size"], given["gated"]))
        if cut is None:
            return today(*args, **options)
        if given.get("pieces"):
            return cut._replace(padded=max(8, power_of_2(given["rows"])))
        return cut

    with mock.patch.object(decode_shapes, "blocks", blocks):
        yield


@contextmanager
def pushing_to_itself(ranks: int) -> Iterator[None]:
    """Inside, decode steps push to slots of so many ranks, all on this GPU. ranks=1 changes
    nothing."""
    begin = DecodeReducer.__init__
    found: dict[tuple[DecodeReducer, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}

    def reducer(self: DecodeReducer, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.pushes = True

    def new_slots(self: DecodePass) -> tuple[InFlight[torch.Tensor], PushTarget]:
        like, decode = self.residual.flatten(0, -2), self.decode
        if (decode, like.shape) not in found:  # before a step is captured
            slots = like.new_full((decode.sets, ranks, *like.shape), -0.0)  # empty
            # Rank 0's slot on rank r is rank r's slot here, so one push fills the slots of all.
            addresses = [slots[0, rank].data_ptr() for rank in range(ranks)]
            found[decode, like.shape] = slots, torch.tensor(addresses, device=like.device)
        slots, buffers = found[decode, like.shape]
        chosen = slots[self.turn % decode.sets]
        self.turn += 1
        return InFlight(chosen), PushTarget(buffers, chosen.storage_offset(), 0, ranks)

    if ranks == 1:
        yield
        return
    with (
        mock.patch.object(DecodeReducer, "__init__", reducer),
        mock.patch.object(DecodePass, "_new_slots", new_slots),
    ):
        yield


def capture(engine: Engine, batch: int, context: int) -> Session:
    """A session whose step is captured, over random keys and values."""
    session = Session(engine.model, batch, context + 128, Sampling(), fused=True, graphs=True)
    session.capture()
    generator = torch.Generator(session.tokens.device).manual_seed(0)
    for cache in (session.cache.keys, session.cache.values):
        cache.normal_(generator=generator)
    return session


def step(session: Session, context: int) -> torch.Tensor:
    """The logits of one step from the same state."""
    assert session.graph is not None
    session.positions.fill_(context)
    session.tokens.fill_(1)
    session.graph.replay()
    return session.graph_logits.float().clone()


def same_logits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by rounding in another order at most; NaN is never the same."""
    return bool((found - expected).square().mean().sqrt() <= SAME * expected.std())


def replays(graph: torch.cuda.CUDAGraph) -> None:
    for _ in range(REPLAYS):
        graph.replay()


def in_turns(sessions: Mapping[str, Session], context: int) -> dict[str, float]:
    """Microseconds of a step of each session, medians over turns."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(TURNS):
        for name, session in sessions.items():
            assert session.graph is not None
            session.positions.fill_(context)
            (ms,) = time_turns(partial(replays, session.graph), 1)
            if turn:
                times[name].append(1e3 * ms / REPLAYS)
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


@torch.inference_mode()
def main(options: argparse.Namespace) -> int:
    if options.ranks < 1:
        raise UserError(f"--ranks {options.ranks}: give 1 (nothing is pushed) or more")
    with pushing_to_itself(options.ranks):
        return try_cuts(options)


def try_cuts(options: argparse.Namespace) -> int:
    point = InferencePoint(
        options.model, options.plan, "async", 1, options.batch, options.context, 1,
        options.layers, weights=options.weights,
    )  # fmt: skip
    config = resolve(point)
    keys = products(config)
    wanted = parse_cuts(options.cuts, options.batch, keys)
    device = launch.join("cuda")
    engine = Engine(build_model(point, config, "async", device))
    chosen: dict[Key, Cut] = {}
    best = capture(engine, options.batch, options.context)
    expected = step(best, options.context)
    kept, rows, wrong = "today", [], False
    for name, cuts in wanted.items():
        sessions = {kept: best}
        for text, cut in cuts.items():
            with cut_as({**chosen, keys[name]: cut}):
                tried = capture(engine, options.batch, options.context)
            if not same_logits(step(tried, options.context), expected):
                print(f"{name} {text}: wrong logits", flush=True)
                wrong = True
                continue
            sessions[f"{name} {text}"] = tried
        us = in_turns(sessions, options.context)
        print(", ".join(f"{each} {time:.1f} us" for each, time in us.items()), flush=True)
        rows.append({"product": name, "us": us})
        fastest = min(us, key=lambda each: us[each])
        if us[fastest] < (1 - GAIN) * us[kept]:
            chosen[keys[name]] = cuts[fastest.split()[1]]
            kept, best = fastest, sessions[fastest]
    about = facts(torch.cuda.get_device_name(device)) | {
        "gpus": 1, "command": " ".join(["python", *sys.argv]), "steps": rows, "kept": kept,
    }  # fmt: skip
    print(json.dumps(about))
    return int(wrong)


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuts", nargs="+", required=True, metavar="PRODUCT=CUT,..")
    parser.add_argument("--model", default="quarter-8b")
    parser.add_argument("--plan", default="standard")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=1)
    return parse_words(parser)


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.run(main, (given,), 1))
