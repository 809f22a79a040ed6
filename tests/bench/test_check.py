"""The benchmark's check before timing, its models and its cold starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.inference import cold, measure
from ladder.bench.inference.build import build_model, random_model
from ladder.bench.inference.memory import sequences
from ladder.bench.inference.points import InferencePoint, Settings, expand, resolve
from ladder.bench.inference.verify import EngineCheck, check_session, forced, reference
from ladder.checkpoint import model_entries, write_config, write_tensors
from ladder.config import model_config
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling
from ladder.models import ModelConfig, Transformer, UserError
from ladder.parallel.sharding import initialise, local_parameters, shard_model
from tests.distributed import Pools

CPU = torch.device("cpu")

# ---- the check before timing ----------------------------------------------------------------

TINY = InferencePoint("tiny", "ladder", "async", 1, batch=3, prompt=9, new_tokens=6, layers=4)
STEPS = 4


def engine_check(
    config: ModelConfig, spoil: Any = None, other: ModelConfig | None = None
) -> EngineCheck:
    """The check of a plain bf16 engine, spoilt or with another config, against `config`."""
    expected = reference(random_model(config, "async", 1, CPU), 2, 9, STEPS)
    model = random_model(other or config, "async", 1, CPU)
    if spoil is not None:
        with torch.no_grad():
            spoil(model)
    return check_session(Engine(model).session(3, 9 + STEPS, Sampling()), expected)


@pytest.mark.parametrize("plan", ["standard", "parallel", "ladder", "desync-4x", "dtp-1", "none"])
def test_a_right_engine_passes(plan: str) -> None:
    found = engine_check(resolve(replace(TINY, plan=plan, degree=2)))
    assert found.passes, found
    assert found.repeats
    assert found.plain_error > 0
    assert found.error == pytest.approx(found.plain_error, rel=0.5)  # it is the plain path
    assert (found.sequences, found.steps, found.compared) == (2, STEPS, 2 * 3 * (STEPS + 1))


def spoilt_weight(model: Transformer) -> None:
    model.model.layers[2].self_attn.v_proj.weight[3] *= 4


def spoilt_norm(model: Transformer) -> None:
    model.model.layers[1].input_layernorm.weight.fill_(1.0)


def spoilt_keys(model: Transformer) -> None:
    model.model.layers[3].self_attn.k_proj.weight.neg_()


def not_a_number(model: Transformer) -> None:
    model.lm_head.weight[5, 0] = float("nan")


@pytest.mark.parametrize("spoil", [spoilt_weight, spoilt_norm, spoilt_keys, not_a_number])
def test_a_wrong_weight_is_refused(spoil: Any) -> None:
    found = engine_check(resolve(TINY), spoil)
    assert not found.passes, found
    assert "allowed" in str(found)


def test_the_reducers_of_a_fused_model_are_told_with_their_reasons() -> None:
    """Of a plain model, all passes have the model's own reducer, and nothing is chosen."""
    config, length = resolve(TINY), 9 + STEPS
    engines = [Engine(random_model(config, "async", 1, CPU), fused=each) for each in (True, False)]
    fused, plain = (engine.session(3, length, Sampling()) for engine in engines)
    found = measure.choices(fused, 9)
    assert found == {
        "prefill": "async (there is one process, and nothing to shard over)",
        "decode": "decode (up to 64 sequences; it reduces as async)",
    }
    crowd = engines[0].session(65, length, Sampling())
    assert measure.choices(crowd, 9)["decode"].startswith("async (more than 64 sequences")
    assert measure.choices(plain, 9) == {}


def test_a_wrong_choice_of_the_token_is_refused() -> None:
    """The logits are right; what the engine returns is not."""
    config = resolve(TINY)
    session = Engine(random_model(config, "async", 1, CPU)).session(3, 9 + STEPS, Sampling())
    choose = session._choose

    def wrongly(*arguments: Any, **named: Any) -> None:
        choose(*arguments, **named)
        session.out[1] = (session.out[1] + 1) % config.vocab_size

    session._choose = wrongly  # type: ignore[method-assign]
    found = check_session(session, reference(random_model(config, "async", 1, CPU), 2, 9, STEPS))
    assert found.disagreements > 0
    assert not found.passes


def test_a_second_run_that_differs_is_refused() -> None:
    config = resolve(TINY)
    model = random_model(config, "async", 1, CPU)
    session = Engine(model).session(3, 9 + STEPS, Sampling())
    prefill, runs = session.prefill, []

    def changing(*arguments: Any) -> None:
        runs.append(1)
        if len(runs) == 2:
            with torch.no_grad():
                model.lm_head.weight[7, 3] += 2**-6  # far less than the allowed error
        prefill(*arguments)

    session.prefill = changing  # type: ignore[method-assign]
    found = check_session(session, reference(random_model(config, "async", 1, CPU), 2, 9, STEPS))
    assert found.error <= 2 * found.plain_error
    assert not found.repeats
    assert not found.passes


def test_another_plan_is_refused() -> None:
    ladder, standard = resolve(TINY), resolve(replace(TINY, plan="standard"))
    found = engine_check(ladder, other=standard)
    assert not found.passes
    assert found.disagreements > 0
    assert found.error > 2 * found.plain_error


