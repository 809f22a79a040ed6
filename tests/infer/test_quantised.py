"""Engines with weights in 8 bits: the plain path, the fused modules, ranks, options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.bench.inference.build import random_model
from ladder.bench.inference.verify import forced
from ladder.checkpoint import load_model, model_entries, write_config, write_tensors
from ladder.convert.command import convert
from ladder.infer.engine import Engine
from ladder.infer.fused import fuse_refusal
from ladder.infer.load import load_for_inference, set_activations
from ladder.infer.sampling import Sampling
from ladder.models import Transformer, UserError
from ladder.models.quantised import matrices, quantise_model, round_activations
from ladder.models.storage import QUANTISED
from ladder.models.transformer import meta_model
from ladder.parallel.sharding import fill_in_8_bits, local_tensor, shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import FUSED_PLANS, SAME_AT_ANY_T, full_model, small_config, virtual

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]


def tokens(model: Transformer, fused: bool) -> list[list[int]]:
    with torch.inference_mode():
        results = Engine(model, fused=fused).generate(PROMPTS, max_new_tokens=8)
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize("name", ["standard", "parallel", "ladder", "desync-3x", "dtp-1"])
def test_fused_modules_compute_what_the_plain_ones_do(name: str, kind: str) -> None:
    depends = name not in SAME_AT_ANY_T
    config = small_config(name, 1, depends, qkv_bias=True, intermediate_size=320)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    quantise_model(plain, kind)
    quantise_model(fused, kind)
    found = tokens(plain, False)
    assert tokens(fused, True) == found
    packed = Engine(fused).model
    small = [m.weight for m in packed.modules() if getattr(m, "scales", None) is not None]
    assert len(small) == 4 * 4 + 1
    assert {weight.itemsize for weight in small} == {1}


BLOCKS: dict[str, Any] = {"intermediate_size": 512, "head_dim": 64}  # two ranks have whole ones


@pytest.mark.parametrize("name", ["standard", "parallel", "desync-3x"])
def test_prompts_in_fp8(name: str) -> None:
    """Tokens of prompts are rounded, and only they; the fused modules round the same ones."""
    config = small_config(name, 2 if name == "desync-3x" else 1, name == "desync-3x")
    models = [full_model(config, 5, torch.float32) for _ in range(3)]
    for model in models:
        quantise_model(model, "fp8")
    for model in models[1:]:
        round_activations(model)
    prompt = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        exact, found = (model(prompt) for model in models[:2])
        assert torch.equal(models[0](prompt[:, :1]), models[1](prompt[:, :1]))
    # 4 layers of 4 roundings; errors that are independent, and at worst uniform within 1/16
    assert 1e-3 < (found - exact).norm() / exact.norm() < 16**0.5 / 16 / 3**0.5
    assert tokens(models[2], True) == tokens(models[1], False)


@pytest.mark.parametrize("kind", ["fp8", "int8", "fp8-block"])
@pytest.mark.parametrize("name", ["standard", "desync-3x"])
def test_virtual_ranks(name: str, kind: str) -> None:
    """A scale of a row is every rank's, that of a block one's; norms of several ranks stay."""
    more = BLOCKS if kind == "fp8-block" else {}
    config = small_config(name, 2, name == "desync-3x", **more)
    plain, fused = (virtual(full_model(config, 5, torch.float32), 2) for _ in range(2))
    for model in (plain, fused):
        quantise_model(model, kind)
    assert tokens(fused, True) == tokens(plain, False)


@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_virtual_ranks_in_bfloat16(count: int) -> None:
    """Products and attention agree on the type and the scale of what is between them."""
    config = small_config("desync-4x", 4, True, qkv_bias=True)
    tokens = torch.randint(0, 67, (count, 12), generator=torch.Generator().manual_seed(2))
    found = {}
    for fused in (False, True):
        model = virtual(full_model(config, 5, torch.bfloat16), 4)
        quantise_model(model, "fp8")
        session = Engine(model, fused=fused).session(*tokens.shape, Sampling())
        found[fused] = torch.stack([each.float() for each in forced(session, tokens, 8)])
    assert found[True].isfinite().all()
    error = (found[True] - found[False]).abs().max() / found[False].abs().max()
    assert error < 0.05


def test_blocks_of_two_virtual_ranks_are_not_fused() -> None:
    config = small_config("standard", 2, **{**BLOCKS, "intermediate_size": 320})
    model = virtual(full_model(config, 5, torch.float32), 2)
    quantise_model(model, "fp8-block")
    assert fuse_refusal(model) == "2 virtual ranks whose inputs are no multiples of a block's 128"


def test_activations_that_have_no_products_are_refused() -> None:
    for kind in ("int8", "fp8-block", None):
        model = full_model(small_config(), 5, torch.float32)
        if kind is not None:
            quantise_model(model, kind)
        with pytest.raises(
            UserError, match=f"--activations=fp8 with matrices in {kind or 'the t'}"
        ):
            set_activations(model, "fp8")
    with pytest.raises(UserError, match=r"unknown type of --activations .fp4.* known: auto, fp8"):
        load_for_inference("nowhere", activations="fp4")
    with pytest.raises(UserError, match="--activations=fp8 with --reducer=fused"):
        load_for_inference("nowhere", activations="fp8", reducer="fused")


def check_ranks(rank: int, world: int, name: str, kind: str) -> None:
    """fp8 has the same values on any number of ranks.

    Of a plan whose ranks have norms of their own, virtual ranks cannot fold those in.
    """
    more = BLOCKS if kind == "fp8-block" else {}
    config = small_config(FUSED_PLANS[name], world, name not in SAME_AT_ANY_T, **more)
    whole = full_model(config, 5, torch.float32)
    quantise_model(whole, kind)
    expected = tokens(whole, False) if name in SAME_AT_ANY_T else None
    for fused in (False, True):
        model = full_model(config, 5, torch.float32)
        shard_model(model, tp_mesh(world))
        quantise_model(model, kind)
        found = tokens(model, fused)
        expected = expected or found
        assert found == expected, (name, fused)


@pytest.mark.parametrize(
    ("name", "kind"), [("ladder", "fp8"), ("desync-3x", "fp8"), ("ladder", "fp8-block")]
)
def test_ranks(pools: Pools, name: str, kind: str) -> None:
    pools(2).run(check_ranks, name, kind)


def load_in_8_bits(rank: int, world: int, whole: str, wrong: str, kind: str) -> None:
    """A rank's matrices are stored as if its shards had been there; an error of one is every
    rank's, and so is too little memory, for a rank's part as it is stored."""
    at = {"device": "cpu"}  # the ranks of gloo share no GPU
    found = load_for_inference(whole, weights=kind, **at)
    expected = load_for_inference(whole, **at)
    quantise_model(expected, kind)
    stored = dict(expected.named_parameters())
    for name, one in found.named_parameters():
        assert torch.equal(local_tensor(one), local_tensor(stored[name])), name
    assert tokens(found, True) == tokens(expected, True)
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.o_proj\.weight holds NaN"):
        load_for_inference(wrong, weights=kind)
    needed = sum(local_tensor(each).nbytes for each in found.parameters())
    page = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = "ladder.parallel.sharding.BEYOND_MEMORY"
    with mock.patch(limit, 1.1 * needed / page):
        load_for_inference(whole, weights=kind)
    with (
        mock.patch(limit, 0.9 * needed / page),
        pytest.raises(UserError, match="this process's weights take"),
    ):
        load_for_inference(whole, weights=kind)


@pytest.mark.parametrize("kind", [*QUANTISED])
def test_ranks_store_matrices_as_they_are_read(kind: str, tmp_path: Path, pools: Pools) -> None:
    config = small_config("ladder", **BLOCKS)
    model = full_model(config, 5, torch.float32)
    for name in ("whole", "wrong"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, config, None)
        write_tensors(tmp_path / name, "model", model_entries(model), writer=True)
        with torch.no_grad():  # of the second rank alone
            model.model.layers[1].self_attn.o_proj.weight[0, -1] = torch.nan
    pools(2).run(load_in_8_bits, *(str(tmp_path / name) for name in ("whole", "wrong")), kind)


def test_a_folder_in_8_bits_keeps_its_type(tmp_path: Path) -> None:
    config = small_config("ladder")
    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model", config, None)
    entries = model_entries(full_model(config, 5))
    write_tensors(tmp_path / "model", "model", entries, writer=True)
    convert(tmp_path / "model", tmp_path / "small", weights="fp8")
    same = tokens(load_model(tmp_path / "small", weights="fp8"), False)
    assert same == tokens(load_model(tmp_path / "small"), False)
    with pytest.raises(UserError, match=r"weights=int8: .* holds fp8 weights"):
        load_model(tmp_path / "small", weights="int8")


def load_blocks(rank: int, world: int, whole: str, cut: str) -> list[list[int]]:
    """The folder's tokens on all ranks; a folder whose blocks two ranks would share is refused."""
    with pytest.raises(UserError, match=r"mlp\.down_proj\.weight .* its 320 columns, and --tp=2"):
        load_for_inference(cut)
    with pytest.raises(UserError, match=r"the fp8-block weights of .* with --reducer=fused"):
        load_for_inference(whole, reducer="fused")
    found = load_for_inference(whole)
    assert found.model.layers[1].mlp.down_proj.scales.shape == (32, 2)
    return tokens(found, True)


