"""Timing of points that are in memory together and take turns, so that drift affects all alike."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.bench.floors import prefill_floor_s
from ladder.bench.inference.build import build_model
from ladder.bench.inference.memory import STEPS, point_bytes, sequences
from ladder.bench.inference.points import InferencePoint, cache_kind, counterpart, resolve
from ladder.bench.inference.profile import profile_session
from ladder.bench.inference.verify import (
    EngineCheck,
    Reference,
    check_session,
    reference,
)
from ladder.costs import HEADROOM, WORKSPACES, decode_bytes
from ladder.infer.engine import Engine
from ladder.infer.fused import PassReducers
from ladder.infer.sampling import Sampling, draws
from ladder.infer.session import Session
from ladder.models.config import ModelConfig
from ladder.parallel import launch
from ladder.parallel.choose import REDUCERS
from ladder.parallel.sharding import local_tensor

ROUNDS = 3


@dataclass(frozen=True)
class InferenceTimes:
    """The times of a point in milliseconds: medians over rounds, except for decode steps.

    prefill: from token ids on the host to the first token chosen. decode: between the ends of
    consecutive steps, median and p99 over all steps of all rounds, and of each step in order the
    median over the rounds (older records lack it); its floor is a step's bytes over the bandwidth.
    prefill_floor: None with activations in fp8: the rate is of products in bf16.
    total: from the start of the prefill to the last of new_tokens tokens, in one go.
    memory: weights, KV cache and graphs, on the fullest rank. picked: message bytes -> the
    algorithm that the reducer used; None if the reducer does not report it. chosen: the reducer of
    a prefill and of a decode step, and the reason, by phase (see `choices`).
    """

    prefill_ms: float
    prefill_rounds_ms: list[float]
    prefill_floor_ms: float | None
    decode_ms: float
    decode_p99_ms: float
    decode_rounds_ms: list[float]
    decode_steps_ms: list[float]
    floor_ms: float
    total_ms: float
    memory_gib: float
    picked: dict[str, str] | None
    chosen: dict[str, str]


@dataclass
class TimedSession:
    """A session of a point: built, checked and ready to be timed."""

    point: InferencePoint
    config: ModelConfig
    session: Session
    memory: float
    check: EngineCheck


def worst(value: float, device: torch.device) -> float:
    """The largest of all ranks' values, so that all ranks make the same decision."""
    if launch.world_size() == 1:
        return value
    everywhere = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return float(everywhere)


def estimated_bytes(config: ModelConfig, point: InferencePoint) -> float:
    """The bytes of a point on each process."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return point_bytes(
        config, point.tp, point.batch, point.prompt, point.new_tokens, point.reducer,
        point.weights, point.cache, gpu,
    )  # fmt: skip


def free_bytes(device: torch.device) -> float:
    """The free bytes of the fullest device, plus WORKSPACES: estimates count these in full, also
    when a part of them is taken already."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return -worst(-min(free + WORKSPACES, total), device)


def chunks(
    points: Sequence[InferencePoint], free: float
) -> tuple[list[list[InferencePoint]], list[InferencePoint]]:
    """Groups of points that fit into memory together, and the points that do not fit at all.

    A plan stays with its counterpart if the two fit, since their difference is reported.
    """
    found: list[list[InferencePoint]] = []
    too_large: list[InferencePoint] = []
    units: list[list[InferencePoint]] = []
    for point in points:
        if estimated_bytes(resolve(point), point) > HEADROOM * free:
            too_large.append(point)
        elif units and point.plan == units[-1][0].plan:
            units[-1].append(point)
        else:
            units.append([point])
    left = 0.0
    for unit in units:
        needs = [estimated_bytes(resolve(point), point) for point in unit]
        if found and sum(needs) <= left:
            found[-1] += unit
            left -= sum(needs)
            continue
        for point, need in zip(unit, needs, strict=True):
            if not found or need > left or point is unit[0]:
                found.append([])
                left = HEADROOM * free
            found[-1].append(point)
            left -= need
    return found, too_large


