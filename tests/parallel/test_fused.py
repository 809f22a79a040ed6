"""Training with exchanges inside matrix products: values, gradients, where, and what wraps it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ladder.ops
from ladder.config import model_config
from ladder.jit import device_name
from ladder.models import Plan, Ranks, Transformer, UserError, resolve_plan
from ladder.operator_names import GATHER, GATHER_BACKWARD, SCATTER, SCATTER_BACKWARD
from ladder.parallel import launch
from ladder.parallel.apply import CHECKPOINTING, make_model
from ladder.parallel.choose import choose_training
from ladder.parallel.fused import FusedReducer
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sequence import SequenceReducer
from ladder.parallel.sharding import initialise, shard_model
from tests.distributed import Pools, tp_mesh
from tests.parallel.calls import operations
from tests.parallel.layouts import Layouts, compare
from tests.parallel.steps import (
    LIMITS,
    assert_none_wrong,
    compiling,
    errors_of,
    prepare,
    step,
)
from tests.samples import (
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
)


def calls_of(plan: Plan) -> dict[str, int]:
    """The operators of one pass: a scatter where a reduce blocks, a gather in the read after it and
    in the first of all. A record of attention+mlp has two of each."""
    each = [1 + (record.kind == "attention+mlp") for record in plan.sublayers]
    gathers = zip([*each, 1], [True, *plan.blocking], strict=True)
    scatters = zip(each, plan.blocking, strict=True)
    return {name: sum(count for count, here in found if here)
            for name, found in ((GATHER, gathers), (SCATTER, scatters))}  # fmt: skip


def parity(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """In a worker: (case, what, relative error) of all that is wrong."""
    wrong: list[tuple[str, str, float]] = []
    for case in cases:
        options, config, tokens, targets, state, expected = prepare(case, world)
        found = {}
        for reducer in ("fused", "sequence"):
            model = Transformer(config).double()
            model.load_state_dict(state)
            shard_model(model, tp_mesh(world), reducer=reducer)
            with operations() as calls, torch.no_grad():
                hidden = model.hidden(tokens)
            found[reducer] = step(model, tokens, targets), hidden
            errors = errors_of(model, found[reducer][0], expected)
            limit = LIMITS[torch.float64]
            wrong += [(str(case), what, e) for what, e in errors.items() if not e < limit]
            last = {GATHER: int(config.plan.blocking[-1])}  # the head's, which `hidden` does not do
            counts = Counter(calls_of(config.plan)) - Counter(last) if reducer == "fused" else {}
            del calls["all_gather"]  # of `hidden`
            if calls != counts:
                wrong.append((str(case), f"{reducer} calls {calls}", 1.0))
        # Two ranks have one order of sums, but for the two products of attention+mlp.
        if world == 2 and all(each.kind != "attention+mlp" for each in config.plan.sublayers):
            (fused, hidden), (apart, other) = found["fused"], found["sequence"]
            pairs = [(fused.logits, apart.logits), (fused.value, apart.value), (hidden, other)]
            if options == {} and not all(torch.equal(*pair) for pair in pairs):
                wrong.append((str(case), "other bits than sequence", 1.0))
    return wrong


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, 2) for name in SAME_AT_ANY_T),
        *(
            pytest.param(name, 4, marks=() if name == "hybrid" else pytest.mark.slow)
            for name in SAME_AT_ANY_T
        ),
    ],
)
def test_every_plan_of_equal_residuals(pools: Pools, name: str, world: int) -> None:
    """Logits, losses, the head's input and every gradient, against one process in float64, and the
    operators where the plan blocks, nowhere else. Catches rows of another sequence, a sum that is
    scattered twice, and a gather beside a plan's own."""
    shapes: list[dict[str, Any]] = [{}, {"batch": 1, "length": 4}, {"batch": 4, "length": 3}]
    cases = [{"plan": name, **each} for each in (shapes if world == 2 else shapes[:1])]
    assert_none_wrong(pools(world).run(parity, cases))


def test_biases_and_replicated_heads(pools: Pools) -> None:
    """Output biases, which every rank adds to its own rows, tied embeddings, norms of q and k, and
    K and V that every rank holds."""
    changes = {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 1, "tie_embeddings": True}
    cases = [{"plan": plan, "qk_norm": True, **changes} for plan in ("standard", "ladder@0-1")]
    assert_none_wrong(pools(4).run(parity, cases))