def test_folders_of_blocks_on_ranks(tmp_path: Path, pools: Pools) -> None:
    for name, size in (("whole", 512), ("cut", 320)):
        config = small_config("ladder", **{**BLOCKS, "intermediate_size": size})
        model = full_model(config, 5, torch.float32)
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, config, None)
        write_tensors(tmp_path / name, "model", model_entries(model), writer=True)
        convert(tmp_path / name, tmp_path / f"{name}-8", weights="fp8-block")
    folders = [str(tmp_path / f"{name}-8") for name in ("whole", "cut")]
    first, second = pools(2).run(load_blocks, *folders)
    assert first == second == tokens(load_for_inference(folders[0]), False)


@pytest.mark.parametrize("tied", [False, True])
def test_no_second_matrix_is_there_in_16_bits(tied: bool, tmp_path: Path) -> None:
    """A folder's, and random ones: as if they had been stored in 8 bits when all were there."""
    config = small_config("ladder", tie_embeddings=tied)
    write_config(tmp_path, config, None)
    write_tensors(tmp_path, "model", model_entries(full_model(config, 5)), writer=True)
    device = torch.device("cpu")
    pairs = [
        (load_for_inference(tmp_path, weights="int8"), load_for_inference(tmp_path)),
        (random_model(config, "async", 1, device, kind="int8"),
         random_model(config, "async", 1, device)),
    ]  # fmt: skip
    for found, whole in pairs:
        quantise_model(whole, "int8")
        assert found.shapes == whole.shapes
        expected = dict(whole.named_parameters())
        assert [*expected] == [name for name, _ in found.named_parameters()]
        for name, one in found.named_parameters():
            assert torch.equal(one, expected[name]), name
    model, there = meta_model(config), []
    shard_model(model, device="meta")

    def fill(name: str, local: torch.Tensor, part: tuple[slice, ...]) -> None:
        local.zero_()
        wide = [matrix for key, matrix in matrices(model) if key != "lm_head"]  # it may be tied
        there.append(sum(each.scales is None and not each.weight.is_meta for each in wide))

    fill_in_8_bits(model, "int8", device, fill)
    assert set(there) == {0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [*QUANTISED])
def test_the_engine_on_a_gpu(kind: str) -> None:
    """Graphs and kernels, with the CPU's tokens; the same bytes are stored on both devices."""
    whole, model = (full_model(small_config("ladder"), 5, torch.float32) for _ in range(2))
    quantise_model(whole, kind)
    shard_model(model, device="cuda")
    quantise_model(model, kind)
    for (name, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.float(), other.float().cpu()), name
    assert tokens(model, True) == tokens(whole, False)
