"""On a GPU: the decode kernels in a CUDA graph, one after another, as an engine launches them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.kernels import (
    add_rms_norm,
    decode_attention,
    gate_up,
    rotary_cache,
    skinny_linear,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_graph_of_dependent_launches_equals_eager_calls(rows: int) -> None:
    """Twelve layers in one graph, buffers reused, against the same with a wait after each call."""
    layers, size, heads, kv, inner, length, dim = 12, 1024, 8, 2, 1536, 2048, 128
    make = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = ((heads + 2 * kv) * dim, size), (size, heads * dim), (inner, size), (inner, size)
    weights = [
        [torch.randn(s, **make) / s[1] ** 0.5 for s in (*shapes, (size, inner))]
        for _ in range(layers)
    ]
    gain, table = torch.ones(size, **make), torch.randn(length, dim, device="cuda")
    caches = torch.randn(layers, 2, rows, kv, length, dim, **make)
    x, positions = torch.randn(rows, size, **make), torch.zeros(rows, device="cuda").long()

    def step(wait: Callable[[], None]) -> Tensor:
        stream, partial = x, None
        for (qkv, o, gate, up, down), (keys, values) in zip(weights, caches, strict=True):
            addends = [] if partial is None else [(partial, 1.0)]
            stream, normed = add_rms_norm(stream, addends, gain, 1e-5)
            wait()
            y = skinny_linear(normed, qkv)
            wait()
            q = rotary_cache(y, table, positions, keys, values, heads, kv)
            wait()
            y = decode_attention(q, keys, values, positions, dim**-0.5)
            wait()
            partial = skinny_linear(y, o)
            wait()
            stream, normed = add_rms_norm(stream, [(partial, 1.0)], gain, 1e-5)
            wait()
            y = gate_up(normed, gate, up)
            wait()
            partial = skinny_linear(y, down)
            wait()
        return add_rms_norm(stream, [(partial, 1.0)], gain, 1e-5)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(torch.cuda.synchronize)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = step(lambda: None)
    before = caches.clone()
    for _ in range(20):
        x.normal_()
        positions.random_(length)
        graph.replay()
        first, after = found.clone(), caches.clone()
        graph.replay()
        assert torch.equal(found, first)
        caches.copy_(before)
        wanted = step(torch.cuda.synchronize)
        assert not wanted.isnan().any()
        assert torch.equal(first, wanted)
        assert torch.equal(caches, after)
        before = after


def test_a_position_outside_the_cache_writes_nothing() -> None:
    """Neither beyond the cache nor into the next head or sequence; those beside it are stored."""
    length, dim = 32, 64
    positions = torch.tensor([length, 5, -1, length + 1000], device="cuda")
    caches = torch.full((2, 4, 2, length, dim), 7.0, device="cuda")
    table = torch.randn(length + 1, dim, device="cuda")
    qkv = torch.randn(4, 6 * dim, device="cuda")
    q = rotary_cache(qkv, table, positions, *caches, 2, 2)
    assert not q[[0, 2, 3]].any()
    assert q[1].all()
    assert (caches != 7.0).nonzero()[:, 1].unique().tolist() == [1]
    assert (caches != 7.0).nonzero()[:, 3].unique().tolist() == [5]
