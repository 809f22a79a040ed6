"""Real ranks against virtual ones: logits, losses and every gradient, for every plan.

The oracle is the same model in float64 with all T ranks in one process, which
tests/models/test_model.py holds to the equations. Each case runs in float64 as it is, and in
float32 with all collectives late (see `late_collectives`), where reading a buffer before its reduce
has been waited for gives NaN on every run and not on an unlucky one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models import Ranks, Transformer
from ladder.parallel import reducers
from ladder.parallel.sharding import (
    local_parameters,
    local_tensor,
    shard_model,
    sum_shared_gradients,
)
from tests.distributed import Pools, tp_mesh
from tests.parallel.steps import LIMITS, assert_none_wrong, errors_of, sample, step, weigh
from tests.samples import (
    DEPENDS_ON_T,
    PLANS,
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    small_config,
    virtual,
)


class LateWork:
    """A collective that happens when it is waited for, and whose buffer is NaN until then."""

    def __init__(self, value: Tensor, **options: Any) -> None:
        self.buffer, self.value, self.options = value, value.clone(), options
        value.fill_(float("nan"))

    def wait(self) -> None:
        dist.all_reduce(self.value, **self.options)
        self.buffer.copy_(self.value)


@contextlib.contextmanager
def late_collectives() -> Iterator[None]:
    """Within it every asynchronous all-reduce of the reducers is as late as it can be."""

    def start(exchange: reducers.Exchange, value: Tensor) -> None:
        exchange.work = LateWork(value.detach(), group=exchange.group)

    with mock.patch.object(reducers.Exchange, "start", start):
        yield


def step_errors(
    rank: int, world_size: int, tp: int, cases: list[dict[str, Any]]
) -> list[tuple[str, str, float]]:
    """In a worker: (case, what, relative error) of all that is wrong.

    A case: plan, and optionally ranks (T, where the plan depends on it; tp otherwise), batch,
    length, of (see `step`), and changes to the config.
    """
    mesh = tp_mesh(tp)
    seed = 1 + 10 * (rank // tp)  # each data-parallel group has its own data
    wrong: list[tuple[str, str, float]] = []
    for case in cases:
        options = {"ranks": tp, "batch": 2, "length": 7, "of": "losses", **case}
        plan, ranks = options.pop("plan"), options.pop("ranks")
        batch, length = options.pop("batch"), options.pop("length")
        of = options.pop("of")
        config = small_config(PLANS.get(plan, plan), ranks, plan in DEPENDS_ON_T, **options)
        tokens, targets = sample(config, seed, batch, length)
        whole = full_model(config, seed=4)
        state = copy.deepcopy(whole.state_dict())
        expected = step(virtual(whole, ranks), tokens, targets, of, oracle=True)
        for late, dtype in ((False, torch.float64), (True, torch.float32)):
            model = Transformer(config).double()
            model.load_state_dict(state)
            shard_model(model, mesh, dtype=dtype)
            assert model.reducer.ranks == Ranks(ranks, (rank % tp) * ranks // tp, ranks // tp)
            with late_collectives() if late else contextlib.nullcontext():
                found = step(model, tokens, targets, of)
            label = f"{case} {dtype}{' late' if late else ''}"
            errors = errors_of(model, found, expected)
            wrong += [(label, what, e) for what, e in errors.items() if not e < LIMITS[dtype]]
    return wrong


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks(pools: Pools, name: str) -> None:
    """T = 2 on two processes, and T = 4 as two processes of two virtual ranks each where T is part
    of the plan. Catches gradients T times too large (autograd through an all-reduce), a shared
    parameter's gradient left as one rank's, an own partial that the reduce overwrote, a peer's lag
    that is not in the backward pass."""
    cases: list[dict[str, Any]] = [{"plan": name}, {"plan": name, "of": "the last logits"}]
    if name in DEPENDS_ON_T:
        cases += [{"plan": name, "ranks": 4}, {"plan": name, "ranks": 4, "num_kv_heads": 1}]
    assert_none_wrong(pools(2).run(step_errors, 2, cases))


# One of each kind on four ranks, too: `make test-all` runs the rest there.
ON_FOUR = {"standard", "ladder", "desync-3x", "accumulate-2x-lag1", "dtp-3", "a mix of everything"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ON_FOUR else pytest.mark.slow) for name in PLANS],
)
def test_four_ranks(pools: Pools, name: str) -> None:
    """T = 4 with two KV heads, so that K and V are replicated and each rank uses its head."""
    assert_none_wrong(pools(4).run(step_errors, 4, [{"plan": name}]))


SHAPES: dict[str, dict[str, Any]] = {
    "one KV head": {"num_kv_heads": 1},
    "KV heads as many as heads": {"num_kv_heads": 4},
    "eight heads, four of KV": {"num_heads": 8, "num_kv_heads": 4},
    "tied": {"tie_embeddings": True},
    "tied, last chunk of one row": {"tie_embeddings": True, "vocab_size": 13},
    "even vocabulary": {"vocab_size": 64},
    "one sequence of two tokens": {"batch": 1, "length": 2},
    "five sequences": {"batch": 5},
    "gradient by the logits": {"of": "logits"},
    "gradient by the logits, tied": {"of": "logits", "tie_embeddings": True},
}
BIASES: dict[str, dict[str, Any]] = {
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "bias of q, k and v alone": {"qkv_bias": True},
    "norms of q and k, one KV head": {"qk_norm": True, "num_kv_heads": 1},
    "both biases, one KV head": {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 1},
}


# Of these, on four ranks: what two do not have. `make test-all` runs the rest there, too.
FOUR = {"eight heads, four of KV", "tied, last chunk of one row", "both biases, one KV head"}


def on_ranks(names: Iterable[str]) -> list[Any]:
    """Parameters (shape, world_size)."""
    rest = pytest.mark.slow
    return [(name, 2) for name in names] + [
        pytest.param(name, 4, marks=() if name in FOUR else rest) for name in names
    ]


@pytest.mark.parametrize(("shape", "world_size"), on_ranks(SHAPES))
def test_shapes(pools: Pools, shape: str, world_size: int) -> None:
    """Catches uneven vocabulary chunks, a target in another rank's chunk, a batch taken for ranks,
    tied weights that come apart when they are placed."""
    cases = [{"plan": p, **SHAPES[shape]} for p in ("ladder", "desync-2x then ladder", "dtp-1")]
    assert_none_wrong(pools(world_size).run(step_errors, world_size, cases))


@pytest.mark.parametrize(("shape", "world_size"), on_ranks(BIASES))
def test_output_biases(pools: Pools, shape: str, world_size: int) -> None:
    """A bias that rank 0 adds. Catches T biases in the sum, and a gradient that the other ranks,
    which do not use it, never hear of (they would step differently, or hang)."""
    cases = [{"plan": p, **BIASES[shape]} for p in ("standard", "parallel", "ladder", "lag 2")]
    assert_none_wrong(pools(world_size).run(step_errors, world_size, cases))


def test_two_groups_of_two(pools: Pools) -> None:
    """Four processes as (dp, tp) = (2, 2), each group with its own data. Catches a collective over
    all processes where it should be over the TP group."""
    plans = ("standard", "ladder", "desync-4x", "dtp-2", "own at once, peers 1 later")
    cases: list[dict[str, Any]] = [{"plan": plan} for plan in plans]
    cases += [{"plan": plan, "ranks": 4} for plan in plans if plan in DEPENDS_ON_T]
    assert_none_wrong(pools(4).run(step_errors, 2, cases))


# That these comparisons can fail


def errors_without_waiting(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """The same comparison with a reducer that forgets to wait."""

    def finish(exchange: reducers.Exchange) -> None:
        exchange.work = None

    with mock.patch.object(reducers.Exchange, "finish", finish), late_collectives():
        return step_errors(rank, world_size, world_size, [{"plan": "ladder"}])


def errors_without_sharing(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """The same comparison where the shared gradients are left as each rank's own."""
    with mock.patch("tests.parallel.steps.sum_shared_gradients"):
        return step_errors(rank, world_size, world_size, [{"plan": "ladder"}])


