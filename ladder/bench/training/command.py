"""`ladder bench train`: training steps of several plans under several layouts, in one run.

A step is that of `ladder train`, on random tokens, launched while the GPU computes the one before.
Each plan under TP is also timed without its sublayers' reduces (no_comm): what it takes
beyond that is exposed communication. `none` is `standard` without communication. The points
of a layout that fit in memory side by side take turns, so that a drift of the machine hits all.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ladder.bench.trace import profile
from ladder.config import load_plan, model_config
from ladder.files import check_writable, make_folder
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.parameters import INIT_STD, Initialisation
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.apply import check_sequence_parallel, make_model
from ladder.parallel.data import data_parallel
from ladder.parallel.mesh import make_mesh
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sequence import SequenceReducer
from ladder.parallel.sharding import local_parameters
from ladder.plans import aligned
from ladder.records import append, facts
from ladder.train.config import MOST, TrainConfig
from ladder.train.optim import make_optimizer
from ladder.train.prefetch import Batch, Part
from ladder.train.speed import utilisation
from ladder.train.step import Outcome, take_step

RESULTS = "train.jsonl"
TURNS = 3  # in which the timed steps are taken
LEAD = 2  # steps before those of a turn: the host gets ahead
ROOM = 1.5  # times what the largest point so far takes must be free for one more beside it
HEAD_START = 0.25  # seconds, of the host before the GPU in a traced pass: it is ahead in training
LAYOUTS = "ddp, fsdp, hsdpN (replicas of N shards), tpN, tpN+sp, and tpN or tpN+sp with +fsdp"


@dataclass(frozen=True)
class Layout:
    """tp processes, dp_shard as in `make_mesh`, and whether the stream is sharded too."""

    name: str
    tp: int = 1
    dp_shard: int = 1
    sequence_parallel: bool = False


def parse_layout(text: str) -> Layout:
    """`tp4+sp+fsdp` and the like. Raises UserError for anything else."""
    fields: dict[str, Any] = {}
    for part in text.split("+"):
        kind = part.rstrip("0123456789")
        number = int(part[len(kind) :] or 0)
        if kind == "tp" and number:
            fields["tp"] = number
        elif kind == "sp" and part == kind:
            fields["sequence_parallel"] = True
        elif kind == "hsdp" and number:
            fields["dp_shard"] = number
        elif part in ("ddp", "fsdp"):
            fields["dp_shard"] = 1 if part == "ddp" else 0
        else:
            raise UserError(f"--layouts: {part!r} of {text!r} is unknown; known: {LAYOUTS}")
    if fields.get("sequence_parallel") and fields.get("tp", 1) == 1:
        raise UserError(f"--layouts: {text!r} has sp without tpN; sequences are sharded beside TP")
    return Layout(text, **fields)


@dataclass(frozen=True)
class TrainingPoint:
    """One configuration. no_comm: without the sublayers' reduces."""

    model: str
    layers: int
    plan: str
    layout: str
    seq_len: int
    batch: int
    micro_batch: int
    dtype: str
    checkpointing: str
    compile: bool
    no_comm: bool = False


class NoCommReducer(AsyncReducer):
    """Leaves out the sublayers' reduces: no model, and as much computation."""

    def post(self, partial: Tensor, blocking: bool = False) -> Any:
        return self.sum_held(partial)

    def wait(self, handle: Any) -> Tensor:
        return handle if isinstance(handle, Tensor) else super().wait(handle)


class NoCommSequenceReducer(SequenceReducer):
    """Keeps its own rows of a partial, and repeats its own rows for those of the others.

    Not of the embedding, of which most rows are zeros on one rank: norms of nothing overflow.
    """

    def start_stream(self, partial: Tensor) -> Tensor:
        rows = self.sum(partial).flatten(0, 1)
        return rows.chunk(self.ranks.processes)[self.ranks.process]

    def scatter(self, rows: Tensor) -> tuple[Tensor, Any]:
        mine = rows.chunk(self.ranks.processes)[self.ranks.process].clone()
        return mine, _launched(mine)

    def collect(self, rows: Tensor) -> tuple[Tensor, Any]:
        whole = rows.repeat(self.ranks.processes, 1)
        return whole, _launched(whole)


def _launched(value: Tensor) -> Any:
    """What a stream that did not compute `value` waits for, as it would for a collective."""
    return torch.cuda.current_stream().record_event() if value.is_cuda else None


