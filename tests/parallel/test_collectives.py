"""The collectives that each plan issues: how many, of what, and when they are waited for.

That count, and that order, are this project's claim. Real calls are counted, in real ranks: every
function of torch.distributed that communicates is wrapped, and a dispatch mode counts once more
below them, where functional collectives and DTensor's redistributions would show.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models import Transformer, resolve_plan
from ladder.models.forward_pass import Output, Pass
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.models.runtime import Runtime
from ladder.parallel import reducers
from ladder.parallel.sharding import shard_model, sum_shared_gradients
from tests.distributed import Pools, tp_mesh
from tests.parallel.calls import Diary, Dispatched
from tests.samples import DEPENDS_ON_T, PLANS, full_model, sample_tokens, small_config

BATCH, LENGTH, SIZE = 2, 7, 32
STATE = BATCH * LENGTH * SIZE  # elements of one hidden state
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)

# (function, "sum" or "max" or "", elements, asynchronous)
Call = tuple[str, str, int, bool]


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Within it, every call of a collective is written down."""
    calls: list[Call] = []

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensor = args[1] if name == "all_gather" else args[0]
            op = options.get("op", dist.ReduceOp.SUM) if "reduce" in name else None
            kind = {None: "", dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}[op]
            elements = tensor.numel() if isinstance(tensor, Tensor) else -1
            calls.append((name, kind, elements, bool(options.get("async_op"))))
            return original(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            original = getattr(dist, name)
            stack.enter_context(mock.patch.object(dist, name, wrapped(name, original)))
        yield calls


def sharded(plan: str, ranks: int, tp: int, **changes: Any) -> Transformer:
    """A sample plan's model on the mesh of `tp` processes."""
    depends = plan in DEPENDS_ON_T or plan == "none"
    config = small_config(PLANS.get(plan, plan), ranks, depends, **changes)
    model = full_model(config, seed=4, dtype=torch.float32)
    shard_model(model, tp_mesh(tp))
    return model


def counts(rank: int, world_size: int, plan: str, ranks: int) -> dict[str, list[Call]]:
    """In a worker: the calls of each phase of a training step, and of a forward for logits."""
    model = sharded(plan, ranks, world_size)
    tokens = sample_tokens(model.config, 1, BATCH, LENGTH)
    found: dict[str, list[Call]] = {}
    below: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        with recorded_calls() as calls, Dispatched() as mode:
            yield
        found[name], below[name] = calls, mode.count

    with phase("forward"):
        losses = model(tokens, tokens)
    with phase("backward"):
        losses.mean().backward()
    with phase("shared"):
        sum_shared_gradients(model)
    with phase("logits"), torch.no_grad():
        model(tokens)
    for name, calls in found.items():
        assert below[name] == len(calls), (name, below[name], calls)
    return found


@pytest.mark.parametrize("name", [*PLANS, "none"])
def test_counts(pools: Pools, name: str) -> None:
    """Forward: the plan's reduces, the embedding's, the final mean's where the residuals differ at
    the end, and the loss's maximum and sum. Backward: the same but for the loss's, and one for all
    that is shared. Each reduce is of one hidden state, however many virtual ranks are held.

    Catches a reduce that a plan was to save, or that comes twice (forward and again in autograd),
    one per virtual rank, one per shared parameter, and a blocking call where it was to be a start.
    """
    for world_size, ranks in ((2, 2), (2, 4), (4, 4)):
        depends = name in DEPENDS_ON_T or name == "none"
        if ranks > world_size and not depends:
            continue
        plan = resolve_plan(PLANS.get(name, name), 4, ranks)
        assert plan.collectives == sum(r.reduce != "none" for r in plan.sublayers)
        mean = name.startswith(("dtp", "a mix"))
        assert plan.final_mean == mean
        states: list[Call] = [("all_reduce", "sum", STATE, True)] * (plan.collectives + 1 + mean)
        tokens = BATCH * LENGTH
        loss: list[Call] = [
            ("all_reduce", "max", tokens, False),
            ("all_reduce", "sum", 2 * tokens, False),
        ]
        chunk = -(-67 // world_size)
        for found in pools(world_size).run(counts, name, ranks):
            assert found["forward"] == states + loss
            assert found["backward"] == states
            assert found["logits"] == [*states, ("all_gather", "", tokens * chunk, False)]
            (shared,) = found["shared"]
            assert (shared[0], shared[1]) == ("all_reduce", "sum")


def counts_in_one_process(rank: int, world_size: int) -> list[Call]:
    """In a worker: the calls of a whole step of models that this process holds alone."""
    with recorded_calls() as calls:
        for plan in ("ladder", "desync-2x", "dtp-1"):
            config = small_config(PLANS[plan], 4, plan in DEPENDS_ON_T)
            model = full_model(config, seed=4)
            shard_model(model)
            tokens = sample_tokens(config, 1)
            model(tokens, tokens).mean().backward()
            sum_shared_gradients(model)
    return calls


def test_one_process_communicates_with_nobody(pools: Pools) -> None:
    """Building, placing and training models with virtual ranks, where other processes exist."""
    assert pools(2).run(counts_in_one_process) == [[], []]


# When: the order of posting, launching and waiting


@dataclass
class NotedWork:
    """A collective's handle that records every wait."""

    work: Any
    note: Callable[[], None]

    def wait(self) -> None:
        self.note()
        self.work.wait()


Events = list[tuple[str, int]]


def diary(rank: int, world_size: int, plan: str, ranks: int) -> tuple[Events, Events]:
    """In a worker: the events of one forward and one backward pass."""
    model = sharded(plan, ranks, world_size)
    events = Diary(model.config.plan)
    events.hook(model)
    tokens = sample_tokens(model.config, 1, BATCH, LENGTH)
    start = reducers.Exchange.start

    def noted_start(exchange: reducers.Exchange, value: Tensor) -> None:
        n = events.sublayer_of(exchange)
        events.write("start", n)
        start(exchange, value)
        exchange.work = NotedWork(exchange.work, lambda: events.write("wait", n))

    with mock.patch.object(reducers.Exchange, "start", noted_start):
        losses = model(tokens, tokens)
        events.in_backward = True
        losses.mean().backward()
    return events.forward, events.backward


def computed_between(events: Events, sublayer: int) -> list[int]:
    """The sublayers that were computed, launch to done, while `sublayer`'s reduce was under way."""
    begin, end = events.index(("start", sublayer)), events.index(("wait", sublayer))
    during = events[begin:end]
    return sorted(n for what, n in during if what == "launch" and ("done", n) in during)


@pytest.mark.parametrize("name", PLANS)
def test_a_reduce_is_waited_for_where_the_plan_says(pools: Pools, name: str) -> None:
    """Forward and backward. A reduce runs while every sublayer computes that does not read it, and
    none other; `Plan.blocking` are those that run alone. Catches a wait at the next read instead of
    the read that needs it, and a backward sum that autograd's accumulation waits for too early."""
    world_size, ranks = 2, 2
    plan = resolve_plan(PLANS[name], 4, ranks)
    count = len(plan.sublayers)
    lands = {each.output: n for n, read in enumerate(plan.landings) for each in read if each.summed}
    for forward, backward in pools(world_size).run(diary, name, ranks):
        for events in (forward, backward):
            for what in ("launch", "done"):
                assert sorted(n for w, n in events if w == what) == list(range(count))
            for what in ("start", "wait"):
                found = [n for w, n in events if w == what and 0 <= n < count]
                assert sorted(found) == sorted(lands)
        for n in lands:
            expected = list(range(n + 1, lands[n]))
            assert computed_between(forward, n) == expected
            assert computed_between(backward, n) == expected
            assert plan.blocking[n] == (not expected)


def test_ladder_waits_one_sublayer_later_than_standard(pools: Pools) -> None:
    """The claim itself, spelled out, and the same diary of `standard`, which blocks throughout."""
    for forward, backward in pools(2).run(diary, "ladder", 2):
        for n in range(7):
            order = [("start", n), ("launch", n + 1), ("done", n + 1), ("wait", n)]
            assert [event for event in forward if event in order] == order
            assert [event for event in backward if event in order] == order
            # Nor may it be later: sublayer n + 2 reads it; backward, n itself needs its gradient.
            if n < 6:
                assert forward.index(("wait", n)) < forward.index(("launch", n + 2))
            assert backward.index(("wait", n)) < backward.index(("launch", n))
        # The next reduce is under way before the last is waited for: never none in flight.
        for n in range(1, 7):
            assert forward.index(("start", n)) < forward.index(("wait", n - 1))
            assert backward.index(("start", n - 1)) < backward.index(("wait", n))
    for forward, backward in pools(2).run(diary, "standard", 2):
        for n in range(8):
            assert computed_between(forward, n) == []
            assert computed_between(backward, n) == []
            assert forward[forward.index(("start", n)) + 1] == ("wait", n)
            assert backward[backward.index(("start", n)) + 1] == ("wait", n)


class Noting(Reducer):
    """Keeps weak references to each partial, and to its output."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.partials: list[weakref.ref] = []
        self.outputs: list[weakref.ref] = []

    def begin(self, runtime: Runtime, plan: Plan, norms: Any, shape: torch.Size) -> Pass:
        reducer = self

        class NotingPass(Pass):
            def reduce(self, n: int, partial: Any) -> Output:
                output = super().reduce(n, partial)
                reducer.partials.append(weakref.ref(partial))
                reducer.outputs.append(weakref.ref(output))
                return output

        return NotingPass(runtime, self, plan, norms)


@pytest.mark.parametrize("name", PLANS)
def test_an_output_is_let_go_when_it_has_landed(name: str) -> None:
    """Looked at as each sublayer begins. Catches a forward pass that keeps a hidden state of every
    sublayer to its end, or of the last one for too long."""
    config = small_config(PLANS[name], 4, name in DEPENDS_ON_T)
    model = full_model(config, seed=0)
    reducer = Noting(Ranks(4, 0, 4))
    model.use(Runtime(reducer))
    kept = []

    def look(*_: Any) -> None:
        for noted in (reducer.partials, reducer.outputs):
            kept.append(sum(each() is not None for each in noted))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(look)
        layer.mlp.register_forward_pre_hook(look)
    with torch.no_grad():
        model(sample_tokens(config, seed=0))
    under_way = max(
        read - landing.output
        for read, landings in enumerate(config.plan.landings)
        for landing in landings
    )
    assert len(reducer.outputs) == len(config.plan.sublayers) > under_way
    # The sum of a group's partials begins as the first of them.
    group = any(begin not in (None, n) for n, begin in enumerate(config.plan.group_begins))
    assert max(kept) <= under_way - 1 + group
