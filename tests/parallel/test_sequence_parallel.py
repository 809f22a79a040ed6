"""The residual sharded by tokens in training: values, gradients, when, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.config import build
from ladder.models import Transformer, UserError
from ladder.parallel.apply import make_model
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sequence import Collective, SequenceReducer, Transfer
from ladder.parallel.sharding import shard_model
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools, tp_mesh
from tests.parallel.calls import Diary
from tests.parallel.layouts import compare
from tests.parallel.steps import (
    LIMITS,
    assert_none_wrong,
    errors_of,
    prepare,
    step,
)
from tests.samples import (
    DEPENDS_ON_T,
    SAME_AT_ANY_T,
    full_model,
    sample_tokens,
    small_config,
)
from tests.train.runs import recipe


@contextlib.contextmanager
def late_transfers() -> Iterator[None]:
    """Within it every collective happens when it is waited for; its result is NaN until then."""

    def start(transfer: Transfer, collective: Collective, value: Tensor) -> Tensor:
        result, work = collective(torch.zeros_like(value))
        work.wait()
        transfer.held = value.clone(), result.fill_(float("nan"))
        transfer.work = collective
        return result

    def finish(transfer: Transfer) -> Tensor:
        value, result = transfer.held
        found, work = transfer.work(value)
        work.wait()
        transfer.work, transfer.held = None, ()
        return result.copy_(found)

    with mock.patch.multiple(Transfer, start=start, finish=finish):
        yield


def step_errors(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """In a worker: (case, what, relative error) of all that is wrong."""
    wrong: list[tuple[str, str, float]] = []
    for case in cases:
        _, config, tokens, targets, state, expected = prepare(case, world)
        for late, dtype in ((False, torch.float64), (True, torch.float32)):
            model = Transformer(config).double()
            model.load_state_dict(state)
            shard_model(model, tp_mesh(world), dtype=dtype, reducer=SequenceReducer)
            with late_transfers() if late else contextlib.nullcontext():
                found = step(model, tokens, targets)
            label = f"{case} {dtype}{' late' if late else ''}"
            errors = errors_of(model, found, expected)
            wrong += [(label, what, e) for what, e in errors.items() if not e < LIMITS[dtype]]
    return wrong


ON_FOUR = ("parallel", "ladder")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, 2) for name in SAME_AT_ANY_T),
        *(
            pytest.param(name, 4, marks=() if name in ON_FOUR else pytest.mark.slow)
            for name in SAME_AT_ANY_T
        ),
    ],
)
def test_every_plan_of_equal_residuals(pools: Pools, name: str, world: int) -> None:
    """Logits, losses and every gradient, against one process in float64. Catches a gather whose
    gradient is not summed, norm gradients of a rank's own tokens alone, rows of another sequence,
    and a result that is read before it has been waited for."""
    shapes: list[dict[str, Any]] = [{}, {"batch": 1, "length": 4}, {"batch": 4, "length": 3}]
    assert_none_wrong(pools(world).run(step_errors, [{"plan": name, **each} for each in shapes]))


def test_biases_and_replicated_heads(pools: Pools) -> None:
    """Output biases, which rank 0 adds, tied embeddings, norms of q and k, and K and V that every
    rank holds."""
    changes = {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 1, "tie_embeddings": True}
    cases = [{"plan": plan, "qk_norm": True, **changes} for plan in ("standard", "ladder")]
    assert_none_wrong(pools(4).run(step_errors, cases))


Events = list[tuple[str, Any]]


def diary(rank: int, world: int, plan: str) -> tuple[Events, Events]:
    """In a worker: the events of a forward and a backward pass, in order.

    start, wait: of ("scatter", n), sublayer n's output, and ("gather", n), what it reads, or the
    transfers that carry their gradients. launch, done: of sublayer n's computation; backward it is
    done when its first matrix has its gradient.
    """
    config = small_config(SAME_AT_ANY_T[plan], world)
    model = full_model(config, seed=4)
    shard_model(model, tp_mesh(world), reducer=SequenceReducer)
    events, names = Diary(config.plan), {}
    events.hook(model)
    for n, record in enumerate(config.plan.sublayers):
        layer = model.model.layers[config.plan.layers[n]]
        first = layer.mlp.gate_proj if record.kind == "mlp" else layer.self_attn.q_proj
        first.weight.register_post_accumulate_grad_hook(lambda _, n=n: events.write("graded", n))
    start, finish, make = Transfer.start, Transfer.finish, Transfer.__init__

    def noted(transfer: Transfer, forward: Collective, backward: Collective) -> None:
        make(transfer, forward, backward)
        kind = {"scatter": "scatter", "collect": "gather"}[forward.__name__]  # type: ignore[attr-defined]
        first = -1 if kind == "scatter" else 0  # the embedding's is no sublayer's
        names[transfer] = kind, first + sum(each == kind for each, _ in names.values())

    def noted_start(transfer: Transfer, *args: Any) -> Tensor:
        events.write("start", transfer)  # type: ignore[arg-type]
        return start(transfer, *args)

    def noted_finish(transfer: Transfer) -> Tensor:
        events.write("wait", transfer)  # type: ignore[arg-type]
        return finish(transfer)

    tokens = sample_tokens(config, 1, 2, 8)
    with (
        mock.patch.multiple(Transfer, start=noted_start, finish=noted_finish),
        mock.patch.object(Transfer, "__init__", noted),
    ):
        losses = model(tokens, tokens)
        events.in_backward = True
        losses.mean().backward()

    embedding = next(iter(names))
    assert names.pop(embedding) == ("scatter", -1)

    def named(found: Events) -> Events:
        return [(what, names.get(which, which)) for what, which in found if which in names
                or isinstance(which, int)]  # fmt: skip

    backward = [event for event in named(events.backward) if event[0] != "done"]
    done = {"graded": "done"}
    return named(events.forward), [(done.get(what, what), which) for what, which in backward]


def computed_between(events: Events, transfer: tuple[str, int]) -> list[int]:
    """The sublayers computed, launch to done, between a transfer's start and its wait."""
    during = events[events.index(("start", transfer)) : events.index(("wait", transfer))]
    return sorted(n for what, n in during if what == "launch" and ("done", n) in during)


