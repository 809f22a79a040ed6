"""Training steps: their candidates, memory, times, and the command that times one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ladder.bench.training.points import Layout, parse_layout
from ladder.config import CHECKPOINTING
from ladder.models.errors import UserError
from ladder.models.ranks import Ranks
from ladder.parallel.refusals import rows_refusal, sharded_refusal
from ladder.perf import memory, training_phase
from ladder.perf.cost_training import groups
from ladder.perf.memory import GIB, Memory
from ladder.perf.nodes import ENDS, links_of
from ladder.perf.phases import Prediction
from ladder.perf.planner.intervals import Interval
from ladder.perf.planner.question import ALONE, WHOLE, Candidate, LeftOut, Question, divided
from ladder.perf.planner.subject import check_names
from ladder.train.config import MOST

Answer = TypeVar("Answer")
MOST_SKEWED = 64  # the most ranks that are simulated one by one
LINKS = "links of declared nodes from half to twice the latency, 60 to 100 % of the rate"
FITS = ["layout", "batch", "weights", "optimiser", "gradients", "activations", "reserve", "GiB",
        "fits"]  # fmt: skip


def check(question: Question) -> None:
    """Raise UserError for options that no candidate can have."""
    if question.objective == "latency":
        raise UserError(
            "--objective=latency with --train: a step has the --batch of each data-parallel rank, "
            "so that layouts do different work in it; give throughput, or leave it out"
        )
    if question.tp:
        raise UserError("--tp is of inference; name the degree in --layouts, as tp4+sp")
    if question.reducers:
        raise UserError("--reducers is of inference; leave it out, layouts have their own")
    for option, stored in (("weights", question.weights), ("cache", question.cache)):
        if stored != "bf16":
            raise UserError(f"--{option}={stored} is of inference; leave it out of --train")
    if question.subject.own is not None:
        raise UserError(
            f"--train: {question.subject.name} is a folder, and steps are timed by shape; give a "
            f"name of configs/models, or a YAML file of its shape"
        )
    if question.jitter and question.gpus > MOST_SKEWED:
        raise UserError(
            f"--jitter with --train on {question.gpus} GPUs: at most {MOST_SKEWED} ranks are "
            f"simulated; lower --nodes"
        )
    check_names("--activation-checkpointing", [question.checkpointing], CHECKPOINTING)
    if question.nodes > 1:
        links_of(question.machine)
    if not 0 <= question.micro_batch <= MOST["micro_batch_size"]:
        raise UserError(
            f"--micro-batch={question.micro_batch} must be 0, for the whole batch, to "
            f"{MOST['micro_batch_size']:,}"
        )
    for batch in question.batches:
        if not 1 <= batch <= MOST["batch_size"]:
            raise UserError(f"--batch={batch} must be 1 to {MOST['batch_size']:,}")
        if not divided([batch], question.micro_batch):
            raise UserError(
                f"--micro-batch={question.micro_batch} does not divide --batch={batch}; choose a "
                f"divisor"
            )
    for layout in layouts(question):
        layout.data_parallel(question.gpus)
        question.subject.shape.check_divides(layout.tp, "--layouts tp")


def layouts(question: Question) -> list[Layout]:
    """The user's layouts, or the default ones: data parallelism, and TP with sequence parallelism
    for every degree that divides a node's GPUs and the shape. On several nodes there are also
    layouts whose shards lie within a node and are copied to the other nodes (HSDP)."""
    if question.layouts:
        return [parse_layout(each) for each in dict.fromkeys(question.layouts)]
    node, several = question.machine.gpus, question.nodes > 1
    names = ["ddp", "fsdp"] + ([f"hsdp{node}"] if several and node > 1 else [])
    for tp in (each for each in question.machines if each > 1):
        if node % tp == 0 and question.subject.divides(tp):
            names += [f"tp{tp}+sp"] if not several else []
            names += [f"tp{tp}+sp+fsdp"] if several or tp < node else []
            names += [f"tp{tp}+sp+hsdp{node // tp}"] if several and tp < node else []
    return [parse_layout(each) for each in names]


def candidates(question: Question, left_out: LeftOut) -> Iterator[Candidate]:
    """All candidates. Those that a default includes but that cannot run go to `left_out`.

    Under data parallelism alone there is nothing to sum, and all plans do the same work: without
    --plans there is only `standard`. A plan or a batch that sequence parallelism refuses gets the
    default layouts without it.
    """
    if not question.layouts:
        question.leave_out_degrees(left_out)
    for layout in layouts(question):
        if missing := _missing(question, layout):
            left_out.add("all plans", layout.name, missing)
            continue
        tp = layout.tp
        plans = question.chosen_plans
        if tp == 1 and not question.plans:
            plans = ("standard",)
        for plan in dict.fromkeys(plans):
            if plan == "none" and not question.plans:
                continue  # not a model
            config = question.config(plan, tp, layout.name, left_out)
            if config is None:
                continue
            if tp == 1 and config.plan.no_comm:
                left_out.add(plan, layout.name, WHOLE)
                continue
            if config.tp_degree == 1:
                left_out.add(plan, layout.name, f"{ALONE}; --tp-degree gives another")
                continue
            degree = config.tp_degree or tp
            if degree % tp:
                left_out.add(plan, layout.name, f"T is {degree}, which {tp} does not divide")
                continue
            refusal = sharded_refusal(config.plan, Ranks(degree, 0, degree // tp))
            for batch in dict.fromkeys(question.batches):
                name = layout.name
                if layout.sequence_parallel and (why := refusal or _uneven(question, tp, batch)):
                    if question.layouts:
                        left_out.add(plan, name, f"not for sequence parallelism ({why})")
                        continue
                    name = _without_sp(layout)
                yield Candidate(plan, config, tp, name, batch)


def _uneven(question: Question, tp: int, batch: int) -> str | None:
    """Why sequence parallelism cannot split the tokens of a batch's passes, or None."""
    return rows_refusal(question.micro_batch or batch, question.context, tp)