def test_what_goes_wrong_is_seen(pools: Pools) -> None:
    """A reducer that does not wait, and shared gradients that are not summed, are both reported."""
    for wrong in pools(2).run(errors_without_waiting):
        assert [
            what for label, what, error in wrong if "late" in label and what == "logits or losses"
        ]
    for wrong in pools(2).run(errors_without_sharing):
        assert {what for _, what, _ in wrong} == {
            *(f"model.layers.{i}.input_layernorm.weight.grad" for i in range(4)),
            *(f"model.layers.{i}.post_attention_layernorm.weight.grad" for i in range(4)),
            "model.norm.weight.grad",
        }


# Several batches, hooks, narrow activations


def two_steps(rank: int, world_size: int) -> list[float]:
    """In a worker: gradient accumulation over two batches, both forwards before either backward."""
    config = small_config("ladder")
    oracle, model = full_model(config, 4), full_model(config, 4)
    shard_model(model, tp_mesh(world_size))
    for each in (oracle, model):
        losses = [each(*sample(config, seed, 2, 7)) for seed in (1, 2)]
        for loss in losses:
            weigh(loss).backward()
    sum_shared_gradients(model)
    found = []
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, _, part in local_parameters(model):
        grad, whole = grads[name], expected[name]
        assert grad is not None
        assert whole is not None
        found.append(relative_error(local_tensor(grad), whole[part]))
    return found


