"""Timing of training steps, in turns with those of other points in memory."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ladder.bench.trace import profile
from ladder.bench.training.no_comm import NoCommReducer, NoCommSequenceReducer
from ladder.bench.training.points import (
    TrainingPoint,
    is_virtual,
    parse_layout,
    recipe_of,
    shape_of,
)
from ladder.models.parameters import INIT_STD, Initialisation
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.apply import make_model
from ladder.parallel.data import data_parallel
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import local_parameters
from ladder.records import file_name
from ladder.train.config import TrainConfig
from ladder.train.optim import make_optimizer
from ladder.train.prefetch import Batch, MicroBatch
from ladder.train.speed import utilisation
from ladder.train.step import Outcome, take_step

TURNS = 3  # turns of each point
LEAD = 2  # untimed steps at the start of a turn, in which the host gets ahead of the GPU
ROOM = 1.5  # times the memory of the largest point must be free to add another point
HEAD_START = 0.25  # seconds by which the host is ahead of the GPU in a traced pass, as in training


def training_model(
    point: TrainingPoint, recipe: TrainConfig, tp_degree: int, device: torch.device
) -> tuple[Transformer, DeviceMesh | None]:
    """The point's model with random weights, and its mesh."""
    mesh = make_mesh(device, recipe.tp, recipe.dp_shard)
    no_comm = NoCommSequenceReducer if recipe.sequence_parallel else NoCommReducer
    model = make_model(
        shape_of(point, tp_degree),
        getattr(torch, recipe.dtype),
        mesh,
        device,
        sequence_parallel=recipe.sequence_parallel,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        reducer=no_comm if point.no_comm else recipe.reducer,
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, local, _ in local_parameters(model):
            ones = model.specs[name].init is Initialisation.ONES
            local.fill_(1.0) if ones else local.normal_(0.0, INIT_STD)
    return model, mesh


@dataclass
class TimedStep:
    """The training step of a point whose model is in memory, and its times.

    times: ms of the steps so far. memory: the peak bytes of its tensors. reserved: the peak bytes
    that the allocator reserved.
    """

    point: TrainingPoint
    model: Transformer
    batch: Batch
    step: Callable[[], Callable[[], Outcome]]
    times: list[float]
    memory: int
    reserved: int


def prepare_point(point: TrainingPoint, tp_degree: int, device: torch.device) -> TimedStep:
    """The step of a point, with its model in memory and warmed up."""
    recipe = recipe_of(point)
    cuda, others = device.type == "cuda", (0, 0)
    if cuda:
        others = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    model, mesh = training_model(point, recipe, tp_degree, device)
    optimizer = make_optimizer(model, recipe)
    source = torch.Generator().manual_seed(data_parallel(mesh)[1])
    shape = (point.batch, point.seq_len)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=source).to(device)
    parts = [MicroBatch(each, each, None) for each in tokens.split(point.micro_batch)]
    batch = Batch([], parts, tokens.numel())
    step = functools.partial(take_step, model, optimizer, batch, mesh, recipe.grad_clip)
    timed = TimedStep(point, model, batch, step, [], 0, 0)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    take_turn(timed, 1, device)
    timed.times.clear()
    if cuda:
        timed.memory = torch.cuda.max_memory_allocated(device) - others[0]
        timed.reserved = torch.cuda.max_memory_reserved(device) - others[1]
    return timed


def take_turn(timed: TimedStep, steps: int, device: torch.device) -> None:
    """Take LEAD steps, then `steps` timed ones. Raises RuntimeError if a result is not finite."""
    outcomes: list[Callable[[], Outcome]] = []
    ends: list[Any] = []
    for step in range(LEAD + steps):
        outcomes.append(timed.step())
        ends.append(_now(device))
        if step:
            outcomes[step - 1]()  # as `ladder train` does: the host is a step ahead
    for outcome in (each() for each in outcomes):
        if not outcome.finite:
            raise RuntimeError(f"{timed.point}: not finite: {outcome}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    timed.times += [_between(*each) for each in itertools.pairwise(ends[LEAD - 1 :])]


def measure(timed: Sequence[TimedStep], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Time `steps` steps of each point, in turns: milliseconds on this rank, and memory."""
    turns = min(TURNS, steps)
    for turn in range(turns):
        for each in timed:
            take_turn(each, steps // turns + (turn < steps % turns), device)
    return [_result(each, device) for each in timed]


def _result(timed: TimedStep, device: torch.device) -> dict[str, Any]:
    point = timed.point
    result: dict[str, Any] = {"step_ms": statistics.median(timed.times), "steps_ms": timed.times}
    replicas = launch.world_size() // parse_layout(point.layout).tp
    rate = 1e3 * point.batch * point.seq_len * replicas / result["step_ms"]
    result["tokens_s_gpu"] = rate / launch.world_size()
    result |= utilisation(timed.model.config, point.seq_len, rate, device)
    if device.type == "cuda":
        result["memory_gib"] = timed.memory / 2**30  # without that of other points
        result["memory_reserved_gib"] = timed.reserved / 2**30
    return result


def has_room(
    timed: Sequence[TimedStep], point: TrainingPoint, tp_degree: int, device: torch.device
) -> bool:
    """Whether every rank has memory for one more point, by a conservative estimate.

    Points of one layout take equal memory. Virtual ranks take more, by an unknown amount, so such
    points stay alone. (They are the last of their layout.)
    """
    if point.layout != timed[0].point.layout or is_virtual(point, tp_degree):
        return False
    if device.type == "cuda":
        release_memory(device)
        free, need = torch.cuda.mem_get_info(device)[0], max(each.reserved for each in timed)
    elif "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return False
    else:  # weights, gradients and moments, on all ranks
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        held = [local.nbytes for _, local, _ in local_parameters(timed[0].model)]
        need = 4 * sum(held) * launch.world_size()
    return all(launch.gathered(need * ROOM < free))


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _now(device: torch.device) -> Any:
    """The time; on a GPU an event after the work launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    """Milliseconds between two times of `_now`, whose events must have completed."""
    if isinstance(before, float):
        return 1e3 * (after - before)
    return float(before.elapsed_time(after))


def trace_passes(timed: TimedStep, device: torch.device, out: Path) -> dict[str, dict[str, float]]:
    """Trace a micro-batch, written to a new file in `out`; returns the figures of each pass in ms.

    hidden: the share of the communication that ran under computation.
    """
    number = len(list(out.glob("trace-*.json.gz")))
    name = file_name(f"{timed.point.layout}-{timed.point.plan}")
    file = out / f"trace-{number:03d}-{name}.json.gz"
    part, loss = timed.batch.parts[0], torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = timed.model(part.tokens, part.targets).mean()

    phases = {"forward": forward, "backward": lambda: loss.backward()}
    text, found = profile(phases, {}, device, file, HEAD_START)
    print(text, file=sys.stderr)
    timed.model.zero_grad(set_to_none=True)
    return {
        phase: {"ms": each.span / 1e3, "communication_ms": each.communication / 1e3,
                "hidden": each.hidden, "exposed_ms": each.exposed / 1e3}
        for phase, each in found.items()
    }  # fmt: skip
