"""Decode steps and prompts: their candidates, memory, times, and the command that runs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ladder.bench.inference.memory import point_bytes
from ladder.costs import HEADROOM
from ladder.infer.refusals import shape_refusals
from ladder.kernels.limits import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.parallel.choose import ROUNDING
from ladder.parallel.refusals import fused_refusal, rounding_refusal
from ladder.perf import lower_prefill, memory, phases
from ladder.perf.cost import WAY
from ladder.perf.fused import check_weights
from ladder.perf.graph import FUSED, Graph
from ladder.perf.machine import Machine
from ladder.perf.memory import GIB, Memory
from ladder.perf.nodes import without_peers
from ladder.perf.phases import Prediction
from ladder.perf.planner.question import ALONE, WHOLE, Candidate, LeftOut, Question
from ladder.perf.planner.subject import check_names, degrees
from ladder.plans import CHECKPOINT

REDUCERS = tuple(WAY)
MEASURED_TOKENS = 64  # new tokens of the command that times a recommended decode step
MOST_BATCH = 2**20  # the most prompts of a batch
FITS = ["TP", "batch", "weights", "cache", "activations", "reserve", "GiB", "fits", "at most"]


def check(question: Question) -> None:
    """Raise UserError for options that no candidate can have."""
    for option, given in (
        ("layouts", question.layouts),
        ("micro-batch", question.micro_batch),
        ("activation-checkpointing", question.checkpointing != "none"),
    ):
        if given:
            raise UserError(f"--{option} is of training; give --train, or leave it out")
    if refusals := shape_refusals(question.subject.shape):
        trains = question.subject.own is None  # folders are refused there
        raise UserError(
            f"{question.subject.name} has {', '.join(refusals)}: its steps and prompts are not "
            f"fused, and only fused ones are predicted; time them with `ladder bench inference`"
            f"{', or give --train for a training step' * trains}"
        )
    most = most_batch(question)
    for batch in question.batches:
        if not 1 <= batch <= most:
            why = ", as fused decode steps have; split it into steps" if most == MAX_ROWS else ""
            raise UserError(f"--batch={batch} must be 1 to {most:,}{why}")
    for reducer, plain in phases.PLAIN.items() if question.phase == "decode" else ():
        if reducer in question.reducers:
            raise UserError(
                f"--reducers {reducer} is of prompts: decode steps run as with {plain}; give "
                f"--prefill, or leave it out"
            )
    if FUSED in question.reducers:
        check_weights(question.weights)
    for reducer in ("push", FUSED) if without_peers(question.machine) else ():
        if reducer in question.reducers:
            raise UserError(
                f"--reducers {reducer}: the GPUs of machine {question.machine.name!r} have no "
                f"access to each other's memory; give --reducers async"
            )
    of_prompts = phases.PLAIN if question.phase == "prefill" else ()
    check_names("reducer of --reducers", question.reducers, (*REDUCERS, *of_prompts))


def most_batch(question: Question) -> int:
    """The most sequences of a pass of the phase, apart from memory."""
    return MAX_ROWS if question.phase == "decode" else MOST_BATCH


def candidates(question: Question, left_out: LeftOut) -> Iterator[Candidate]:
    """All candidates. Those that a default includes but that cannot run go to `left_out`."""
    subject = question.subject
    if not question.tp:
        question.leave_out_degrees(left_out)
    for tp in degrees(subject, question.machines, question.tp):
        reducers = question.reducers or _measured(question.machines[tp], tp, left_out)
        for plan in dict.fromkeys(question.chosen_plans):
            config = question.config(plan, tp, f"TP {tp}", left_out)
            if config is None:
                continue
            degree = config.tp_degree or tp
            if degree % tp:
                _refuse_degree(question, plan, degree, tp, left_out)
                continue
            if degree > tp and {question.weights, question.cache} != {"bf16"}:
                why = "virtual ranks are predicted with weights and a cache in bf16"
                left_out.add(plan, f"TP {tp}", why)
                continue
            if question.is_own(plan, config):
                continue
            if degree == 1 and config.plan.depends_on_tp and plan != CHECKPOINT:
                if question.plans:
                    left_out.add(plan, "TP 1", WHOLE if config.plan.no_comm else ALONE)
                continue
            alone = tp == 1 or config.plan.no_comm
            plain = [each for each in reducers if each in REDUCERS]
            bare = plain or sorted(phases.PLAIN[each] for each in reducers)  # async needs no peers
            for reducer in bare[:1] if alone else reducers:
                held = Ranks(degree, 0, degree // tp)
                if refusal := _reducer_refusal(reducer, config.plan, held):
                    left_out.add(plan, f"TP {tp}", refusal)
                    continue
                for batch in dict.fromkeys(question.batches):
                    asked = question, config, tp, batch, plain
                    if same := _same(*asked) if reducer == FUSED else "":
                        why = f"by fused operators, since it runs as with {same}"
                        left_out.add(plan, f"TP {tp} with batch {batch}", why)
                        continue
                    yield Candidate(plan, config, tp, reducer if tp > 1 else "", batch)


def _reducer_refusal(reducer: str, plan: Plan, ranks: Ranks) -> str | None:
    """Why prompts of this plan and these ranks cannot use the reducer, or None."""
    if reducer == FUSED and (refusal := fused_refusal(plan, ranks)):
        return f"not by fused operators ({refusal})"
    if reducer in ROUNDING:
        refusal = "virtual ranks" if ranks.held > 1 else rounding_refusal(plan)
        return f"not by {reducer} ({refusal})" if refusal else None
    return None


def _same(
    question: Question, config: ModelConfig, tp: int, batch: int, reducers: Sequence[str]
) -> str:
    """The first of `reducers` with which a prompt runs just as with `fused`, or ""."""
    gpu, shape = question.machines[tp].gpu, (batch, question.context)

    def graph(reducer: str) -> Graph:
        way = phases.prompt_way(config, config.plan, gpu, tp, reducer, shape)
        return lower_prefill.prefill(config.plan, way)

    fused = graph(FUSED)
    return next((each for each in reducers if graph(each) == fused), "")


def _measured(machine: Machine, tp: int, left_out: LeftOut) -> tuple[str, ...]:
    """The reducers whose all-reduces a machine's file has; on one GPU, where all are alike, one."""
    found = REDUCERS[:1] if tp == 1 else ()
    for reducer, algorithm in WAY.items() if tp > 1 else ():
        if machine.family("all-reduce", algorithm=algorithm):
            found = (*found, reducer)
        else:
            left_out.add(reducer, f"TP {tp}", f"machine {machine.name!r} has no curve of it")
    return found