def test_gradients_accumulate(pools: Pools) -> None:
    """Two batches in flight at once, one sum of the shared gradients at the end. Catches an
    exchange that belongs to the reducer rather than to the call."""
    for found in pools(2).run(two_steps):
        assert max(found) < LIMITS[torch.float64]


def errors_with_hooks(rank: int, world_size: int) -> list[tuple[str, float]]:
    """In a worker: a step of a model whose modules all have forward and backward hooks."""
    config = small_config("ladder")
    tokens, targets = sample(config, 1, 2, 7)
    expected = step(full_model(config, 4), tokens, targets)
    model = full_model(config, 4)
    shard_model(model, tp_mesh(world_size))
    for module in model.modules():
        module.register_full_backward_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
    errors = errors_of(model, step(model, tokens, targets), expected)
    return [(what, error) for what, error in errors.items() if not error < LIMITS[torch.float64]]


def test_module_hooks_change_nothing(pools: Pools) -> None:
    """Backward hooks on modules (torch's CommDebugMode, profilers, FSDP set such) hand the loop
    views of what the modules returned. Catches a reduce in place that cannot take a view."""
    assert pools(2).run(errors_with_hooks) == [[], []]


def narrow_errors(rank: int, world_size: int) -> list[tuple[str, float]]:
    """In a worker: what a step in bfloat16 from float32 parameters gets wrong by more than 5 %."""
    wrong = []
    for plan in ("ladder", "desync-2x", "dtp-1"):
        config = small_config(plan, world_size, plan in DEPENDS_ON_T)
        tokens, targets = sample(config, 1, 2, 7)
        whole = full_model(config, 4)
        expected = step(virtual(whole, world_size), tokens, targets)
        model = full_model(config, 4)
        shard_model(model, tp_mesh(world_size), dtype=torch.float32)
        model.use(replace(model.runtime, compute_dtype=torch.bfloat16))
        found = step(model, tokens, targets)
        assert found.logits.dtype == torch.bfloat16
        assert found.value.dtype == torch.float32
        assert {grad.dtype for grad in found.grads.values() if grad is not None} == {torch.float32}
        errors = errors_of(model, found, expected)
        for what in ("logits without grad", "logits or losses", "model.embed_tokens.weight.grad"):
            if not 1e-5 < errors[what] < 0.05:
                wrong.append((f"{plan}: {what}", errors[what]))
    return wrong


def test_bfloat16_activations(pools: Pools) -> None:
    """Parameters, their gradients and losses stay float32; what is exchanged is bfloat16."""
    assert pools(2).run(narrow_errors) == [[], []]


def test_plans_cover_both_kinds() -> None:
    """The lists above contain the plans that their names say."""
    for name, spec in PLANS.items():
        plan = small_config(spec, 2, name in DEPENDS_ON_T).plan
        assert plan.depends_on_tp == (name not in SAME_AT_ANY_T)