DOCUMENTS = torch.tensor([0, 5, 8, 16], dtype=torch.int32)


def one_step(model: Transformer, tokens: Tensor) -> tuple[dict[str, Tensor], Counter[str]]:
    """The losses and every gradient of documents, and the operators of the backward pass."""
    losses = model(tokens, tokens, documents=DOCUMENTS)
    with operations() as calls:
        losses.mean().backward()
    held = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"losses": losses.detach(), **held}, calls


def wrapped(rank: int, world: int, plan: str) -> dict[str, tuple[float, Counter[str]]]:
    """In a worker: by what wraps sublayers, the largest relative error and the operators."""
    config = small_config(SAME_AT_ANY_T[plan], num_layers=2)
    tokens, mesh = sample_tokens(config, 1, 2, 8), make_mesh(torch.device("cpu"), world)
    counters = torch._dynamo.utils.counters
    found = {}

    def note(name: str, reducer: str, mode: str, compile: bool) -> None:
        model = make_model(
            config, torch.float32, mesh, torch.device("cpu"), sequence_parallel=True,
            activation_checkpointing=mode, compile=compile, reducer=reducer,
        )  # fmt: skip
        initialise(model, 3)
        found[name] = one_step(model, tokens)
        graphs = counters["stats"]["unique_graphs"]
        model(tokens, tokens, documents=DOCUMENTS)  # compiled once, for all passes
        assert counters["stats"]["unique_graphs"] == graphs, name

    note("sequence", "sequence", "none", False)
    for mode in CHECKPOINTING:
        note(mode, "fused", mode, False)
        same = zip(found["none"][0].items(), found[mode][0].values(), strict=True)
        for (what, value), again in same:
            assert torch.equal(value, again), (mode, what)
    counters.clear()
    with compiling("aot_eager"):
        for mode in ("none", "full"):
            note(f"{mode}, compiled", "fused", mode, True)
    assert not counters["graph_break"]
    plain = found["sequence"][0]
    return {
        name: (max(relative_error(each, plain[what]) for what, each in values.items()), calls)
        for name, (values, calls) in found.items()
    }


@pytest.mark.parametrize("plan", [pytest.param("hybrid", marks=pytest.mark.slow), "parallel"])
def test_checkpointing_and_compilation(pools: Pools, plan: str) -> None:
    """Within documents. `full` does a sublayer's exchanges again, `selective` none; neither changes
    a bit. Catches compiled sublayers with products of their own, and graphs that break."""
    counts = calls_of(small_config(SAME_AT_ANY_T[plan], num_layers=2).plan)
    # Backward, each is the other; the rows that were gathered are kept.
    # These are within the operators of the gradients, which count for themselves.
    backward = {GATHER: counts[SCATTER], SCATTER: counts[GATHER], GATHER_BACKWARD: counts[GATHER],
                SCATTER_BACKWARD: counts[SCATTER]}  # fmt: skip
    every = sum(counts.values())
    again = {**backward, GATHER: every - 1, SCATTER: every}  # not the head's
    unused = {**again, SCATTER: backward[SCATTER]}  # a compiler sees that a sum is not read again
    expected = {"sequence": {}, "none": backward, "selective": backward, "full": again,
                "none, compiled": backward, "full, compiled": unused}  # fmt: skip
    for found in pools(2).run(wrapped, plan):
        assert all(error < 1e-5 for error, _ in found.values()), found
        assert {name: dict(calls) for name, (_, calls) in found.items()} == expected


SHARDED = [(2, 1, "TP + SP x DDP"), (2, 0, "TP + SP x FSDP")]


