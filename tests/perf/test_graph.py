"""Operations of a pass: against the launches of the fused decode step, and by their properties."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.kernels.landing import LandingJob, SendJob
from ladder.models import Plan, Ranks, UserError, resolve_plan
from ladder.models.in_flight import InFlight
from ladder.models.layers import RMSNorm
from ladder.models.runtime import Runtime
from ladder.parallel import chains, matrix
from ladder.parallel import decode as fused
from ladder.parallel.chains import Chains
from ladder.parallel.decode import DecodePass, DecodeReducer
from ladder.parallel.matrix import Matrix
from ladder.parallel.reducers import AsyncReducer, PushReducer
from ladder.parallel.refusals import sharded_refusal
from ladder.perf.graph import COMM, COPIES, DATA, Graph, Operation, forward, training
from ladder.perf.lower_decode import STREAMS, WAYS, decode
from tests.samples import FUSED_PLANS, random_plan

D = 8
Launch = tuple[str, str, frozenset[int]]  # kind, stream, and what has ended before
PLANS = {name: resolve_plan(each, 4, 2) for name, each in FUSED_PLANS.items()}
PLANS |= {f"random {seed}": random_plan(random.Random(seed), 1 + seed % 6) for seed in range(40)}


@dataclass
class Stream:
    """A stream, or an event of one: the launches that have ended by then."""

    after: frozenset[int] = frozenset()

    def record_event(self) -> Stream:
        return Stream(self.after)

    def wait_event(self, event: Stream) -> None:
        self.after |= event.after


class Recorder:
    """Launches of a decode pass in a CUDA graph, without kernels: of each its kind, its stream, and
    which of the others have ended when it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str, plan: Plan) -> None:
        self.launches: list[Launch] = []
        self.streams, self.comm = (Stream(), Stream()), Stream()
        self.current = self.streams[0]
        for module, name in ((matrix, "project"), (fused, "land"), (fused, "send")):
            monkeypatch.setattr(module, name, getattr(self, name))
        kind = {"push": PushReducer, "nccl": AsyncReducer, "alone": AsyncReducer}[way]
        base: Any = kind.__new__(kind)
        base.ranks = Ranks(1, 0, 1) if way == "alone" else Ranks(2, 0, 1)
        base.group, base.picked = None, {}
        base.note = lambda size, name: None
        base.sum = lambda value: value
        base.reduce = self.reduce
        made = DecodeReducer(base, plan)
        slots = torch.zeros(made.sets, 2, 1, D)
        memory = SimpleNamespace(own=slots, addresses=torch.zeros(2, dtype=torch.int64))
        made.slots = lambda like: memory  # type: ignore[assignment, method-assign, return-value]
        norms = [RMSNorm(D, 1e-5) for _ in range(len(plan.sublayers) + 1)]
        self.run = DecodePass(Runtime(), made, plan, norms)
        self.run.chains = Chains(self.streams, self.set_stream)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def launch(self, kind: str, stream: Stream) -> None:
        name = COMM if stream is self.comm else STREAMS[self.streams.index(stream)]
        self.launches.append((kind, name, stream.after))
        stream.after |= {len(self.launches) - 1}

    def reduce(self, whole: Tensor, blocking: bool) -> InFlight[Tensor]:
        self.comm.wait_event(self.current)
        self.launch("all-reduce", self.comm)
        event = self.comm.record_event()

        def wait(value: Tensor) -> Tensor:
            self.current.wait_event(event)
            return value

        return InFlight(whole, wait)

    def project(self, x: Tensor, weight: Tensor, *_: Any, **options: Any) -> Tensor | None:
        self.launch("pushing product" if options.get("push") else "product", self.current)
        return torch.zeros(1, D) if options.get("keep", True) else None

    def land(self, job: LandingJob) -> None:
        self.launch("landing", self.current)

    def send(self, job: SendJob) -> None:
        self.launch("send", self.current)

    def step(self, plan: Plan) -> None:
        """What the loop of a fused model does in a decode step."""
        run, weight = self.run, Matrix(torch.zeros(D, D))
        run.start(torch.zeros(1, 1, D))
        for n, record in enumerate(plan.sublayers):
            x = run.read(n)
            partial: Any = None
            for kind in record.kind.split("+"):
                (inner,) = run.operators(n).column(x, (weight,))
                if kind == "attention":
                    self.launch("attention", self.current)
                made = run.operators(n).row(inner, weight)
                partial = made if partial is None else partial + made
            run.write(n, partial)
        run.logits(weight)