@torch.inference_mode()
def measure(
    points: Sequence[InferencePoint],
    device: torch.device,
    speed: float,
    rate: float,
    traces: Callable[[InferencePoint], Path] | None = None,
    keep: Callable[[list[dict[str, Any]], list[str]], None] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of the points, and error messages for refused points; every rank must call this.

    speed: the memory's bytes per second; rate: FLOPs per second of a matmul. traces: the file of
    each point's trace. Traces are made after all timing, and after `keep` was called with the
    result, so that a trace that fails loses no figures.
    """
    expected = _references(points, device)
    sessions, refused = [], []
    for point in points:
        timed = _build(point, expected[_function(point)], device)
        if worst(float(not timed.check.passes), device):
            refused.append(f"{point}: {timed.check}; the engine is wrong, it is not timed")
            continue
        sessions.append(timed)
    expected.clear()
    timings = [Timings([], [], []) for _ in sessions]
    source = torch.Generator().manual_seed(0)
    for turn in range(ROUNDS + 1):  # the first warms up
        for timed, timing in zip(sessions, timings, strict=True):
            found = _round(timed, source)
            if turn:
                timing.add(found)
    records = []
    for timed, timing in zip(sessions, timings, strict=True):
        bare = counterpart(timed.point, timed.point.reducer)
        records.append(
            {
                "point": asdict(timed.point),
                "result": asdict(_result(timed, timing, speed, rate)),
                "check": asdict(timed.check),
                "no_comm": None if bare is None else [bare.plan, bare.no_comm],
            }
        )
    if keep is not None:
        keep(records, refused)
    for timed in sessions if traces is not None else ():
        assert traces is not None
        text = profile_session(
            timed.session, _prompts(timed, source), _uniforms(timed), traces(timed.point)
        )
        if text:  # on rank 0
            print(f"{timed.point}\n{text}\n", flush=True)
    return records, refused


def _function(point: InferencePoint) -> tuple[str, int, bool, str]:
    """What determines the function that a point of a case computes, and its plain reducer."""
    rounds = REDUCERS[point.reducer].rounds
    return point.plan, point.degree, point.no_comm, point.reducer if rounds else "async"


def _references(
    points: Sequence[InferencePoint], device: torch.device
) -> dict[tuple[str, int, bool, str], Reference]:
    """The reference of each plan, from the plain modules with NCCL; one model is in memory."""
    found: dict[tuple[str, int, bool, str], Reference] = {}
    for point in points:
        key = _function(point)
        if key not in found:
            config = resolve(point)
            model = build_model(point, config, key[-1], device)
            steps = min(STEPS, point.new_tokens)
            count = sequences(config, point.tp, point.batch, point.prompt)
            found[key] = reference(model, count, point.prompt, steps, cache_kind(point))
            del model
            gc.collect()
            torch.cuda.empty_cache()
    return found


def _build(point: InferencePoint, expected: Reference, device: torch.device) -> TimedSession:
    """The point's engine, captured, warmed up and checked."""
    free_bytes(device)  # frees the memory of earlier points
    config = resolve(point)
    model = build_model(point, config, point.reducer, device)
    engine = Engine(model, cache=cache_kind(point))
    session = engine.session(point.batch, point.prompt + point.new_tokens, Sampling())
    checked = check_session(session, expected)
    torch.cuda.empty_cache()  # the memory of the check
    prompts = list(expected.tokens[torch.arange(point.batch) % len(expected.tokens)])
    session.prefill([prompt[: point.prompt] for prompt in prompts], torch.zeros((1, point.batch)))
    torch.cuda.synchronize()
    return TimedSession(point, config, session, worst(held_bytes(session) / 2**30, device), checked)


def held_bytes(session: Session) -> int:
    """The session's bytes on this rank's GPU: weights, KV cache and graphs."""
    found = session.cache.tensors()
    for module in session.model.modules():
        own = (vars(module), module._parameters, module._buffers)  # packed weights are attributes
        found += [local_tensor(v) for each in own for v in each.values() if isinstance(v, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in found}
    graphs = [session.graph, *(graph for graph, _, _ in session.prompt_graphs.values())]
    pools = {graph.pool() for graph in graphs if graph is not None}
    segments = torch.cuda.memory_snapshot() if pools else []
    return sum(storage.nbytes() for storage in storages.values()) + sum(
        segment["total_size"] for segment in segments if segment["segment_pool_id"] in pools
    )


@dataclass
class Timings:
    """Milliseconds of each prefill, of each decode step (by rounds) and of each whole run."""

    prefills: list[float]
    steps: list[list[float]]
    totals: list[float]

    def add(self, found: tuple[float, list[float], float]) -> None:
        self.prefills.append(found[0])
        self.steps.append(found[1])
        self.totals.append(found[2])


def _round(timed: TimedSession, source: torch.Generator) -> tuple[float, list[float], float]:
    """Prefill new random prompts and decode all new tokens, once."""
    point, session = timed.point, timed.session
    prompts, uniforms = _prompts(timed, source), _uniforms(timed)
    session.prefill(prompts, uniforms)  # warms this configuration up, after that of another point
    start, *marks = [torch.cuda.Event(enable_timing=True) for _ in range(point.new_tokens + 1)]
    torch.cuda.synchronize()
    if launch.world_size() > 1:  # all ranks start together
        dist.barrier()
        torch.cuda.synchronize()
    start.record()
    session.prefill(prompts, uniforms)
    marks[0].record()
    for mark in marks[1:]:
        session.step()
        mark.record()
    torch.cuda.synchronize()
    steps = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return start.elapsed_time(marks[0]), steps, start.elapsed_time(marks[-1])


def in_order(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The median over rounds of each step, to a tenth of a microsecond."""
    return [round(statistics.median(step), 4) for step in zip(*rounds, strict=True)]


def _prompts(timed: TimedSession, source: torch.Generator) -> list[Tensor]:
    shape = (timed.point.batch, timed.point.prompt)
    return list(torch.randint(0, timed.config.vocab_size, shape, generator=source))


def _uniforms(timed: TimedSession) -> Tensor:
    return draws(Sampling(), timed.point.batch, timed.point.new_tokens)


def choices(session: Session, prompt: int) -> dict[str, str]:
    """The reducer of a prefill of `prompt` tokens and of a decode step, with the reason, by phase.

    Empty for a model that is not fused: its own reducer runs all passes.
    """
    pick = session.model.runtime.pick
    if not isinstance(pick, PassReducers):
        return {}
    batch, width = len(session.tokens), session.prompt_width(prompt)
    prefill = pick.choice(torch.Size((batch, width)), session.prompt_mode(width))
    return {"prefill": str(prefill), "decode": str(pick.choice(torch.Size((batch, 1))))}


def _result(timed: TimedSession, timing: Timings, speed: float, rate: float) -> InferenceTimes:
    point, config = timed.point, timed.config
    context = point.prompt + point.new_tokens / 2  # halfway through the new tokens
    ordered = sorted(step for steps in timing.steps for step in steps)
    picked = getattr(timed.session.model.reducer, "picked", None)
    floor = prefill_floor_s(config, point.tp, point.batch, point.prompt, speed, rate, point.weights)
    return InferenceTimes(
        prefill_ms=statistics.median(timing.prefills),
        prefill_rounds_ms=timing.prefills,
        prefill_floor_ms=1e3 * floor if point.activations == "bf16" else None,
        decode_ms=statistics.median(ordered),
        decode_p99_ms=ordered[int(len(ordered) * 0.99)],
        decode_rounds_ms=[statistics.median(steps) for steps in timing.steps],
        decode_steps_ms=in_order(timing.steps),
        floor_ms=1e3
        * decode_bytes(config, point.tp, point.batch, context, point.weights, point.cache)
        / speed,
        total_ms=statistics.median(timing.totals),
        memory_gib=timed.memory,
        picked=None if picked is None else {str(size): str(name) for size, name in picked.items()},
        chosen=choices(timed.session, point.prompt),
    )
