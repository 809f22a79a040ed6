"""Times of decode steps in order: those right after a prefill, beside those after a pause.

    python benchmarks/steps.py [--nproc 2] [--model half-8b] [--plan ladder] [--batch 1 4 16 64]
        [--pauses 0 20 200]

Random weights; nothing is checked (`ladder bench inference` does). A pause is the milliseconds
between the end of a prefill and the first step. Each round times every pause, with a prompt of its
own; a step's time is its median over the rounds. Differences between the pauses come from the
prefill: for example, its power has lowered the clock. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from ladder.bench.inference.build import build_model
from ladder.bench.inference.measure import in_order
from ladder.bench.inference.points import InferencePoint, load_shape, resolve
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.infer.session import Session
from ladder.parallel import launch
from ladder.parser import Parser, parse_words
from ladder.records import facts

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NEAR = 1.02  # a step that takes this many settled times or less is settled


def decode(session: Session, prompts: list[torch.Tensor], steps: int, pause: float) -> list[float]:
    """Milliseconds of each step, after a prefill and a pause in milliseconds."""
    uniforms = draws(Sampling(), len(prompts), steps + 1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    if launch.world_size() > 1:
        dist.barrier()
    session.prefill(prompts, uniforms)
    if pause:
        torch.cuda.synchronize()
        time.sleep(pause / 1e3)
    marks[0].record()
    for mark in marks[1:]:
        session.step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def settled(steps: Sequence[float]) -> tuple[float, int, float]:
    """The settled time (median of the second half); the steps before one near it; their time."""
    late = statistics.median(steps[len(steps) // 2 :])
    slow = next((n for n, step in enumerate(steps) if step <= NEAR * late), len(steps))
    return late, slow, sum(steps[:slow])


@torch.inference_mode()
def main(options: argparse.Namespace) -> int:
    device, tp = launch.join("cuda"), launch.world_size()
    reducer = "push" if tp > 1 else "async"
    layers, results = load_shape(options.model).num_layers, {}
    point = InferencePoint(options.model, options.plan, reducer, tp, 1, options.prompt, 1, layers)
    config = resolve(point)
    engine = Engine(build_model(point, config, reducer, device))
    source = torch.Generator().manual_seed(0)
    for batch in options.batch:
        session = engine.session(batch, options.prompt + options.steps + 1, Sampling())
        times: dict[float, list[list[float]]] = {pause: [] for pause in options.pauses}
        for turn in range(options.rounds + 1):  # the first warms up
            for pause, found in times.items():
                shape = (batch, options.prompt)
                prompts = list(torch.randint(0, config.vocab_size, shape, generator=source))
                steps = decode(session, prompts, options.steps, pause)
                found += [steps] if turn else []
        results[batch] = {pause: in_order(found) for pause, found in times.items()}
        for pause, steps in results[batch].items() if launch.rank() == 0 else ():
            late, slow, lasted = settled(steps)
            every = sorted(step for each in times[pause] for step in each)
            shown = " ".join(f"{n}:{steps[n - 1] / late:.3f}" for n in SHOWN if n <= len(steps))
            print(
                f"batch {batch}, pause {pause:g} ms: settled {late:.3f} ms, after {slow} steps "
                f"({lasted:.0f} ms); p99 {every[int(len(every) * 0.99)] / late:.3f} of it; step: "
                f"{shown}",
                flush=True,
            )
    if launch.rank() == 0:
        record = facts(torch.cuda.get_device_name(device)) | {
            "gpus": tp,
            "command": " ".join(["python", *sys.argv]),
            "results": results,
        }
        print(json.dumps(record))
    return 0


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=1, help="GPUs; 1 under torchrun")
    parser.add_argument("--model", default="half-8b")
    parser.add_argument("--plan", default="ladder")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--pauses", nargs="+", type=float, default=[0.0, 20.0, 200.0])
    parser.add_argument("--rounds", type=int, default=5)
    return parse_words(parser)


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.run(main, (given,), given.nproc))