def _refuse_degree(question: Question, plan: str, degree: int, tp: int, left_out: LeftOut) -> None:
    """Leave out a plan whose T the TP degree does not divide; UserError if the user named both."""
    if question.tp and question.tp_degree:
        raise UserError(
            f"--tp-degree={degree} with --tp={tp}: a process has as many of the T ranks as any "
            f"other; give a multiple of --tp"
        )
    why = f"T is {degree}, which {tp} does not divide"
    if plan != CHECKPOINT:
        why += "; without --tp-degree T is that of TP, another model"
    left_out.add(plan, f"TP {tp}", why)


def held(question: Question, each: Candidate) -> Memory:
    return _memory(question, each.config, each.tp, each.batch, [each.way])


def predict(question: Question, each: Candidate) -> Prediction:
    asked = (
        each.config, question.machines[each.tp], each.tp, each.way or REDUCERS[0], each.batch,
        question.context, question.jitter, question.weights,
    )  # fmt: skip
    if question.phase == "decode":
        return phases.decode(*asked, cache=question.cache)
    return phases.prefill(*asked)


def tokens(question: Question, each: Candidate) -> int:
    """The tokens of one pass of all copies of the model."""
    length = question.context if question.phase == "prefill" else 1
    return question.gpus // each.tp * each.batch * length


def _memory(
    question: Question, config: ModelConfig, tp: int, batch: int, ways: Sequence[str]
) -> Memory:
    """The memory of a session for `batch` sequences, for the one of `ways` that takes the most.

    Prompts that run by fused operators hold slots; the GPU's table decides which these are.
    """
    length, inside = question.context, question.weights == "bf16" and {*ways} & {"push", FUSED}
    gpu = question.machines[tp].gpu if inside else ""
    rounds = question.phase == "prefill" and tp > 1 and not {*ways}.isdisjoint(ROUNDING)
    return memory.inference(
        config, tp, batch, length, length, question.weights, gpu, rounds, FUSED in ways,
        question.cache,
    )  # fmt: skip


def fit_table(question: Question) -> list[list[Any]]:
    """The memory of a GPU that each TP degree and batch takes, for the plan `standard` and the way
    that takes the most."""
    subject = question.subject
    table: list[list[Any]] = [FITS]
    for tp in degrees(subject, question.machines, question.tp):
        machine = question.machines[tp]
        ways = question.reducers or _measured(machine, tp, LeftOut())
        asked = partial(_memory, question, subject.shape, tp, ways=ways)
        most = most_sequences(machine, asked)
        for batch in dict.fromkeys(question.batches):
            found = asked(batch)
            parts = (found.weights, found.cache, found.activations, found.reserve, found.total)
            sizes = [each / GIB for each in parts]
            table.append([tp, batch, *sizes, memory.fits(found, machine), most])
    return table


