"""A case for each kernel that needs one GPU: what it writes, and what its reference does.

A function that ladder.kernels exports must have one: write a generator function of (dtype) that
yields (found, wanted) pairs and decorate it with @case("name of the kernel's function"). A function
may have others, under names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ladder import jit, kernels
from ladder.comm.primitives import EMPTY
from ladder.comm.symmetric import SymmetricTensor
from ladder.infer.sampling import choose_greedily
from ladder.kernels import choice
from ladder.kernels.bags import pool_bags
from ladder.kernels.gemm import (
    GEMM_DTYPES,
    Addition,
    Arrivals,
    Tiling,
    Track,
    gemm_reference,
    tiles_of,
)
from ladder.kernels.gemm import gemm as run_gemm
from ladder.kernels.landing import with_pieces
from ladder.kernels.limits import CHUNK
from ladder.kernels.pieces import LOWS
from ladder.kernels.slots import SlotArrivals, land_slots, sum_slots, sum_slots_reference
from ladder.models import Reducer
from ladder.models.quantised import quantise
from ladder.models.storage import QUANTISED
from ladder.ops.bags import pool
from ladder.ops.track_maps import all_to_all, rotated

Pairs = Iterator[tuple[Tensor, Tensor]]
CASES: dict[str, Callable[[torch.dtype], Pairs]] = {}
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # and allowed errors
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [1, 2, 3, 8, 24, 33, 64]
MIDDLE = 4100, 1304  # outputs, inputs: cut differently beside other kernels


def case(name: str) -> Callable[[Callable[[torch.dtype], Pairs]], Callable[[torch.dtype], Pairs]]:
    def register(function: Callable[[torch.dtype], Pairs]) -> Callable[[torch.dtype], Pairs]:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return register


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def positions(batch: int, length: int) -> Tensor:
    """Positions in a cache, including the first and the last."""
    return torch.tensor([0, length - 1, length // 2][:batch], device=DEVICE)


def caches(dtype: torch.dtype, batch: int, kv: int, length: int, size: int) -> tuple[Tensor, ...]:
    return random(dtype, batch, kv, length, size), random(dtype, batch, kv, length, size)


def table_for(length: int, size: int) -> Tensor:
    return random(torch.float32, length, size)


def gains_of(dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Weights of the norms of queries and keys, around 1."""
    return 1 + random(dtype, size) / 4, 1 + random(dtype, size) / 4


# batch, query heads, KV heads, cache length, head_dim: one split and several, groups of any size
ATTENTION = [(1, 4, 4, 5, 12), (3, 6, 2, 77, 40), (2, 8, 1, 300, 64), (1, 5, 5, 1, 128)]


@case("add_rms_norm")
def add_rms_norm(dtype: torch.dtype) -> Pairs:
    for rows, size, count in ((1, 12, 0), (3, 200, 1), (2, 1537, 8), (5, 4100, 3)):
        residual, weight = random(dtype, rows, size), random(dtype, size)
        addends = [(random(dtype, rows, size), factor / 2) for factor in range(1, count + 1)]
        addends += [(random(dtype, 1, size), 1.5)] * (count < 8)  # for all rows
        found = kernels.add_rms_norm(residual, addends, weight, 1e-5)
        wanted = kernels.add_rms_norm_reference(residual, addends, weight, 1e-5)
        yield from zip(found, wanted, strict=True)
    residual, weights = random(dtype, 6, 1537), random(dtype, 3, 1537)  # of three virtual ranks
    found = kernels.add_rms_norm(residual, [], weights, 1e-5)
    yield from zip(found, kernels.add_rms_norm_reference(residual, [], weights, 1e-5), strict=True)


