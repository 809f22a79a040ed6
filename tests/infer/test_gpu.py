"""On GPUs, where there are any: the same model over NCCL, against one CPU process in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.bench.inference.build import random_model
from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.inference.verify import STEPS, check_session, reference
from ladder.config import build
from ladder.infer.engine import Engine, Session, generate
from ladder.infer.sampling import Sampling
from ladder.kernels.decode import MAX_ROWS
from ladder.models import ModelConfig, Transformer, document_starts
from ladder.models.documents import Packed, within_documents
from ladder.parallel import launch
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import (
    initialise,
    local_parameters,
    local_tensor,
    shard_model,
    sum_shared_gradients,
)
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.interruption import Interruption
from ladder.train.loop import train
from ladder.train.optim import make_optimizer
from ladder.train.prefetch import Batch, MicroBatch
from ladder.train.step import take_step, to_host
from tests import samples
from tests.infer.engines import fused_config, heads_agree, pushing_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS: list[tuple[str, int | None]] = [
    ("standard", None),
    ("parallel", None),
    ("ladder", None),
    ("hybrid", None),
    ("desync-4x", 4),
    ("accumulate-4x", 4),
    ("dtp-1", 4),
]
WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


def make(
    plan: str, degree: int | None, dtype: torch.dtype, max_seq_len: int = 2048,
    qwen: bool = False, **where: Any,
) -> Transformer:  # fmt: skip
    """qwen: with biases of queries, keys and values, and norms of queries and keys."""
    config = ModelConfig(
        max_seq_len=max_seq_len,
        vocab_size=515,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        plan=plan,  # type: ignore[arg-type]
        tp_degree=degree,
        qkv_bias=qwen,
        qk_norm=qwen,
    )
    with torch.device("meta"):
        model = Transformer(config)
    shard_model(model, **where, dtype=dtype)
    initialise(model, 1)
    with torch.no_grad():  # what every rank's part of them is
        for name, local, _ in local_parameters(model):
            if name.endswith("bias"):
                local.fill_(0.1)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                local.copy_(torch.linspace(0.5, 1.5, len(local)))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    both = torch.randint(0, 515, (2, 3, 65), generator=source)
    return both[0], both[1]


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    value = value.cpu().double()
    assert torch.isfinite(value).all()
    return float((value - expected).abs().max() / expected.abs().max())


def on_gpus() -> int:
    """Logits and every gradient of every plan, and greedy text, on this rank's GPU."""
    device = launch.join("cuda")
    mesh = make_mesh(device, launch.world_size())
    tokens, targets = batch()
    for plan, degree in PLANS:
        oracle = make(plan, degree, torch.float64)
        expected = oracle(tokens)
        oracle(tokens, targets).sum().backward()
        grads = {name: p.grad for name, p in oracle.named_parameters()}
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            tp = None if mesh is None else mesh["tp"]
            model = make(plan, degree, dtype, mesh=tp, device=device)
            error = relative(model(tokens.to(device)).detach(), expected.detach())
            assert error < tolerance, (plan, dtype, error)
            model(tokens.to(device), targets.to(device)).sum().backward()
            sum_shared_gradients(model)
            parameters = dict(model.named_parameters())
            for name, _, part in local_parameters(model):
                grad, wanted = parameters[name].grad, grads[name]
                assert grad is not None
                assert wanted is not None
                scale = wanted.abs().max()
                difference = local_tensor(grad).cpu().double() - wanted[part]
                assert difference.abs().max() / scale < tolerance * 2, (plan, dtype, name)
    return 0


