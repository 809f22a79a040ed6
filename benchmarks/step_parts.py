"""What each part of a layer adds to a decode step, on one GPU.

    python benchmarks/step_parts.py [--model quarter-8b] [--plans ladder standard]
        [--batch 1 4 16 64] [--weights bf16] [--cache auto] [--context 1024] [--out FILE]

The default model has the shapes of a rank of an 8B at TP 4, without its communication. CUDA graphs
of the same step, with random weights, are captured with all kernels and with some parts of a layer
left out: the products, attention, or the landings. All graphs take turns, in another order each
round; a time is the median of the rounds, in microseconds of a layer, less what a step takes
without any of the three (embedding, head, choice: `rest`, in microseconds of a step). Where plans
lag, products alone run on two streams, as they do in the step.

floor: the bytes of the layer's weights and of its cache over the bandwidth of a large copy (read +
write) in the same run. Nothing is checked: `ladder bench inference` does that. --out: a line of
JSON for each point.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ladder.bench.floors import bandwidth
from ladder.bench.inference.build import build_model
from ladder.bench.inference.points import InferencePoint, load_shape, resolve
from ladder.infer import fused
from ladder.infer.engine import Engine
from ladder.infer.graphs import time_turns
from ladder.infer.sampling import Sampling
from ladder.infer.session import Session
from ladder.kernels.limits import MAX_ROWS
from ladder.models.storage import QUANTISED
from ladder.parallel import decode
from ladder.parallel.matrix import Matrix
from ladder.parser import Parser, parse_words
from ladder.records import facts

# The parts of a layer that each graph keeps.
KEPT: dict[str, tuple[str, ...]] = {
    "layer": ("products", "landings", "attention"),
    "products": ("products",),
    "products, landings": ("products", "landings"),
    "products, attention": ("products", "attention"),
    "landings": ("landings",),
    "attention": ("attention",),
    "rest": (),
}
ROUNDS, WARM, STEPS = 15, 3, 8


class Placeholders:
    """Results of kernels that are left out: random, and the same for each shape."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        key = len(x), columns, dtype or x.dtype
        if key not in self.held:
            values = torch.randn(key[:2], device=x.device)
            self.held[key] = values.to(key[2])
        return self.held[key]

    def attention(
        self, packed: Tensor, *others: Any, gives: torch.dtype | None, **options: bool
    ) -> Tensor:
        heads, kept = others[4], others[2].shape[-1]
        return self.like(packed, heads * kept, gives)


@contextlib.contextmanager
def only(kept: tuple[str, ...], placeholders: Placeholders, head: Matrix) -> Iterator[None]:
    """Inside, captured steps leave out the parts of a layer that are not `kept`."""
    project = decode.Read.project

    def column(read: decode.Read, weight: Matrix, beside: bool) -> Tensor:
        if weight is head:  # no part of a layer
            return project(read, weight, beside)
        return placeholders.like(read.residual, weight.outputs).unsqueeze(1)

    def row(step: decode.DecodePass, product: decode.Product, *others: Any) -> Tensor:
        return placeholders.like(step.residual, product.weight.outputs)

    with contextlib.ExitStack() as stack:
        if "products" not in kept:
            stack.enter_context(mock.patch.object(decode.Read, "project", column))
            stack.enter_context(mock.patch.object(decode.DecodePass, "_run", row))
        if "landings" not in kept:
            stack.enter_context(mock.patch.object(decode, "land"))
        if "attention" not in kept:
            stack.enter_context(
                mock.patch.object(fused, "decode_attention", placeholders.attention)
            )
        yield


def sessions_of(engine: Engine, batch: int, context: int) -> dict[str, Session]:
    placeholders, found = Placeholders(), {}
    for name, kept in KEPT.items():
        with only(kept, placeholders, engine.model.lm_head):
            session = Session(
                engine.model, batch, context + STEPS, Sampling(), True, True, engine.cache
            )
            session.capture()
        for layer in (*session.cache.keys, *session.cache.values):
            layer.copy_(torch.randn(layer.shape, device=layer.device))
        found[name] = session
    return found


def measure(sessions: dict[str, Session], context: int) -> dict[str, float]:
    """Microseconds of a step of each session."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    order = list(sessions)
    for turn in range(ROUNDS + WARM):
        random.shuffle(order)
        for name in order:
            session = sessions[name]
            assert session.graph is not None
            session.positions.fill_(context)
            taken = time_turns(session.graph.replay, STEPS)
            times[name] += [each * 1e3 for each in taken] if turn >= WARM else []
    return {name: statistics.median(each) for name, each in times.items()}


def bytes_of(engine: Engine, session: Session, context: int) -> dict[str, float]:
    """Bytes that one layer reads."""
    layer = engine.model.model.layers[0]
    matrices = [each for each in layer.modules() if isinstance(each, Matrix)]
    keys = session.cache.keys[0]
    return {
        "products": float(sum(each.weight.nbytes for each in matrices)),
        "attention": 2 * keys.nbytes / keys.shape[2] * context,
    }


def show(record: dict[str, Any]) -> None:
    layer, floor = record["us"], record["floor"]
    landings = layer["products, landings"] - layer["products"]
    attention = layer["layer"] - layer["products, landings"]
    print(
        f"{record['plan']:>9} {record['batch']:>5}: floor {floor['products']:.1f} + "
        f"{floor['attention']:.1f}; layer {layer['layer']:.1f} = products {layer['products']:.1f}, "
        f"landings {landings:+.1f}, attention {attention:+.1f}; alone landings "
        f"{layer['landings']:.1f}, attention {layer['attention']:.1f}; without landings "
        f"{layer['products, attention']:.1f}; rest of a step {record['rest']:.1f}",
        flush=True,
    )


@torch.inference_mode()
def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: there is nothing to measure")
    device = torch.device("cuda")
    rate, layers = bandwidth(device), load_shape(options.model).num_layers
    about = facts(torch.cuda.get_device_name()) | {
        "command": " ".join(["python", *sys.argv]),
        "bandwidth": rate,
    }
    for plan in options.plans:
        point = InferencePoint(
            options.model, plan, "async", 1, 1, options.context, 1, layers, weights=options.weights
        )  # fmt: skip
        model = build_model(point, resolve(point), "async", device)
        engine = Engine(model, cache=options.cache)
        for batch in options.batch:
            sessions = sessions_of(engine, batch, options.context)
            times = measure(sessions, options.context)
            rest = times.pop("rest")
            floors = bytes_of(engine, sessions["layer"], options.context)
            record = about | {
                "model": options.model, "plan": plan, "batch": batch, "rest": rest,
                "weights": options.weights, "cache": options.cache, "context": options.context,
                "us": {name: (each - rest) / layers for name, each in times.items()},
                "floor": {name: each / rate * 1e6 for name, each in floors.items()},
            }  # fmt: skip
            show(record)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            del sessions
        del engine, model
    return 0


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quarter-8b")
    parser.add_argument("--plans", nargs="+", default=["ladder", "standard"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--weights", choices=["bf16", *QUANTISED], default="bf16")
    parser.add_argument("--cache", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="appended: a line of JSON for each point")
    options = parse_words(parser)
    if not all(1 <= batch <= MAX_ROWS for batch in options.batch):
        parser.error(f"--batch {options.batch}: give 1 to {MAX_ROWS}, as fused decode steps have")
    return options


if __name__ == "__main__":
    sys.exit(main(parse()))
