"""The fused modules and the decode reducer, by the kernels' references, against the plain path.

One process and gloo ranks, every plan. On GPUs with the kernels: test_gpu_decode.py.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ladder.comm import symmetric
from ladder.comm.symmetric import INTEGERS, SymmetricTensor
from ladder.infer import fused
from ladder.infer.engine import Engine
from ladder.infer.fused import can_fuse, fuse_refusal
from ladder.kernels import decode_attention
from ladder.kernels.limits import MAX_ROWS, MAX_SIZE
from ladder.models import ModelConfig, Ranks, Transformer, UserError
from ladder.models.presets import PlanSpec, resolve_plan
from ladder.models.quantised import quantise_model
from ladder.parallel.decode import DecodeReducer
from ladder.parallel.reducers import PushReducer
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.infer.engines import heads_agree
from tests.samples import (
    ADDED_APART,
    FUSED_PLANS,
    SAME_AT_ANY_T,
    full_model,
    heads_read_the_same,
    share_head,
    small_config,
    virtual,
)

Prompts = list[list[int]]
PROMPTS: Prompts = [[3, 1, 4, 1, 5], [9, 2], [6]]


def decode(model: Transformer, fused: bool, prompts: Prompts = PROMPTS) -> list[list[int]]:
    engine = Engine(model, fused=fused)
    assert engine.fused == fused
    with torch.inference_mode():
        return [result.tokens for result in engine.generate(prompts, max_new_tokens=12)]


def fused_on_ranks(
    rank: int, world_size: int, plan: PlanSpec, depends: bool,
    changes: dict[str, Any] | None = None, prompts: Prompts = PROMPTS,
) -> list[list[int]]:  # fmt: skip
    config = small_config(plan, world_size, depends, **changes or {})
    model = full_model(config, 5, torch.float32)
    shard_model(model, tp_mesh(world_size))
    return decode(model, True, prompts)


@pytest.mark.parametrize("name", FUSED_PLANS)
def test_the_fused_path_decodes_what_the_plain_one_does(name: str) -> None:
    """A norm's weight folded into the wrong matrix, or a landing left out, gives other tokens."""
    config = small_config(FUSED_PLANS[name], 1, name not in SAME_AT_ANY_T)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    expected = decode(plain, False)
    assert decode(fused, True) == expected


@pytest.mark.parametrize("change", [("qkv_bias",), ("qk_norm",), ("qkv_bias", "qk_norm")])
def test_the_fused_path_of_qwens(pools: Pools, change: tuple[str, ...]) -> None:
    """Alone, and on four ranks of which two share each KV head."""
    changes: dict[str, Any] = dict.fromkeys(change, True)
    config = small_config("ladder", 1, **changes)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    expected = decode(plain, False)
    assert decode(fused, True) == expected
    assert pools(4).run(fused_on_ranks, "ladder", False, changes) == [expected] * 4