def generate_on_gpus(reducer: str) -> int:
    """The engine, plain, in graphs and fused, against the plain one on the CPU: equal tokens."""
    device = launch.join("cuda")
    mesh = make_mesh(device, launch.world_size())
    source = torch.Generator().manual_seed(4)
    lengths = {1: (7,), 3: (1, 250, 30), 64: tuple(range(1, 65))}  # 250 + 12 crosses a bucket
    for plan, degree, qwen in [*((*each, False) for each in PLANS), ("ladder", None, True)]:
        oracle = make(plan, degree, torch.float32, qwen=qwen)
        tp = None if mesh is None else mesh["tp"]
        model = make(plan, degree, torch.float32, qwen=qwen, mesh=tp, device=device)
        for each in (oracle, model):
            with torch.no_grad():
                for _, local, _ in local_parameters(each):
                    local.mul_(3.0)  # wide logits: choices that are no near ties
        plain = Engine(model, graphs=False, fused=False)
        engines = [Engine(model, fused=False)]
        if degree is None or degree == launch.world_size():
            where = {"mesh": tp, "device": device, "reducer": reducer}
            other = make(plan, degree, torch.float32, qwen=qwen, **where)
            for _, local, _ in local_parameters(other):
                local.mul_(3.0)
            engines.append(Engine(other, fused=True))
        for count, each_length in lengths.items():
            prompts = [torch.randint(0, 515, (n,), generator=source).tolist() for n in each_length]
            expected = generate(oracle, prompts, max_new_tokens=12)
            assert plain.generate(prompts, max_new_tokens=12) == expected, (plan, count)
            for engine in engines:
                case = (plan, qwen, count, engine.fused)
                first = engine.generate(prompts, max_new_tokens=12)
                again = engine.generate(prompts, max_new_tokens=12)
                assert first == expected, case
                assert again == expected, case  # a replayed graph, a used session
                sampling = Sampling(0.9, top_k=50, seed=2)
                drawn = engine.generate(prompts, max_new_tokens=12, sampling=sampling)
                assert drawn == engine.generate(prompts, max_new_tokens=12, sampling=sampling)
                assert drawn != expected
                launch.agree({"tokens": [result.tokens for result in drawn]})
    fill_the_cache({"mesh": tp, "device": device, "reducer": reducer})
    return 0


def fill_the_cache(where: dict[str, Any]) -> None:
    """To its last place, through every kind of engine: the tokens of the CPU's."""
    oracle = make("ladder", None, torch.float32, max_seq_len=48)
    expected = generate(oracle, [[3] * 5, [9] * 40], max_new_tokens=100)
    assert [(len(r.tokens), r.reason) for r in expected] == [(43, "context"), (8, "context")]
    for kind in ({"graphs": False, "fused": False}, {"fused": False}, {"fused": True}):
        model = make("ladder", None, torch.float32, max_seq_len=48, **where)
        found = Engine(model, **kind).generate([[3] * 5, [9] * 40], max_new_tokens=100)
        assert found == expected, kind


@pytest.mark.parametrize("world", WORLDS)
def test_the_engine_on_gpus(world: int) -> None:
    """A cache or graph that holds stale state, a rank that samples apart, or a wrong mask fails."""
    assert launch.run(generate_on_gpus, ("async" if world == 1 else "push",), nproc=world) == 0


@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_on_gpus(world: int) -> None:
    """float32 within 1e-5 (TF32 is off), bfloat16 within its rounding."""
    assert launch.run(on_gpus, (), nproc=world) == 0