def points(options: Any) -> list[TrainingPoint]:
    """The points of the command's options, each plan beside itself without communication."""
    found: list[TrainingPoint] = []
    for name in options.layouts:
        layout = parse_layout(name)
        for plan in options.plans:
            reduces = [False, True] if layout.tp > 1 else [False]
            if plan == "none":
                if layout.tp == 1:
                    continue  # without TP there is no reduce to leave out
                plan, reduces = "standard", [True]
            for no_comm in reduces:
                point = TrainingPoint(
                    options.model, options.layers, plan, name, options.seq_len, options.batch,
                    options.micro_batch or options.batch, options.dtype,
                    options.activation_checkpointing, options.compile, no_comm,
                )  # fmt: skip
                if point not in found:
                    found.append(point)
    return found


def shape_of(point: TrainingPoint, tp_degree: int) -> ModelConfig:
    """The model of a point. Raises UserError for what does not fit it."""
    whole = model_config(point.model)
    if not 0 <= point.layers <= whole.num_layers:
        raise UserError(
            f"--layers={point.layers}: {point.model} has {whole.num_layers}; give fewer, or 0 for "
            f"all"
        )
    if not 1 <= point.seq_len <= whole.max_seq_len:
        raise UserError(
            f"--seq-len={point.seq_len} must be 1 to the context of {point.model}, "
            f"{whole.max_seq_len}"
        )
    layers = {"num_layers": point.layers} if point.layers else {}
    shape = model_config({"name": point.model, "max_seq_len": point.seq_len, **layers})
    plan = resolve_plan(load_plan(point.plan), shape.num_layers, tp_degree)
    shape.check_divides(parse_layout(point.layout).tp, "--layouts tp")
    return replace(shape, plan=plan, tp_degree=tp_degree if plan.depends_on_tp else None)


def recipe_of(point: TrainingPoint) -> TrainConfig:
    """The training options of a point, checked as a recipe's are."""
    layout = parse_layout(point.layout)
    return TrainConfig(
        data="random tokens",
        out="",
        tp=layout.tp,
        dp_shard=layout.dp_shard,
        sequence_parallel=layout.sequence_parallel,
        activation_checkpointing=point.checkpointing,
        compile=point.compile,
        dtype=point.dtype,
        seq_len=point.seq_len,
    )


def build(
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
        reducer=no_comm if point.no_comm else None,
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, local, _ in local_parameters(model):
            ones = model.specs[name].init is Initialisation.ONES
            local.fill_(1.0) if ones else local.normal_(0.0, INIT_STD)
    return model, mesh


@dataclass
class TimedStep:
    """A point in memory. times: of its steps so far, ms. memory: the most it takes, in bytes, and
    reserved: with what the allocator holds beside tensors."""

    point: TrainingPoint
    model: Transformer
    batch: Batch
    step: Callable[[], Callable[[], Outcome]]
    times: list[float]
    memory: int
    reserved: int


def prepare(point: TrainingPoint, tp_degree: int, device: torch.device) -> TimedStep:
    """A point in memory, which has taken its first steps."""
    recipe = recipe_of(point)
    cuda, others = device.type == "cuda", (0, 0)
    if cuda:
        others = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    model, mesh = build(point, recipe, tp_degree, device)
    optimizer = make_optimizer(model, recipe)
    source = torch.Generator().manual_seed(data_parallel(mesh)[1])
    shape = (point.batch, point.seq_len)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=source).to(device)
    parts = [Part(each, each, None) for each in tokens.split(point.micro_batch)]
    batch = Batch([], parts, tokens.numel())
    step = functools.partial(take_step, model, optimizer, batch, mesh, recipe.grad_clip)
    live = TimedStep(point, model, batch, step, [], 0, 0)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    take_turn(live, 1, device)
    live.times.clear()
    if cuda:
        live.memory = torch.cuda.max_memory_allocated(device) - others[0]
        live.reserved = torch.cuda.max_memory_reserved(device) - others[1]
    return live


