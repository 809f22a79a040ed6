"""Prefill by plan and transport, side by side on several GPUs.

    python benchmarks/prefill.py --nproc 4 [--layers 8] [--cases 1x1024 64x1024]
        [--reducers async collective copy fused] [--rounds 7] [--carveout SMS]

Random weights. Each time is from token ids on the host to the first token chosen, the slowest
rank's, the median over rounds in which all configurations take turns. "exposed" is the time beyond
that of the same plan without communication. The floor is the FLOPs over the rate of a large
matmul in the same run. `async` is NCCL's all-reduce; `fused` is ladder.parallel.prefill, whose
operators the table that LADDER_OPS_TABLE names picks; the others are transports of
ladder.comm.transports. "differs" compares the logits with those of the plan's first reducer. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ladder.bench.floors import bandwidth, matrix_rate, prefill_floor_s
from ladder.bench.inference.build import random_model
from ladder.bench.inference.command import machine
from ladder.bench.inference.points import InferencePoint, load_shape, resolve
from ladder.comm.transports import TRANSPORTS
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.infer.session import Session
from ladder.models.errors import UserError
from ladder.models.reducer import Reducer
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.prefill import FusedPrefill
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sharded import ShardedReducer
from ladder.parser import Parser, parse_words

PLANS = {"standard": "none", "ladder": "ladder no_comm"}  # a plan: the one without communication


@dataclass
class Line:
    """One row of the table: a model, the reducer of its prompts, and its session."""

    plan: str
    reducer: str
    model: Transformer
    prompts: Reducer
    session: Session | None = None
    times: list[float] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def prefill(self, prompts: Sequence[Sequence[int]], uniforms: torch.Tensor) -> float:
        """Milliseconds on this rank."""
        assert self.session is not None
        self.model.use(replace(self.model.runtime, pick=lambda shape: self.prompts))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        self.session.prefill(prompts, uniforms)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def lines_of(options: argparse.Namespace, device: torch.device) -> list[Line]:
    world, found = launch.world_size(), []
    for plan, no_comm in [*((p, False) for p in PLANS), ("none", False), ("ladder", True)]:
        point = InferencePoint(
            options.model, plan, "async", world, 1, 1, 1, options.layers, no_comm=no_comm
        )
        config = resolve(point)
        model = Engine(random_model(config, "async", world, device)).model
        base = model.reducer
        assert isinstance(base, AsyncReducer)
        for reducer in ["-"] if config.plan.no_comm else options.reducers:
            prompts: Reducer = base
            if reducer in TRANSPORTS:
                prompts = ShardedReducer(base.ranks, base.group, config.plan, reducer)
            elif reducer == "fused":
                prompts = FusedPrefill(base.ranks, base.group, config.plan)
            found.append(Line(config.plan.name, reducer, model, prompts))
    return found


@torch.inference_mode()
def measure(lines: list[Line], batch: int, prompt: int, rounds: int, device: torch.device) -> None:
    vocabulary = lines[0].model.config.vocab_size
    source = torch.Generator().manual_seed(0)
    for line in lines:
        line.times.clear()
        line.session = Session(line.model, batch, prompt + 64, Sampling(), True, True)
    for turn in range(rounds + 2):  # the first two warm up: buffers, graphs
        prompts = torch.randint(0, vocabulary, (batch, prompt), generator=source).tolist()
        uniforms = draws(Sampling(), batch, 1)
        for line in lines:
            slowest = torch.tensor(line.prefill(prompts, uniforms), device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn > 1:
                line.times.append(float(slowest))
            assert line.session is not None
            line.logits = line.session.logits.float().clone()
    for line in lines:
        line.session = None
    gc.collect()
    torch.cuda.empty_cache()


def rows(lines: list[Line], floor: float) -> list[dict[str, Any]]:
    """The records of one case, one for each line."""
    medians = {(line.plan, line.reducer): statistics.median(line.times) for line in lines}
    records = []
    for line in lines:
        own = medians[line.plan, line.reducer]
        bare = medians.get((PLANS.get(line.plan, ""), "-"))
        first = next(other.logits for other in lines if other.plan == line.plan)
        assert first is not None
        assert line.logits is not None
        records.append(
            {
                "plan": line.plan,
                "reducer": line.reducer,
                "ms": own,
                "min_ms": min(line.times),
                "max_ms": max(line.times),
                "exposed": own / bare - 1 if bare else None,
                "of_none": own / medians["none", "-"],
                "of_floor": floor * 1e3 / own,
                "differs": float((line.logits - first).norm() / first.norm()),
            }
        )
    return records


def main(options: argparse.Namespace) -> int:
    device = launch.join("cuda")
    if launch.world_size() == 1:
        raise UserError("nothing is communicated by one process; use --nproc")
    if options.carveout:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(options.carveout)
    speed, rate = bandwidth(device), matrix_rate(device)
    lines, head, results = lines_of(options, device), launch.rank() == 0, {}
    for case in options.cases:
        batch, prompt = map(int, case.split("x"))
        measure(lines, batch, prompt, options.rounds, device)
        config, tp = load_shape(options.model, options.layers), launch.world_size()
        floor = prefill_floor_s(config, tp, batch, prompt, speed, rate)
        results[case] = rows(lines, floor)
        if head:
            print(
                f"\n{case}, {options.model}, {config.num_layers} layers, TP {tp}: floor "
                f"{floor * 1e3:.2f} ms at {rate / 1e12:.0f} TFLOP/s\n{'plan':24}{'reducer':14}"
                f"{'ms':>9}{'min':>9}{'max':>9}{'exposed':>9}{'x none':>8}{'floor':>7}"
                f"{'differs':>9}"
            )
            for r in results[case]:
                exposed = "-" if r["exposed"] is None else f"{r['exposed']:.1%}"
                print(
                    f"{r['plan']:24}{r['reducer']:14}{r['ms']:9.2f}{r['min_ms']:9.2f}"
                    f"{r['max_ms']:9.2f}{exposed:>9}{r['of_none']:8.3f}{r['of_floor']:7.0%}"
                    f"{r['differs']:9.1e}",
                    flush=True,
                )
    if head:
        record = machine(device, speed, rate) | {
            "command": " ".join(["python", *sys.argv]),
            "options": vars(options),
            "results": results,
        }
        print(json.dumps(record))
    return 0


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=1, help="GPUs; 1 under torchrun")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=0, help="instead of all")
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024"])
    parser.add_argument(
        "--reducers",
        nargs="+",
        choices=["async", "fused", *TRANSPORTS],
        default=["async", "collective", "copy", "fused"],
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--carveout", type=int, default=0, help="SMs that cuBLAS is to leave free")
    return parse_words(parser)


if __name__ == "__main__":
    arguments = parse()
    raise SystemExit(launch.run(main, (arguments,), nproc=arguments.nproc))