def train_on_gpus(settings: dict[str, Any]) -> int:
    train(build(TrainConfig, settings, "test recipe"), device="cuda")
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-2x", 4)])
def test_training_on_gpus_equals_the_cpu(
    corpus: Path, tmp_path: Path, world: int, plan: str, degree: int | None
) -> None:
    """TP, and with 4 GPUs TP x data parallel, against one CPU process."""
    settings: dict[str, Any] = {
        "data": str(corpus), "out": str(tmp_path / "cpu"), "plan": plan, "tp_degree": degree,
        "steps": 5, "seq_len": 16, "batch_size": 4, "warmup_steps": 1, "log_interval": 1,
        "eval_windows": 4, "lr": 1e-3, "tensorboard": False,
    }  # fmt: skip
    train(build(TrainConfig, settings, "test recipe"), device="cpu")
    there = settings | {"out": str(tmp_path / "gpu"), "tp": min(world, 2)}
    assert launch.run(train_on_gpus, (there,), nproc=world) == 0
    losses = [
        [record["loss"] for record in metrics.read_metrics(tmp_path / run) if "loss" in record]
        for run in ("cpu", "gpu")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of several documents a row, of 1 to 300 tokens, and where each begins."""
    source = torch.Generator().manual_seed(12)
    tokens = torch.randint(1, 515, (3, 400), generator=source)
    for row, ends in enumerate(([0, 1, 40], [299], [])):
        tokens[row, ends] = 0
    return tokens, document_starts(tokens, 0)


@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-4x", 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_on_a_gpu(plan: str, degree: int | None, dtype: torch.dtype) -> None:
    """Logits and gradients against the CPU's mask in float64; bfloat16 takes the kernel, with fewer
    heads of keys than of queries. Catches a kernel that pairs them wrongly, is not causal, gives no
    gradient, or makes the host wait."""
    tokens, starts = ragged()
    targets = tokens.roll(-1, 1)
    device = torch.device("cuda", 0)
    oracle = make(plan, degree, torch.float64)
    model = make(plan, degree, torch.float32, device=device)
    model.use(replace(model.runtime, compute_dtype=dtype))
    inputs = [value.to(device) for value in (tokens, targets, starts)]
    expected = oracle(tokens, targets, documents=starts)
    expected.sum().backward()
    model(inputs[0], inputs[1], documents=inputs[2])  # whatever is compiled or set up first
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = model(inputs[0], inputs[1], documents=inputs[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert relative(losses.detach(), expected.detach()) < tolerance
    wanted = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        grad, reference = parameter.grad, wanted[name].grad
        assert grad is not None
        assert reference is not None
        assert relative(grad, reference) < 2 * tolerance, name
    kernel = isinstance(within_documents(inputs[2], tokens.shape, 1, dtype, 32), Packed)
    assert kernel == (dtype == torch.bfloat16)


@pytest.mark.parametrize("plan", ["ladder", "desync-2x"])
def test_a_training_step_never_waits_for_the_gpu(plan: str) -> None:
    """Catches what keeps the host from being a step ahead: a number that is asked for, a copy from
    memory that is not page-locked."""
    device = torch.device("cuda", 0)
    model = make(plan, 2 if plan != "ladder" else None, torch.float32, device=device)
    model.use(replace(model.runtime, compute_dtype=torch.bfloat16))
    config = build(TrainConfig, {"data": "", "out": ""}, "test recipe")
    optimizer = make_optimizer(model, config)
    tokens, targets = (each.to(device) for each in batch())
    whole = Batch([0], [MicroBatch(tokens, targets, None)] * 2, 2.0 * tokens.numel())
    told = Interruption()
    first = take_step(model, optimizer, whole, None, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = take_step(model, optimizer, whole, None, 1.0)
        stop = to_host(told.on_any_rank(device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second().sums < first().sums
    assert stop() == [0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_masked_training_on_a_gpu(corpus: Path, tmp_path: Path, wrapped: bool) -> None:
    """The CPU's losses in bfloat16, with batches from pinned memory; plain, and with sublayers that
    are compiled and checkpointed. Catches batches that are overwritten while they are copied,
    documents that are another micro-batch's, and a kernel that cannot be compiled."""
    settings: dict[str, Any] = {
        "data": str(corpus), "plan": "ladder", "mask_documents": True, "dtype": "bfloat16",
        "steps": 12, "seq_len": 256, "batch_size": 4, "micro_batch_size": 2, "warmup_steps": 1,
        "log_interval": 1, "eval_windows": 4, "lr": 1e-3, "tensorboard": False,
    }  # fmt: skip
    found = []
    for out, device in (("cpu", "cpu"), ("gpu", "cuda")):
        changes: dict[str, Any] = {"out": str(tmp_path / out)}
        if wrapped and device == "cuda":
            changes |= {"compile": True, "activation_checkpointing": "selective"}
        result = train(build(TrainConfig, settings | changes, "test recipe"), device=device)
        assert result is not None
        records = [record for record in metrics.read_metrics(tmp_path / out) if "loss" in record]
        assert all(0 <= record["data_wait"] < 1 for record in records)
        found.append([*(record["loss"] for record in records), result.loss])
    assert found[1] == pytest.approx(found[0], rel=2e-2)


def short_prompts(count: int, source: torch.Generator) -> list[list[int]]:
    return [torch.randint(0, 67, (1 + n % 9,), generator=source).tolist() for n in range(count)]


def decode_on_gpus() -> int:
    """Every sample plan through fused products that push, in graphs, against the plain CPU."""
    device = launch.join("cuda")
    source = torch.Generator().manual_seed(6)
    for name in samples.FUSED_PLANS:
        oracle, engine = pushing_engine(name, device)
        for count in (1, 2, 3, 12, 33, MAX_ROWS + 6):  # beyond the rows of the products
            prompts = short_prompts(count, source)
            expected = generate(oracle, prompts, max_new_tokens=10)
            for _ in range(3):  # a graph replayed, slots used again
                assert engine.generate(prompts, max_new_tokens=10) == expected, (name, count)
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_decodes_through_pushing_products(world: int) -> None:
    """Any lags, kinds, reduces and scales; several numbers of rows. A slot that is written before
    it is clear, or landed twice or not at all, gives other tokens or a hang."""
    assert launch.run(decode_on_gpus, (), nproc=world) == 0


def heads_on_gpus() -> int:
    """The heads of all ranks read the same bits, for every plan, in prefill and decode."""
    device = launch.join("cuda")
    world = launch.world_size()
    mesh = make_mesh(device, world)
    assert mesh is not None
    source = torch.Generator().manual_seed(9)
    for name in [name for name in samples.FUSED_PLANS if name not in samples.ADDED_APART]:
        config = fused_config(name, world, vocab_size=68)  # which ranks cut evenly
        for dtype in (torch.float32, torch.bfloat16):
            model = samples.full_model(config, 5, dtype)
            samples.share_head(model, world)
            shard_model(model, mesh["tp"], device=device, reducer="push")
            engine = Engine(model, fused=True)
            for count in (1, 3, 33, MAX_ROWS + 6):
                tokens = torch.randint(0, 68, (count, 30), generator=source)
                assert all(heads_agree(engine, tokens, 20)), (name, dtype, count)
    return 0


@pytest.mark.parametrize("world", WORLDS[1:])
def test_what_the_heads_read_is_the_same_on_all_gpus(world: int) -> None:
    """An all-reduce that adds in another order on some rank shows in the last bits."""
    assert launch.run(heads_on_gpus, (), nproc=world) == 0


def check_on_gpus() -> int:
    """The benchmark's check, before it times, of every plan at an 8B's width: bfloat16."""
    device = launch.join("cuda")
    world = launch.world_size()
    reducer = "async" if world == 1 else "push"
    for plan in ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x",
                 "accumulate-4x", "dtp-1", "dtp-2", "none"):  # fmt: skip
        config = resolve(
            InferencePoint("llama-3-8b", plan, reducer, world, 64, 60, STEPS, layers=4)
        )
        exact = random_model(config, "async", world, device)
        engine = Engine(random_model(config, reducer, world, device))
        with torch.inference_mode():
            for batch in (1, 3, 64):
                expected = reference(exact, batch, 60, STEPS)
                found = check_session(engine.session(batch, 60 + STEPS, Sampling()), expected)
                assert found.passes, (plan, batch, str(found))
                assert found.compared == 2 * batch * (STEPS + 1)
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_passes_the_check_before_timing(world: int) -> None:
    """Errors up to twice the plain path's, the reference's tokens, and every run the same bits."""
    assert launch.run(check_on_gpus, (), nproc=world) == 0