def _without_sp(layout: Layout) -> str:
    """The name of a default layout without sequence parallelism."""
    return layout.name.replace("+sp", "")


def _missing(question: Question, layout: Layout) -> str:
    """Why a layout's collectives cannot be predicted; empty if files have those of all groups."""
    replicas, _ = layout.data_parallel(question.gpus)
    for size in groups(layout.tp, replicas, question.nodes):
        if size not in question.machines and question.machine.gpus % size == 0:
            return (
                f"no file has the collectives of its groups of {size} GPUs; ladder bench machine "
                f"--nproc {size} --out FILE, and give --machine FILE, too"
            )
    return ""


def held(question: Question, each: Candidate) -> Memory:
    return memory.training(
        each.config, each.way, question.gpus, question.context, each.batch,
        question.micro_batch, question.checkpointing,
    )  # fmt: skip


def predict(question: Question, each: Candidate) -> Prediction:
    return _asked(training_phase.train, question, each, jitter=question.jitter)


def _asked(
    of: Callable[..., Answer], question: Question, each: Candidate, **more: Any
) -> Answer:  # fmt: skip
    return of(
        each.config, question.machine, each.way, question.context, each.batch,
        question.micro_batch, question.checkpointing, nodes=question.nodes,
        machines=question.machines, **more,
    )  # fmt: skip


def doubted(question: Question, each: Candidate, found: Prediction, near: Interval) -> Interval:
    """The interval on several nodes: that of one node, widened by the doubt about the links."""
    if near.low is None or near.high is None:
        return near
    likely = found.us - found.waiting_us
    best, worst = (
        _asked(training_phase.train_us, question, each, doubt=end) / likely for end in ENDS
    )
    source = f"{near.source}; {LINKS}"
    return Interval(near.low * best, near.high * worst, source, True, near.wider)


def tokens(question: Question, each: Candidate) -> int:
    """The tokens of one step over all copies of the model."""
    return question.gpus // each.tp * each.batch * question.context


def fit_table(question: Question) -> list[list[Any]]:
    """The memory of a GPU that each layout and batch takes, for the plan `standard`."""
    subject = question.subject
    table: list[list[Any]] = [FITS]
    for layout in layouts(question):
        for batch in dict.fromkeys(question.batches):
            name = layout.name
            if layout.sequence_parallel and _uneven(question, layout.tp, batch):
                if question.layouts:
                    continue
                name = _without_sp(layout)
            each = Candidate("standard", subject.shape, layout.tp, name, batch)
            found = held(question, each)
            parts = (found.weights, found.optimiser, found.gradients, found.activations,
                     found.reserve, found.total)  # fmt: skip
            sizes = [each / GIB for each in parts]
            table.append([name, batch, *sizes, memory.fits(found, question.machine)])
    return table


def command(question: Question, each: Candidate) -> list[str]:
    """The words of the command that times a candidate."""
    words = ["bench", "train", "--model", question.subject.name, "--plans", each.plan]
    words += ["--layouts", each.way, "--seq-len", str(question.context)]
    words += ["--batch", str(each.batch), "--compile"]
    words += ["--nproc", str(question.machine.gpus)] if question.nodes == 1 else []
    if question.micro_batch:
        words += ["--micro-batch", str(question.micro_batch)]
    if question.checkpointing != "none":
        words += ["--activation-checkpointing", question.checkpointing]
    if each.config.tp_degree:
        words += ["--tp-degree", str(each.config.tp_degree)]
    return words
