"""Memory: against what recorded runs took, and against the parts by hand."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import Any

import pytest

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.bench.training.points import TrainingPoint, is_virtual, shape_of
from ladder.config import model_config
from ladder.costs import GRAPHED_PROMPT_TOKENS
from ladder.infer.memory import prompt_width, specified_parameters
from ladder.models import ModelConfig, UserError
from ladder.models.layers import ColumnParallelLinear
from ladder.models.sublayers import FEED_FORWARDS, MLP
from ladder.perf import memory
from ladder.perf.machine import Machine, Value
from tests import ROOT

RESULTS = ROOT / "benchmarks/results"
# File: a commit whose memory has changed since, and the largest error (%).
TRAINED = {
    "2026-11-21-train-8b-again-h200x4": ("", 1.0),
    "2026-11-22-train-h200x2": ("", 1.0),
    "2026-11-22-train-compiled-h200x2": ("ec5445c", 1.7),
}
INFERRED = {
    "2026-11-22-accumulate-h200x2": 1.5,
    "2026-11-22-frame-after-2b-h200x2": 1.6,
    "2026-11-22-frame-after-h200x4": 0.5,
    "2026-11-22-rare-reduces-half-8b-h200x2": 1.5,
    "2026-11-22-virtual-ranks-h200x2": 0.6,
    "2026-11-22-table1-h200x2": 14.0,
}


def of(kind: type, point: dict) -> dict:
    return {each.name: point[each.name] for each in fields(kind) if each.name in point}


def held_by_session(config: ModelConfig, tp: int, batch: int, prompt: int, length: int) -> float:
    """Bytes that a session keeps, as `memory_gib` of recorded inference counts them.

    A prefill's activations stay only if it is a CUDA graph, as small prefills are.
    """
    found = memory.inference(config, tp, batch, prompt, length)
    graphed = batch * prompt_width(config, prompt, length) <= GRAPHED_PROMPT_TOKENS
    return found.weights + found.cache + (found.activations if graphed else 0.0)


@pytest.mark.parametrize("name", TRAINED)
def test_training_takes_what_was_recorded(name: str) -> None:
    before, most = TRAINED[name]
    for record in read_results(RESULTS / f"{name}.jsonl"):
        if record["machine"]["commit"] == before:
            continue
        point = TrainingPoint(**of(TrainingPoint, record["point"]))
        ranks = record["machine"]["ranks"]
        found = memory.training(
            shape_of(point, 4), point.layout, ranks, point.seq_len, point.batch, point.micro_batch
        )
        error = 100 * ((found.total - found.reserve) / 2**30 / record["result"]["memory_gib"] - 1)
        assert abs(error) <= (3.8 if is_virtual(point, 4) else most), (point, error)


@pytest.mark.parametrize("name", INFERRED)
def test_inference_takes_what_was_recorded(name: str) -> None:
    for record in read_results(RESULTS / f"{name}.jsonl"):
        point = InferencePoint(**of(InferencePoint, record["point"]))
        length = point.prompt + point.new_tokens
        found = held_by_session(resolve(point), point.tp, point.batch, point.prompt, length)
        error = 100 * (found / 2**30 / record["result"]["memory_gib"] - 1)
        assert abs(error) <= INFERRED[name], (point, error)


def test_parts_by_hand() -> None:
    """The 8B of Llama 3 has 8,030,261,248 parameters; at TP 4 only its norms are whole."""
    shape = model_config("llama-3-8b")
    assert memory.local_parameters(shape, 1) == 8_030_261_248
    norms = 65 * 4096
    assert memory.local_parameters(shape, 4) == (8_030_261_248 - norms) // 4 + norms
    found = memory.inference(shape, 4, 2, 1024, 1100)
    assert found.cache == 2 * 1280 * 32 * 2 * 2 * 128 * 2  # in steps of 256 tokens
    step = memory.training(shape, "tp2+sp+fsdp", 8, 8192, 4, 1)
    assert step.optimiser == 2 * step.gradients == 8 * memory.local_parameters(shape, 2) / 4


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "of q, k and v": {"qkv_bias": True, "qk_norm": True},
    "odd": {"vocab_size": 1003, "head_dim": 24, "num_kv_heads": 2},
    "tied": {"tie_embeddings": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["tiny", "llama-3-70b", "bloom-176b"])
def test_parameters_are_those_of_the_specs(name: str, variant: str) -> None:
    shape = replace(model_config({"name": name, "num_layers": 2}), **VARIANTS[variant])
    for tp in (1, 2, 4, 8):  # some are more than the heads of keys
        with contextlib.suppress(UserError):
            shape.check_divides(tp, "--tp")
            found = memory.local_parameters(shape, tp)
            assert found == specified_parameters(shape, tp), tp


def test_parameters_of_other_sublayers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoInputs(MLP):
        def __init__(self, config: ModelConfig, layer: int) -> None:
            super().__init__(config, layer)
            self.second = ColumnParallelLinear(config.hidden_size, 8, bias=False)

    monkeypatch.setitem(FEED_FORWARDS, "two", TwoInputs)
    usual = model_config("tiny")
    more = 8 * usual.hidden_size * usual.num_layers
    other = replace(usual, feed_forward="two")
    for tp in (1, 2):
        assert memory.local_parameters(other, tp) - memory.local_parameters(usual, tp) == more / tp


def test_tied_embeddings_count_once() -> None:
    untied = model_config("tiny")
    tied = replace(untied, tie_embeddings=not untied.tie_embeddings)
    found = [memory.local_parameters(each, 1) for each in (untied, tied)]
    assert abs(found[0] - found[1]) == untied.vocab_size * untied.hidden_size


@pytest.mark.parametrize("gib", [19, 200])
def test_what_fits_leaves_room(gib: float) -> None:
    machine = Machine("m", "a GPU", 1, {"memory_gib": Value(gib, "declared")})
    found = memory.inference(model_config("llama-3-8b"), 1, 1, 1024, 2048)
    assert memory.fits(found, machine) == (gib == 200)


def test_more_of_anything_takes_more() -> None:
    shape = model_config("llama-3-8b")
    base = memory.training(shape, "fsdp", 8, 2048, 4, 2).total
    assert memory.training(shape, "fsdp", 8, 4096, 4, 2).total > base
    assert memory.training(shape, "ddp", 8, 2048, 4, 2).total > base
    assert memory.training(shape, "fsdp", 4, 2048, 4, 2).total > base
    assert memory.training(shape, "fsdp", 8, 2048, 4, 2, "full").total < base


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp3", "--layouts tp3: 3 does not divide the 8 GPUs"),
        ("hsdp3", "--layouts hsdp3: 3 shards do not divide 8 replicas"),
    ],
)
def test_layouts_that_do_not_divide_are_one_line(layout: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        memory.training(model_config("llama-3-8b"), layout, 8, 2048, 1)


def test_a_context_above_the_models_is_refused() -> None:
    with pytest.raises(UserError, match="9000 tokens are above the model's context of 8192"):
        memory.inference(model_config("llama-3-8b"), 1, 1, 1024, 9000)
