"""The measurements, in parts of a few seconds each: every part gives one curve, or some values."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ladder.costs import stored_bytes
from ladder.kernels.attention import decode_attention
from ladder.kernels.carveout import carveout, least
from ladder.kernels.landing import land, new_landing
from ladder.models import storage
from ladder.models.eight_bits import EIGHT_BITS
from ladder.perf.calibration import beside, collectives, exchanges, turns
from ladder.perf.calibration.sizes import HELD, Part, Point, Sizes, copies_of, pairs, random
from ladder.perf.calibration.timing import host_microseconds, microseconds
from ladder.perf.machine import ATTENTION, IN_8_BITS

TURN, MOST_CALLS = 1e12, 32  # of a turn of large products: multiplications (a few ms), and calls
KV_GROUP = 4  # query heads for each KV head
PROMPT_HEADS = 32  # query heads of prompts; they fill all multiprocessors


def parts(
    sizes: Sizes, device: torch.device, group: ProcessGroup | None, push: bool
) -> Iterator[Part]:
    """All parts, the most useful first. group: of all ranks, as a model would use it to reduce;
    None for one rank. push: whether the ranks can write to peer memory."""
    yield Part("values", {}, partial(_values, sizes, device))
    for rows in sizes.rows:
        yield Part("product", {"rows": rows}, partial(_products, sizes, rows, device))
    converts = device.type != "cuda" or (
        torch.cuda.get_device_capability(device) >= storage.FP8_CAPABILITY
    )
    for cache in ("bf16", "fp8") if converts else ("bf16",):
        for keys in sizes.keys:
            run = partial(_attention, sizes, keys, cache, device)
            yield Part(ATTENTION[cache], {"keys": keys}, run)
    for hidden in sizes.landing_hidden:
        yield Part("landing", {"hidden": hidden}, partial(_landings, sizes, hidden, device))
    if group is not None:
        yield from collectives.parts(sizes, group, device, push)
        yield from beside.parts(sizes, group, device, push)
        yield from turns.parts(sizes, group, device)
        if push:
            yield from exchanges.parts(sizes, group, device)
    yield Part("copy", {}, partial(_copies, sizes, device))
    yield Part("prompt attention", {}, partial(_prompt_attention, sizes, device))
    for weights in EIGHT_BITS:
        for rows in sizes.rows if converts or weights == "int8" else ():
            run = partial(_products, sizes, rows, device, weights)
            yield Part(IN_8_BITS, {"rows": rows, "weights": weights}, run)
    for outputs, inputs in sizes.matrices:
        run = partial(_matrix, sizes, outputs, inputs, device)
        yield Part("matrix", {"outputs": outputs, "inputs": inputs}, run)


def _values(sizes: Sizes, device: torch.device) -> dict[str, float]:
    one = torch.zeros(1, device=device)
    tiny = partial(one.add_, 1)
    a, b = (random(sizes.square, sizes.square, dtype=sizes.dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = microseconds([partial(torch.mm, a, b, out=out)], 1, device, cool=True)
    large = max(sizes.copies)
    copied = _copy(large, device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "memory_gib": memory / 2**30,
        "launch_us": microseconds([tiny], 10 * sizes.calls, device),
        "host_launch_us": host_microseconds(tiny, 10 * sizes.calls, device),
        "matrix_tflop_s": 2 * sizes.square**3 / product / 1e6,
        "copy_tb_s": 2 * large / copied / 1e6,
    }


def _copy(nbytes: int, device: torch.device) -> float:
    count = copies_of(2 * nbytes, device)
    made = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2 * count)]
    works = [partial(a.copy_, b) for a, b in zip(made[::2], made[1::2], strict=True)]
    return microseconds(works, count if nbytes > HELD else max(count, 4), device)


def _copies(sizes: Sizes, device: torch.device) -> list[Point]:
    return [(nbytes, _copy(nbytes, device)) for nbytes in sizes.copies]


def _products(
    sizes: Sizes, rows: int, device: torch.device, weights: str = "bf16"
) -> list[Point]:  # fmt: skip
    """The time of a product in a chain of pairs: one from `hidden`, then one back to it, each with
    a weight of its own, and with as much shared memory as in a decode step."""
    plain = weights == "bf16"
    found: list[Point] = []
    for outputs in sizes.outputs if plain else sizes.outputs_in_8_bits:
        works = pairs(sizes, rows, outputs, device, weights)
        with carveout(least(rows)):
            us = microseconds(works, max(sizes.calls, len(works)), device)
        elements = outputs * sizes.hidden
        nbytes = elements * sizes.dtype.itemsize
        if not plain:
            nbytes = round(stored_bytes(elements, (outputs + sizes.hidden) / 2, weights))
        found.append((nbytes, us / 2))
    return found


def _matrix(sizes: Sizes, outputs: int, inputs: int, device: torch.device) -> list[Point]:
    found: list[Point] = []
    for rows in sizes.matrix_rows:
        options = {"dtype": sizes.dtype, "device": device}
        weight, x = random(outputs, inputs, **options), random(rows, inputs, **options)
        calls = max(1, min(MOST_CALLS, int(TURN / (rows * outputs * inputs))))
        us = microseconds([partial(F.linear, x, weight)], calls, device, cool=True)
        found.append((rows, us))
    return found


def _prompt_attention(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Causal attention of whole prompts with the same number of tokens in all: the rate for a very
    long prompt, and the prompt's length at which the rate is half of that."""
    rates: dict[float, float] = {}
    tokens, dim = max(sizes.prompts), sizes.head_dim
    for prompt in sizes.prompts:
        q, k, v = (
            random(tokens // prompt, heads, prompt, dim, dtype=sizes.dtype, device=device)
            for heads in (PROMPT_HEADS, *[PROMPT_HEADS // KV_GROUP] * 2)
        )
        work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        us = microseconds([work], 4, device, cool=True, captured=False)  # as prompts run
        rates[prompt] = 2e-6 * tokens * PROMPT_HEADS * dim * prompt / us
    rate, half = halved(rates)
    return {"prompt_attention_tflop_s": rate, "prompt_attention_half": half}


def halved(rates: Mapping[float, float]) -> tuple[float, float]:
    """The rate R and the size H for which R / (1 + H / size) explains the rates best, by least
    squares of their inverses."""
    places = [1 / size for size in rates]
    slope, least = statistics.linear_regression(places, [1 / rate for rate in rates.values()])
    if least <= 0:  # no limit is in sight
        return max(rates.values()), 1.0
    return 1 / least, max(1.0, slope / least)


def _attention(sizes: Sizes, keys: int, cache: str, device: torch.device) -> list[Point]:
    """Attention of one token of each sequence over `keys` earlier ones, each sequence with its own
    cache, and with as much shared memory as in a decode step."""
    stored = torch.float8_e4m3fn if cache == "fp8" else sizes.dtype
    found: list[Point] = []
    dim = sizes.head_dim
    for heads in sizes.heads:
        held = 2 if heads % 2 == 0 else 1
        batch, length = heads // held, keys + 1
        options = {"dtype": sizes.dtype, "device": device}
        nbytes = 2 * heads * length * dim * stored.itemsize
        caches = [
            random(2, batch, held, length, dim, **options).to(stored)
            for _ in range(copies_of(nbytes, device))
        ]
        exponents = None
        if cache == "fp8":
            ones = torch.full((2, batch, held, length), 127, dtype=torch.uint8, device=device)
            exponents = ones[0], ones[1]
        packed = random(batch, (KV_GROUP + 2) * held * dim, **options)
        table = torch.ones(length, dim, device=device)
        positions = torch.full((batch,), keys, device=device)
        arrived = torch.zeros(heads, dtype=torch.int32, device=device)

        works = [
            partial(decode_attention, packed, table, positions, *each, KV_GROUP * held,
                    dim**-0.5, arrived, exponents=exponents)
            for each in caches
        ]  # fmt: skip
        with carveout(least(batch)):
            us = microseconds(works, max(sizes.calls, len(works)), device)
        found.append((heads, us))
    return found


def _landings(sizes: Sizes, hidden: int, device: torch.device) -> list[Point]:
    """A landing of one own partial, without a sum for which it would wait."""
    found: list[Point] = []
    for rows in sizes.rows:
        options = {"dtype": sizes.dtype, "device": device}
        residual, own = random(rows, hidden, **options), random(rows, hidden, **options)

        found.append((rows, microseconds([partial(_land, residual, own)], sizes.calls, device)))
    return found


def _land(residual: Tensor, own: Tensor) -> None:
    land(new_landing(residual, owns=[(own, 1.0)]))
