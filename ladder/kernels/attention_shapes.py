"""How the attention of a decode step is cut into programs (`ladder.kernels.attention`)."""

from __future__ import annotations

import torch

from ladder.costs import MULTIPROCESSORS
from ladder.jit import triton
from ladder.kernels.limits import FEW_BLOCKS, FEW_HEADS, FEW_PROGRAMS

FULL = 96  # programs that fill the GPU without a split
FEW = FEW_HEADS  # sequences times KV heads
# Few sequences over a cache of up to SHORT blocks (2048 tokens in bfloat16) have about so many
# programs, or CHEAP_SPLITS for each sequence and KV head if that is less. Beside other kernels,
# fewer programs find room on the SMs that larger tiles of products leave: a ladder's steps of 4
# sequences (an 8B at TP 4, and a 2B) took 3 % less. Alone they took 0 to 3 % less, but 1 % more
# with weights in 8 bits.
BESIDE, ALONE, SHORT = FEW_PROGRAMS, 128, FEW_BLOCKS
MAX_SPLITS = 128
LONG = 64  # blocks: of 64 keys, 4k tokens
LONG_OF_FEW = 1024  # blocks: 64k tokens
OVERHEAD = 3  # blocks that could be read in the time a program takes beside its keys
CHEAP_SPLITS = 32  # up to here the combination is not weighed against the reading
COMBINED = 128 * 128  # numbers combined at once: 128 registers of each thread of 4 warps
PAIRED = (32, 64, 128, 256)  # sizes of heads whose halves make pairs without padding


def in_pairs(dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether a cache in e4m3 is read in pairs, by `group` query heads of each KV head: queries and
    values then have room in registers, and tensor cores multiply numbers of 16 bits."""
    return dtype != torch.float32 and head_dim in PAIRED and group <= 16


def shape(
    sequences_and_heads: int, length: int, dims: int, row_bytes: int, e4m3: bool = False,
    beside: bool = False, eight_bits: bool = False, pairs: bool = False,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(keys per block, splits, warps, stages): enough programs to fill the GPU, none idle.

    row_bytes: of one head's queries. e4m3: the cache is in e4m3. pairs: it is read in pairs
    (`ladder.kernels.attention`). beside: other kernels run at the same time. eight_bits: weights
    are stored in 8 bits. Chosen by measurements on an H200 (benchmarks/results/README.md).
    """
    most = COMBINED // dims
    largest = max(16, min(128, 32768 // row_bytes))
    if pairs:
        block = largest // 2
        apart = beside and not eight_bits
        found = splits_of_pairs(sequences_and_heads, triton.cdiv(length, block), apart)
        found = min(found, most)
        # Larger blocks if each split has only one.
        return largest if length > largest * (found - 1) else block, found, 4, 3
    single = row_bytes > 2 * dims  # precision
    # Conversions of e4m3, and products of float32, want more warps.
    if sequences_and_heads >= FULL and (e4m3 or single):
        return largest, 1, 8, 2 if single else 3
    # At most 16 KiB per block of keys with 4 warps: larger blocks spill registers.
    block = max(16, min(64, 16384 // row_bytes))
    blocks = triton.cdiv(length, block)
    if sequences_and_heads >= FULL and blocks < LONG:
        # Two programs on an SM have shared memory for three stages each.
        two = MULTIPROCESSORS < sequences_and_heads <= 2 * MULTIPROCESSORS
        return block, 1, 4, 3 if two else 4
    found = min(splits(sequences_and_heads, blocks, beside, eight_bits), most)
    # One program in place of two on an SM, with as many warps: 1 to 5 % less time.
    if sequences_and_heads > FEW and blocks >= LONG and not (found % 2 or e4m3 or single):
        return largest, found // 2, 8, 3
    return block, found, 4, 2 if single else 3


def splits_of_pairs(sequences_and_heads: int, blocks: int, beside: bool = False) -> int:
    """As `splits`, for a cache in e4m3 that is read in pairs: two programs on each SM, which
    convert in turns. Few sequences have CHEAP_SPLITS, or eight blocks each.

    beside: other kernels run at the same time, and weights are not in 8 bits. Then caches of up to
    SHORT blocks have one program on each SM, or for few sequences some 8 splits: for an 8B at TP 4,
    a ladder's steps of 2 to 32 sequences took 3 to 6 % less, and with weights in fp8 6 % more.
    """
    if sequences_and_heads > FEW and blocks >= LONG:
        return even_splits(sequences_and_heads, blocks)
    beside &= blocks <= SHORT
    wanted = (1 if beside and sequences_and_heads < FULL else 2) * MULTIPROCESSORS
    wanted = max(1, wanted // sequences_and_heads)
    if sequences_and_heads <= FEW:
        least = max(8, CHEAP_SPLITS // sequences_and_heads) if beside else CHEAP_SPLITS
        wanted = min(wanted, max(least, blocks // 8), MAX_SPLITS)
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(blocks))


def splits(
    sequences_and_heads: int, blocks: int, beside: bool = False, eight_bits: bool = False
) -> int:
    """How many programs share the `blocks` blocks of keys of one KV head.

    From LONG blocks on it is `even_splits`, but not for few sequences. Else it is a power of two.

    There is one program for each SM: with two, steps of 16 and 33 sequences with 2 KV heads took 2
    to 4 % longer. Few sequences have CHEAP_SPLITS at least, since they wait for memory more than
    they read; for exceptions see BESIDE. The number of SMs is a constant, so that the order of sums
    does not depend on the device.

    One of the programs combines all their results, at the 50 to 100 GB/s of one SM. With 8 query
    heads of 128, those of 128 splits are 512 KiB, at least 5 us; the keys and values of 8192 tokens
    on 2 KV heads are 8 MiB, 2 us at 4.2 TB/s. So few sequences have more than CHEAP_SPLITS only
    where there are SMs for them and a split has at least four blocks: a step of one sequence of
    8192 tokens took 1 to 5 % less with 32 splits than with 64. From 64k tokens on reading takes
    longest, and two programs on each SM have more loads in flight.
    """
    if sequences_and_heads > FEW and blocks >= LONG:
        return even_splits(sequences_and_heads, blocks)
    one_each = -(-MULTIPROCESSORS // sequences_and_heads)
    wanted = one_each
    if sequences_and_heads <= FEW:
        most = 2 * one_each if blocks >= LONG_OF_FEW else one_each
        cheap = CHEAP_SPLITS
        if blocks <= SHORT and (beside or not eight_bits):
            cheap = min(cheap, (BESIDE if beside else ALONE) // sequences_and_heads)
        wanted = max(cheap, min(most, blocks // 4, MAX_SPLITS))
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(blocks))


def even_splits(sequences_and_heads: int, blocks: int) -> int:
    """As `splits`, for long contexts: the number whose programs, two on each SM, end first.

    A last round that leaves many SMs idle costs most: 20 sequences with 2 KV heads, over 32k tokens
    in e4m3, took 136 us with 4 splits (160 programs) and 93 with 6 (docs/results/inference.md).
    Each split is taken to cost 1 % more.
    """

    def time(splits: int) -> int:
        rounds = triton.cdiv(sequences_and_heads * splits, 2 * MULTIPROCESSORS)
        return rounds * (triton.cdiv(blocks, splits) + OVERHEAD) * (100 + splits)

    return min(range(1, CHEAP_SPLITS + 1), key=time)


def heads_at_once(group: int, splits: int, dims: int) -> int:
    """How many query heads' splits a program combines at once without spilled registers."""
    most = COMBINED // (triton.next_power_of_2(splits) * dims)
    return max(1, min(triton.next_power_of_2(group), most))