def test_one_wrong_sequence_of_a_batch_is_refused() -> None:
    """A batch repeats distinct sequences; every copy is compared."""
    config = resolve(TINY)
    expected = reference(random_model(config, "async", 1, CPU), 2, 9, STEPS)
    session = Engine(random_model(config, "async", 1, CPU)).session(3, 9 + STEPS, Sampling())
    step = session.step

    def forgets() -> None:
        session.cache.keys[:, 2, :, :4] = 0  # the last sequence's first four keys
        step()

    session.step = forgets  # type: ignore[method-assign]
    assert not check_session(session, expected).passes


def test_no_error_allows_none() -> None:
    good = EngineCheck(0.0, 0.0, 0.0, 0.0, 0, 1, 1, 1, True)
    assert good.passes
    assert not replace(good, error=1e-9).passes
    for name in ("error", "rms", "plain_error", "plain_rms"):
        assert not replace(good, **{name: float("nan")}).passes
    assert not replace(good, disagreements=1).passes


def test_forced_logits_are_the_models() -> None:
    """After the prompt and after each given token, at the right places."""
    model = Transformer(resolve(TINY))
    initialise(model, 3)
    tokens = torch.randint(0, 1024, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        session = Engine(model).session(2, 13, Sampling())
        found = torch.stack(list(forced(session, tokens, 9)), dim=1)
        expected = model(tokens)[:, 8:]
    assert found.shape == expected.shape == (2, 5, 1024)
    torch.testing.assert_close(found, expected)


def test_the_reference_takes_as_many_sequences_as_are_cheap() -> None:
    large = model_config("llama-3-70b")
    assert 1 < sequences(large, 4, 64, 1024) < 64
    assert sequences(resolve(TINY), 1, 3, 9) == 3
    assert sequences(large, 1, 64, 8192) == 1


# ---- measuring, with a clock that ticks once an event -----------------------------------------


class Clock:
    """torch.cuda.Event: milliseconds are the events recorded in between."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.now += 1
        self.time = Clock.now

    def elapsed_time(self, end: Clock) -> float:
        return float(end.time - self.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))


@pytest.mark.usefixtures("clock")
def test_points_take_turns_and_wrong_ones_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [replace(TINY, plan=plan) for plan in ("ladder", "standard", "parallel")]
    turns: list[str] = []
    round_ = measure._round

    def noted(live: measure.TimedSession, source: torch.Generator) -> Any:
        turns.append(live.point.plan)
        return round_(live, source)

    def spoils(
        point: InferencePoint, config: ModelConfig, reducer: str, device: torch.device
    ) -> Transformer:
        model = random_model(config, reducer, point.tp, device)
        built[point.plan] = built.get(point.plan, 0) + 1
        if point.plan == "standard" and built[point.plan] == 2:  # the engine's, not the reference's
            with torch.no_grad():
                spoilt_weight(model)
        return model

    built: dict[str, int] = {}
    monkeypatch.setattr(measure, "_round", noted)
    monkeypatch.setattr(measure, "build_model", spoils)
    kept: list[Any] = []

    def busy(*_: Any) -> str:
        raise UserError("the profiler is busy")

    monkeypatch.setattr(measure, "profile_session", busy)
    with pytest.raises(UserError, match="busy"):
        measure.measure(
            points, CPU, 1e12, 1e12, lambda _: Path("trace"), lambda *found: kept.append(found)
        )
    ((records, refused),) = kept  # whatever becomes of the traces
    assert len(refused) == 1
    assert refused[0].startswith("standard, reducer async, tiny")
    assert "not timed" in refused[0]
    assert turns == ["ladder", "parallel"] * (measure.ROUNDS + 1)
    assert [found["point"]["plan"] for found in records] == ["ladder", "parallel"]
    for found in records:
        assert EngineCheck(**found["check"]).passes
        result = found["result"]
        assert result["prefill_ms"] == result["decode_ms"] == result["decode_p99_ms"] == 1.0
        assert result["total_ms"] == TINY.new_tokens  # the prefill, and a step for each but one
        assert result["prefill_rounds_ms"] == result["decode_rounds_ms"] == [1.0] * measure.ROUNDS
        assert result["decode_steps_ms"] == [1.0] * (TINY.new_tokens - 1)
    json.dumps(records)


def test_steps_keep_their_order_over_rounds() -> None:
    assert measure.in_order([[9.0, 2.0, 1.0], [7.0, 3.0, 1.0], [8.0, 9.0, 1.00004]]) == [8, 3, 1]


# ---- models, on ranks too -------------------------------------------------------------------


def shards(tp: int) -> list[tuple[str, tuple, torch.Tensor]]:
    model = random_model(resolve(replace(TINY, tp=tp)), "async", tp, CPU)
    return [
        (name, tuple((s.start, s.stop) for s in part), local.clone())
        for name, local, part in local_parameters(model)
    ]


def checked_on_ranks(rank: int, world_size: int) -> tuple[list, EngineCheck, EngineCheck]:
    point = replace(TINY, tp=world_size)
    config = resolve(point)
    expected = reference(random_model(config, "async", world_size, CPU), 2, 9, STEPS)
    found = []
    for spoil in (False, True):
        model = random_model(config, "async", world_size, CPU)
        if spoil and rank == 1:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(2)
        session = Engine(model).session(3, 9 + STEPS, Sampling())
        found.append(check_session(session, expected))
    return shards(world_size), found[0], found[1]


def test_weights_and_verdicts_are_the_same_on_ranks(pools: Pools) -> None:
    whole = {name: weight for name, _, weight in shards(1)}
    results = pools(2).run(checked_on_ranks)
    for parts, good, bad in results:
        for name, bounds, local in parts:
            index = tuple(slice(*bound) for bound in bounds)
            assert torch.equal(local, whole[name][index]), name
        assert good.passes, good
        assert not bad.passes
        assert (good, bad) == results[0][1:]


def test_random_logits_have_size(capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(resolve(replace(TINY, plan="standard")), "async", 1, CPU, torch.float32)
    tokens = torch.randint(0, 1024, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert 0.5 < float(model(tokens).std()) < 2


def test_a_checkpoint_is_timed_with_its_own_plan(tmp_path: Path) -> None:
    config = resolve(replace(TINY, plan="hybrid"))
    model = Transformer(config)
    shard_model(model)
    initialise(model, 1)
    write_config(tmp_path, config, None)
    write_tensors(tmp_path, "model", model_entries(model), writer=True)
    settings = Settings(str(tmp_path), prompt=8, new_tokens=4, reducers=("async",))
    ((*points,),), _ = expand([settings], 2, True, lambda reducer, tp: None)
    assert [(p.plan, p.no_comm) for p in points] == [
        ("checkpoint", False),
        ("checkpoint", True),
        ("standard", False),
        ("none", False),
    ]
    assert resolve(points[0]).plan.sublayers == config.plan.sublayers
    alone = replace(points[0], tp=1)
    built = {n: w for n, w, _ in local_parameters(build_model(alone, config, "async", CPU))}
    for name, parameter in model.named_parameters():
        assert torch.equal(built[name], parameter.detach().bfloat16()), name
    with pytest.raises(UserError, match="--layers"):
        Settings(str(tmp_path), plans=("checkpoint",), layers=2, prompt=8, new_tokens=4)


# ---- cold starts ----------------------------------------------------------------------------


def test_a_cold_start_reports_its_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cold.STARTED, repr(cold.time.time() - 5))
    assert cold.child(replace(TINY, batch=1), "cpu") == 0
    line = capsys.readouterr().out.strip()
    times = json.loads(line.removeprefix(cold.MARK))
    parts = {name: seconds for name, seconds in times.items() if name != "total_s"}
    assert set(parts) == {"imports_s", "group_s", "weights_s", "capture_s", "prefill_s"}
    assert parts["imports_s"] >= 5
    assert times["total_s"] == pytest.approx(sum(parts.values()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_cold_start_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)cold start of ladder.*ended with.*needs a GPU"):
        cold.start(TINY)


# ---- on a GPU -------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engines_are_checked_and_timed() -> None:
    """The fused engine in graphs, one GPU: every record is complete and its check passes."""
    point = InferencePoint("llama-3-8b", "ladder", "async", 1, 3, 60, 8, 2)
    points = [point, replace(point, plan="standard"), replace(point, plan="parallel")]
    records, refused = measure.measure(points, GPU, 1e13, 1e15)  # beyond any GPU of today
    assert refused == []
    assert [r["point"]["plan"] for r in records] == ["ladder", "standard", "parallel"]
    for found in records:
        assert EngineCheck(**found["check"]).passes
        result = found["result"]
        assert 0 < result["floor_ms"] < result["decode_ms"] <= result["decode_p99_ms"]
        assert 0 < result["prefill_floor_ms"] < result["prefill_ms"] < result["total_ms"]
        assert result["memory_gib"] > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_a_wrong_fused_weight_is_refused() -> None:
    config = resolve(replace(TINY, plan="ladder"))
    expected = reference(random_model(config, "async", 1, GPU), 2, 9, STEPS)
    engine = Engine(random_model(config, "async", 1, GPU))
    session = engine.session(3, 9 + STEPS, Sampling())
    assert check_session(session, expected).passes
    engine.model.model.layers[1].mlp.gate_up.weight.mul_(1.5)
    assert not check_session(session, expected).passes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("plan", "degree"), [("standard", 0), ("desync-2x", 4)])
@torch.inference_mode()
def test_plain_decoding_repeats(plan: str, degree: int) -> None:
    """Bit for bit, virtual ranks too; cuDNN's attention under a mask would not, at this batch."""
    config = resolve(
        InferencePoint("llama-3-8b", plan, "async", 1, 64, 1024, 4, layers=4, degree=degree)
    )
    model = random_model(config, "async", 1, GPU)
    session = Engine(model, fused=False).session(64, 1024 + STEPS, Sampling())
    tokens = torch.randint(0, config.vocab_size, (64, 1024 + STEPS))
    first, *others = [list(forced(session, tokens, 1024)) for _ in range(4)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
