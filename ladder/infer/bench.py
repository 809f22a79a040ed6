"""`ladder bench inference`: prefill and decode of several plans and reducers, side by side.

All configurations of a batch size live at once and take turns, round by round, so that drift hits
all alike. `none` is the bound: the standard wiring with its sublayers' reduces dropped.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ladder import __version__
from ladder.config import load_plan, model_config
from ladder.files import make_folder
from ladder.infer.engine import Engine, Session
from ladder.infer.sampling import Sampling, draws
from ladder.models.config import ModelConfig
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.sharding import local_parameters, place

ROUNDS = 3
COPY_BYTES = 2**31


@dataclass(frozen=True)
class Point:
    """One configuration to measure."""

    model: str
    plan: str
    reducer: str
    tp: int
    batch: int
    prompt: int
    new_tokens: int
    layers: int


@dataclass(frozen=True)
class Result:
    """Milliseconds. decode: over all steps of all rounds; floor: a step's bytes over bandwidth."""

    prefill_ms: float
    decode_ms: float
    decode_p99_ms: float
    floor_ms: float
    memory_gib: float


def random_model(
    config: ModelConfig,
    reducer: str,
    tp: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Transformer:
    """The model with random weights made on the device: for timing, not for quality."""
    mesh = launch.make_mesh(device, tp)
    with torch.device("meta"):
        model = Transformer(config)
    where = None if mesh is None else mesh["tp"]
    place(model, where, device=device, dtype=dtype, reducer=reducer)
    torch.manual_seed(launch.rank())
    with torch.no_grad():
        for name, weight, _ in local_parameters(model):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02)
    return model


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start, end = _events()
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / statistics.median(times)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@torch.inference_mode()
def measure(points: Sequence[Point], configs: Sequence[ModelConfig], device: torch.device,
            speed: float) -> list[Result]:  # fmt: skip
    """Time points of one batch size together; every rank calls this alike."""
    sessions: list[Session] = []
    memory: list[float] = []
    for point, config in zip(points, configs, strict=True):
        before = torch.cuda.memory_allocated(device)
        model = random_model(config, point.reducer, point.tp, device)
        engine = Engine(model)
        length = point.prompt + point.new_tokens
        sessions.append(engine.session(point.batch, length, Sampling()))
        memory.append((torch.cuda.memory_allocated(device) - before) / 2**30)
    prefills: list[list[float]] = [[] for _ in points]
    steps: list[list[float]] = [[] for _ in points]
    source = torch.Generator().manual_seed(0)
    for turn in range(ROUNDS + 1):  # the first warms up
        for i, (point, session) in enumerate(zip(points, sessions, strict=True)):
            shape = (point.batch, point.prompt)
            vocabulary = configs[i].vocab_size
            prompts = torch.randint(0, vocabulary, shape, generator=source).tolist()
            uniforms = draws(Sampling(), point.batch, point.new_tokens)
            session.prefill(prompts, uniforms)
            _line_up()
            start, end = _events()
            start.record()
            session.prefill(prompts, uniforms)
            end.record()
            end.synchronize()
            prefills[i].append(start.elapsed_time(end))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(point.new_tokens)]
            _line_up()
            for mark in marks:
                mark.record()
                session.step()
            torch.cuda.synchronize()
            if turn:
                steps[i] += [a.elapsed_time(b) for a, b in pairwise(marks)]
    results = []
    for i, (point, config) in enumerate(zip(points, configs, strict=True)):
        floor = decode_bytes(config, point) / speed * 1e3
        ordered = sorted(steps[i])
        results.append(
            Result(
                prefill_ms=statistics.median(prefills[i][1:]),
                decode_ms=statistics.median(ordered),
                decode_p99_ms=ordered[int(len(ordered) * 0.99)],
                floor_ms=floor,
                memory_gib=memory[i],
            )
        )
    return results


def _line_up() -> None:
    """Let all ranks start together."""
    torch.cuda.synchronize()
    if launch.world_size() > 1:
        torch.distributed.barrier()
        torch.cuda.synchronize()