def take_turn(live: TimedStep, steps: int, device: torch.device) -> None:
    """Take so many timed steps after LEAD others. Raises RuntimeError where one is not finite."""
    outcomes: list[Callable[[], Outcome]] = []
    ends: list[Any] = []
    for step in range(LEAD + steps):
        outcomes.append(live.step())
        ends.append(_now(device))
        if step:
            outcomes[step - 1]()  # as `ladder train` does: the host is a step ahead
    for outcome in (each() for each in outcomes):
        if not outcome.finite:
            raise RuntimeError(f"{live.point}: not finite: {outcome}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    live.times += [_between(*each) for each in itertools.pairwise(ends[LEAD - 1 :])]


def measure(lives: Sequence[TimedStep], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Time `steps` steps of each point, in turns: milliseconds on this rank, and memory."""
    turns = min(TURNS, steps)
    for turn in range(turns):
        for live in lives:
            take_turn(live, steps // turns + (turn < steps % turns), device)
    return [_result(live, device) for live in lives]


def _result(live: TimedStep, device: torch.device) -> dict[str, Any]:
    point = live.point
    result: dict[str, Any] = {"step_ms": statistics.median(live.times), "steps_ms": live.times}
    replicas = launch.world_size() // parse_layout(point.layout).tp
    rate = 1e3 * point.batch * point.seq_len * replicas / result["step_ms"]
    result["tokens_s_gpu"] = rate / launch.world_size()
    result |= utilisation(live.model.config, point.seq_len, rate, device)
    if device.type == "cuda":
        result["memory_gib"] = live.memory / 2**30  # without what else is in memory
        result["memory_reserved_gib"] = live.reserved / 2**30
    return result


def has_room(
    lives: Sequence[TimedStep], point: TrainingPoint, tp_degree: int, device: torch.device
) -> bool:
    """Whether, on every rank, one more point fits beside these in memory, on the safe side.

    Those of a layout take as much as each other. Virtual ranks take more, how much is not known
    before: such points stay alone. (They are the last of their layout.)
    """
    if point.layout != lives[0].point.layout or is_virtual(point, tp_degree):
        return False
    if device.type == "cuda":
        _let_go(device)
        free, need = torch.cuda.mem_get_info(device)[0], max(live.reserved for live in lives)
    elif "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return False
    else:  # weights, gradients and moments, on all ranks
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        held = [local.nbytes for _, local, _ in local_parameters(lives[0].model)]
        need = 4 * sum(held) * launch.world_size()
    return all(launch.gathered(need * ROOM < free))


def is_virtual(point: TrainingPoint, tp_degree: int) -> bool:
    """Whether a process computes several ranks of the plan's T."""
    degree = shape_of(point, tp_degree).tp_degree
    return degree is not None and degree > parse_layout(point.layout).tp


def _now(device: torch.device) -> Any:
    """The time, on a GPU the time at which what was launched so far will be done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    """Milliseconds between two times of `_now` that have come."""
    if isinstance(before, float):
        return 1e3 * (after - before)
    return float(before.elapsed_time(after))


def _trace(live: TimedStep, device: torch.device, out: Path) -> dict[str, dict[str, float]]:
    """By pass, how long one of a micro-batch takes (ms), and its communication, hidden and not.

    The trace goes to a new file in `out`.
    """
    number = len(list(out.glob("trace-*.json.gz")))
    file = out / f"trace-{number:03d}-{live.point.layout}-{live.point.plan}.json.gz"
    part, loss = live.batch.parts[0], torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = live.model(part.tokens, part.targets).mean()

    phases = {"forward": forward, "backward": lambda: loss.backward()}
    text, found = profile(phases, {}, device, file, HEAD_START)
    print(text, file=sys.stderr)
    live.model.zero_grad(set_to_none=True)
    return {
        phase: {"ms": each.span / 1e3, "communication_ms": each.communication / 1e3,
                "hidden": each.hidden, "exposed_ms": each.exposed / 1e3}
        for phase, each in found.items()
    }  # fmt: skip


def main(options: Any) -> int:
    """Run `ladder bench train` on every rank; rank 0 records and prints."""
    device = launch.join(options.device)
    launch.agree({"options": {**vars(options), "verb": None, "out": str(options.out)}})
    for name, least in (("steps", 1), ("batch", 1), ("micro_batch", 0)):
        if (value := getattr(options, name)) < least:
            raise UserError(f"--{name.replace('_', '-')}={value} must be {least} or more")
    if options.batch > (most := MOST["batch_size"]):
        raise UserError(f"--batch={options.batch} is too large; {most:,} is the most")
    if options.batch % (options.micro_batch or options.batch):
        raise UserError(
            f"--micro-batch={options.micro_batch} does not divide --batch={options.batch}; choose "
            f"a divisor"
        )
    todo = points(options)
    if not todo:
        raise UserError("--plans none needs a layout with tpN: without TP there is no reduce")
    for point in todo:  # all are checked before the first is timed
        recipe = recipe_of(point)
        make_mesh(device, recipe.tp, recipe.dp_shard)
        shape = shape_of(point, options.tp_degree)
        if recipe.sequence_parallel:
            check_sequence_parallel(shape, recipe.tp)
            recipe.check_rows(point.micro_batch)
    main_rank = launch.rank() == 0
    without = [name for name in options.layouts if parse_layout(name).tp == 1]
    if main_rank and without and "none" in options.plans:
        said = f"--plans none is left out under {', '.join(without)}: without TP there is no reduce"
        print(said, file=sys.stderr, flush=True)
    out = Path(options.out)
    if main_rank:
        check_writable(out / RESULTS)
        make_folder(out)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    machine = {**facts(gpu), "ranks": launch.world_size()}
    order = list(todo)
    # Virtual ranks last, so that the others of a layout are neighbours.
    layouts = [point.layout for point in order]
    todo.sort(key=lambda p: (layouts.index(p.layout), is_virtual(p, options.tp_degree)))
    records = []
    while todo:
        lives: list[TimedStep] = []
        while todo and (not lives or has_room(lives, todo[0], options.tp_degree, device)):
            lives.append(prepare(todo.pop(0), options.tp_degree, device))
        results = measure(lives, options.steps, device)
        try:
            for live, result in zip(lives, results, strict=True):
                if options.profile and not live.point.no_comm:
                    result["trace"] = _trace(live, device, out)
        finally:  # a trace that failed costs no figures
            for live, result in zip(lives, results, strict=True):
                point = live.point
                records.append({"point": asdict(point), "result": result, "machine": machine})
                if main_rank:
                    append(out / RESULTS, records[-1:])
                    said = f"{point.layout} {label(point)}: {result['step_ms']:.1f} ms"
                    print(said, file=sys.stderr, flush=True)
        del lives, live
        _let_go(device)
    if main_rank:
        records.sort(key=lambda record: order.index(TrainingPoint(**record["point"])))
        print(table(records))
        print(f"\n{out / RESULTS}")
    return 0


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def label(point: TrainingPoint) -> str:
    if not point.no_comm:
        return point.plan
    return "none" if point.plan == "standard" else f"{point.plan} no_comm"


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text."""
    return aligned([HEAD, *cells(records)], left=2)


HEAD = ("layout", "plan", "step ms", "range", "tokens/s/GPU", "MFU", "exposed", "x standard",
        "hidden", "bare ms", "GiB")  # fmt: skip


def cells(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each point, under HEAD; what it is compared with is in the same run.

    exposed: against the same plan without TP's reduces. Of a traced micro-batch, whatever the
    layout, forward / backward: hidden, how much of the communication's time ran under computation,
    and bare ms, the rest.
    """
    found = {TrainingPoint(**each["point"]): each["result"] for each in records}
    rows: list[tuple[str, ...]] = []
    for point, result in found.items():
        own = {**asdict(point), "no_comm": True}
        bound = None if point.no_comm else found.get(TrainingPoint(**own))
        standard = found.get(
            TrainingPoint(**{**asdict(point), "plan": "standard", "no_comm": False})
        )
        exposed = f"{result['step_ms'] / bound['step_ms'] - 1:.1%}" if bound else "-"
        speed = f"{standard['step_ms'] / result['step_ms']:.3f}" if standard else "-"
        times, passes = result["steps_ms"], result.get("trace", {}).values()
        row = (
            point.layout, label(point), f"{result['step_ms']:.1f}",
            f"{min(times):.1f}-{max(times):.1f}", f"{result['tokens_s_gpu']:,.0f}",
            f"{result['mfu']:.1%}" if "mfu" in result else "-", exposed, speed,
            " / ".join(f"{each['hidden']:.0%}" for each in passes) or "-",
            " / ".join(f"{each['exposed_ms']:.1f}" for each in passes) or "-",
            f"{result['memory_gib']:.1f}" if "memory_gib" in result else "-",
        )  # fmt: skip
        rows.append(row)
    return rows