def launched(graph: Graph) -> list[Launch]:
    """What `Recorder` has, of a graph."""
    before: list[frozenset[int]] = []
    for needs in graph.before():
        before.append(frozenset(needs).union(*(before[need] for need in needs)))
    kinds: dict[int, str] = {}
    for each in graph.operations:
        if each.launched and (each.kind != "all-reduce" or each.output is not None):
            kind = "landing" if each.kind == "sum" else each.kind
            kinds[each.index] = "pushing product" if each.pushes else kind
    numbers = {
        index: number
        for number, index in enumerate(
            index
            for index, kind in kinds.items()
            if kind not in ("embed", "norm", "copy", "choice")
        )
    }
    return [
        (kinds[index], graph.operations[index].stream,
         frozenset(numbers[each] for each in before[index] if each in numbers))
        for index in numbers
    ]  # fmt: skip


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLANS)
def test_a_decode_step_launches_what_the_fused_one_does(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str, branches: bool
) -> None:
    """In this order, on these streams, and each after the same others: fails for one landing, send
    or product too many, and for one that waits for too much or too little."""
    plan = PLANS[name]
    monkeypatch.setattr(chains, "MOST_BRANCHED", 1 if branches else 0)
    recorder = Recorder(monkeypatch, way, plan)
    recorder.step(plan)
    graph = decode(plan, way, branches)
    if plan.final_mean:  # its head is a plain product, which the recorder sees, too
        assert graph.launches["norm"] == 1
    assert launched(graph) == recorder.launches


def lists(plan: Plan) -> dict[str, Graph]:
    found = {"forward": forward(plan), **{way: decode(plan, way) for way in WAYS}}
    if sharded_refusal(plan, Ranks(2, 0, 1)) is None:
        found["sharded"] = forward(plan, "sharded")
    return found


@pytest.mark.parametrize("name", PLANS)
def test_every_output_lands_as_the_plan_says(name: str) -> None:
    """Each read lands its parts once and in order, and nothing else does."""
    plan = PLANS[name]
    for graph in lists(plan).values():
        found: list[list] = [[] for _ in plan.landings]
        for each in graph.of("landing"):
            found[each.sublayer or 0] += each.landings
        assert found == [list(each) for each in plan.landings]


@pytest.mark.parametrize("name", PLANS)
def test_collectives_are_the_plans_and_blocking_ones_are_waited_for_at_once(name: str) -> None:
    plan = PLANS[name]
    for way, graph in lists(plan).items():
        if way == "alone":
            assert graph.reduces == []
            continue
        assert [each.output for each in graph.reduces] == [
            n for n, record in enumerate(plan.sublayers) if record.reduce != "none"
        ]
        for each in graph.reduces:
            assert each.output is not None
            landing = graph.waits(each.output)
            assert each.index in landing.needs
            until = landing.index
            if landing.stream == "side":  # launched at once; what waits is the read of its gather
                until = next(o.index for o in graph.operations if until + 1 in o.needs)
            between = computed(graph.operations[each.index + 1 : until])
            assert (between == []) == plan.blocking[each.output], (way, each)


def computed(operations: list[Operation]) -> list[Operation]:
    return [each for each in operations if each.kind in ("product", "attention")]


@pytest.mark.parametrize("gradients", ["none", "ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["standard", "ladder", "dtp-2", "accumulate-4x", "random 3"])
def test_a_training_step_has_every_operation_twice(name: str, gradients: str) -> None:
    plan = PLANS[name]
    graph = training(plan, gradients=gradients)
    there = [each for each in graph.operations if each.stream not in (DATA, COPIES)]
    back = [each for each in there if each.backward]
    ahead = [each for each in there if not each.backward and each.kind not in ("loss", "optimiser")]
    assert [each.sublayer for each in back] == [each.sublayer for each in reversed(ahead)]
    assert Counter(each.kind for each in back) == Counter(each.kind for each in ahead)
    layers, gathers = plan.num_layers, gradients in ("fsdp", "hsdp")
    data = Counter(each.part for each in graph.operations if each.stream == DATA)
    assert data["gradients"] == layers * (gradients != "none")
    assert data["weights"] == 2 * layers * gathers
    copies = [each for each in graph.operations if each.stream == COPIES]
    assert len(copies) == layers * (gradients == "hsdp")
    for each in copies:  # what has been scattered, alone
        (need,) = each.needs
        assert graph.operations[need].kind == "reduce-scatter"
    last = graph.operations[-1]
    assert last.kind == "optimiser"
    assert {each.index for each in back} <= set(last.needs)


def test_sequence_parallelism_mirrors_gathers_and_scatters() -> None:
    graph = training(PLANS["ladder"], "sharded")
    assert len(graph.of("all-gather")) == 9  # each read
    assert len(graph.of("reduce-scatter")) == 8  # each output
    assert len(graph.of("reduce-scatter", True)) == 9
    assert len(graph.of("all-gather", True)) == 8


def test_a_ladders_layer_is_seven_kernels() -> None:
    """docs/architecture.md says so: qkv, attention, output, gate and up, down, and two landings; as
    many as without a lag. What is pushed is no launch."""
    for name in ("ladder", "standard", "none"):
        few, more = (
            sum(decode(resolve_plan(name, layers, 4), "push").launches.values())
            for layers in (4, 5)
        )
        assert more - few == 7


def test_wrong_words_are_one_line() -> None:
    plan = PLANS["dtp-1"]
    with pytest.raises(UserError, match="unknown way of a decode step 'pull'"):
        decode(plan, "pull")
    with pytest.raises(UserError, match="unknown style of a pass"):
        forward(plan, "whole")
    with pytest.raises(UserError, match="unknown reduction of gradients"):
        training(plan, gradients="zero")
    with pytest.raises(UserError, match="plan 'dtp-1' cannot be sharded by tokens"):
        forward(plan, "sharded")
