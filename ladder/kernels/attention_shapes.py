"""How the attention of a decode step is cut into programs (`ladder.kernels.attention`)."""

from __future__ import annotations

from ladder.costs import MULTIPROCESSORS
from ladder.jit import triton

FULL = 96  # programs that fill the GPU without a split
FEW = 8  # sequences times KV heads
# Over a cache of up to SHORT blocks (2048 tokens in bfloat16) few sequences have about so many
# programs, or CHEAP_SPLITS for each of them and of their KV heads if that is less. Beside other
# kernels: fewer find room on the SMs that larger tiles of products leave (3 % less of a ladder's
# steps of 4 sequences of an 8B at TP 4, and of a 2B). Alone: 0 to 3 % less, but 1 % more with
# weights in 8 bits. A cache in e4m3 was not measured.
BESIDE, ALONE, SHORT = 64, 128, 32
MAX_SPLITS = 128
LONG = 128  # blocks: of 64 keys, 8k tokens
LONG_OF_FEW, LONG_OF_FEW_E4M3 = 1024, 512  # 64k and 32k tokens
CHEAP_SPLITS = 32  # up to here the combination is not weighed against the reading
COMBINED = 128 * 128  # numbers combined at once: 128 registers of each thread of 4 warps


def shape(
    sequences_and_heads: int, length: int, dims: int, row_bytes: int, e4m3: bool = False,
    beside: bool = False, eight_bits: bool = False,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(keys per block, splits, warps, stages): enough programs to fill the GPU, none idle.

    row_bytes: of one head's queries. e4m3: the cache is in it. beside: other kernels run at the
    same time. eight_bits: weights are stored in so many.
    Chosen by measurements on an H200 (benchmarks/results/README.md).
    """
    single = row_bytes > 2 * dims  # precision
    # Conversions of e4m3, and products of float32, want more warps.
    if sequences_and_heads >= FULL and (e4m3 or single):
        return max(16, min(128, 32768 // row_bytes)), 1, 8, 2 if single else 3
    # At most 16 KiB per block of keys with 4 warps: larger blocks spill registers.
    block = max(16, min(64, 16384 // row_bytes))
    if sequences_and_heads >= FULL:
        return block, 1, 4, 4
    found = splits(sequences_and_heads, triton.cdiv(length, block), e4m3, beside, eight_bits)
    return block, min(found, COMBINED // dims), 4, 2 if single else 3


def splits(
    sequences_and_heads: int, blocks: int, e4m3: bool = False, beside: bool = False,
    eight_bits: bool = False,
) -> int:  # fmt: skip
    """How many programs share the `blocks` blocks of keys of one KV head: a power of two.

    One program for each SM: two took 2 to 4 % more of a step of 16 and 33 sequences with 2 KV
    heads. Few sequences have CHEAP_SPLITS at least, since they wait for memory more than they read,
    but for what BESIDE says. The number of SMs is a constant, so that the order of sums does not
    depend on the device.

    One of the programs combines all their results, at the 50 to 100 GB/s of one SM. With 8 query
    heads of 128, those of 128 splits are 512 KiB, at least 5 us; the keys and values of 8192 tokens
    on 2 KV heads are 8 MiB, 2 us at 4.2 TB/s. So few sequences have more than CHEAP_SPLITS only
    where there are SMs for them and a split has at least four blocks: a sequence of 8192 tokens
    took 1 to 5 % less of a step with 32 splits than with 64. In long contexts reading takes
    longest, and two programs on each SM have more loads in flight; more of them gain nothing
    (docs/results/inference.md).

    What is read of e4m3 is converted, and programs wait for that more than for loads: up to 64
    splits may have two blocks each, and few sequences have two programs on an SM from 32k tokens
    on; of others from 64k.
    """
    one_each = -(-MULTIPROCESSORS // sequences_and_heads)
    wanted = one_each
    if sequences_and_heads <= FEW:
        many = LONG_OF_FEW_E4M3 if e4m3 else LONG_OF_FEW
        most = 2 * one_each if blocks >= many else one_each
        enough = max(blocks // 4, min(blocks // 2, 2 * CHEAP_SPLITS)) if e4m3 else blocks // 4
        cheap = CHEAP_SPLITS
        if blocks <= SHORT and not e4m3 and (beside or not eight_bits):
            cheap = min(cheap, (BESIDE if beside else ALONE) // sequences_and_heads)
        wanted = max(cheap, min(most, enough, MAX_SPLITS))
    elif blocks >= LONG:
        wanted = min(2 * one_each, blocks // 4)
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(blocks))


def heads_at_once(group: int, splits: int, dims: int) -> int:
    """Query heads of which one program combines the splits at once, without spilled registers."""
    return max(1, min(triton.next_power_of_2(group), COMBINED // (splits * dims)))
