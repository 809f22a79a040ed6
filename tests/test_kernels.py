"""The decode kernels against float64: references on a CPU, the Triton kernels on a GPU.

`TRITON_INTERPRET=1 pytest tests/test_kernels.py` puts the Triton kernels through Triton's
interpreter on the CPU instead of the references. `pytest -m gpu` runs the compiled ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import (
    add_rms_norm,
    decode_attention,
    gate_up,
    launch,
    rotary_cache,
    skinny_linear,
)
from ladder.models import ModelConfig
from ladder.models.layers import rotary_tables, rotate

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on(device: str, *shape: Any) -> Any:
    marks = GPU if device == "cuda" else []
    return pytest.param(device, *shape, marks=marks, id="-".join(str(s) for s in (device, *shape)))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so an element that a kernel leaves out is seen; fresh inputs."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


@pytest.fixture(autouse=True)
def _interpreter_with_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes loop bounds by `int(array)`, which NumPy refuses from 2.4 on."""
    if not launch.INTERPRETED:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: allocate(*args, **kwargs).fill_(torch.nan)


def assert_close(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """`found` against float64: 1e-5 in float32, else twice the plain path's error and an ulp."""
    assert found.shape == exact.shape
    assert found.dtype == plain.dtype
    error = (found.double() - exact).abs()
    if found.dtype == torch.float32:
        bound = 1e-5 * exact.abs().max().expand_as(exact)
    else:
        allowed = 2 * (plain.double() - exact).abs().max()
        bound = allowed + torch.finfo(found.dtype).eps * exact.abs()
    # Not `error > bound`: a NaN fails.
    assert bool((error <= bound).all()), f"{error.max()} of {exact.abs().max()}"


LINEAR = [
    *(on("cpu", *s) for s in ((1, 96, 96), (3, 71, 200), (8, 6, 2100), (5, 33, 12), (2, 1, 1024))),
    *(on("cuda", m, *s) for m in (1, 2, 3, 8) for s in ((96, 96), (71, 200), (33, 12))),
    # 8B, 70B and 1B at TP 4: QKV, attention's output, down; and 8B's head.
    *(on("cuda", m, *s) for m in (1, 4, 8) for s in ((1536, 4096), (4096, 1024), (4096, 3584))),
    *(on("cuda", m, *s) for m in (1, 7) for s in ((2560, 8192), (8192, 2048), (8192, 7168))),
    *(on("cuda", m, *s) for m in (1, 5) for s in ((768, 2048), (2048, 512), (2048, 2048))),
    on("cuda", 1, 32064, 4096),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "m", "n", "k"), LINEAR)
def test_matrix_products(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, device=device).to(dtype)
    gate, up = (torch.randn(2, n, k, device=device) / k**0.5).to(dtype)
    product, other = F.linear(x.double(), gate.double()), F.linear(x.double(), up.double())
    plain = F.linear(x, gate)
    for out in (None, torch.empty(m * n + 64, dtype=dtype, device=device)):
        view = None if out is None else out[: m * n].view(m, n)
        found = skinny_linear(x, gate, view)
        assert_close(found, product, plain)
        if out is not None:
            assert found.data_ptr() == out.data_ptr()
            assert out[m * n :].isnan().all()
    assert_close(gate_up(x, gate, up), F.silu(product) * other, F.silu(plain) * F.linear(x, up))


ROWS = [
    *(on("cpu", *s) for s in ((1, 96, 0), (3, 200, 1), (2, 1536, 3), (1, 12, 8))),
    *(on("cuda", *s) for s in ((1, 96, 1), (3, 200, 8), (1, 2048, 1), (256, 1536, 2))),
    *(on("cuda", *s) for s in ((1, 4096, 1), (64, 4096, 0), (8, 8192, 4), (4, 12288, 2))),
    on("cuda", 2, 16384, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "rows", "size", "count"), ROWS)
def test_add_rms_norm(device: str, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    stream, weight = torch.randn(rows, size, device=device), torch.rand(size, device=device) + 0.5
    stream, weight = stream.to(dtype), weight.to(dtype)
    kinds = [dtype, torch.float32]
    addends = [
        (torch.randn(rows, size, device=device).to(kinds[n % 2]), (1.0, 0.5, -1.7)[n % 3])
        for n in range(count)
    ]
    exact = stream.double()
    plain = stream.clone()
    for addend, factor in addends:
        exact = exact + addend.double() * factor
        plain = plain + (addend * factor).to(dtype)
    normed = F.rms_norm(exact, (size,), weight.double(), 1e-5)
    landed, found = add_rms_norm(stream, addends, weight, 1e-5)
    assert_close(landed, exact, exact.to(dtype))
    assert_close(found, normed, F.rms_norm(plain, (size,), weight, 1e-5))
    if count == 0:
        assert torch.equal(landed, stream)
    add_rms_norm(stream, addends, weight, 1e-5, out=(stream, found))  # in place
    assert torch.equal(stream, landed)


CACHES = [  # batch, query heads, KV heads, length, head_dim
    *(on("cpu", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 2, 2, 130, 64))),
    *(on("cuda", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 5, 1, 333, 96))),
    *(on("cuda", *s) for s in ((1, 8, 2, 8192, 128), (1, 16, 2, 4096, 128), (64, 8, 2, 2048, 128))),
    *(on("cuda", *s) for s in ((1, 8, 2, 32768, 64), (256, 8, 2, 512, 128), (4, 6, 6, 1000, 64))),
    on("cuda", 2, 40, 1, 500, 128),
    on("cuda", 2, 4, 2, 300, 256),
]


