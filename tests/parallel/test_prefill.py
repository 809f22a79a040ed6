"""Prefill whose blocking exchanges are inside matrix products, on gloo ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ladder.ops
from ladder.bench.inference.points import Settings, expand
from ladder.comm.capture import Mode, as_captured
from ladder.config import model_config
from ladder.costs import GRAPHED_PROMPT_TOKENS
from ladder.infer.engine import Engine
from ladder.infer.fused import PassReducers
from ladder.infer.load import fuse_prompts
from ladder.infer.session import PROMPT_GRAPHS, Session
from ladder.models import ModelConfig, Plan, Ranks, UserError, resolve_plan
from ladder.models.quantised import quantise_model
from ladder.ops import Choice, choice
from ladder.ops.registry import Call
from ladder.parallel import launch
from ladder.parallel.choose import check_base, choose_decode, choose_prefill
from ladder.parallel.dispatch import Dispatch, Prefill, load_dispatch
from ladder.parallel.mesh import make_mesh
from ladder.parallel.overlap import Overlap, prompt_mode, slot_bytes
from ladder.parallel.prefill import FusedPrefill
from ladder.parallel.reducers import AsyncReducer, PushReducer
from ladder.parallel.refusals import fused_refusal, sums_in_products
from ladder.parallel.sharding import shard_model
from ladder.perf import memory
from tests.distributed import Pools, tp_mesh
from tests.gpu import make
from tests.parallel.calls import operations
from tests.samples import (
    DEPENDS_ON_T,
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
)

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
LANDING = f"{SCATTER}_add_rms_norm"
PLANS = {**SAME_AT_ANY_T, "biased standard": SAME_AT_ANY_T["standard"]}

WHOLE = {
    name: plan
    for name, plan in DEPENDS_ON_T.items()
    if fused_refusal(resolve_plan(plan, 4, 4), Ranks(4, 0, 1)) is None
}


def expected_calls(plan: Plan, bias: bool) -> dict[str, int]:
    """The operators of a pass that returns all positions."""
    found = {GATHER: sum(plan.blocking), SCATTER: 0, LANDING: 0}
    for n, record in enumerate(plan.sublayers):
        if plan.blocking[n] and record.kind != "attention+mlp":
            found[SCATTER if bias or len(plan.landings[n + 1]) > 1 else LANDING] += 1
    return {name: count for name, count in found.items() if count}


def compared(rank: int, world_size: int, plan: str, batch: int, length: int) -> dict[str, Any]:
    """In a worker: the logits against AsyncReducer's, and the operators that ran."""
    bias = plan.startswith("biased")
    changes = {"attention_bias": True, "mlp_bias": True} if bias else {}
    config = small_config(PLANS[plan], **changes)
    model = full_model(config, seed=4, dtype=torch.float32)
    shard_model(model, tp_mesh(world_size))
    tokens = sample_tokens(config, 1, batch, length)
    base = model.reducer
    assert isinstance(base, AsyncReducer)
    with torch.no_grad():
        last = torch.tensor([(3 * n) % length for n in range(batch)])
        border = -(-batch * length // world_size)  # the second rank's first row
        last[border // length] = border % length
        expected = model(tokens), model(tokens, last=last)
        prompts = FusedPrefill(base.ranks, base.group, config.plan)
        model.use(replace(model.runtime, pick=lambda shape: prompts))
        with operations() as calls:
            logits = model(tokens)
        found = logits, model(tokens, last=last)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    return {
        "error": max(relative_error(a, b) for a, b in zip(found, expected, strict=True)),
        "same": all(torch.equal(a, b) for e in everyone for a, b in zip(found, e, strict=True)),
        "calls": dict(calls) == expected_calls(config.plan, bias),
        "found": dict(calls),
    }


@pytest.mark.parametrize(
    ("world_size", "batch", "length"), [(2, 2, 8), (2, 3, 7), (4, 3, 7), (4, 1, 2)]
)
@pytest.mark.parametrize("plan", PLANS)
def test_prompts_compute_the_same(
    pools: Pools, plan: str, batch: int, length: int, world_size: int
) -> None:
    """Rows that T does not divide, fewer rows than ranks, biases, all positions and the last ones.

    Catches a wrong row, norm or residual; the counts catch a landing or a gather left outside.
    """
    for result in pools(world_size).run(compared, plan, batch, length):
        assert result["error"] < 1e-5, result
        assert result["same"]
        assert result["calls"], result


def compared_whole(rank: int, world_size: int, plan: Any, length: int) -> dict[str, Any]:
    """In a worker: the logits of a plan whose residuals differ, and the products that sum."""
    config = small_config(plan, world_size, True)
    model = full_model(config, seed=4, dtype=torch.float32)
    shard_model(model, tp_mesh(world_size))
    tokens = sample_tokens(config, 1, 2, length)
    last = torch.tensor([length - 1, length // 2])
    with torch.no_grad():
        expected = model(tokens), model(tokens, last=last)
        fuse_prompts(model)
        with operations() as calls:
            logits = model(tokens)
        found = logits, model(tokens, last=last)
    sums = sum(sums_in_products(config.plan, n) for n in range(len(config.plan.sublayers)))
    assert sums > 0
    assert calls == {"matmul_all_reduce": sums}, calls
    return {"error": max(relative_error(a, b) for a, b in zip(found, expected, strict=True))}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_prompts_of_plans_whose_residuals_differ(pools: Pools, name: str, world_size: int) -> None:
    """A sum without the residual, or without the group before it, or with it twice, fails."""
    for result in pools(world_size).run(compared_whole, WHOLE[name], 7):
        assert result["error"] < 1e-5


def test_it_is_chosen_from_its_size_on_and_only_where_everything_blocks() -> None:
    ranks = Ranks(4, 1, 1)
    table = Dispatch((), "a test", Prefill(100, 100, 10, fused=200))
    for plan, tokens, expected in (
        ("standard", 19, "sharded"), ("standard", 20, "fused"), ("standard", 31, "sharded"),
        ("parallel", 20, "sharded"), ("ladder", 20, "sharded"), ("hybrid", 20, "sharded"),
    ):  # fmt: skip
        choice = choose_prefill(
            resolve_plan(plan, 4, 4), ranks, (1, tokens), 10, table,
            overlaps=lambda tokens: tokens < 30,
        )  # fmt: skip
        assert (choice.reducer, choice.transport) == (expected, "copy-kernels" if tokens < 11
                                                      else "copy"), plan  # fmt: skip
    never = replace(table, prefill=Prefill())
    for given, overlaps in ((table, None), (never, lambda tokens: True)):
        assert choose_prefill(
            resolve_plan("standard", 4, 4), ranks, (9, 999), 10, given, overlaps=overlaps,
        ).reducer == ("sharded")  # fmt: skip
    for given, transport in ((table, "direct"), (None, "collective")):
        choice = choose_prefill(resolve_plan("ladder", 4, 4), ranks, (1, 9), 10, given, "fused")
        assert str(choice) == f"fused, {transport} (it was asked for)"
    assert choose_decode(resolve_plan("ladder", 4, 4), ranks, 1, None, "fused") == (
        choose_decode(resolve_plan("ladder", 4, 4), ranks, 1, None, "async")
    )


def test_large_prompts_whose_products_overlap_on_two_h100s() -> None:
    """By the shipped tables: an 8B's, from the measured sizes on; another model's have no such
    operators, nor has another GPU."""
    h100 = "NVIDIA H100 80GB HBM3"
    table, plan = load_dispatch(h100, 2), resolve_plan("standard", 4, 4)
    config = model_config("llama-3-8b")

    def chosen(config: ModelConfig, tokens: int, gpu: str = h100, mode: Mode = "captured") -> str:
        return choose_prefill(
            plan, Ranks(2, 1, 1), (1, tokens), 2 * config.hidden_size, table,
            overlaps=lambda tokens: Overlap(config, gpu, 2, torch.bfloat16)(tokens, mode),
        ).reducer  # fmt: skip

    for tokens in (4096, 5120, 8192, 16384, 20480, 32768, 65536):
        assert chosen(config, tokens) == "fused", tokens
        assert chosen(config, tokens, mode="eager") == "fused", tokens
        assert chosen(model_config("half-8b"), tokens) == "sharded", tokens
        assert chosen(config, tokens, "NVIDIA H100 NVL") == "sharded", tokens
    for tokens in (1024, 4094, 131072):
        assert chosen(config, tokens) == "sharded", tokens
    # Without a graph, the operators of a prompt that was not measured wait for the host.
    assert chosen(config, 4352) == "fused"
    assert chosen(config, 4352, mode="eager") == "sharded"


def test_large_prompts_whose_products_overlap_on_four_h200s() -> None:
    """An 8B's: those that were measured (4,096, 16,384 and 65,536 tokens), and most between."""
    table, config = load_dispatch("NVIDIA H200", 4), model_config("llama-3-8b")

    def chosen(plan: str, tokens: int) -> str:
        overlap = Overlap(config, "NVIDIA H200", 4, torch.bfloat16)
        return choose_prefill(
            resolve_plan(plan, 4, 4), Ranks(4, 1, 1), (1, tokens),
            2 * config.hidden_size, table, overlaps=lambda n: overlap(n, prompt_mode(n)),
        ).reducer  # fmt: skip

    for tokens in (4096, 5378, 8192, 16384, 20000, 32768, 65536):
        assert chosen("standard", tokens) == "fused", tokens
        assert chosen("ladder", tokens) == "sharded", tokens
    for tokens in (1024, 4094, 4098, 6146, 9218, 131072):
        assert chosen("standard", tokens) == "sharded", tokens


def test_what_the_slots_of_a_prompt_take() -> None:
    """64 x 1024 tokens of an 8B: 512 MiB of partials; four sets of slots, up to a quarter more."""
    config, h100 = model_config("llama-3-8b"), "NVIDIA H100 80GB HBM3"
    assert slot_bytes(config, h100, 2, 65536) == 5 * 2**29
    assert slot_bytes(config, h100, 2, 4095) == 0  # below 32 MiB they run another way
    assert slot_bytes(config, "another GPU", 2, 65536) == 0
    assert slot_bytes(config, "another GPU", 2, 65536, asked=True) == 5 * 2**29
    assert slot_bytes(config, h100, 1, 65536, asked=True) == 0
    more = [memory.inference(config, 2, 64, 1024, 1024, "bf16", gpu) for gpu in ("", h100)]
    assert more[1].total - more[0].total == 5 * 2**29


def test_an_engine_asks_what_its_own_calls_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `ladder.ops.use`, this machine and the group's order of sums; predictions by the table."""
    picked, asked = "chunked", []

    def choose_call(call: Call) -> Choice:
        asked.append((call.mode, call.any_order))
        return Choice(call, picked, "a test")

    monkeypatch.setattr(choice, "choose", choose_call)
    group: Any = type("Group", (), {})()
    where = model_config("llama-3-8b"), "NVIDIA H100 80GB HBM3", 2
    mine = Overlap(*where, torch.bfloat16, group)
    assert mine(8, "eager")
    assert asked == [("eager", False)] * 4
    monkeypatch.setattr(choice, "any_order_groups", {group})
    picked = "staged"
    assert not mine(4096, "captured")
    assert asked[4:] == [("captured", True)]
    assert Overlap(*where, torch.bfloat16)(4096, "captured")


def test_the_mode_of_a_prompt_is_that_of_its_pass() -> None:
    """In a graph, unless it is large, graphs are off, or a session's graphs are all in use."""
    session = Session.__new__(Session)
    session.graphs, session.prompt_graphs, session.tokens = True, {}, torch.zeros(2)
    half = GRAPHED_PROMPT_TOKENS // 2
    assert [session.prompt_mode(width) for width in (half, half + 1)] == ["captured", "eager"]
    session.prompt_graphs = dict.fromkeys(range(1, PROMPT_GRAPHS + 1))
    assert [session.prompt_mode(width) for width in (8, 9)] == ["captured", "eager"]
    session.graphs = False
    assert session.prompt_mode(8) == "eager"
    seen: list[Any] = []
    push = PushReducer.__new__(PushReducer)
    push.ranks, push.group = Ranks(2, 0, 1), None
    push.dispatch = Dispatch((), "a test", Prefill(fused=1))
    reducers = PassReducers.__new__(PassReducers)
    reducers.base = reducers.push = push
    reducers.plan, reducers.token_bytes = resolve_plan("standard", 4, 4), 10
    reducers.insists, reducers.overlaps = False, lambda *each: bool(seen.append(each))
    with as_captured():
        reducers.choice(torch.Size((2, 7)))
    reducers.choice(torch.Size((2, 7)))
    reducers.choice(torch.Size((2, 7)), "captured")
    assert seen == [(14, "captured"), (14, "eager"), (14, "captured")]


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ("dtp-1", Ranks(4, 0, 1), "no blocking reduce .*own_scale.*; use reducer=async or push$"),
        ("standard", Ranks(4, 0, 2), "2 virtual ranks"),
        ("standard", Ranks(), "there is one process.*; use reducer=async$"),
    ],
)
def test_what_is_refused(plan: str, ranks: Ranks, message: str) -> None:
    with pytest.raises(UserError, match=f"reducer=fused with tp=.*{message}"):
        check_base("prefill", resolve_plan(plan, 4, 4), ranks, "fused")


def generated(rank: int, world_size: int, plan: str, weights: str = "") -> Any:
    """In a worker: tokens by the plain and by the packed model; and how the latter is prefilled."""
    config = small_config(SAME_AT_ANY_T[plan])
    found = []
    for packed in (False, True):
        model = full_model(config, 5, torch.float32)
        shard_model(model, tp_mesh(world_size))
        fuse_prompts(model)
        if weights:
            quantise_model(model, weights)
        engine = Engine(model, fused=packed)
        with operations() as calls:
            tokens = engine.generate([[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]], max_new_tokens=8)
        assert calls[GATHER] > 0
        found.append([each.tokens for each in tokens])
    pick = engine.model.runtime.pick
    assert isinstance(pick, PassReducers)
    return found, [str(pick.choice(torch.Size((3, length)))) for length in (5, 1)]


@pytest.mark.parametrize("plan", ["standard", "hybrid", "parallel"])
def test_engines_generate_the_same_tokens(pools: Pools, plan: str) -> None:
    """Prompts by fused operators, decoding as before, also of a model that an engine has packed."""
    whole = full_model(small_config(SAME_AT_ANY_T[plan]), 5, torch.float32)
    results = Engine(whole).generate([[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]], max_new_tokens=8)
    expected = [each.tokens for each in results]
    for found, (prefill, decode) in pools(2).run(generated, plan):
        assert found == [expected, expected]
        assert prefill == "fused, collective (it was asked for)"
        assert decode.startswith("decode (")


def in_8_bits(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as error:
        generated(rank, world_size, "standard", "int8")
    return str(error.value)


def test_matrices_in_8_bits_are_refused_by_name(pools: Pools) -> None:
    for text in pools(2).run(in_8_bits):
        assert text.startswith("reducer=fused multiplies by matrices of 16 or 32 bits")
        assert "use --weights bf16, or another reducer" in text


def loaded(rank: int, world_size: int) -> str:
    model = full_model(small_config("dtp-1", world_size, True), 5, torch.float32)
    shard_model(model, tp_mesh(world_size))
    with pytest.raises(UserError) as error:
        fuse_prompts(model)
    return str(error.value)


def test_a_plan_that_waits_for_no_sum_is_refused_when_it_is_loaded(pools: Pools) -> None:
    for text in pools(2).run(loaded):
        assert text.startswith("reducer=fused with tp=2 and plan 'dtp-1': the plan has no blocking")


def test_the_benchmark_leaves_out_what_is_refused() -> None:
    """By name; plans without communication are measured once, with the first reducer."""
    plans = ("standard", "dtp-1", "none")
    given = Settings(
        "tiny", plans=plans, reducers=("fused", "async"), tp=(2,), prompt=8, new_tokens=4,
    )  # fmt: skip
    cases, left_out = expand([given], 2, True, lambda reducer, tp: None)
    found = [(point.plan, point.reducer, point.no_comm) for case in cases for point in case]
    assert ("standard", "fused", False) in found
    assert ("none", "fused", False) in found
    assert [reducer for plan, reducer, bare in found if plan == "dtp-1" and not bare] == ["async"]
    (line,) = left_out
    assert line.startswith("dtp-1 at TP 2, reducer fused: the plan has no blocking reduce")
    eight = replace(given, plans=("standard",), weights="int8")
    _, (line,) = expand([eight], 2, True, lambda reducer, tp: None)
    assert line == "standard at TP 2, reducer fused: its products take no int8 weights"


def on_gpus(plan: str, implementation: str) -> int:
    """Captured and eager prompts by an implementation of the operators: the CPU's tokens."""
    prompts = [[1 + n % 60 for n in range(length)] for length in (150, 37, 300)]
    device, world = launch.join("cuda"), launch.world_size()
    degree = world if plan.startswith("desync") else None
    oracle = Engine(make(plan, degree, torch.float32)).generate(prompts, max_new_tokens=6)
    where = {"mesh": make_mesh(device, world)["tp"], "device": device, "reducer": "push"}
    for graphs in (True, False):
        model = make(plan, degree, torch.float32, **where)
        fuse_prompts(model)
        with contextlib.ExitStack() as stack:
            for op in (GATHER, SCATTER, LANDING, "matmul_all_reduce"):
                name = implementation
                if op == GATHER and name == "collective":
                    name = "staged"
                stack.enter_context(ladder.ops.use(op, name))
            engine = Engine(model, graphs=graphs)
            with operations() as calls:
                for _ in range(3):  # graphs are replayed
                    found = engine.generate(prompts, max_new_tokens=6)
                    assert [each.tokens for each in found] == [each.tokens for each in oracle]
        assert calls["matmul_all_reduce" if degree else GATHER] > 0
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("implementation", ["staged", "collective", "chunked"])
@pytest.mark.parametrize("plan", ["standard", "hybrid", "parallel", "desync-2x"])
def test_on_gpus(plan: str, implementation: str) -> None:
    assert launch.run(on_gpus, (plan, implementation), nproc=2) == 0
