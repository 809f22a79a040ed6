"""Keys and values in e4m3: what prompts and decode steps store, and attention over it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import attention, decode_attention, rotary_prompt
from ladder.models import ModelConfig
from ladder.models.errors import UserError
from ladder.models.layers import rotary_tables, rotate
from ladder.models.storage import LEAST_CACHED, ROUNDING, exponents, powers, rounded
from tests.kernels.support import (
    DTYPES,
    _poisoned_memory,  # noqa: F401  (a fixture)
    assert_close,
    attend,
    on,
    some_positions,
)

CACHES = [  # batch, query heads, KV heads, length, head_dim
    on("cpu", 3, 4, 1, 70, 80),
    *(on("interpreter", *s) for s in ((1, 4, 2, 70, 12), (3, 4, 1, 40, 80), (2, 2, 2, 70, 64))),
    *(on("interpreter", *s) for s in ((1, 34, 1, 20, 32), (1, 9, 1, 20, 32), (1, 3, 1, 140, 128))),
    *(on("cuda", *s) for s in ((1, 8, 4, 100, 12), (2, 5, 1, 333, 96), (1, 8, 2, 8192, 128))),
    *(
        on("cuda", *s)
        for s in ((64, 8, 2, 2048, 128), (256, 8, 2, 512, 128), (20, 8, 2, 4352, 128))
    ),
    *(
        on("cuda", *s)
        for s in (
            (1, 34, 1, 70, 32),
            (2, 20, 1, 333, 64),
            (3, 4, 2, 333, 256),
            (1, 17, 1, 999, 128),
        )
    ),
]


def tables_of(length: int, size: int, heads: int, device: str) -> tuple[Tensor, Tensor]:
    """The model's rotary tables, and the kernels' form of them."""
    shape = ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1,
                        num_heads=heads, num_kv_heads=heads, head_dim=size)  # fmt: skip
    tables = rotary_tables(shape, torch.arange(length, device=device)[None], torch.float32)
    return tables, tables[:, 0, 0, :, : size // 2].transpose(0, 1).flatten(1).contiguous()


def stored(values: Tensor) -> tuple[Tensor, Tensor]:
    small, scales = rounded(values, "fp8", LEAST_CACHED)
    return small, exponents(scales)


def read(cache: Tensor, scales: Tensor) -> Tensor:
    return cache.double() * powers(scales).double()[..., None]


def rounding(values: Tensor, scales: Tensor) -> Tensor:
    """The largest error of values in e4m3."""
    relative, absolute = ROUNDING["fp8"]
    return relative * values.abs() + absolute * powers(scales).double()[..., None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "batch", "heads", "kv", "length", "size"), CACHES)
def test_decode_attention_over_e4m3(
    device: str, batch: int, heads: int, kv: int, length: int, size: int, dtype: torch.dtype
) -> None:
    """Exact over what is stored; against exact keys and values, within what e4m3 rounds.

    Positions have very different scales, so that another one's is off by far. Memory from the
    token's place on is NaN before; the cache changes at that place only.
    """
    tables, table = tables_of(length, size, heads, device)
    arrived = torch.zeros(batch * kv, dtype=torch.int32, device=device)
    powers_of_4 = 4.0 ** torch.randint(-3, 2, (2, batch, kv, length + 8, 1), device=device)
    exact_cache = (torch.randn(2, batch, kv, length + 8, size, device=device) * powers_of_4).to(
        dtype
    )
    rows = torch.arange(batch, device=device)
    for positions in some_positions(batch, length, device):
        qkv = torch.randn(batch, (heads + 2 * kv) * size, device=device).to(dtype)
        qkv.unflatten(1, (-1, size))[:, -kv:, 1] *= 2.0**-20  # zeros of their sign in e4m3
        own = tables[:, 0, 0, positions][:, :, None, None]
        q, k, v = qkv.unflatten(1, (-1, 1, size)).split((heads, kv, kv), 1)
        turned = [rotate(x.double(), own.double()) for x in (q, k)]
        cache, scales = stored(exact_cache)
        for b, position in enumerate(positions.tolist()):
            cache.view(torch.uint8)[:, b, :, position:] = 0x7F
            scales[:, b, :, position:] = 0xFF
        before = cache.clone(), scales.clone()
        parts = [each[n, :, :, :length] for n in range(2) for each in (cache, scales)]
        keys, key_scales, values, value_scales = parts
        found = decode_attention(
            qkv, table, positions, keys, values, heads, size**-0.5, arrived,
            exponents=(key_scales, value_scales),
        )  # fmt: skip
        for n, new in enumerate((turned[1].squeeze(2), v.squeeze(2).double())):
            at = parts[2 * n][rows, :, positions], parts[2 * n + 1][rows, :, positions]
            # A key is rounded to the dtype before, and e4m3 may round that 1/16 further off.
            rotated = torch.finfo(dtype).eps * new.abs() + 1e-5 if n == 0 else 0.0
            assert ((read(*at) - new).abs() <= rounding(new, at[1]) + 17 / 16 * rotated).all()
            again = stored(read(*at).to(dtype))  # the scale is the least that fits
            assert torch.equal(read(*again), read(*at))
            assert (again[1] <= at[1]).all()
            for old, whole in zip(before, (cache, scales), strict=True):
                changed = old.view(torch.uint8)[n]
                changed[rows, :, positions] = whole.view(torch.uint8)[n][rows, :, positions]
        small, exponent = stored(v.squeeze(2))  # the values, as a prompt's
        assert torch.equal(at[0].view(torch.uint8), small.view(torch.uint8))
        assert torch.equal(at[1], exponent)
        assert torch.equal(before[0].view(torch.uint8), cache.view(torch.uint8)), "another place"
        assert torch.equal(before[1], scales), "another place"
        results: list[list[Tensor]] = [[], [], []]  # exact, plain, and of values' magnitudes
        for b, position in enumerate(positions.tolist()):
            there = slice(b, b + 1), slice(None), slice(position + 1)
            k_read, v_read = (read(*(p[there] for p in parts[n : n + 2])) for n in (0, 2))
            for kind, result in zip((torch.float64, dtype), results, strict=False):
                query = turned[0][b : b + 1].to(kind)
                result.append(attend(query, k_read.to(kind), v_read.to(kind), size**-0.5))
            results[2].append(attend(turned[0][b : b + 1], k_read, v_read.abs(), size**-0.5))
            # And how far from keys and values that nothing has rounded: softmax weights are off
            # by a factor of exp(2 d), if scores are off by d.
            olds = exact_cache[:, b : b + 1, :, :position].double()
            k_all = torch.cat((olds[0], turned[1][b : b + 1]), 2)
            v_all = torch.cat((olds[1], v[b : b + 1].double()), 2)
            query = turned[0][b : b + 1].unflatten(1, (kv, -1)).squeeze(3)
            apart = rounding(k_all, key_scales[there]) + 1e-5 + 1e-2 * k_all.abs()
            d = (query.abs() @ apart.mT).amax((2, 3)) * size**-0.5
            most = torch.expm1(2 * d) * v_all.abs().amax((2, 3))
            most += rounding(v_all, value_scales[there]).amax((2, 3))
            exact = attend(turned[0][b : b + 1], k_all, v_all, size**-0.5)
            error = (results[0][-1] - exact).abs().unflatten(1, (kv, -1)).amax((2, 3))
            assert (error <= most).all()
        # Each softmax weight is rounded; where one value is by far the largest, a plain path's
        # error may be much smaller by chance.
        assert_close(found, *(torch.cat(each).flatten(1) for each in results))
        assert not arrived.any()


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("size", [64, 80])  # in pairs and one by one
@pytest.mark.parametrize(("query", "key", "value"), [(90, -90, 60), (-90, 90, -9), (10, 0, 100)])
def test_magnitudes_far_from_one(device: str, size: int, query: int, key: int, value: int) -> None:
    """bfloat16 has float32's exponents: queries, keys and values of any size are attended to, and
    values of very different sizes each have their part."""
    heads, kv, length = 4, 2, 150
    _, table = tables_of(length, size, heads, device)
    table = torch.cat((torch.ones_like(table[:, : size // 2]), 0 * table[:, size // 2 :]), 1)
    cache, scales = stored(
        torch.stack((
            torch.randn(1, kv, length, size, device=device) * 2.0**key,
            torch.randn(1, kv, length, size, device=device)
            * 2.0 ** (value - torch.randint(0, 9, (1, kv, length, 1), device=device)),
        ))
    )  # fmt: skip
    sizes = torch.tensor([query] * heads + [key] * kv + [value] * kv, device=device)
    qkv = (torch.randn(1, len(sizes), size, device=device) * 2.0 ** sizes[:, None]).bfloat16()
    positions = torch.tensor([length - 1], device=device)
    arrived = torch.zeros(kv, dtype=torch.int32, device=device)
    found = decode_attention(
        qkv.flatten(1), table, positions, cache[0], cache[1], heads, size**-0.5, arrived,
        exponents=(scales[0], scales[1]),
    )  # fmt: skip
    keys, values = (read(cache[n], scales[n]) for n in range(2))
    q = qkv[:, :heads, None]
    exact = attend(q.double(), keys, values, size**-0.5)
    plain = attend(q.float(), keys.float(), values.float(), size**-0.5).bfloat16()
    assert exact.isfinite().all()
    weighted = attend(q.double(), keys, values.abs(), size**-0.5)
    assert_close(found, exact.flatten(1), plain.flatten(1), weighted.flatten(1))


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("size", [64, 80])  # in pairs and one by one
@pytest.mark.parametrize("own", [0.004, 0.3, 300.0])
@pytest.mark.parametrize("others", [0.3, 30.0])
def test_many_small_weights_beside_a_large_one(
    device: str, size: int, own: float, others: float
) -> None:
    """A token attends to itself above all, and 1023 others together have some 2 % of the weight:
    none of that is rounded away, whatever the values' scales."""
    length, kv = 1024, 1
    table = torch.tensor([1.0] * (size // 2) + [0.0] * (size // 2), device=device)
    towards = torch.ones(size, device=device)
    keys = torch.randn(1, kv, length, size, device=device) / 8
    keys -= keys.mean(-1, keepdim=True)  # no score
    near = torch.rand(1, kv, length, size, device=device) / 4 + 1
    cache, scales = stored(torch.stack((keys, others * near)))
    qkv = torch.stack((towards, towards * 10.75 / size**0.5, towards * own))[None].bfloat16()
    positions = torch.tensor([length - 1], device=device)
    arrived = torch.zeros(kv, dtype=torch.int32, device=device)
    with mock.patch.object(attention, "shape", return_value=(64, 1, 4, 3)):
        found = decode_attention(
            qkv.flatten(1), table.expand(length, -1).contiguous(), positions, cache[0], cache[1], 1,
            size**-0.5, arrived, exponents=(scales[0], scales[1]),
        )  # fmt: skip
    k, v = (read(cache[n], scales[n]) for n in range(2))
    exact = attend(qkv[:, :1, None].double(), k, v, size**-0.5).flatten(1)
    assert ((found.double() - exact).abs() <= 0.02 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("device", "batch", "length", "heads", "size"),
    [on("cpu", 2, 9, (3, 1), 16), on("interpreter", 2, 9, (3, 1), 16),
     on("interpreter", 1, 5, (2, 2), 12), on("cuda", 3, 300, (8, 2), 128)],
)  # fmt: skip
def test_prompts_are_stored_in_e4m3(
    device: str, batch: int, length: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    """A prompt attends to exact keys and values; what is stored is these, rounded as by `rounded`,
    bit for bit.

    The kernel with a cache in e4m3 is another compilation than without: on a GPU it may add up a
    row's squares in another order. So both are compared with float64.
    """
    queries, kv = heads
    tables, table = tables_of(length + 3, size, queries, device)
    packed = torch.randn(batch, length, (queries + 2 * kv) * size, device=device)
    packed *= 4.0 ** torch.randint(-3, 2, (batch, length, 1), device=device)
    # What is too small for e4m3 becomes a zero, of its sign.
    packed.unflatten(-1, (-1, size))[..., [1, 1 + size // 2]] *= 2.0**-20
    packed = packed.to(dtype)
    gains = tuple(torch.rand(2, size, device=device).to(dtype) + 0.5)
    cache = torch.full((2, batch, kv, length + 3, size), 0x55, dtype=torch.uint8, device=device)
    scales = torch.full(cache.shape[:-1], 0x55, dtype=torch.uint8, device=device)
    small = cache.view(torch.float8_e4m3fn)
    found = rotary_prompt(
        packed, table, *small, queries, kv, gains, 1e-3, exponents=(scales[0], scales[1])
    )
    split = packed.unflatten(-1, (-1, size)).transpose(1, 2).split((queries, kv, kv), dim=1)
    cut = tables[:, :, :, :length]
    for each, source, gain in zip(found, split, gains, strict=False):
        exact, plain = (
            rotate(F.rms_norm(x, (size,), gain.to(x.dtype), 1e-3), cut.to(x.dtype))
            for x in (source.double(), source)
        )
        assert_close(each, exact, plain)
    assert torch.equal(found[2], split[2])
    for n in range(2):
        wanted, wanted_scales = stored(found[1 + n])
        assert torch.equal(cache[n, :, :, :length], wanted.view(torch.uint8))
        assert torch.equal(scales[n, :, :, :length], wanted_scales)
    assert (cache[:, :, :, length:] == 0x55).all()
    assert (scales[:, :, :, length:] == 0x55).all()


def test_exponents_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(2, 2, 2, 8, 4, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(2, 2, 2, 8, dtype=torch.uint8)
    fits = torch.randn(2, 32), torch.randn(8, 4), torch.zeros(2, dtype=torch.int64)
    arrived = torch.zeros(4, dtype=torch.int32)
    decode_attention(*fits, *cache, 4, 0.5, arrived, exponents=(scales[0], scales[1]))
    wrong = (
        (cache, None),
        (cache.float(), tuple(scales)),
        (cache, tuple(scales.int())),
        (cache, (scales[0], scales[1, :, :, :7])),
        (cache, (scales[0], scales[1].transpose(0, 1).contiguous().transpose(0, 1))),
    )
    for held, given in wrong:
        with pytest.raises(UserError, match=r"expected torch\.float8_e4m3fn with|dtypes"):
            decode_attention(*fits, *held, 4, 0.5, arrived, exponents=given)  # type: ignore[arg-type]