def some_positions(batch: int, length: int, device: str) -> Tensor:
    """Random, but the first and the last place too, and the edges of a block."""
    edges = torch.tensor([0, length - 1, 63, 64, 65])
    positions = torch.cat((edges, torch.randint(length, (max(batch - 5, 1),))))
    positions = positions[torch.randperm(len(positions))] if batch < 5 else positions
    return positions[:batch].to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "batch", "heads", "kv", "length", "size"), CACHES)
def test_rotary_cache(
    device: str, batch: int, heads: int, kv: int, length: int, size: int, dtype: torch.dtype
) -> None:
    qkv = torch.randn(batch, (heads + 2 * kv) * size, device=device).to(dtype)
    config = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1}
    shape = ModelConfig(**config, num_heads=heads, num_kv_heads=kv, head_dim=size)
    places = torch.arange(length, device=device)
    tables = rotary_tables(shape, places[None], torch.float32)  # the model's own
    table = tables[:, 0, 0, :, : size // 2].transpose(0, 1).flatten(1).contiguous()
    keys, values = torch.randn(2, batch, kv, length, size, device=device).to(dtype)
    wanted = [keys.clone(), values.clone()]
    positions = some_positions(batch, length, device)
    q, k, v = qkv.unflatten(1, (-1, 1, size)).split((heads, kv, kv), 1)
    own = tables[:, 0, 0, positions][:, :, None, None]

    found = rotary_cache(qkv, table, positions, keys, values, heads, kv)
    plain = [rotate(x, own.to(dtype)).squeeze(2) for x in (q, k)]
    exact = [rotate(x.double(), own.double()).squeeze(2) for x in (q, k)]
    rows = torch.arange(batch, device=device)
    assert_close(found, exact[0], plain[0])
    assert_close(keys[rows, :, positions], exact[1], plain[1])
    wanted[0][rows, :, positions] = keys[rows, :, positions]
    wanted[1][rows, :, positions] = v.squeeze(2)
    assert torch.equal(keys, wanted[0]), "another place was written"
    assert torch.equal(values, wanted[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "batch", "heads", "kv", "length", "size"), CACHES)
def test_decode_attention(
    device: str, batch: int, heads: int, kv: int, length: int, size: int, dtype: torch.dtype
) -> None:
    q = torch.randn(batch, heads, size, device=device).to(dtype) * 2
    # A cache cut from a longer one, as a captured graph for short contexts may use it.
    keys, values = torch.randn(2, batch, kv, length + 8, size, device=device).to(dtype)
    keys, values = keys[:, :, :length], values[:, :, :length]
    for positions in (some_positions(batch, length, device) for _ in range(3)):
        exact, plain = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
        poisoned_keys, poisoned_values = keys.clone(), values.clone()
        for b, position in enumerate(positions.tolist()):
            k, v = keys[b : b + 1, :, : position + 1], values[b : b + 1, :, : position + 1]
            args = (q[b : b + 1, :, None], k, v)
            exact[b] = attend(*(x.double() for x in args), size**-0.5)[0]
            plain[b] = attend(*args, size**-0.5)[0]
            poisoned_keys[b, :, position + 1 :] = torch.nan
            poisoned_values[b, :, position + 1 :] = torch.nan
        found = decode_attention(q, poisoned_keys, poisoned_values, positions, size**-0.5)
        assert_close(found, exact.flatten(1), plain.flatten(1))
        assert torch.equal(found, decode_attention(q, keys, values, positions, size**-0.5))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return ((q @ k.mT * scale).softmax(-1) @ v).squeeze(2)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(9, 16), torch.randn(4, 16)
    with pytest.raises(ValueError, match=r"M from 1 to 8"):
        skinny_linear(x, weight)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 15\); expected \(4, 16\)"):
        skinny_linear(x[:1], weight[:, :15].contiguous())
    with pytest.raises(ValueError, match="not contiguous"):
        skinny_linear(x[:1], torch.randn(16, 4).t())
    with pytest.raises(ValueError, match="dtypes"):
        gate_up(x[:1], weight, weight.half())
    with pytest.raises(ValueError, match="at most 8"):
        add_rms_norm(x, [(x, 1.0)] * 9, weight[0], 1e-5)
    cache, q = torch.randn(2, 3, 8, 4), torch.randn(2, 4, 4)
    with pytest.raises(ValueError, match="KV heads must divide"):
        decode_attention(q, cache, cache, torch.zeros(2, dtype=torch.int64), 1.0)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        decode_attention(q, cache, cache, torch.zeros(2, dtype=torch.int32), 1.0)


def test_no_triton_on_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton", None)
    assert not launch.INTERPRETED or launch.on_triton(torch.zeros(1))
    with pytest.raises(ValueError, match="need Triton"):
        launch.on_triton(torch.zeros(1, device="meta"))


def test_the_interpreter_is_used_where_it_is_asked_for() -> None:
    if launch.triton is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 and Triton put the kernels through the interpreter")
    assert launch.on_triton(torch.zeros(1))
