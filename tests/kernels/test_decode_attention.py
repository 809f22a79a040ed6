"""The attention of a decode step, against float64: support.py says how it runs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ladder.kernels import attention, attention_shapes, decode_attention, decode_shapes
from ladder.models import ModelConfig
from ladder.models.layers import rotary_tables, rotate
from tests.kernels.support import (
    DTYPES,
    _poisoned_memory,  # noqa: F401  (a fixture)
    assert_close,
    attend,
    on,
    some_positions,
)

CACHES = [  # batch, query heads, KV heads, length, head_dim
    *(on("cpu", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 2, 2, 130, 64))),
    *(on("interpreter", *s) for s in ((1, 4, 2, 70, 12), (3, 4, 1, 40, 80), (2, 2, 2, 70, 64))),
    *(on("cuda", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 5, 1, 333, 96))),
    *(on("cuda", *s) for s in ((1, 8, 2, 8192, 128), (1, 16, 2, 4096, 128), (64, 8, 2, 2048, 128))),
    *(on("cuda", *s) for s in ((1, 8, 2, 32768, 64), (256, 8, 2, 512, 128), (4, 6, 6, 1000, 64))),
    on("cuda", 2, 40, 1, 500, 128),
    on("cuda", 1, 8, 1, 32768, 128),  # 128 splits, a head at a time
    on("cuda", 2, 4, 2, 300, 256),
    *(on("cuda", *s) for s in ((20, 8, 2, 4352, 128), (24, 8, 2, 4352, 128), (9, 3, 1, 9000, 64))),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biased and normed"])
@pytest.mark.parametrize(("device", "batch", "heads", "kv", "length", "size"), CACHES)
def test_decode_attention(
    device: str, batch: int, heads: int, kv: int, length: int, size: int, dtype: torch.dtype,
    extras: bool,
) -> None:  # fmt: skip
    """Memory from the token's place on is NaN before; the cache changes at that place only."""
    check_decode_attention(device, (heads, kv, size), length, dtype, extras,
                           some_positions(batch, length, device))  # fmt: skip


@pytest.mark.parametrize(
    ("device", "heads", "splits", "used"),
    [
        on("interpreter", *s, slow=s[1:] == (128, 128))
        for s in ((8, 128, 1), (5, 128, 2), (8, 128, 31), (5, 128, 32), (5, 128, 33), (8, 128, 128),
                  (5, 5, 1), (5, 5, 4), (5, 5, 5), (5, 5, 19), (4, 11, 9), (3, 11, 24))
    ],
)  # fmt: skip
def test_splits_are_combined_some_heads_at_a_time(
    device: str, heads: int, splits: int, used: int
) -> None:
    """Splits of 16 keys or more, of which the position uses some, in any number; the last piece has
    heads to spare."""
    length, size = 128 * 16, 16
    pieces = 2 * size * (1 << (splits - 1).bit_length())  # two heads at a time
    with (
        mock.patch.object(attention, "shape", return_value=(16, splits, 4, 3)),
        mock.patch.object(attention_shapes, "COMBINED", pieces),
    ):
        check_decode_attention(device, (heads, 1, size), length, torch.float32, False,
                               [torch.tensor([used * 16 - 1])])  # fmt: skip