def test_the_fused_path_of_scaled_rotary() -> None:
    """With yarn, cos and sin are multiplied by a factor."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = small_config("ladder", rope_scaling=scaling, rope_theta=100.0)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    expected = decode(plain, False)
    assert decode(full_model(small_config("ladder"), 5, torch.float32), False) != expected
    assert decode(fused, True) == expected


def test_models_with_adapters_are_not_fused() -> None:
    """The packed matrices would lack what the adapter adds."""
    model = full_model(small_config("ladder"), 5, torch.float32)
    assert can_fuse(model)
    layer = model.model.layers[1].mlp
    layer.up_proj = torch.nn.Sequential(layer.up_proj)
    assert not can_fuse(model)
    assert fuse_refusal(model) == "adapters"


@pytest.mark.parametrize("tied", [False, True])
def test_a_fused_model_serves_every_engine_and_its_source_none(tied: bool) -> None:
    """Catches a source that computes nonsense from its empty weights, or keeps the head's twice."""
    config = small_config(tie_embeddings=tied)
    plain, source = (full_model(config, 5, torch.float32) for _ in range(2))
    expected = decode(plain, False)
    embedding, head = source.model.embed_tokens.weight, weakref.ref(source.lm_head.weight)
    assert decode(source, True) == expected
    held = {name for name, each in source.named_parameters() if not each.is_meta}
    assert not {name for name in held if "proj" in name or "head" in name}
    assert (head() is embedding) == tied
    for model in (source, Engine(source).model):  # another engine, by default
        again = Engine(model)
        assert again.fused
        assert [each.tokens for each in again.generate(PROMPTS, max_new_tokens=12)] == expected
    with pytest.raises(UserError, match=r"packed this model's weights.*load the model again"):
        source(torch.tensor([PROMPTS[0]]))


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", ["standard", "ladder", "parallel"])
def test_attention_knows_what_it_runs_beside(
    name: str, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are cut for that, and for weights in 8 bits."""
    model = full_model(small_config(name), 5, torch.float32)
    if weights is not None:
        quantise_model(model, weights)
    seen = set()

    def attention(*args: Any, **options: Any) -> torch.Tensor:
        seen.add((options["beside"], options["eight_bits"]))
        return decode_attention(*args, **options)

    monkeypatch.setattr(fused, "decode_attention", attention)
    decode(model, True)
    assert seen == {(name != "standard", weights is not None)}


def test_prompts_of_one_token_and_no_way_back() -> None:
    """A prefill of one place looks like a decode step, whose input has no places to choose from."""
    plain, fused = (full_model(small_config(), 5, torch.float32) for _ in range(2))
    expected = Engine(plain).generate([[3], [5]], max_new_tokens=6)
    assert Engine(fused, fused=True).generate([[3], [5]], max_new_tokens=6) == expected
    with pytest.raises(UserError, match="no engine has fused"):
        Engine(fused, fused=False)


@pytest.mark.parametrize("name", FUSED_PLANS)
def test_the_fused_path_on_two_ranks(pools: Pools, name: str) -> None:
    """Every rank decodes the tokens of one plain process that holds both ranks as virtual ranks."""
    depends = name not in SAME_AT_ANY_T
    expected = decode(virtual(full_model(small_config(FUSED_PLANS[name], 2, depends), 5), 2), False)
    assert pools(2).run(fused_on_ranks, FUSED_PLANS[name], depends) == [expected, expected]


def held_virtually(config: ModelConfig, ranks: int) -> tuple[Transformer, Transformer]:
    """The same model twice, with its ranks in this process."""
    first, second = (virtual(full_model(config, 5, torch.float32), ranks) for _ in range(2))
    return first, second


NO_COMM = {f"{name}, no_comm": resolve_plan(name, 4, 4).as_no_comm() for name in ("none", "dtp-1")}


@pytest.mark.parametrize("name", [*FUSED_PLANS, *NO_COMM])
def test_the_fused_path_of_virtual_ranks(name: str) -> None:
    """Each rank has its own part of every matrix, its own norms, and its own residual.

    Four ranks, of which two share each KV head; another rank's part gives other tokens. Without
    communication ranks differ at the end, and the head reads the first, normed by its own weight.
    """
    plan = {**FUSED_PLANS, **NO_COMM}[name]
    plain, fused = held_virtually(small_config(plan, 4, name not in SAME_AT_ANY_T), 4)
    expected = decode(plain, False)
    assert decode(fused, True) == expected


@pytest.mark.parametrize("name", ["ladder", "desync-2x", "dtp-1"])
def test_the_fused_path_of_virtual_ranks_of_qwens(name: str) -> None:
    """Each rank's own biases; also more prompts than products have rows, and prompts of one."""
    config = small_config(name, 2, name not in SAME_AT_ANY_T, qkv_bias=True, qk_norm=True)
    for prompts in (PROMPTS, MANY, [[3], [5]]):
        plain, fused = held_virtually(config, 2)
        expected = decode(plain, False, prompts)
        assert decode(fused, True, prompts) == expected


def two_on_each(rank: int, world_size: int, plan: PlanSpec) -> list[list[int]]:
    model = full_model(small_config(plan, 2 * world_size, True), 5, torch.float32)
    shard_model(model, tp_mesh(world_size))
    assert model.reducer.ranks.held == 2
    return decode(model, True)


@pytest.mark.parametrize("name", ["desync-2x", "dtp-1"])
def test_the_fused_path_of_two_virtual_ranks_on_each_of_two(pools: Pools, name: str) -> None:
    expected = decode(virtual(full_model(small_config(name, 4, True), 5), 4), False)
    assert pools(2).run(two_on_each, name) == [expected] * 2


def read_by_heads(rank: int, world_size: int, plan: PlanSpec, depends: bool) -> list[bool]:
    model = full_model(small_config(plan, world_size, depends, vocab_size=68), 5, torch.float32)
    share_head(model, world_size)
    shard_model(model, tp_mesh(world_size))
    tokens = torch.randint(0, 68, (3, 12), generator=torch.Generator().manual_seed(1))
    return heads_agree(Engine(model, fused=True), tokens, 5)


@pytest.mark.parametrize("name", [name for name in FUSED_PLANS if name not in ADDED_APART])
def test_what_the_heads_read_is_the_same_on_all_ranks(pools: Pools, name: str) -> None:
    """Bit for bit: each rank makes the logits of its own part of the vocabulary from it."""
    found = pools(2).run(read_by_heads, FUSED_PLANS[name], name not in SAME_AT_ANY_T)
    assert found == [[True] * 8] * 2


def test_heads_that_read_different_bits_are_seen() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    assert heads_read_the_same(logits, 2)
    logits[0, 2] = -0.0
    assert not heads_read_the_same(logits, 2)


MANY = [[n % 67, *range(n % 5)] for n in range(MAX_ROWS + 6)]  # rows beyond the products' own


@pytest.mark.parametrize("name", ["standard", "ladder", "desync-2x"])
def test_more_prompts_than_the_products_have_rows(pools: Pools, name: str) -> None:
    """The fused modules then run by matrix products and the base reducer."""
    depends = name not in SAME_AT_ANY_T
    expected = decode(virtual(full_model(small_config(name, 2, depends), 5), 2), False, MANY)
    assert pools(2).run(fused_on_ranks, name, depends, None, MANY) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_slots_begin_empty(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of every fused dtype begin with -0.0, which a landing takes as empty."""
    asked = []

    def allocate(shape: Any, dtype: Any, group: Any, device: Any, bits: int) -> SymmetricTensor:
        asked.append(shape)
        whole = torch.full(shape, bits, dtype=INTEGERS[dtype.itemsize]).view(dtype)
        return SymmetricTensor(0, [whole, whole], torch.zeros(2, dtype=torch.int64))

    monkeypatch.setattr(symmetric, "allocate", allocate)
    base = PushReducer.__new__(PushReducer)
    base.group = None  # type: ignore[assignment]
    reducer = DecodeReducer.__new__(DecodeReducer)
    reducer.base, reducer.memory, reducer.sets, reducer.ranks = base, {}, 3, Ranks(2, 0, 1)
    found = reducer.slots(torch.zeros(5, 8, dtype=dtype)).own
    assert (found.shape, found.dtype) == ((3, 2, 5, 8), dtype)
    assert (found == 0).all()
    assert found.signbit().all()
    assert asked == [found.shape]


def test_weights_of_a_type_that_no_kernel_takes_are_not_fused() -> None:
    model = full_model(small_config("standard"), 5, torch.float64)
    assert not can_fuse(model)
    assert fuse_refusal(model) == "weights in torch.float64"


def test_rows_that_no_kernel_holds_are_not_fused() -> None:
    """Their norm would fail in the first prompt, after the weights are packed."""
    for size in (MAX_SIZE, MAX_SIZE + 16):
        config = small_config("standard", 1, num_layers=1, hidden_size=size, intermediate_size=8)
        with torch.device("meta"):
            model = Transformer(config)
        reason = "" if size == MAX_SIZE else "hidden_size=16400 above 16384"
        assert fuse_refusal(model) == reason


def test_more_sequences_than_attention_has_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before there is a cache for them: two heads of keys on each of two held ranks."""
    monkeypatch.setattr(fused, "COUNTERS", 12)
    _, source = held_virtually(small_config("standard", 2, num_kv_heads=4), 2)
    engine = Engine(source, fused=True)
    engine.generate(PROMPTS, max_new_tokens=2)
    monkeypatch.setattr("ladder.infer.engine.Session", None)
    with pytest.raises(UserError, match=r"a batch of 4 is above the 3 sequences .* fused=False"):
        engine.generate([*PROMPTS, [1]], max_new_tokens=2)


@pytest.mark.parametrize("change", ["attention_bias", "mlp_bias"])
def test_what_the_kernels_do_not_know_is_not_fused(change: str) -> None:
    """The fused modules have no place for a bias of an output or an MLP: it would be dropped."""
    model = full_model(small_config("standard", **{change: True}), 5, torch.float32)
    assert not can_fuse(model)
    with pytest.raises(UserError, match=rf"fused=True cannot run biases of .* \({change}\)"):
        Engine(model, fused=True)
    assert not Engine(model).fused