def test_a_ladders_gathers_run_beneath_a_sublayer(pools: Pools) -> None:
    """The gather of read n + 1 is in flight while sublayer n computes, and its gradient while
    sublayer n's gradients are computed. Scatters and their gradients go on a stream of their own on
    a GPU, beneath the same sublayers: what matters here is that they are launched before it, and
    that backward none is queued behind one that waits for it. `standard` overlaps nothing."""
    for forward, backward in pools(2).run(diary, "ladder"):
        for n in range(7):  # the final norm waits for what is still in flight
            for events in (forward, backward):
                assert computed_between(events, ("gather", n + 1)) == [n]
            if n:
                scattered = forward.index(("start", ("scatter", n - 1)))
                gathered = forward.index(("start", ("gather", n + 1)))
                assert scattered < gathered < forward.index(("launch", n))
            began = backward.index(("start", ("scatter", n)))
            assert began < backward.index(("start", ("gather", n + 1)))
            assert began < backward.index(("launch", n))
    for forward, backward in pools(2).run(diary, "standard"):
        for n in range(9):
            for events in (forward, backward):
                assert computed_between(events, ("gather", n)) == []


LAYOUTS = {  # as in tests.parallel.layouts
    2: [(2, 1, "TP + SP")],
    4: [(4, 1, "TP + SP"), (2, 1, "TP + SP x DDP"), (2, 0, "TP + SP x FSDP")],
}


@pytest.mark.parametrize(
    ("plan", "layouts", "steps"),
    [
        ("ladder", {4: LAYOUTS[4][-1:]}, 8),
        pytest.param("ladder", LAYOUTS, 8, marks=pytest.mark.slow),
        *(
            pytest.param(plan, {4: LAYOUTS[4][-1:]}, 8, marks=pytest.mark.slow)
            for plan in ("standard", "parallel", "hybrid")
        ),
        *(
            pytest.param(plan, LAYOUTS, 20, marks=pytest.mark.slow)
            for plan in ("standard", "parallel", "ladder", "hybrid")
        ),
    ],
)
def test_it_trains_as_one_process(
    corpus: Path,
    tmp_path: Path,
    pools: Pools,
    plan: str,
    layouts: dict[int, list[tuple[int, int, str]]],
    steps: int,
) -> None:
    """The residual sharded by tokens, forward and backward, alone and under data parallelism."""
    compare(corpus, tmp_path, pools, layouts, {"sequence_parallel": True}, steps, plan=plan)


def odd(rank: int, world: int, settings: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        train(build(TrainConfig, settings, "test recipe"), device="cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("micro", "windows", "words"),
    [
        (1, 4, "15 tokens (1 x 15) among tp=2 ranks; choose a seq_len that tp divides"),
        (2, 3, "15 tokens (1 x 15) among tp=2 ranks in the last batch of eval_windows; choose"),
    ],
)
def test_tokens_that_tp_does_not_divide_are_refused_before_the_run_begins(
    corpus: Path, tmp_path: Path, pools: Pools, micro: int, windows: int, words: str
) -> None:
    """The tokens of a micro-batch, and of the last held-out batch, evaluated at the end."""
    settings = recipe(
        corpus, tmp_path / "run", seq_len=15, tp=2, sequence_parallel=True,
        micro_batch_size=micro, eval_windows=windows,
    ).to_dict()  # fmt: skip
    for message in pools(2).run(odd, settings):
        assert f"cannot divide {words}" in message
    assert not (tmp_path / "run").exists()


def mesh_of(tp: int) -> Any:
    return make_mesh(torch.device("cpu"), tp)


def refusals(rank: int, world: int) -> list[str]:
    found = []
    for plan, tp in (("desync-2x", 4), ("dtp-1", 2), ("ladder", 1)):
        config = small_config(plan, 4, plan in DEPENDS_ON_T)
        try:
            make_model(config, torch.float32, mesh_of(tp), torch.device("cpu"),
                       sequence_parallel=True)  # fmt: skip
        except UserError as error:
            found.append(str(error))
    model = make_model(small_config("ladder"), torch.float32, mesh_of(4), torch.device("cpu"),
                       sequence_parallel=True)  # fmt: skip
    with pytest.raises(UserError, match=r"3 tokens.*among tp=4"):
        model(torch.zeros(1, 3, dtype=torch.long))
    return found


def test_what_cannot_be_sharded_is_refused(pools: Pools) -> None:
    for first, second, third in pools(4).run(refusals):
        assert "reduce='none'" in first
        assert "2 virtual ranks" in second
        assert "one process" in third


def places_wanted(rank: int, world_size: int) -> str:
    model = full_model(small_config("ladder"), 3)
    shard_model(model, tp_mesh(world_size), reducer=SequenceReducer)
    with pytest.raises(UserError) as error:
        model(sample_tokens(model.config, 2, 2, 8), last=torch.tensor([7, 3]))
    return str(error.value)


def test_one_place_of_each_sequence_is_refused(pools: Pools) -> None:
    assert all("leave out `last`" in text for text in pools(2).run(places_wanted))