@case("decode_attention")
def decode_attention(dtype: torch.dtype) -> Pairs:
    for batch, heads, kv, length, size in ATTENTION:
        qkv, table = random(dtype, batch, (heads + 2 * kv) * size), table_for(length, size)
        keys, values = caches(dtype, batch, kv, length, size)
        others = keys.clone(), values.clone()
        arrived = torch.zeros(batch * kv, dtype=torch.int32, device=DEVICE)
        shared, scale = (qkv, table, positions(batch, length)), size**-0.5
        bias, gains = random(dtype, qkv.shape[1]), gains_of(dtype, size)
        for more in ({}, {"bias": bias}, {"gains": gains, "eps": 1e-5},
                     {"bias": bias, "gains": gains, "eps": 1e-5}):  # fmt: skip
            found = kernels.decode_attention(*shared, keys, values, heads, scale, arrived, **more)
            wanted = kernels.decode_attention_reference(*shared, *others, heads, scale, **more)
            yield from zip((found, keys, values), (wanted, *others), strict=True)
            yield arrived, torch.zeros_like(arrived)


def squares_of(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x.float().square(), (0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).sum(-1)


@case("project")
def project(dtype: torch.dtype) -> Pairs:
    """project alone, and with a push to three ranks' slots on this GPU, which land."""
    world, start = 3, 64
    for rows in ROWS:
        for outputs, size in ((7, 200), (66, 1304), (130, 2048), (130, 2100), MIDDLE):
            x, (gate, up) = random(dtype, rows, size), random(dtype, 2, outputs, size) / size**0.5
            normed = {"squares": squares_of(x), "eps": 1e-5}
            cut_apart = {False, (outputs, size) == MIDDLE}
            for options, other, beside in product(({}, normed), (None, up), cut_apart):
                counted = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
                found = kernels.project(x, gate, other, beside=beside, arrived=counted, **options)
                yield found, kernels.project_reference(x, gate, other, **options)
            if not jit.on_triton(x):
                continue  # the references share no slots
            sets = [torch.full((start + world * rows * outputs,), -0.0, dtype=dtype, device=DEVICE)
                    for _ in range(world)]  # fmt: skip
            buffers = torch.tensor([each.data_ptr() for each in sets], device=DEVICE)
            for rank in range(world):
                push = kernels.PushTarget(buffers, start, rank, world)
                kernels.project(x, gate, push=push, keep=rank == 1)
            residual = random(dtype, rows, outputs)
            job = kernels.new_landing(residual, sums=[sets[1][start:].view(world, rows, outputs)])
            kernels.land(job)
            wanted = kernels.project_reference(x, gate)
            yield job.out, residual.float() + world * wanted.to(dtype).float()
            yield sets[1], torch.full_like(sets[1], -0.0)


@case("eight_bits")
def eight_bits(dtype: torch.dtype) -> Pairs:
    """`project` with weights in 8 bits, alone and beside other kernels; in float16 by halves."""
    if dtype == torch.float32:
        return
    for kind in QUANTISED if dtype == torch.bfloat16 else ("fp8",):
        for rows, (outputs, size) in product(ROWS, ((66, 1304), MIDDLE)):
            weights = random(torch.float32, 2, outputs, size) / size**0.5
            (gate, one), (up, other) = (quantise(each, kind, "w") for each in weights)
            x = random(dtype, rows, size)
            for matrix, beside in product((None, up), {False, (outputs, size) == MIDDLE}):
                options = {"scales": (one, None if matrix is None else other)}
                found = kernels.project(x, gate, matrix, beside=beside, **options)
                yield found, kernels.project_reference(x, gate, matrix, **options)


@case("send")
def send(dtype: torch.dtype) -> Pairs:
    """send to two ranks' slots on this GPU."""
    if not jit.on_triton(torch.zeros(1, device=DEVICE)):
        return
    for rows, size in ((1, 200), (3, 1500), (33, 2049)):
        sets = [random(dtype, 2, rows, size) for _ in range(2)]
        buffers = torch.tensor([each.data_ptr() for each in sets], device=DEVICE)
        wanted = random(dtype, 2, rows, size)
        for rank in range(2):
            target = kernels.PushTarget(buffers, 0, rank, 2)
            kernels.send(kernels.SendJob(wanted[rank].clone(), target))
        yield from ((each, wanted) for each in sets)


@case("land")
def land(dtype: torch.dtype) -> Pairs:
    for rows, size, world, count in ((1, 200, 1, 1), (3, 1500, 3, 2), (2, 2049, 4, 2)):
        residual, own = random(dtype, 2, rows, size)
        slots = [random(dtype, world, rows, size) for _ in range(count)]
        wanted = kernels.new_landing(
            residual, sums=[each.clone() for each in slots], owns=[(own, -1.0)]
        )
        found = kernels.new_landing(residual, sums=slots, owns=[(own, -1.0)])
        kernels.land_reference(wanted)
        kernels.land(found)
        yield found.out, wanted.out
        yield found.squares, wanted.squares
        yield from zip(slots, wanted.sums, strict=True)


@case("pieces")
def in_pieces(dtype: torch.dtype) -> Pairs:
    """Landings that make pieces, and products that read them."""
    if dtype != torch.bfloat16:
        return
    for kind, rows in product(QUANTISED, (2, 9, 33)):
        for outputs, size in ((7, 200), (66, 1304), (2050, 2112), (8450, 256)):
            x, weights = random(dtype, rows, size), random(torch.float32, 2, outputs, size)
            (gate, one), (up, other) = (quantise(each / size**0.5, kind, "w") for each in weights)
            stored = QUANTISED[kind]
            job, wanted = (with_pieces(kernels.new_landing(x), stored) for _ in range(2))
            kernels.land_reference(wanted)
            kernels.land(job)
            assert wanted.pieces is not None
            assert job.pieces is not None
            yield tuple(
                each.pieces.values[0].float() * LOWS[stored] + each.pieces.values[1].float()
                for each in (job, wanted)
            )
            yield job.pieces.factors, wanted.pieces.factors
            pieces = {"squares": job.squares, "eps": 1e-5, "pieces": job.pieces}
            for matrix in (None, up):
                options = {"scales": (one, None if matrix is None else other), **pieces}
                found = kernels.project(x, gate, matrix, **options)
                del options["pieces"]
                yield found, kernels.project_reference(x, gate, matrix, **options)


@case("land_rows")
def land_rows(dtype: torch.dtype) -> Pairs:
    for rows, size, count in ((1, 12, 1), (3, 200, 4), (7, 1537, 8)):
        pieces = [random(dtype, rows, size) for _ in range(count)]
        arguments = pieces, random(dtype, rows, size), random(dtype, size), 1e-5
        copies = [torch.empty_like(arguments[1]) for _ in range(count - 1)]
        found = kernels.land_rows(*arguments, copies=copies)
        wanted = kernels.land_rows_reference(*arguments)
        yield from zip((*found, *copies), (*wanted, *[wanted[1]] * len(copies)), strict=True)


@case("swiglu")
def swiglu(dtype: torch.dtype) -> Pairs:
    for rows, inner in ((1, 3), (5, 71), (33, 700), (130, 513)):
        packed = random(dtype, rows, 2 * inner)
        yield kernels.swiglu(packed), kernels.swiglu_reference(packed)


@case("rotary_prompt")
def rotary_prompt(dtype: torch.dtype) -> Pairs:
    for batch, heads, kv, length, size in ATTENTION:
        seen = max(1, length - 3)
        packed = random(dtype, batch, seen, (heads + 2 * kv) * size)
        table, cache = table_for(length, size), caches(dtype, batch, kv, length, size)
        others = tuple(each.clone() for each in cache)
        for more in ({}, {"gains": gains_of(dtype, size), "eps": 1e-5}):
            found = kernels.rotary_prompt(packed, table, *cache, heads, kv, **more)
            wanted = kernels.rotary_prompt_reference(packed, table, *others, heads, kv, **more)
            yield from zip((*found, *cache), (*wanted, *others), strict=True)


@case("embed")
def embed(dtype: torch.dtype) -> Pairs:
    for count, rows, size, first in ((1, 7, 12, 0), (3, 20, 1030, 40), (64, 9, 2048, 5)):
        weight = random(dtype, rows, size)
        whole = first + rows + 3
        tokens = torch.randint(0, whole, (count,), device=DEVICE)
        found = choice.embed(tokens, weight, first, whole)
        yield found, choice.embed(tokens.cpu(), weight.cpu(), first, whole).to(DEVICE)


@case("greedy_choice")
def greedy_choice(dtype: torch.dtype) -> Pairs:
    """greedy_choice alone, and as two ranks on this GPU, the second of which has already sent."""
    for batch, size, first in ((1, 7, 0), (3, 1024, 500), (9, 2100, 40)):
        logits = random(dtype, batch, size)
        logits[0, size // 2], logits[-1, [1, size - 1]] = torch.nan, 100.0
        wanted = choose_greedily(logits, first, Reducer())
        alone = choice.GreedyChoice(batch, 0, 1, None, logits.device)
        positions = torch.arange(batch, device=DEVICE)
        out, tokens = chosen(alone, logits, first, positions, batch - 1)
        # Differences from 0: relative to large token ids an error would pass as rounding.
        yield out - wanted, torch.zeros_like(out)
        yield tokens - wanted.clamp(min=0), torch.zeros_like(out)
        yield positions - torch.arange(1, batch + 1, device=DEVICE).clamp(max=batch - 1), 0 * wanted
        ranks = two_ranks(batch)
        other = random(dtype, batch, size)
        send_best(other, first + size, ranks[0])
        wanted = choose_greedily(torch.cat((logits, other), dim=1), first, Reducer())
        for rank, part in zip(ranks, (logits, other), strict=True):
            out, _ = chosen(rank, part, first + rank.rank * size)
            yield out - wanted, torch.zeros_like(out)


def chosen(
    choose: choice.GreedyChoice, logits: Tensor, first: int, *positions: Any
) -> tuple[Tensor, Tensor]:
    out, tokens = (torch.full((len(logits),), 77, device=DEVICE) for _ in range(2))
    choose(logits, first, out, tokens, *positions)
    return out, tokens


def two_ranks(batch: int) -> list[choice.GreedyChoice]:
    """The choices of two ranks, with all slots on this GPU."""
    slots = [torch.full((choice.SETS * 2 * batch * 2,), EMPTY[4], dtype=torch.int32,
                        device=DEVICE) for _ in range(2)]  # fmt: skip
    buffers = torch.tensor([each.data_ptr() for each in slots], device=DEVICE)
    ranks = [choice.GreedyChoice(batch, 0, 1, None, slots[0].device) for _ in slots]
    for number, rank in enumerate(ranks):
        rank.rank, rank.world = number, 2
        rank.slots = SymmetricTensor(number, slots, buffers)
    return ranks


def send_best(logits: Tensor, first: int, to: choice.GreedyChoice) -> None:
    """Put rank 1's best into rank 0's slots: in the same stream its kernel would run too late."""
    batch = len(logits)
    top, token = logits.float().max(-1)
    sent = torch.stack((top.view(torch.int32), (token + first).int()), dim=1).flatten()
    assert to.slots is not None
    to.slots.own[2 * batch : 4 * batch] = sent


@case("gemm")
def gemm(dtype: torch.dtype) -> Pairs:
    """Ragged tiles, both layouts of a weight, alone, with shards that have arrived, and tracked."""
    if dtype not in GEMM_DTYPES:
        return
    tiling = Tiling(16, 32, 16, 2, 4)
    for m, n, k in ((2 * 7, 40, 24), (2 * 20, 72, 33), (2 * 33, 9, 64)):
        a, flags = random(dtype, m, k), torch.ones(2, dtype=torch.int32, device=DEVICE)
        down, across = tiles_of(m, n, 2, tiling)
        order = torch.tensor(rotated(down, across, 2, down, 0), dtype=torch.int32, device=DEVICE)
        for b in (random(dtype, k, n), random(dtype, n, k).t()):
            wanted = gemm_reference(a, b)
            for arrivals in (None, Arrivals(flags, 0)):
                yield run_gemm(a, b, order, tiling=tiling, shards=2, arrivals=arrivals), wanted
        # All tiles of the own shard go to its slot, in this GPU's memory; the others stay.
        program = all_to_all(down, across, 2, down // 2).compile(0)
        slots, out = random(dtype, m, n), random(dtype, m, n)
        counters = torch.zeros(len(program.blocks), dtype=torch.int32, device=DEVICE)
        tables = [
            each.to(DEVICE)
            for each in (program.target, program.counter, program.chunk, program.peer)
        ]
        bases = [torch.tensor([each.data_ptr()] * 2, device=DEVICE) for each in (slots, counters)]
        track = Track(*tables, *bases)
        run_gemm(
            a, b, program.order.to(DEVICE), tiling=tiling, shards=2, out=out, track=track
        )  # fmt: skip
        yield torch.cat((slots[: m // 2], out[m // 2 :])), wanted
        yield counters, program.count.to(counters)
        # The own shard is added to the other rank's slot, which has arrived.
        shard = m // 2
        others, total = random(dtype, 2, shard, n), random(dtype, shard, n)
        there = SlotArrivals(flags, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), shard)
        run_gemm(
            a, b, program.order.to(DEVICE), tiling=tiling, shards=2, out=out, track=track,
            addition=Addition(total, others, there, 0),
        )  # fmt: skip
        own = wanted[:shard].float() + others[1].float()
        yield torch.cat((total, out[shard:])), torch.cat((own.to(dtype), wanted[shard:]))


@case("sum_slots")
def sums(dtype: torch.dtype) -> Pairs:
    for count, rows, size in ((2, 1, 5), (3, 7, 603), (8, 3, 2048)):
        slots = random(dtype, count, rows, size)
        for average in (False, True):
            found, wanted = random(dtype, rows, size), random(dtype, rows, size)
            yield sum_slots(slots, found, average), sum_slots_reference(slots, wanted, average)


@case("land_slots")
def landings(dtype: torch.dtype) -> Pairs:
    """Without flags, and with flags of pieces of 3 rows, which are set; all slots are filled."""
    for count, rows, size in ((2, 1, 12), (3, 7, 603), (8, 300, 2048)):
        slots, residual, weight = (
            random(dtype, *shape) for shape in ((count, rows, size), (rows, size), (size,))
        )
        wanted = kernels.land_rows_reference(list(slots), residual, weight, 1e-5)
        pieces = -(-rows // 3)
        flags = torch.ones(pieces * count, dtype=torch.int32, device=DEVICE)
        table = torch.arange(pieces * count, dtype=torch.int32, device=DEVICE).view(pieces, count)
        for arrivals in (None, SlotArrivals(flags, table, 3)):
            out = torch.empty_like(residual), torch.empty_like(residual)
            found = land_slots(slots, residual, weight, 1e-5, out, arrivals)
            yield from zip(found, wanted, strict=True)


@case("pool_bags")
def bags(dtype: torch.dtype) -> Pairs:
    """Two tables; ragged bags, some empty; rows of one tile and of several."""
    for batch, dim in ((3, 5), (7, 64), (2, 600)):
        weights = [random(dtype, rows, dim) for rows in (2, 9)]
        lengths = torch.randint(12, (len(weights), batch))
        looked = [
            torch.randint(len(weight), (int(each.sum()),))
            for weight, each in zip(weights, lengths, strict=True)
        ]
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(DEVICE)
        indices = torch.cat(looked).to(DEVICE)
        for mode in ("sum", "mean"):
            wide = pool([weight.double() for weight in weights], indices, offsets, mode)
            yield pool_bags(weights, indices, offsets, mode), wide.flatten(1).to(dtype)
