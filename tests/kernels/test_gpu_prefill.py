"""On GPUs: the kernels of prompts; the residual sharded by tokens over NCCL and copy engines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ladder.comm.transports import TRANSPORTS
from ladder.kernels.prefill import swiglu
from ladder.models import Transformer
from ladder.parallel import launch
from ladder.parallel.mesh import make_mesh
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sharded import ShardedReducer
from ladder.parallel.sharding import initialise, shard_model
from tests.kernels.support import (  # noqa: F401  (a fixture)
    DTYPES,
    _poisoned_memory,
    check_land_rows,
    check_rotary_prompt,
    check_swiglu,
)
from tests.samples import SAME_AT_ANY_T, relative_error, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "count"),
    [(1, 96, 1), (3, 200, 8), (257, 4096, 4), (64, 8192, 3), (1000, 2048, 2), (2, 16384, 8)],
)
def test_land_rows(rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    check_land_rows("cuda", rows, size, count, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (9, 515), (1024, 3584), (4097, 7168)])
def test_swiglu(rows: int, inner: int, dtype: torch.dtype) -> None:
    check_swiglu("cuda", rows, inner, dtype)


def test_swiglu_beyond_two_to_the_31_elements() -> None:
    """Offsets in 32 bits write elsewhere, or read what is not there."""
    rows, inner = 2**31 // 3584 + 5, 3584
    packed = torch.empty(rows, 2 * inner, device="cuda", dtype=torch.bfloat16).normal_()
    found = swiglu(packed)
    for part in (slice(0, 7), slice(rows // 2, rows // 2 + 7), slice(rows - 7, rows)):
        gate, up = packed[part].double().chunk(2, dim=-1)
        assert relative_error(found[part], F.silu(gate) * up) < 5e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads"),
    [(1, 1024, (8, 2, 128)), (3, 130, (32, 8, 64)), (5, 17, (3, 1, 12)), (2, 77, (16, 2, 128))],
)
def test_rotary_prompt_and_attention(
    batch: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    """What it returns runs on torch's fused attention as it is, and comes out without a copy."""
    q, k, v = check_rotary_prompt("cuda", batch, length, heads, dtype, normed)
    if dtype == torch.float32 or heads[2] % 8:
        return
    v[0, -1, 0, -1] = 0.0  # it was infinite
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):  # an error where the backend cannot
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert out.transpose(1, 2).is_contiguous(), backend
        repeat = heads[0] // heads[1]
        whole = (k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1))
        exact = F.scaled_dot_product_attention(q.double(), *whole, is_causal=True)
        assert relative_error(out, exact) < 2e-2, backend


# -- the sharded residual --------------------------------------------------------------------


class Provoked:
    """A model whose sublayers come late on a rank now and then.

    in_buffer: their partials lie in the pass's `partial_buffer`; else somewhere else.
    """

    def __init__(self, model: Transformer, source: random.Random) -> None:
        self.model, self.source, self.in_buffer = model, source, False
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(self._hook)
            layer.mlp.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, partial: Tensor) -> Tensor:
        if self.source.random() < 0.3:
            torch.cuda._sleep(self.source.randrange(200_000))
        return partial if self.in_buffer else partial.clone()


def sharded_on_gpus(plan: str, transport: str) -> int:
    device = launch.join("cuda")
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        compare(plan, transport, dtype, limit, device)
    return 0


@torch.inference_mode()
def compare(
    plan: str, transport: str, dtype: torch.dtype, limit: float, device: torch.device
) -> None:
    """Eager and replayed passes of several sizes against AsyncReducer's, with fresh tokens."""
    world, rank = launch.world_size(), launch.rank()
    mesh = make_mesh(device, world)
    assert mesh is not None
    source, delays = torch.Generator().manual_seed(7), random.Random(rank)
    config = small_config(
        SAME_AT_ANY_T[plan], hidden_size=256, intermediate_size=512, vocab_size=515,
        max_seq_len=2048,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(config)
    shard_model(model, mesh["tp"], device=device, dtype=dtype)
    initialise(model, 1)
    plain = model.reducer
    assert isinstance(plain, AsyncReducer)
    plainly = model.runtime
    reducer = ShardedReducer(plain.ranks, plain.group, config.plan, transport)
    sharded = replace(plainly, reducer=reducer)
    provoked = Provoked(model, delays)

    def fresh(size: torch.Size | tuple[int, int]) -> Tensor:
        return torch.randint(0, 515, size, generator=source).to(device)

    def places(tokens: Tensor) -> Tensor:
        return torch.randint(0, tokens.shape[1], tokens.shape[:1], generator=source).to(device)

    def check(found: Tensor, tokens: Tensor, where: object, last: Tensor | None = None) -> None:
        model.use(plainly)
        wanted = model(tokens, last=last)
        error = relative_error(found, wanted)
        assert error < limit, (plan, transport, dtype, where, error)
        everyone = [torch.empty_like(found) for _ in range(world)]
        torch.distributed.all_gather(everyone, found.contiguous())
        assert all(torch.equal(found, other) for other in everyone), where

    sizes = [(1, 16), (3, 65), (2, 1500), (1, 1), (3, 65)]  # some beyond the first buffers
    for turn, size in enumerate(sizes * 4):
        provoked.in_buffer = turn % 2 == 1
        tokens = fresh(size)
        last = places(tokens) if turn % 3 else None
        model.use(sharded)
        check(model(tokens, last=last), tokens, (turn, size), last)
    graphs = []
    for turn, size in enumerate(((3, 65), (1, 256))):
        provoked.in_buffer = turn % 2 == 0
        tokens = fresh(size)
        last = places(tokens) if turn else None
        model.use(sharded)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(tokens, last=last)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = model(tokens, last=last)
        graphs.append((graph, tokens, last, found))
    for turn in range(200):  # the sets of buffers rotate out of step with the graphs
        graph, tokens, last, found = graphs[turn % 3 % 2]
        tokens.copy_(fresh(tokens.shape))
        if last is not None:
            last.copy_(places(tokens))
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randrange(2_000_000))
        graph.replay()
        if turn % 5 == 0 or turn > 180:
            check(found.clone(), tokens, ("replay", turn), last)
        if turn % 7 == 0:  # and with passes that are not recorded
            other = fresh((2, 33))
            model.use(sharded)
            check(model(other), other, ("between", turn))
    for graph, tokens, last, found in graphs:
        for _ in range(1000):
            graph.replay()
        check(found.clone(), tokens, "in a row", last)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("plan", ["standard", "ladder", "parallel", "hybrid", "lag 2"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_sharded_residual_on_gpus(world: int, plan: str, transport: str) -> None:
    """A buffer that is written while a peer reads it gives other logits; a lost flag hangs."""
    assert launch.run(sharded_on_gpus, (plan, transport), nproc=world) == 0