def decode_bytes(config: ModelConfig, point: Point) -> float:
    """Bytes that a rank must read for one decode step, halfway through the new tokens (bf16)."""
    size, head = config.hidden_size, config.head_dim
    attention = size * head * (2 * config.num_heads + 2 * config.num_kv_heads)
    per_layer = (attention + 3 * size * config.intermediate_size) / point.tp
    kv_heads = max(1, config.num_kv_heads / point.tp)
    context = point.prompt + point.new_tokens / 2
    cache = 2 * kv_heads * head * context * point.batch
    vocabulary = config.vocab_size * size / point.tp
    return 2 * (config.num_layers * (per_layer + cache) + vocabulary)


def finished(file: Path) -> dict[Point, dict[str, Any]]:
    """The points that a result file holds already."""
    if not file.is_file():
        return {}
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {Point(**record["point"]): record for record in records}


def main(options: Any) -> int:
    """Run `ladder bench inference` on this rank; rank 0 prints and writes."""
    device = launch.join("cuda")
    world = launch.world_size()
    launch.agree({"options": {k: str(v) for k, v in vars(options).items() if k != "verb"}})
    out = Path(options.out)
    make_folder(out)
    file = out / "inference.jsonl"
    done = finished(file)
    speed = bandwidth(device)
    head = launch.rank() == 0
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "ladder": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "bandwidth_tb_s": speed / 1e12,
    }
    overrides = {"num_layers": options.layers} if options.layers else {}
    shape = model_config({"name": options.model, **overrides})
    for batch in options.batch:
        points, configs = [], []
        for plan in options.plans:
            for reducer in options.reducers:
                if plan == "none" and reducer != options.reducers[0]:
                    continue  # it reduces nothing
                plan_of_t = resolve_plan(load_plan(plan), shape.num_layers, world)
                degree = world if plan_of_t.depends_on_tp else None
                config = replace(shape, plan=plan_of_t, tp_degree=degree)
                point = Point(options.model, plan, reducer, world, batch, options.prompt,
                              options.new_tokens, config.num_layers)  # fmt: skip
                if point not in done:
                    points.append(point)
                    configs.append(config)
        if not points:
            continue
        results = measure(points, configs, device, speed)
        if head:
            with file.open("a", encoding="utf-8") as stream:
                for point, result in zip(points, results, strict=True):
                    record = {"point": asdict(point), "result": asdict(result), "machine": facts}
                    done[point] = record
                    stream.write(json.dumps(record) + "\n")
            print(table([done[point] for point in points]), flush=True)
        torch.cuda.empty_cache()
    return 0


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records of one batch size as text, with each plan's ratio to `none` and to standard."""
    by_plan = {(r["point"]["plan"], r["point"]["reducer"]): r["result"] for r in records}
    bound = next((r for (plan, _), r in by_plan.items() if plan == "none"), None)
    standard = min(
        (r["decode_ms"] for (plan, _), r in by_plan.items() if plan == "standard"), default=None
    )
    point = records[0]["point"]
    lines = [
        f"{point['model']}, {point['layers']} layers, TP {point['tp']}, batch {point['batch']}, "
        f"prompt {point['prompt']}, {point['new_tokens']} new tokens",
        f"{'plan':14}{'reducer':9}{'prefill ms':>11}{'decode ms':>11}{'p99':>9}{'floor':>8}"
        f"{'of floor':>9}{'tokens/s':>10}{'x none':>8}{'speed-up':>9}",
    ]
    for (plan, reducer), r in by_plan.items():
        ratio = f"{r['decode_ms'] / bound['decode_ms']:.3f}" if bound else "-"
        gain = f"{standard / r['decode_ms']:.3f}" if standard else "-"
        lines.append(
            f"{plan:14}{reducer:9}{r['prefill_ms']:11.2f}{r['decode_ms']:11.3f}"
            f"{r['decode_p99_ms']:9.3f}{r['floor_ms']:8.3f}{r['floor_ms'] / r['decode_ms']:9.0%}"
            f"{1e3 * point['batch'] / r['decode_ms']:10,.0f}{ratio:>8}{gain:>9}"
        )
    return "\n".join(lines)


def commit() -> str:
    """The commit of the checkout that this package lies in, or `unknown`."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