@pytest.mark.parametrize(
    ("plan", "layouts"),
    [
        ("hybrid", {4: SHARDED[1:]}),
        pytest.param("parallel", {2: [(2, 1, "TP + SP")], 4: SHARDED}, marks=pytest.mark.slow),
        pytest.param("standard", {8: [(2, 2, "TP + SP x HSDP")]}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_process(
    corpus: Path, tmp_path: Path, pools: Pools, plan: str, layouts: dict[int, Layouts]
) -> None:
    """Under data parallelism, with checkpointed sublayers. Catches a result that FSDP does not see,
    whose weights are then gone in the backward pass."""
    changes = {"sequence_parallel": True, "reducer": "fused", "micro_batch_size": 1}
    changes |= {"activation_checkpointing": "selective"}
    compare(corpus, tmp_path, pools, layouts, changes, steps=4, plan=plan)


@pytest.mark.parametrize(
    ("plan", "ranks", "sharded", "message"),
    [
        ("standard", Ranks(4, 0, 1), False, "sequence_parallel=false: use async or auto"),
        ("desync-2x", Ranks(4, 0, 1), True, "tp=4 and plan 'desync-2x': .*reduce='none'"),
        ("dtp-1", Ranks(4, 0, 2), True, "tp=2 .*: 2 virtual ranks .*=async and seq"),
        ("standard", Ranks(), True, "tp=1 .*there is one process"),
    ],
)
def test_what_is_refused(plan: str, ranks: Ranks, sharded: bool, message: str) -> None:
    resolved = resolve_plan(plan, 4, 4)
    with pytest.raises(UserError, match=f"reducer=fused .*{message}"):
        choose_training(resolved, ranks, (1, 8), "fused", sequence_parallel=sharded)


def adapted(rank: int, world: int) -> str:
    model = full_model(small_config(), 3)
    shard_model(model, tp_mesh(world), reducer="fused")
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UserError) as error:
        model(sample_tokens(model.config, 2, 2, 8))
    return str(error.value)


def test_a_matrix_with_an_adapter_is_refused(pools: Pools) -> None:
    """It computes more than the product by its matrix."""
    for text in pools(2).run(adapted):
        assert "a Sequential" in text
        assert "use reducer=sequence" in text


def trained_on_gpus(gather: str, scatter: str) -> int:
    """A step in float32 by overlapped operators, eager and compiled, against `sequence`."""
    device, world = launch.join("cuda"), launch.world_size()
    config = small_config(
        SAME_AT_ANY_T["hybrid"], hidden_size=256, intermediate_size=512, num_heads=8,
        num_kv_heads=4, max_seq_len=256,
    )  # fmt: skip
    dtype = torch.float32 if (gather, scatter) == ("chunked", "chunked") else torch.bfloat16
    tokens = sample_tokens(config, 1, 2, 256).to(device)
    mesh = make_mesh(device, world)
    found: dict[str, dict[str, Tensor]] = {}
    for name, reducer, mode, compile in (
        ("sequence", "sequence", "none", False), ("fused", "fused", "none", False),
        ("checkpointed", "fused", "full", False), ("compiled", "fused", "selective", True),
    ):  # fmt: skip
        model = make_model(
            config, dtype, mesh, device, sequence_parallel=True, activation_checkpointing=mode,
            compile=compile, reducer=reducer,
        )  # fmt: skip
        initialise(model, 3)
        with ladder.ops.use(GATHER, gather), ladder.ops.use(SCATTER, scatter):
            for _ in range(3):
                model.zero_grad()
                model(tokens, tokens).mean().backward()
        found[name] = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    limit = 1e-4 if dtype == torch.float32 else 0.1  # of 4 layers' roundings
    for name, grads in found.items():
        for what, grad in grads.items():
            error = relative_error(grad, found["sequence"][what].double())
            assert error < limit, (name, what, error)
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("gather", "scatter"), [("chunked", "chunked"), ("waiting", "tracked"), ("chunked", "tracked")]
)
def test_on_gpus(gather: str, scatter: str) -> None:
    assert launch.run(trained_on_gpus, (gather, scatter), nproc=2) == 0


def chosen_on_gpus() -> int:
    """`auto` of an 8B's layer, whose products are in the table of two H100s, and of a small one."""
    device, world = launch.join("cuda"), launch.world_size()
    measured = device_name(device) == "NVIDIA H100 80GB HBM3"
    mesh, layer = make_mesh(device, world), {"num_layers": 1, "vocab_size": 512}
    for shape, mode, found in (
        ((1, 8192), "selective", FusedReducer if measured else SequenceReducer),
        ((1, 8192), "full", SequenceReducer),
        ((1, 128), "none", SequenceReducer),
    ):
        model = make_model(
            model_config({"name": "llama-3-8b", **layer}), torch.bfloat16, mesh, device,
            sequence_parallel=True, activation_checkpointing=mode, shape=shape,
        )  # fmt: skip
        assert type(model.reducer) is found, (shape, mode)
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_auto_on_gpus() -> None:
    assert launch.run(chosen_on_gpus, (), nproc=2) == 0