def decode_late(plans: list[str], turns: int) -> int:
    """Sessions in turns, whose steps begin late on some rank: the tokens of one process."""
    device = launch.join("cuda")
    source, late = torch.Generator().manual_seed(8), random.Random(launch.rank())
    undelayed = Session.step

    def step(session: Session) -> None:
        if late.random() < 0.2:
            torch.cuda._sleep(late.randrange(400_000))
        undelayed(session)

    for name in plans:
        oracle, engine = pushing_engine(name, device)
        cases = [short_prompts(count, source) for count in (1, 33)]
        expected = [generate(oracle, prompts, max_new_tokens=24) for prompts in cases]
        with mock.patch.object(Session, "step", step):
            for turn in range(turns):
                for prompts, wanted in zip(cases, expected, strict=True):
                    found = engine.generate(prompts, max_new_tokens=24)
                    assert found == wanted, (name, len(prompts), turn)
    return 0


@pytest.mark.parametrize("world", WORLDS[1:])
def test_decoding_survives_provocation(world: int) -> None:
    """Thousands of replays, by graphs that share slots. A slot cleared too late or read too early
    gives other tokens, or a hang."""
    plans = ["standard", "ladder", "desync-2x", "dtp-2"]
    assert launch.run(decode_late, (plans, 25), nproc=world) == 0