def test_splits_of_long_contexts() -> None:
    """One program per SM, two of few sequences; beyond 32 splits one again, with four blocks; two
    from 64k tokens on. Of others from 4k tokens on, what ends first with two on each SM."""
    sizes = {1: 1024, 2: 2048, 8: 8192, 16: 16384, 32: 32768, 128: 131072}
    found = {
        pairs: [attention_shapes.splits(pairs, length // 64) for length in sizes.values()]
        for pairs in (1, 2, 3, 8, 9, 16, 32, 40, 66, 320)
    }
    assert found == {
        1: [16, 32, 32, 64, 128, 128],
        2: [16, 32, 32, 64, 64, 128],
        3: [16, 32, 32, 32, 32, 64],
        8: [16, 16, 32, 32, 32, 32],
        9: [8, 8, 26, 29, 29, 29],
        16: [8, 8, 16, 16, 16, 16],
        32: [4, 4, 8, 8, 8, 8],
        40: [4, 4, 6, 6, 6, 13],
        66: [2, 2, 4, 4, 4, 4],
        320: [1, 1, 4, 4, 4, 4],
    }
    for dims in (16, 64, 128, 256):
        for pairs in (1, 2, 32, 40, 9):
            splits = attention_shapes.shape(pairs, 131072, dims, 2 * dims)[1]
            for group in (1, 3, 8):
                heads = attention_shapes.heads_at_once(group, splits, dims)
                assert splits * heads * dims <= attention_shapes.COMBINED
                assert heads == 1 << (heads.bit_length() - 1)


def test_splits_of_few_sequences() -> None:
    """Over 2048 tokens there are about 128 programs, 64 beside other kernels; with weights in 8
    bits, and beyond, 32 of each KV head."""
    splits, pairs = attention_shapes.splits, (1, 2, 4, 5, 8)
    assert [splits(each, 32) for each in pairs] == [32, 32, 32, 16, 16]
    assert [splits(each, 32, beside=True) for each in pairs] == [32, 32, 16, 8, 8]
    assert [splits(each, 32, eight_bits=True) for each in pairs] == [32] * 5
    assert [splits(each, 32, beside=True, eight_bits=True) for each in pairs] == [32, 32, 16, 8, 8]
    assert [splits(each, 33, beside=True) for each in pairs] == [32] * 5
    assert splits(16, 32, beside=True) == splits(16, 32) == 8


def test_shapes_over_pairs_of_e4m3() -> None:
    """Two programs per SM; of few sequences 32 splits, or four blocks of 128 keys each; blocks of
    64 where no split would be without one. None beyond the keys. From 4k tokens on others than few
    have what ends first."""
    found = {
        pairs: [
            attention_shapes.shape(pairs, length, 128, 256, e4m3=True, pairs=True)[:2]
            for length in (64, 1024, 2048, 8192, 32768, 131072)
        ]
        for pairs in (1, 2, 4, 8, 16, 32, 96, 256, 300)
    }
    large = {n: (128, n) for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    few = [large[1], (64, 16), (64, 32), large[32]]
    assert found == {
        1: [*few, large[64], large[128]],
        2: [*few, large[64], large[128]],
        4: [*few, large[64], large[64]],
        8: [*few, large[32], large[32]],
        16: [large[1], (64, 16), *[large[16]] * 4],
        32: [large[1], *[large[8]] * 5],
        96: [large[1], *[large[2]] * 2, (128, 5), large[8], large[8]],
        256: [large[1]] * 6,
        300: [*[large[1]] * 3, large[4], (128, 7), (128, 7)],
    }
    assert attention_shapes.shape(32, 8192, 256, 512, e4m3=True, pairs=True)[:2] == (64, 8)
    for length, eight_bits, expected in (
        (1152, False, [(64, 16), large[8], large[8], large[8], large[4], large[2], large[2]]),
        (1152, True, [(64, 32), (64, 32), (64, 32), (64, 16), large[8], large[4], large[2]]),
        (2049, False, [(64, 32), (64, 32), (64, 32), large[16], large[8], large[4], large[2]]),
    ):
        assert expected == [
            attention_shapes.shape(pairs, length, 128, 256, True, True, eight_bits, True)[:2]
            for pairs in (2, 4, 8, 16, 32, 64, 128)
        ]
    for size, group in ((80, 4), (128, 17)):
        assert not attention_shapes.in_pairs(torch.bfloat16, size, group)


def test_shapes_of_programs() -> None:
    """Programs that fill a GPU read with 4 warps, but for e4m3 and float32; and no more stages are
    asked for than a GPU of compute capability 8.6 has shared memory for."""
    shape = attention_shapes.shape
    assert [shape(n, 1152, 128, 256)[3] for n in (128, 133, 264, 265)] == [4, 3, 3, 4]
    assert shape(128, 1152, 128, 256) == (64, 1, 4, 4)
    assert shape(128, 63 * 64, 128, 256) == (64, 1, 4, 4) != shape(128, 64 * 64, 128, 256)
    assert [shape(n, 8320, 128, 256) for n in (128, 144)] == [(128, 1, 8, 3), (64, 5, 4, 3)]
    assert [shape(n, 8320, 128, 256) for n in (8, 34, 40)] == [
        (64, 32, 4, 3), (64, 7, 4, 3), (128, 3, 8, 3)
    ]  # fmt: skip
    assert shape(40, 8320, 128, 512) == (32, 6, 4, 2)
    assert shape(128, 1152, 128, 256, e4m3=True) == (128, 1, 8, 3)
    assert shape(128, 1152, 128, 512) == (64, 1, 8, 2)
    assert shape(32, 1152, 128, 256) == (64, 4, 4, 3)
    assert shape(32, 1152, 128, 512)[2:] == (4, 2)
    assert decode_shapes.fitting(4, 2 * 64 * 128 * 2, 100 * 1024) == 3


def check_decode_attention(
    device: str, heads_of: tuple[int, int, int], length: int, dtype: torch.dtype, extras: bool,
    turns: list[torch.Tensor],
) -> None:  # fmt: skip
    """heads_of: query heads, KV heads, head_dim. turns: the positions of each step, [batch]."""
    heads, kv, size = heads_of
    batch = len(turns[0])
    shape = ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1,
                        num_heads=heads, num_kv_heads=kv, head_dim=size)  # fmt: skip
    places = torch.arange(length, device=device)
    tables = rotary_tables(shape, places[None], torch.float32)  # the model's own
    table = tables[:, 0, 0, :, : size // 2].transpose(0, 1).flatten(1).contiguous()
    arrived = torch.zeros(batch * kv, dtype=torch.int32, device=device)
    # A cache cut from a longer one, as a captured graph for short contexts may use it.
    cache = torch.randn(2, batch, kv, length + 8, size, device=device).to(dtype)
    given, halves = [], []
    for positions in turns:
        qkv = torch.randn(batch, (heads + 2 * kv) * size, device=device).to(dtype)
        qkv[:, : heads * size] *= 2  # some keys weigh more than others
        own = tables[:, 0, 0, positions][:, :, None, None]
        bias, gains = None, None
        if extras:
            bias = torch.randn((heads + 2 * kv) * size, device=device).to(dtype)
            gains = tuple(torch.rand(2, size, device=device).to(dtype) + 0.5)
        more = (bias, gains, 1e-3)
        results = []
        for kind in (torch.float64, dtype):
            whole = qkv.to(kind) if bias is None else qkv.to(kind) + bias.to(kind)
            parts = whole.unflatten(1, (-1, 1, size)).split((heads, kv, kv), 1)
            turned = []
            for n, x in enumerate(parts[:2]):
                if gains is not None:
                    x = torch.nn.functional.rms_norm(x, (size,), gains[n].to(kind), 1e-3)
                turned.append(rotate(x, own.to(kind)))
            outs = []
            for b, position in enumerate(positions.tolist()):
                old = cache[:, b : b + 1, :, :position].to(kind)
                k_all = torch.cat((old[0], turned[1][b : b + 1]), 2)
                v_all = torch.cat((old[1], parts[2][b : b + 1]), 2)
                outs.append(attend(turned[0][b : b + 1], k_all, v_all, size**-0.5))
            results.append((torch.cat(outs).flatten(1), turned[1].squeeze(2), parts[2].squeeze(2)))
        # Heads are not a multiple of head_dim apart.
        apart = (length + 8) * size + 8
        strides = (batch * kv * apart, kv * apart, apart, size, 1)
        poisoned = torch.empty_strided(cache.shape, strides, dtype=dtype, device=device)
        poisoned.copy_(cache)
        for b, position in enumerate(positions.tolist()):
            poisoned[:, b, :, position:] = torch.nan
        before = poisoned.clone()
        keys, values = poisoned[0, :, :, :length], poisoned[1, :, :, :length]
        found = decode_attention(
            qkv, table, positions, keys, values, heads, size**-0.5, arrived, *more
        )
        rows = torch.arange(batch, device=device)
        given.append((found, results[0][0], results[1][0]))
        assert_close(keys[rows, :, positions], results[0][1], results[1][1])
        if extras:
            assert_close(values[rows, :, positions], results[0][2], results[1][2])
        else:
            assert torch.equal(values[rows, :, positions], results[1][2])
        before[0][rows, :, positions] = keys[rows, :, positions]
        before[1][rows, :, positions] = values[rows, :, positions]
        assert torch.equal(before.nan_to_num(7.0), poisoned.nan_to_num(7.0)), "another place"
        assert not arrived.any()
        again = decode_attention(
            qkv, table, positions, keys, values, heads, size**-0.5, arrived, *more
        )
        assert torch.equal(found, again)
        if dtype == torch.bfloat16:
            half = decode_attention(
                qkv, table, positions, keys, values, heads, size**-0.5, arrived, *more,
                gives=torch.float16,
            )  # fmt: skip
            halves.append((half, results[0][0], results[1][0].half()))
    # All turns at once: the plain path's error in one alone can be small by chance.
    for each in (given, halves):
        if each:
            assert_close(*(torch.cat(part) for part in zip(*each, strict=True)))


def test_attention_that_does_not_fit_is_refused() -> None:
    fits: dict[str, Any] = {
        "qkv": torch.randn(2, 8 * 4),
        "table": torch.randn(8, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
        "keys": torch.randn(2, 2, 8, 4),
        "values": torch.randn(2, 2, 8, 4),
        "num_heads": 4,
        "scale": 0.5,
        "arrived": torch.zeros(4, dtype=torch.int32),
    }
    decode_attention(**fits)
    three, odd = torch.randn(2, 3, 8, 4), torch.randn(2, 2, 8, 3)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("KV heads must divide", {"qkv": torch.randn(2, 10 * 4), "keys": three, "values": three}),
        ("head_dim must be even", {"qkv": torch.randn(2, 8 * 3), "keys": odd, "values": odd}),
        (r"qkv has shape \(2, 31\); expected \(2, 32\)", {"qkv": torch.randn(2, 31)}),
        ("dtypes", {"values": fits["values"].half()}),
        (r"positions is torch\.int32; expected torch\.int64", {"positions": torch.zeros(2).int()}),
        ("values has shape", {"values": torch.randn(2, 2, 7, 4)}),
        ("keys has strides", {"keys": torch.randn(2, 2, 4, 8).mT}),
        (r"expected torch\.float32 \[>= 8", {"table": fits["table"].half()}),
        (r"expected torch\.float32 \[>= 8", {"table": fits["table"][:7]}),
        (r"arrived is torch\.int32 \(3,\); expected .* \[>= 4\]", {"arrived": fits["arrived"][:3]}),
        (r"arrived is torch\.int64", {"arrived": fits["arrived"].long()}),
        (r"bias has shape \(4,\); expected \(32,\)", {"bias": torch.randn(4)}),
        (r"gains\[1\] has shape", {"gains": (torch.randn(4), torch.randn(8))}),
        ("dtypes", {"gains": (torch.randn(4), torch.randn(4).half())}),
    ]
    for message, changed in cases:
        with pytest.raises(ValueError, match=message):
            decode_attention(**fits | changed)
