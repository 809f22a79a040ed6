"""The model and its engine on GPUs, over NCCL, against one CPU process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ladder.infer.devices import free_bytes
from ladder.infer.engine import Engine, generate
from ladder.infer.sampling import Sampling
from ladder.models import document_starts
from ladder.models.documents import Packed, within_documents
from ladder.models.forward_pass import Output
from ladder.parallel import launch
from ladder.parallel.decode import DecodePass, Product
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import local_parameters, local_tensor, sum_shared_gradients
from tests.gpu import WORLDS, batch, make
from tests.infer.engines import PLANS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fused", [False, True])
def test_a_model_on_another_gpu_than_the_current_one(fused: bool) -> None:
    """A graph that is captured on the current one is empty, and gives any tokens."""
    prompts, sampling = [[5, 8], [3] * 20], Sampling(0.9, top_k=50, seed=2)
    text: list[Any] = []
    for place in ("cpu", "cuda:1"):
        model = make("ladder", None, torch.float32, device=torch.device(place))
        for _, local, _ in local_parameters(model):
            with torch.no_grad():
                local.mul_(3.0)  # wide logits: choices that are no near ties
        engine = Engine(model, fused=fused)
        text.append([engine.generate(prompts, max_new_tokens=12) for _ in range(2)])
        again = [engine.generate(prompts, max_new_tokens=12, sampling=sampling) for _ in range(2)]
        assert again[0] == again[1]
        assert torch.cuda.current_device() == 0
    assert text[0] == text[1]


def test_what_a_dropped_session_held_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache and its graphs' memory, before the next session is made; texts stay."""
    engine = Engine(make("ladder", None, torch.float32, device=torch.device("cuda")))
    expected = engine.generate([[5, 8]], max_new_tokens=8)
    large = engine.session(64, 2048, Sampling())
    held, before = large.cache.keys.nbytes, free_bytes(engine.device)
    del large
    monkeypatch.setattr("ladder.infer.engine.session_bytes", lambda *_: math.inf)
    engine.generate([[5, 8]] * 2, max_new_tokens=8)
    assert [batch for batch, *_ in engine.sessions] == [2]
    assert free_bytes(engine.device) - before > held  # and that of values, less the new session
    assert engine.generate([[5, 8]], max_new_tokens=8) == expected


@pytest.mark.parametrize("failing", [2, 3])
def test_a_step_that_failed_in_a_capture_can_be_captured(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either stream: the error is the step's own, and the next capture is as good as any."""
    engine = Engine(make("ladder", None, torch.float32, device=torch.device("cuda")), fused=True)
    expected = engine.generate([[5, 8]], max_new_tokens=8)
    undisturbed = DecodePass.reduce

    def reduce(run: DecodePass, n: int, partial: Product) -> Output:
        if n == failing and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("out of something")
        return undisturbed(run, n, partial)

    engine.sessions.clear()
    with monkeypatch.context() as patched:
        patched.setattr(DecodePass, "reduce", reduce)
        with pytest.raises(RuntimeError, match="out of something"):
            engine.generate([[5, 8]], max_new_tokens=8)
    assert engine.generate([[5, 8]], max_new_tokens=8) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_on_gpus(world: int) -> None:
    """float32 within 1e-5 (TF32 is off), bfloat16 within its rounding."""
    assert launch.run(on_gpus, (), nproc=world) == 0


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