def most_sequences(machine: Machine, asked: Callable[[int], Memory]) -> int:
    """The most sequences of a batch whose memory fits. asked: the memory of so many."""

    def fits(batch: int) -> bool:
        return memory.fits(asked(batch), machine)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def command(question: Question, each: Candidate) -> list[str]:
    """The words of a command that runs a candidate. A folder's own plan generates; any other plan
    is timed, beside `standard` if the two were compared. [] if the benchmark does not fit: see
    `untimed`."""
    model = question.subject.name
    ranks = ["--nproc", str(each.tp)] if each.tp > 1 else []
    if each.plan == CHECKPOINT:
        words = ["generate", model, "--prompt", "The", "--tp", str(each.tp)]
        words += ["--reducer", each.way] if each.way else []
        stored = question.weights == (question.subject.stored or "bf16")  # no option needed
        asked = replace(question, weights="bf16") if stored else question
        return [*words, *_stored(asked), *ranks]
    prompt, new, size = _benchmark(question, each)
    if size > _room(question, each):
        return []
    plans = ["standard", each.plan] if _beside_standard(question, each) else [each.plan]
    words = ["bench", "inference", "--model", model, "--plans", *plans]
    words += ["--reducers", each.way] if each.way else []
    words += ["--tp", str(each.tp), "--batch", str(each.batch)]
    words += ["--p2p", "off"] if each.tp > 1 and without_peers(question.machine) else []
    if (each.config.tp_degree or each.tp) > each.tp:
        words += ["--tp-degree", str(each.config.tp_degree)]
    words += _stored(question)
    return [*words, "--prompt", str(prompt), "--new-tokens", str(new), *ranks]


def untimed(question: Question, each: Candidate) -> str:
    """A sentence that says why there is no command, and with which context there would be one."""
    size, room = _benchmark(question, each)[2], _room(question, each)
    context = question.context // 2
    while context and _benchmark(replace(question, context=context), each)[2] > room:
        context //= 2
    return (
        f"no command times batch {each.batch}: `ladder bench inference`, which checks the engine "
        f"against float32 first, takes {size / GIB:.1f} GiB of a GPU for it, of which "
        f"{room / GIB:.1f} can be used"
        f"{f'; there is one with --context {context}' * bool(context)}"
    )


def _benchmark(question: Question, each: Candidate) -> tuple[int, int, float]:
    """The prompt and the new tokens of the benchmark, and the bytes that it takes of a GPU. Decode
    steps have `context` tokens halfway, a prefill in its prompt; or, if only that fits, at the end,
    where a prompt is padded to the same width.
    """
    context, most = question.context, question.subject.shape.max_seq_len
    prompt, new = min(context, most - 2), 2
    if question.phase == "decode":
        half = max(1, min(MEASURED_TOKENS // 2, context - 1, most - context))
        prompt, new = max(1, min(context - half, most - 2 * half)), 2 * half
    sizes = [(prompt, new)] + [(context - new, new)] * (context > new)
    found = [(*size, _benchmark_bytes(question, each, *size)) for size in sizes]
    room = _room(question, each)
    return next((size for size in found if size[2] <= room), found[-1])


def _benchmark_bytes(question: Question, each: Candidate, prompt: int, new: int) -> float:
    """The bytes of a GPU that the benchmark takes, for the plan that takes the most."""
    asked = each.tp, each.batch, prompt, new, each.way or REDUCERS[0], question.weights
    configs, gpu = [each.config], question.machines[each.tp].gpu
    if _beside_standard(question, each):
        configs.append(question.subject.config("standard", each.tp, question.tp_degree))
    return max(point_bytes(config, *asked, question.cache, gpu) for config in configs)


def _beside_standard(question: Question, each: Candidate) -> bool:
    """Whether the benchmark times both the plan and `standard`."""
    return each.plan != "standard" and "standard" in question.chosen_plans


def _room(question: Question, each: Candidate) -> float:
    """The bytes of a GPU that can be used."""
    return HEADROOM * GIB * question.machines[each.tp].value("memory_gib")


def _stored(question: Question) -> list[str]:
    """The options for weights and a cache that are not stored in bfloat16."""
    asked = {"--weights": question.weights, "--cache": question.cache}
    return [word for each in asked.items() if each[1] != "bf16" for word in each]
